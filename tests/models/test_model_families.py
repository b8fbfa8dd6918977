"""Logits of every model family against transformers in float32."""

from pathlib import Path

import pytest
import random_checkpoints as checkpoints
import torch
from model_equality import SERVED, assert_alike, prompt_of, theirs_of
from paged_model_forward import logits_of
from transformers import AutoModelForCausalLM

from quire.models.description import FAMILIES

EMBEDDED = Path(__file__).parents[2] / "quire" / "assets" / "demo_model"


def test_every_family_has_a_variant():
    tested = {checkpoints.architecture(kind) for kind in checkpoints.EVERY}
    assert tested == set(FAMILIES)


@pytest.mark.parametrize("kind", checkpoints.EVERY)
def test_logits_equal_transformers(saved, kind):
    folder, theirs = saved(kind)
    prompt = prompt_of(75)
    found = logits_of(folder, prompt, cut=13, max_model_len=SERVED.get(kind))
    assert_alike(found, theirs_of(theirs, prompt), 1e-5)


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
