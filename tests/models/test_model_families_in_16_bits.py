"""Every model family in 16 bits against transformers in 32."""

from dataclasses import replace

import pytest
import random_checkpoints as checkpoints
import torch
from model_equality import SERVED, prompt_of, theirs_of
from paged_model_forward import logits_of

from quire.models.decoder import Decoder
from quire.models.description import describe


@pytest.mark.parametrize("kind", checkpoints.EVERY)
def test_bfloat16_from_shards_is_no_further_from_the_truth_than_transformers(tmp_path, kind):
    """The exact result is in float32. If its best two logits differ by more than rounding, tokens are equal."""
    model = checkpoints.save(tmp_path, kind, shard="40KB", dtype=torch.bfloat16)
    assert len({stored.file for stored in describe(tmp_path).checkpoint.tensors.values()}) > 3
    prompt = prompt_of(60)
    rounded = theirs_of(model, prompt)
    truth = theirs_of(model.float(), prompt)
    found = logits_of(tmp_path, prompt, cut=25, dtype="bfloat16", max_model_len=SERVED.get(kind))
    assert (found - truth).abs().median() < 1.2 * (rounded - truth).abs().median()
    best = truth.topk(2).values
    wide = best[:, 0] - best[:, 1] > 2 * torch.maximum((rounded - truth).abs().amax(-1), (found - truth).abs().median())
    assert wide.float().mean() > 0.3
    is_best = found[wide].argmax(-1) == truth[wide].argmax(-1)
    has_experts = describe(tmp_path).config.experts is not None  # rounding may select another one for a token
    assert is_best.float().mean() >= (0.95 if has_experts else 1.0)


@pytest.mark.parametrize("kind", ["llama-mqa-biases", "qwen3-tied", "gemma3", "falcon-40b", "qwen2-moe"])
def test_float16_comes_near(saved, kind):
    folder, theirs = saved(kind)
    prompt = prompt_of(40)
    found, expected = logits_of(folder, prompt, cut=15, dtype="float16"), theirs_of(theirs, prompt)
    assert found.isfinite().all()
    assert (found - expected).std() < 0.01 * expected.std()


def test_the_scale_of_embeddings_is_rounded_as_in_training(saved):
    config = replace(describe(saved("gemma")[0]).config, embed_scale=3072**0.5)
    assert Decoder(config, torch.bfloat16).embed_scale == 55.5
    assert Decoder(config, torch.float32).embed_scale == pytest.approx(55.4256, abs=1e-4)
