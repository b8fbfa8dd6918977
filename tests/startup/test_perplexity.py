"""Perplexity of token ids under an engine's model, compared with the logits of transformers' model."""

import shutil
from math import exp

import pytest
import torch

import quire
from quire.errors import ConfigError, ModelError
from quire.hub import embedded
from quire.startup.perplexity import perplexity, token_logprobs

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


def test_a_failed_step_is_an_error(model, monkeypatch):
    engine = engine_of(model[0])
    monkeypatch.setattr(engine.runner, "launch", lambda step: 1 / 0)
    with pytest.raises(ModelError, match="the perplexity cannot be computed: "):
        perplexity(engine, [5, 6, 7], window=3)
