"""Logits against transformers' own, for random checkpoints and for the embedded model."""

from pathlib import Path

import checkpoints
import numpy as np
import pytest
import torch
from body_steps import cache_for, load_model
from transformers import AutoModelForCausalLM

from quire.kernels import reference
from quire.kernels.contract import Batch
from quire.layers.attend import PagedAttend
from quire.store.device import DeviceStore

EMBEDDED = Path(__file__).parents[2] / "quire" / "assets" / "demo_model"


@torch.inference_mode()
def logits_of(model, prompt, *, cut=10**9, num_groups=1):
    """Logits at every position of a prompt that is computed in chunks of at most `cut` tokens."""
    block_size = 8
    num_blocks = -(-len(prompt) // block_size)
    cache = cache_for(model, num_blocks, block_size, num_groups)
    store = DeviceStore(reference, cache, model.device)
    attend = PagedAttend(reference, store.storages, model.config.scale)
    tables = [np.random.default_rng(group).permutation(num_blocks)[None] for group in range(num_groups)]
    parts = []
    for start in range(0, len(prompt), cut):
        stop = min(start + cut, len(prompt))
        attend.plan([Batch(np.array([start]), np.array([stop]), table) for table in tables])
        hidden = model(torch.tensor(prompt[start:stop]), torch.arange(start, stop), attend)
        parts.append(model.logits(hidden))
    return torch.cat(parts).float()


@torch.inference_mode()
def theirs_of(model, prompt):
    return model(torch.tensor([prompt])).logits[0].float()


def prompt_of(length, vocab_size=checkpoints.VOCAB):
    return np.random.default_rng(length).integers(0, vocab_size, length).tolist()


def assert_alike(found, expected, share):
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < share * (expected.max() - expected.min())


@pytest.mark.parametrize("cut", [10**9, 16, 7])
@pytest.mark.parametrize("kind", checkpoints.KINDS)
def test_logits_equal_transformers(saved, kind, cut):
    folder, theirs = saved(kind)
    prompt = prompt_of(50)
    assert_alike(logits_of(load_model(folder), prompt, cut=cut), theirs_of(theirs, prompt), 2e-4)


def test_layers_may_lie_in_several_groups(saved):
    model = load_model(saved("qwen3-gqa")[0])
    prompt = prompt_of(30)
    assert_alike(logits_of(model, prompt, cut=11, num_groups=3), logits_of(model, prompt), 1e-5)


def test_the_embedded_model_equals_transformers():
    theirs = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32).eval()
    prompt = prompt_of(300, 2048)
    assert_alike(logits_of(load_model(EMBEDDED), prompt, cut=128), theirs_of(theirs, prompt), 2e-4)


@pytest.mark.parametrize(("dtype", "share"), [("float16", 0.01), ("bfloat16", 0.06)])
@pytest.mark.parametrize("kind", ["llama-mqa-biases", "qwen3-tied"])
def test_short_types_come_near(saved, kind, dtype, share):
    folder, theirs = saved(kind)
    prompt = prompt_of(40)
    found = logits_of(load_model(folder, dtype), prompt, cut=15)
    expected = theirs_of(theirs, prompt)
    assert found.isfinite().all()
    assert (found - expected).std() < share * expected.std()


def test_a_far_position_is_rotated_as_in_transformers(saved):
    folder, theirs = saved("qwen3-tied")
    prompt = prompt_of(500)
    assert_alike(logits_of(load_model(folder), prompt, cut=256)[-5:], theirs_of(theirs, prompt)[-5:], 2e-4)
