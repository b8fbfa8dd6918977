"""Request parameters and model sources in the whole engine, against transformers."""

import shutil

import pytest
import torch
from gguf_writer import write_gguf
from packaged_wheels import entry, write_wheel
from random_checkpoints import VOCAB, save
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from quire import LLM, SamplingParams
from quire.cli import app
from quire.config import EngineOptions
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.errors import ModelError, RequestError
from quire.hub import embedded, packaged
from quire.planner.setup import find_model
from quire.startup.doctor import examine
from quire.startup.quantize import quantize

SMALL = {"dtype": "float32", "memory": "400MiB", "max_num_seqs": 16}
PROMPT = [(7 * i + 3) % VOCAB for i in range(61)]


def with_tokenizer(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded.folder() / name, folder)


@pytest.fixture(scope="module")
def llm():
    made = LLM(**SMALL)
    yield made
    made.close()


@pytest.fixture(scope="module")
def reference():
    return AutoModelForCausalLM.from_pretrained(embedded.folder(), dtype=torch.float32).eval()


def test_the_first_of_n_sequences_is_that_of_a_lone_request(llm):
    asked = SamplingParams(n=4, temperature=1.0, seed=11, max_tokens=12, ignore_eos=True)
    (together,) = llm.generate([PROMPT], asked)
    assert len({tuple(output.token_ids) for output in together.outputs}) == 4
    (again,) = llm.generate([PROMPT], asked)
    assert [output.token_ids for output in again.outputs] == [output.token_ids for output in together.outputs]
    (first,) = llm.generate([PROMPT], SamplingParams(temperature=1.0, seed=11, max_tokens=12, ignore_eos=True))
    assert first.outputs[0].token_ids == together.outputs[0].token_ids


@pytest.mark.parametrize("budget", [2048, 17])
def test_prompt_logprobs_are_those_of_transformers(reference, budget):
    engine = LLM(**SMALL, max_num_batched_tokens=budget)
    (result,) = engine.generate([PROMPT], SamplingParams(max_tokens=1, prompt_logprobs=3))
    engine.close()
    with torch.inference_mode():
        logprobs = reference(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    assert result.prompt_logprobs is not None and result.prompt_logprobs[0] is None
    assert len(result.prompt_logprobs) == len(PROMPT)
    for position, row in enumerate(result.prompt_logprobs[1:], 1):
        expected = logprobs[position - 1]
        assert row[PROMPT[position]].logprob == pytest.approx(float(expected[PROMPT[position]]), abs=1e-3)
        assert set(expected.topk(3).indices.tolist()) <= set(row)


def test_no_end_before_min_tokens(llm):
    (free,) = llm.chat([{"role": "user", "content": "Hello!"}], SamplingParams(temperature=0, max_tokens=60))
    length = len(free.outputs[0].token_ids)
    asked = SamplingParams(temperature=0, max_tokens=60, min_tokens=length + 5)
    (held,) = llm.chat([{"role": "user", "content": "Hello!"}], asked)
    assert len(held.outputs[0].token_ids) >= length + 5
    ends = set(llm.llm_engine.eos_token_ids)
    assert ends.isdisjoint(held.outputs[0].token_ids[: length + 4]), "masked, not only overlooked"


def test_a_deterministic_request_in_half_precision_does_not_notice_others():
    half = LLM(**SMALL | {"dtype": "bfloat16"})
    asked = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, deterministic=True, logprobs=0)
    (alone,) = half.generate([PROMPT], asked)
    others = [[(5 * i + salt) % VOCAB for i in range(20 + 9 * salt)] for salt in range(7)]
    plain = SamplingParams(temperature=0, max_tokens=25, ignore_eos=True)
    crowded = half.generate([PROMPT, *others], [asked] + [plain] * len(others))[0]
    half.close()
    assert crowded.outputs[0].token_ids == alone.outputs[0].token_ids
    assert crowded.outputs[0].cumulative_logprob == alone.outputs[0].cumulative_logprob


def test_a_gguf_file_generates_what_its_source_does(tmp_path):
    (tmp_path / "source").mkdir()
    save(tmp_path / "source", "llama-gqa-tied")
    with_tokenizer(tmp_path / "source")
    file = write_gguf(tmp_path / "source", tmp_path / "model.gguf", pre="smollm")
    tokens = []
    for model in (tmp_path / "source", file):
        loaded = LLM(model, **SMALL)
        asked = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        tokens.append([result.outputs[0].token_ids for result in loaded.generate([PROMPT, PROMPT[:9]], asked)])
        loaded.close()
    assert tokens[0] == tokens[1]


def test_the_embedded_model_as_gguf_answers_the_same(llm, tmp_path):
    file = write_gguf(embedded.folder(), tmp_path / "demo.gguf", pre="smollm")
    loaded = LLM(file, **SMALL)
    greedy = SamplingParams(temperature=0, max_tokens=40)
    for text in ("Hello!", "Tell me a story about Mira and a kettle."):
        messages = [{"role": "user", "content": text}]
        assert loaded.chat(messages, greedy)[0].outputs[0].text == llm.chat(messages, greedy)[0].outputs[0].text
    assert loaded.model_name == "demo"
    loaded.close()


def test_a_packaged_model_has_the_name_that_was_given(llm, tmp_path, monkeypatch):
    data = write_gguf(embedded.folder(), tmp_path / "demo.gguf", pre="smollm", kind="Q8_0").read_bytes()
    wheel = write_wheel(tmp_path / "index", {"tiny/demo.gguf": data})
    monkeypatch.setattr(packaged, "PACKAGED", {"tiny": entry(wheel, "tiny/demo.gguf", data)})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.chdir(tmp_path)
    asked = EngineOptions(model="tiny", download_dir="cache", memory="400MiB")
    with pytest.raises(
        ModelError, match="`quire pull tiny --download-dir cache` downloads it; configs that are part of quire: llama"
    ):
        find_model(asked)
    loaded = LLM("tiny", **SMALL, download_dir="cache")
    assert loaded.model_name == "tiny"
    greedy, messages = SamplingParams(temperature=0, max_tokens=20), [{"role": "user", "content": "Hello!"}]
    assert loaded.chat(messages, greedy)[0].outputs[0].text == llm.chat(messages, greedy)[0].outputs[0].text
    loaded.close()
    findings = list(examine(asked))
    assert findings[-1].text == "tiny can be served" and not any(finding.problem for finding in findings)
    planned = find_model(asked)
    assert planned.name == "tiny" and planned.path.name == "demo.gguf"
    assert planned.description.weight_bytes("bfloat16", planned.description.schemes(None)) < 8e6  # its 8 bits are known
    text = "Mira had a kettle."
    assert planned.tokenize()(text) == llm.get_tokenizer().encode(text, add_special_tokens=False)


def test_transformers_runs_what_quire_does_not_describe(tmp_path):
    source = save_olmo(tmp_path)
    said: list[str] = []
    loaded = LLM(tmp_path, **SMALL, report=said.append)
    assert any("transformers as a backend" in line for line in said)
    (result,) = loaded.generate([PROMPT], SamplingParams(temperature=0, max_tokens=32, ignore_eos=True))
    source.generation_config.eos_token_id = None
    with torch.inference_mode():
        whole = source.generate(torch.tensor([PROMPT]), max_new_tokens=32, do_sample=False, pad_token_id=0)
    assert result.outputs[0].token_ids == whole[0, len(PROMPT) :].tolist()
    with pytest.raises(RequestError, match="cannot be run deterministically"):
        loaded.generate([PROMPT], SamplingParams(deterministic=True))
    loaded.close()
    with pytest.raises(ModelError, match="not supported"):
        LLM(tmp_path, **SMALL, model_impl="quire")


def save_olmo(folder):
    """A model that only the transformers backend runs."""
    from transformers import OlmoConfig, OlmoForCausalLM  # noqa: PLC0415  (slow to import, for one test)

    torch.manual_seed(5)
    shape = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = OlmoConfig(**shape, num_attention_heads=4, max_position_embeddings=256, pad_token_id=None, eos_token_id=2)
    model = OlmoForCausalLM(config).eval()
    model.save_pretrained(folder)
    with_tokenizer(folder)
    return model


def test_the_doctor_finds_a_model_that_runs_and_one_that_does_not(tmp_path):
    healthy = list(examine(EngineOptions(memory="400MiB")))
    assert not any(finding.problem for finding in healthy)
    assert {finding.topic for finding in healthy} == {
        *("versions", "hardware", "kernels", "model", "block size", "precision"),
    }
    assert healthy[-1].text == "quire-demo can be served"
    save(tmp_path, "gemma2")
    problems = [finding.text for finding in examine(EngineOptions(model=str(tmp_path))) if finding.problem]
    assert len(problems) == 1 and "tokenizer.json" in problems[0]
    with_tokenizer(tmp_path)
    texts = [finding.text for finding in examine(EngineOptions(model=str(tmp_path), memory="400MiB"))]
    assert any("KV pool" in text and "last" in text for text in texts), "the window has a pool of its own"
    for options in ({"kernels": "tritn"}, {"device": "cuda"}, {"device": "banana"}):
        problems = [finding for finding in examine(EngineOptions(**options, memory="400MiB")) if finding.problem]
        assert [finding.topic for finding in problems] == ["kernels"]
    problems = [finding.text for finding in examine(EngineOptions(revision="main")) if finding.problem]
    assert len(problems) == 1 and "revision" in problems[0]


@pytest.mark.parametrize(
    ("memory", "recommended"),
    [
        ("400MiB", "weights in bfloat16, the most accurate that holds a sequence of 2048 tokens"),
        ("55MiB", "--quantization int8, the most accurate that holds a sequence of 2048 tokens"),
        ("50MiB", "--quantization int4 --kv-cache-dtype int8, which holds the longest sequence"),
        ("40MiB", None),
    ],
)
def test_the_doctor_recommends_the_most_accurate_precision_that_fits(memory, recommended):
    findings = list(examine(EngineOptions(memory=memory)))
    texts = [finding.text for finding in findings if finding.topic == "precision"]
    assert len(texts) == 7
    assert texts[-1] == (
        f"recommended: {recommended}" if recommended else "none of these can be used, for the reasons beside them"
    )
    assert any(finding.problem for finding in findings) == (memory in ("50MiB", "40MiB"))


def test_the_doctor_keeps_the_weights_of_a_quantized_checkpoint(tmp_path):
    quantize(embedded.folder(), tmp_path / "model", "int4", report=lambda _: None, progress=lambda *_: None)
    texts = [finding.text for finding in examine(EngineOptions(model=str(tmp_path / "model"), memory="400MiB"))
             if finding.topic == "precision"]  # fmt: skip
    assert [text.partition(":")[0] for text in texts] == [
        "weights in compressed-tensors",
        "--kv-cache-dtype int8",
        "recommended",
    ]


def test_tokens_that_the_model_does_not_have_can_neither_come_up_nor_hurt(llm):
    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=4, min_tokens=2, ignore_eos=True)
    engine.add(Request("a", PROMPT, params, bad_words=[[400_000], [3, 400_000]]))
    tokens = [token for _ in range(6) for output in engine.step() for token in output.token_ids]
    assert len(tokens) == 4 and engine.stats().failed_steps == 0
    other = Engine(engine.scheduler, engine.runner, vocab_size=2048, eos_token_ids=(2, 2048, -1))
    assert other.eos_token_ids == (2,)


def test_the_doctor_on_the_command_line(tmp_path):
    healthy = CliRunner().invoke(app, ["doctor", "--memory", "400MiB"])
    assert healthy.exit_code == 0 and "quire-demo can be served" in healthy.output
    ill = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert ill.exit_code == 1 and "config.json" in ill.output
