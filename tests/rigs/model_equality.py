"""Logits of a checkpoint by transformers and by quire."""

import numpy as np
import random_checkpoints as checkpoints
import torch

# Positions depend on the longest sequence, which here is no longer than the training context.
SERVED = {"llama-dynamic": 96}


@torch.inference_mode()
def theirs_of(model, prompt):
    """Logits of transformers at every position."""
    return model(torch.tensor([prompt])).logits[0].float()


def prompt_of(length, vocab_size=checkpoints.VOCAB):
    return np.random.default_rng(length).integers(0, vocab_size, length).tolist()


def assert_alike(found, expected, share):
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < share * (expected.max() - expected.min())
