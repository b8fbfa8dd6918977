"""Perplexity of token ids under an engine's model, compared with the logits of transformers' model."""

import re
import shutil
from math import exp

import pytest
import torch
from typer.testing import CliRunner

import quire
from quire.cli import app
from quire.config import EngineOptions
from quire.errors import ConfigError, ModelError
from quire.hub import embedded
from quire.startup.doctor import examine
from quire.startup.perplexity import perplexity, token_logprobs
from quire.tokenizer.tokenizer import Tokenizer
from tools.demo_model.sample_text import sample

WINDOW = 100


@pytest.fixture(scope="module")
def token_ids():
    return torch.randint(3, 301, (250,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def model(saved, token_ids, tmp_path_factory):
    """Folder, and the logprobs of the tokens by transformers' model in float64, in windows of WINDOW tokens."""
    plain, reference = saved("qwen3-gqa")
    folder = shutil.copytree(plain, tmp_path_factory.mktemp("model") / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded.folder() / name, folder)
    found = []
    for start in range(0, len(token_ids), WINDOW):
        ids = torch.tensor(token_ids[start : start + WINDOW])
        with torch.no_grad():
            logits = reference.double()(ids[None]).logits[0, :-1]
        found.append(logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0])
    reference.float()
    return folder, torch.cat(found)


def engine_of(folder, **options):
    options = {"memory": "64MiB", "dtype": "float32", "max_model_len": 128, "max_num_seqs": 4} | options
    return quire.LLM(folder, **options).llm_engine


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 16}])
def test_logprobs_are_those_of_transformers_in_each_window(model, token_ids, options):
    folder, expected = model
    engine, calls = engine_of(folder, **options), []
    found = token_logprobs(engine, token_ids, window=WINDOW, progress=lambda done, total: calls.append((done, total)))
    assert found == pytest.approx(expected.numpy(), abs=1e-4)
    assert calls == [(100, 250), (200, 250), (250, 250)]
    again = perplexity(engine, token_ids, window=WINDOW)  # the prefix cache has the windows now
    assert again == pytest.approx(exp(-expected.mean().item()), rel=1e-5)


def test_the_options_of_the_engine_change_it(model, token_ids):
    folder, expected = model
    for options in ({"kv_cache_dtype": "int4"}, {"quantization": "int8"}):
        found = perplexity(engine_of(folder, **options), token_ids, window=WINDOW)
        assert found != pytest.approx(exp(-expected.mean().item()), rel=1e-6)
        assert found == pytest.approx(exp(-expected.mean().item()), rel=0.1)


def test_windows_begin_with_the_begin_token(model):
    engine = engine_of(model[0])
    found = token_logprobs(engine, [1, 5, 6, 7, 8], window=3, bos_token_id=1)
    assert len(found) == 4
    assert found[2:] == pytest.approx(token_logprobs(engine, [1, 7, 8], window=3), abs=1e-5)


def test_texts_and_windows_that_do_not_fit_are_refused(model):
    engine = engine_of(model[0])
    for ids, window in (([], 100), ([5], 100), ([5, 6, 7], 1), ([5, 6, 7], 129)):
        with pytest.raises(ConfigError, match=r"give a longer text, or a window of 2 to 128 tokens"):
            perplexity(engine, ids, window=window)
    assert perplexity(engine, [5, 6, 7], window=2) > 1  # the last window has one token, which has no logprob


# In the doctor's report


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(sample(7, 8_000))
    return file


def test_the_doctor_compares_a_model_as_served_with_its_exact_weights(text):
    flags = ["--memory", "256MiB", "--quantization", "int4", "--kv-cache-dtype", "int8", "--perplexity", str(text)]
    shown = CliRunner().invoke(app, ["doctor", *flags], catch_exceptions=False)
    assert shown.exit_code == 0
    lines = shown.stdout.splitlines()
    served, exact = lines[lines.index("perplexity") + 1 :]
    found = re.fullmatch(
        rf"  ([\d.]+) as served with these options: (\d+) tokens of {text}, in windows of 2048", served
    )
    changed = re.fullmatch(
        r"  ([\d.]+) with weights, keys and values in the model's type: as served it changes by ([+-][\d.]+)%", exact
    )
    ids = Tokenizer.from_folder(embedded.folder()).encode(text.read_text())
    assert int(found[2]) == len(ids)
    for options, figure in (({}, changed[1]), ({"quantization": "int4", "kv_cache_dtype": "int8"}, found[1])):
        llm = quire.LLM(memory="256MiB", **options)
        assert perplexity(llm.llm_engine, ids) == pytest.approx(float(figure), rel=1e-3)
        llm.close()
    assert float(changed[2]) == pytest.approx(100 * (float(found[1]) / float(changed[1]) - 1), abs=0.02)


def test_exact_weights_that_cannot_be_loaded_are_no_problem(text, monkeypatch):
    monkeypatch.setattr("quire.startup.doctor.perplexities", perplexities_without("none"))
    served, exact = list(examine(EngineOptions(memory="256MiB"), perplexity=text))[-2:]
    assert served.text.startswith("7.0000 as served with these options: ")
    assert exact.text == "with weights, keys and values in the model's type it is not computed: the memory is short"
    assert not exact.problem


def perplexities_without(quantization):
    """`perplexities` that always finds 7, and has no memory for this quantization."""

    def find(models, _ids, *, progress):
        if models[0].quantization == quantization:
            raise ConfigError("the memory is short")
        return [7.0], 2048

    return find


@pytest.mark.parametrize(
    ("content", "message"),
    [("short", "not computed: the text .* has 3 tokens, but at least 1024"), (None, "not computed: .*No such file")],
)
def test_the_doctor_names_a_text_that_cannot_be_used(content, message, tmp_path):
    if content is not None:
        (tmp_path / "text").write_text(content)
    *_, last = examine(EngineOptions(memory="256MiB"), perplexity=tmp_path / "text")
    assert last.topic == "perplexity" and last.problem and re.match(message, last.text)


def test_the_doctor_reads_no_text_for_a_model_that_cannot_run(tmp_path):
    findings = list(examine(EngineOptions(model=str(tmp_path)), perplexity=tmp_path / "text"))
    assert findings[-2].problem
    assert findings[-1].text == "not computed, because the model cannot be served"


def test_a_failed_step_is_an_error(model, monkeypatch):
    engine = engine_of(model[0])
    monkeypatch.setattr(engine.runner, "launch", lambda step: 1 / 0)
    with pytest.raises(ModelError, match="the perplexity cannot be computed: "):
        perplexity(engine, [5, 6, 7], window=3)
