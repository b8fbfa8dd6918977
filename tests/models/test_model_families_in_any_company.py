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

HYBRIDS = [kind for kind in checkpoints.HYBRIDS if kind != "granite-hybrid-no-states"]


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


@pytest.mark.parametrize("kind", HYBRIDS)
def test_states_matter_in_every_variant(saved, kind):
    description = describe(saved(kind)[0])
    model, prompt, found = load(description, dtype="float32"), prompt_of(40), []
    for is_cleared in (False, True):
        sequences = Sequences(description, model, [40])
        sequences.logits([(0, 0, prompt[:30])])
        sequences.states.data.mul_(not is_cleared)
        found.append(sequences.logits([(0, 30, prompt[30:])]))
    assert (found[0] - found[1]).abs().max() > 0.01 * (found[0].max() - found[0].min())


@pytest.mark.parametrize("kind", HYBRIDS)
def test_tokens_that_are_replaced_leave_no_trace_in_the_states(saved, kind):
    """The last three tokens of each chunk stay beside the state, and other tokens take their places."""
    description = describe(saved(kind)[0])
    model, prompt = load(description, dtype="float32"), prompt_of(40)
    expected = Sequences(description, model, [40]).logits([(0, 0, prompt)])
    sequences, wrong, place = Sequences(description, model, [43], unsettled=3), [7, 8, 9], 0
    for size in (9, 1, 2, 11, 17):
        part = prompt[place : place + size]
        found = sequences.logits([(0, place, part + wrong)])[:size]
        assert (found - expected[place : place + size]).abs().max() < 1e-5 * (expected.max() - expected.min())
        place += size


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
