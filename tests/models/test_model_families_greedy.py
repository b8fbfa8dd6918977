"""Greedy tokens of every model family against transformers, in batches that mix prompts with decoding."""

import pytest
import random_checkpoints as checkpoints
from model_equality import SERVED, prompt_of, theirs_of
from paged_model_forward import generate

LENGTHS = (1, 5, 16, 17, 31, 33, 48, 70)
NUM_TOKENS = 64


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
