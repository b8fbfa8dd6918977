"""Every model family: a token's logits do not depend on others in its batch, and depend on its attention."""

from dataclasses import replace

import pytest
import random_checkpoints as checkpoints
import torch
from model_equality import prompt_of
from paged_model_forward import Sequences

from quire.kernels.deterministic import DETERMINISTIC as deterministic
from quire.models.description import describe
from quire.models.loading import load


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


@pytest.mark.parametrize("kind", checkpoints.EVERY)
def test_with_invariant_kernels_logits_have_the_same_bits_in_any_company(saved, kind):
    """`row_invariant`: no operation of the decoder itself depends on other tokens."""
    description = describe(saved(kind)[0])
    model = load(description, dtype="float32")
    assert model.batch_invariant
    prompts = [prompt_of(length) for length in (13, 6, 1)]
    together = Sequences(description, model, [13, 6, 1], kernels=deterministic)
    parts = [together.logits([(0, 0, prompts[0][:4])])]
    found = together.logits([(1, 0, prompts[1]), (0, 4, prompts[0][4:]), (2, 0, prompts[2])]).split([6, 9, 1])
    for prompt, logits in zip(prompts, [torch.cat([*parts, found[1]]), found[0], found[2]], strict=True):
        alone = Sequences(description, model, [len(prompt)], kernels=deterministic)
        one_by_one = [alone.logits([(0, place, [token])]) for place, token in enumerate(prompt)]
        assert torch.equal(torch.cat(one_by_one), logits)
