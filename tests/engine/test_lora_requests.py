"""LLM with adapters: one for all prompts or one for each, what is read, what is refused."""

from pathlib import Path

import pytest
from adapter_folders import BROKEN, AdapterNoting, digest_of, write_adapter
from embedded_model_server import CHAT, STORY

from quire import LLM, BeamSearchParams, LoRARequest, SamplingParams
from quire.engine.lora_requests import RequestedAdapters
from quire.errors import ModelError, RequestError

ONE = SamplingParams(max_tokens=1, temperature=0)


@pytest.fixture(scope="module")
def llm():
    llm = LLM(memory="256MiB", max_model_len=512, dtype="float32", enable_lora=True)
    llm.llm_engine = AdapterNoting(llm.llm_engine)
    llm.adapters = RequestedAdapters(llm.llm_engine, is_enabled=True)
    yield llm
    llm.close()


@pytest.fixture
def pirate(tmp_path):
    return LoRARequest("pirate", 1, str(write_adapter(tmp_path / "pirate")))


@pytest.fixture
def poet(tmp_path):
    return LoRARequest("poet", lora_path=write_adapter(tmp_path / "poet"))


def used(llm, count):
    """The names of the adapters of the latest requests."""
    return [one and one.name for one in list(llm.llm_engine.adapters.values())[-count:]]


def test_every_method_takes_an_adapter(llm, pirate):
    llm.generate(STORY, ONE, lora_request=pirate)
    assert used(llm, 1) == ["pirate"]
    llm.chat(CHAT, ONE, lora_request=pirate)
    assert used(llm, 1) == ["pirate"]
    "".join(llm.stream_chat(CHAT, ONE, lora_request=pirate))
    assert used(llm, 1) == ["pirate"]
    llm.beam_search(STORY, BeamSearchParams(beam_width=2, max_tokens=2), lora_request=pirate)
    assert used(llm, 1) == ["pirate"]
    llm.embed(["a", "b"], lora_request=pirate)
    assert used(llm, 2) == ["pirate"] * 2
    llm.score("a", "b", lora_request=pirate)
    assert used(llm, 2) == ["pirate"] * 2
    llm.generate(STORY, ONE)
    assert used(llm, 1) == [None]


def test_prompts_may_have_their_own_adapters(llm, pirate, poet):
    llm.generate(["a", "b", "c"], ONE, lora_request=[pirate, None, poet])
    assert used(llm, 3) == ["pirate", None, "poet"]
    llm.chat([CHAT, CHAT], ONE, lora_request=[None, poet])
    assert used(llm, 2) == [None, "poet"]
    llm.embed(["a", "b"], lora_request=[poet, None])
    assert used(llm, 2) == ["poet", None]
    with pytest.raises(RequestError, match="3 prompts need as many lora_requests, not 2") as wrong:
        llm.generate(["a", "b", "c"], ONE, lora_request=[pirate, None])
    assert wrong.value.param == "lora_request"


def test_a_folder_is_read_once_unless_it_changed(llm, pirate, tmp_path):
    read = llm.llm_engine.read
    before = len(read)
    for _ in range(2):
        llm.generate(["a", "b"], ONE, lora_request=pirate)
    assert len(read) == before + 1
    write_adapter(tmp_path / "pirate", "changed")
    llm.generate("a", ONE, lora_request=LoRARequest("pirate", 1, pirate.lora_path, load_inplace=True))
    assert list(llm.llm_engine.adapters.values())[-1].digest == digest_of("changed")


def test_what_cannot_be_used_is_refused(llm, tmp_path):
    bad = LoRARequest("bad", 1, str(write_adapter(tmp_path / "bad", BROKEN)))
    with pytest.raises(ModelError, match="no matrices"):
        llm.generate("a", ONE, lora_request=bad)
    with pytest.raises(RequestError, match="LoRARequest"):
        llm.generate("a", ONE, lora_request="bad")
    for given in (("", 1, "a"), ("a", 1, ""), ("a", 1), ("a", 1, 3), (Path("a"), 1, "a")):
        with pytest.raises(RequestError, match="must be a text"):
            LoRARequest(*given)


def test_an_engine_without_adapters_says_so(pirate):
    llm = LLM(memory="64MiB", max_model_len=64)
    with pytest.raises(RequestError, match="enable_lora=True"):
        llm.generate("a", ONE, lora_request=pirate)
    llm.close()
