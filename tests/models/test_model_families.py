"""Every model family against transformers: logits, greedy tokens of mixed batches, 16-bit types, shards."""

from dataclasses import replace
from pathlib import Path

import pytest
import random_checkpoints as checkpoints
import torch
from model_equality import assert_alike, prompt_of, theirs_of
from paged_model_forward import Sequences, generate, logits_of
from transformers import AutoModelForCausalLM

from quire.kernels.deterministic import DETERMINISTIC as deterministic
from quire.models.decoder import Decoder
from quire.models.description import FAMILIES, describe
from quire.models.loading import load

EMBEDDED = Path(__file__).parents[2] / "quire" / "assets" / "demo_model"
LENGTHS = (1, 5, 16, 17, 31, 33, 48, 70)
NUM_TOKENS = 64

# Positions depend on the longest sequence, which here is no longer than the training context.
SERVED = {"llama-dynamic": 96}


def test_every_family_has_a_variant():
    tested = {checkpoints.architecture(kind) for kind in checkpoints.EVERY}
    assert tested == set(FAMILIES)


@pytest.mark.parametrize("kind", checkpoints.EVERY)
def test_logits_equal_transformers(saved, kind):
    folder, theirs = saved(kind)
    prompt = prompt_of(75)
    found = logits_of(folder, prompt, cut=13, max_model_len=SERVED.get(kind))
    assert_alike(found, theirs_of(theirs, prompt), 1e-5)


@pytest.mark.parametrize("kind", checkpoints.EVERY)
def test_greedy_tokens_of_a_mixed_batch_equal_transformers(saved, kind):
    """A token is greedy if it is the argmax of transformers' logits after the tokens before it."""
    folder, theirs = saved(kind)
    limit = SERVED.get(kind)
    prompts = [prompt_of(length if limit is None else min(length, limit - NUM_TOKENS)) for length in LENGTHS]
    found = generate(folder, prompts, NUM_TOKENS, cut=20, max_model_len=limit)
    for prompt, tokens in zip(prompts, found, strict=True):
        logits = theirs_of(theirs, prompt + tokens)
        assert tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


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


@pytest.mark.parametrize("kind", checkpoints.EVERY)
def test_attention_matters_in_every_variant(saved, kind):
    """Otherwise a wrong attention would pass the tests above."""
    description = describe(saved(kind)[0])
    config = description.config
    layers = [
        replace(layer, score_scaling=replace(layer.score_scaling, scale=1.5 * layer.score_scaling.scale))
        for layer in config.layers
    ]
    steeper = replace(description, config=replace(config, layers=tuple(layers)))
    prompt = prompt_of(40)
    usual, moved = (
        Sequences(one, load(one, dtype="float32"), [40]).logits([(0, 0, prompt)]) for one in (description, steeper)
    )
    assert (moved - usual).abs().max() > 0.01 * (usual.max() - usual.min())


@pytest.mark.parametrize("kind", ["llama-mqa-biases", "qwen3-tied", "gemma3", "falcon-40b", "qwen2-moe"])
def test_float16_comes_near(saved, kind):
    folder, theirs = saved(kind)
    prompt = prompt_of(40)
    found, expected = logits_of(folder, prompt, cut=15, dtype="float16"), theirs_of(theirs, prompt)
    assert found.isfinite().all()
    assert (found - expected).std() < 0.01 * expected.std()


def test_the_embedded_model_equals_transformers():
    theirs = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32).eval()
    prompt = prompt_of(300, 2048)
    assert_alike(logits_of(EMBEDDED, prompt, cut=128), theirs_of(theirs, prompt), 2e-5)


@pytest.mark.parametrize("kind", ["qwen3-tied", "gemma3"])
def test_a_far_position_is_rotated_as_in_transformers(saved, kind):
    folder, theirs = saved(kind)
    prompt = prompt_of(500)
    assert_alike(logits_of(folder, prompt, cut=256)[-5:], theirs_of(theirs, prompt)[-5:], 1e-4)


@pytest.mark.parametrize(("limit", "length"), [(None, 192), (150, 150), (96, 60), (96, 96)])
def test_dynamic_ntk_is_that_of_the_longest_sequence(saved, limit, length):
    folder, _ = saved("llama-dynamic")
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()  # a new one, because it remembers its longest sequence
    prompt = prompt_of(length)
    assert_alike(logits_of(folder, prompt, cut=50, max_model_len=limit), theirs_of(theirs, prompt), 1e-5)


def test_longrope_uses_short_factors_up_to_the_context_of_training(saved):
    folder, theirs = saved("phi3-longrope")
    short, long = prompt_of(32), prompt_of(33)
    assert_alike(logits_of(folder, short, max_model_len=32), theirs_of(theirs, short), 1e-5)
    assert_alike(logits_of(folder, long, max_model_len=33), theirs_of(theirs, long), 1e-5)
    wrong = logits_of(folder, short, max_model_len=33) - theirs_of(theirs, short)
    assert wrong.abs().max() > 0.01  # they differ


def test_longrope_of_phi_moe_has_its_own_magnitudes(tmp_path):
    """Transformers applies short_factor to sequences of any length, so that its long ones need other fields."""
    short, long = [1.0 + i / 10 for i in range(8)], [1.0, 2.0, 4.0, 6.0, 9.0, 12.0, 14.0, 15.0]
    kept = {"original_max_position_embeddings": 32, "short_mscale": 1.2, "long_mscale": 1.3, "long_factor": long}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": short, **kept}
    theirs = checkpoints.save(tmp_path, "phi-moe", rope_parameters=rope)
    stretched = checkpoints.save(tmp_path / "b", "phi-moe", rope_parameters={**rope, "short_factor": long})
    few, many = prompt_of(32), prompt_of(60)
    assert_alike(logits_of(tmp_path, few, max_model_len=32), theirs_of(theirs, few), 1e-5)
    assert_alike(logits_of(tmp_path, many), theirs_of(stretched, many), 1e-5)


@pytest.mark.parametrize("kind", checkpoints.EVERY)
def test_with_invariant_kernels_logits_have_the_same_bits_in_any_company(saved, kind):
    """`row_invariant`: no operation of the decoder itself depends on other tokens."""
    description = describe(saved(kind)[0])
    model = load(description, dtype="float32")
    assert model.batch_invariant
    prompts = [prompt_of(length) for length in (21, 6, 1)]
    together = Sequences(description, model, [21, 6, 1], kernels=deterministic)
    parts = [together.logits([(0, 0, prompts[0][:4])])]
    found = together.logits([(1, 0, prompts[1]), (0, 4, prompts[0][4:]), (2, 0, prompts[2])]).split([6, 17, 1])
    for prompt, logits in zip(prompts, [torch.cat([*parts, found[1]]), found[0], found[2]], strict=True):
        alone = Sequences(description, model, [len(prompt)], kernels=deterministic)
        one_by_one = [alone.logits([(0, place, [token])]) for place, token in enumerate(prompt)]
        assert torch.equal(torch.cat(one_by_one), logits)


def test_the_scale_of_embeddings_is_rounded_as_in_training(saved):
    config = replace(describe(saved("gemma")[0]).config, embed_scale=3072**0.5)
    assert Decoder(config, torch.bfloat16).embed_scale == 55.5
    assert Decoder(config, torch.float32).embed_scale == pytest.approx(55.4256, abs=1e-4)
