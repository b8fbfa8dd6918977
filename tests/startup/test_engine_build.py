"""From options to an engine: errors, the report before loading, and memory during loading."""

import ctypes
import gc
import os
import platform
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from random_checkpoints import save
from transformers import LlamaConfig, LlamaForCausalLM

from quire import LLM, SamplingParams
from quire.config import EngineOptions
from quire.core.request import Request
from quire.errors import ConfigError, ModelError
from quire.hub import embedded
from quire.models.description import describe
from quire.startup import hardware
from quire.startup.build import build
from quire.startup.freed_memory import return_freed_memory
from quire.startup.model_loading import open_model


def attempt(**options):
    return build(EngineOptions(**options), report=lambda line: None, progress=lambda done, total: None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size: Expected `int` >= 1"),
        ({"block_size": "16"}, "block_size: Expected `int`, got `str`"),
        ({"max_num_seqs": 0}, "max_num_seqs: Expected `int` >= 1"),
        ({"max_num_seqs": -4}, "max_num_seqs: Expected `int` >= 1"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens: Expected `int` >= 1"),
        ({"max_num_batched_tokens": 8}, "max_num_batched_tokens .8. must be at least max_num_seqs"),
        ({"max_model_len": 1}, "max_model_len must be between 2 and the model's 2048"),
        ({"max_model_len": 4096}, "max_model_len must be between 2 and the model's 2048"),
        ({"memory": 0.5}, "memory: Expected `str | null`"),
        ({"memory": "lots"}, "memory must be bytes"),
        ({"memory": "8MiB"}, "Raise memory"),
        ({"dtype": "int8"}, "dtype: Invalid enum value 'int8'"),
        (
            {"dtype": "float32", "kv_cache_dtype": "bfloat16"},
            "are stored in dtype, or in fp8_e4m3, int8, int4",
        ),
        ({"step_seconds": float("inf")}, "step_seconds must be positive and finite"),
        ({"step_seconds": 0.0}, "step_seconds must be positive and finite"),
        ({"watermark": 1.0}, "watermark must be at least 0 and below 1"),
        ({"steps_in_flight": 3}, "steps_in_flight 3 is more than the 2 that this runner takes"),
        ({"kernels": "trition"}, "there are no kernels 'trition'"),
        ({"block_size": 24}, "block_size 24 is not a multiple of 16. Use such a block_size; --kernels reference"),
        ({"kernels": "flashinfer"}, "quire has no kernels of flashinfer"),
        ({"device": "meta"}, "device 'meta' cannot be used"),
        ({"threads": 1_000_000}, "threads: must be at most .* on this machine"),
        ({"journal": "/nowhere/at/all"}, "cannot be written"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        attempt(**options)


def test_a_journal_is_never_overwritten(tmp_path):
    (tmp_path / "journal").write_bytes(b"somebody's")
    with pytest.raises(ConfigError, match="exists; name another file"):
        attempt(journal=str(tmp_path / "journal"))
    assert (tmp_path / "journal").read_bytes() == b"somebody's"


@pytest.mark.parametrize(("is_restart", "files"), [(True, []), (False, ["journal"])])
def test_a_failed_restart_leaves_no_journal(tmp_path, monkeypatch, is_restart, files):
    def fail():
        raise ModelError("no memory for the weights")

    monkeypatch.setattr("quire.startup.build.return_freed_memory", fail)
    options = EngineOptions(memory="256MiB", max_model_len=256, journal=str(tmp_path / "journal"))
    with pytest.raises(ModelError, match="no memory for the weights"):
        build(options, report=lambda line: None, progress=lambda done, total: None, is_restart=is_restart)
    assert [path.name for path in tmp_path.iterdir()] == files


def test_each_restarted_engine_writes_a_journal_of_its_own(tmp_path):
    folder = tmp_path / "journals"
    folder.mkdir()
    options = EngineOptions(memory="256MiB", max_model_len=256, journal=str(folder / "j"))

    def written(*, is_restart=True):
        """The files that are new once an engine was built."""
        before = set(folder.iterdir())
        build(options, report=lambda line: None, progress=lambda *_: None, is_restart=is_restart).engine.close()
        return {path.name for path in set(folder.iterdir()) - before}

    assert [written(is_restart=False), written()] == [{"j"}, {"j.1"}]
    (folder / "j.2").write_bytes(b"of another server")
    assert written() == {"j.3"}
    assert (folder / "j.2").read_bytes() == b"of another server"


def test_a_journal_that_cannot_be_written_does_not_stop_a_restart(tmp_path):
    options = EngineOptions(memory="256MiB", max_model_len=256, journal=str(tmp_path / "away" / "j"))
    engine = build(options, report=lambda line: None, progress=lambda *_: None, is_restart=True).engine
    engine.add(Request("a", [5, 6, 7], SamplingParams(max_tokens=2)))
    while engine.has_work:
        engine.step()
    engine.close()
    assert list(tmp_path.iterdir()) == []


def test_a_missing_model_folder_is_an_error_that_names_it():
    with pytest.raises(ModelError, match=r"there is no folder or .gguf file 'no/such/folder'"):
        attempt(model="no/such/folder")


def test_paths_and_shares_are_taken_as_they_come():
    with_path = LLM(embedded.folder(), memory=0.4, dtype="float32", max_num_seqs=2)
    assert with_path.max_model_len == 2048


def test_the_plan_is_reported_before_anything_is_loaded():
    heard: list[str] = []
    options = EngineOptions(memory="256MiB")
    build(options, report=lambda line: heard.append(line), progress=lambda done, total: heard.append(f"{done}"))
    first_bytes = heard.index("0")
    said = "\n".join(heard[:first_bytes])
    for word in ("weights", "KV pool", "workspace", "blocks of 16", "max_model_len 2048", "kernels", "sequences of"):
        assert word in said
    assert all(line.isdigit() for line in heard[first_bytes:])


def anonymous_memory() -> int:
    """Bytes of this process without a file behind them."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon:"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux for the memory of a process")
def test_weights_are_never_held_twice(tmp_path):
    config = LlamaConfig(
        hidden_size=512, num_hidden_layers=12, num_attention_heads=8, intermediate_size=1536, vocab_size=4000
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded.folder() / name, tmp_path)
    weights = 4 * describe(tmp_path).num_parameters
    assert weights > 150e6
    before = anonymous_memory()
    seen = []
    options = EngineOptions(model=str(tmp_path), memory="1GiB", max_model_len=256, max_num_seqs=4)
    built = build(
        options, report=lambda line: None, progress=lambda done, total: seen.append(anonymous_memory() - before)
    )
    assert built.engine.vocab_size == 4000
    assert max(seen) < 1.15 * weights


def test_a_sharded_checkpoint_is_the_same_model(tmp_path):
    save(tmp_path / "one", "llama-gqa-tied")
    save(tmp_path / "many", "llama-gqa-tied", shard="100KB")
    assert len({stored.file for stored in describe(tmp_path / "many").checkpoint.tensors.values()}) > 1
    answers = []
    for name in ("one", "many"):
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(embedded.folder() / file, tmp_path / name)
        llm = LLM(tmp_path / name, dtype="float32", memory="200MiB", max_num_seqs=4)
        answers.append(llm.generate([[5, 6, 7]])[0].outputs[0].token_ids)
    assert len(answers[0]) > 0
    # temperature 1 with the engine's seed: equal weights give equal tokens
    assert answers[0] == answers[1]


def test_a_container_is_not_charged_for_cached_files(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("16000000\n")
    (tmp_path / "memory.current").write_text("15000000\n")
    (tmp_path / "memory.stat").write_text("anon 900000\ninactive_file 14000000\n")
    assert hardware.available_memory("cpu") == 15_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert hardware.available_memory("cpu") > 15_000_000


@pytest.mark.parametrize(
    ("share", "num_cores"), [("50000 100000", 1), ("100001 100000", 2), ("12800000 100000", 64), ("max 100000", 64)]
)
def test_a_container_uses_no_more_cores_than_its_share_of_time(tmp_path, monkeypatch, share, num_cores):
    monkeypatch.setattr(hardware, "_CGROUP", tmp_path)
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda _: range(64))
    (tmp_path / "cpu.max").write_text(f"{share}\n")
    assert hardware.num_cores() == num_cores


def test_the_default_number_of_threads_is_bounded_by_the_container(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "_CGROUP", tmp_path)
    monkeypatch.setattr("quire.startup.build._TINY_WEIGHT_BYTES", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert "; 1 threads" in " ".join(reported())
    (tmp_path / "cpu.max").unlink()
    assert "; 2 threads" in " ".join(reported())


def reported():
    """The report of a start."""
    lines = []
    build(EngineOptions(memory="64MiB"), report=lines.append, progress=lambda done, total: None)
    return lines


def test_offline_steps_may_take_longer_than_those_of_a_server(monkeypatch):
    options = []
    monkeypatch.setattr("quire.llm.build", lambda chosen, **_: options.append(chosen) or build(chosen, **_))
    LLM(memory="64MiB")
    LLM(memory="64MiB", step_seconds=0.25)
    assert [chosen.step_seconds for chosen in options] == [2.0, 0.25]
    assert EngineOptions().step_seconds == 0.5


def test_answering_imports_neither_a_compiler_nor_the_hub():
    """These imports take a second and 100 MB, which would delay the first or second token."""
    script = """
import sys
from quire import LLM, SamplingParams
LLM(memory="64MiB").generate("one two", SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
print(*(name for name in ("sympy", "torch._dynamo", "huggingface_hub.hf_api", "transformers") if name in sys.modules))
"""
    answer = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert answer.stdout.strip() == ""


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_8_bit_keys_and_values_take_half_as_much_and_answer_alike(dtype):
    plain, lines = attempt(memory="1GiB", kernels="reference"), []
    options = {"memory": "1GiB", "kv_cache_dtype": dtype}
    small = LLM(**options, report=lines.append)
    group, other = (built.cache.groups[0] for built in (plain, attempt(**options)))
    size = group.kind.head_dim
    assert other.bytes_per_block * 2 * size == group.bytes_per_block * (size + 4)
    assert any("keys and values in " in line for line in lines)
    assert any(line.startswith("kernels    cpu") for line in lines)
    questions = [[{"role": "user", "content": text}] for text in ("Who are you?", "What does the lamp cost?")]
    answers = [llm.chat(questions, SamplingParams(temperature=0)) for llm in (small, LLM(memory="256MiB"))]
    texts = [[answer.outputs[0].text for answer in of_one] for of_one in answers]
    assert texts[0] == texts[1]


def test_the_description_of_the_checkpoint_is_dropped(monkeypatch):
    """A GGUF header has all tokens and merges: 40 MB for a vocabulary of 128 000 tokens."""
    opened = []

    def watched(*args, **options):
        files = open_model(*args, **options)
        opened.append(weakref.ref(files.description.checkpoint))
        return files

    monkeypatch.setattr("quire.startup.build.open_model", watched)
    built = attempt(memory="64MiB", calibration=0.01)
    gc.collect()
    assert [checkpoint() for checkpoint in opened] == [None]
    built.engine.close()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has a setting for it")
def test_memory_that_was_freed_goes_back_to_the_system():
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    pieces = [libc.malloc(60_000) for _ in range(2000)]  # small enough for the heap
    for piece in pieces:
        ctypes.memset(piece, 1, 60_000)

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    for piece in pieces[:-1]:  # the last one keeps the heap from shrinking by itself
        libc.free(piece)
    before = resident()
    return_freed_memory()
    assert before - resident() > 60_000_000
    libc.free(pieces[-1])
