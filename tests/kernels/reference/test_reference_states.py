"""Recurrent states of the reference: transformers' outputs, in whatever chunks a sequence is computed."""

import numpy as np
import pytest
import torch
from recurrence_oracle import recurrence
from state_schedules import KINDS, Schedule, batch_of, group_of, weights_of

from quire.kernels.reference import REFERENCE

CPU = torch.device("cpu")
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def recur(storage, batch, inputs, weights, layer=0):
    return REFERENCE.recur(storage, layer, inputs, weights, REFERENCE.plan_states(batch, storage))


def poisoned(group):
    """State blocks full of NaN, as a sequence before may have left them."""
    storage = REFERENCE.allocate_states(group, CPU)
    storage.data.fill_(torch.nan)
    return storage


def state_of(storage, block, layer=0):
    """The recurrent state of a layer in a block."""
    kind = storage.group.kind
    shape = (kind.num_value_heads, kind.key_dim, kind.value_dim) if kind.key_dim else (0,)
    return storage.data[block, layer, : storage.num_recurrent].view(shape)


def inputs_of(storage, block, layer=0):
    """The inputs of the tokens of a layer in a block, (num_inputs, width)."""
    return storage.data[block, layer, storage.num_recurrent :].view(storage.num_inputs, -1)


@each_kind
@pytest.mark.parametrize("seed", [0, 1], ids=["without bias", "with bias and limits"])
def test_a_prompt_has_the_outputs_and_the_state_of_transformers(kind, seed):
    weights = weights_of(kind, seed=seed)
    inputs = torch.randn(37, kind.width, generator=torch.Generator().manual_seed(seed))
    storage = poisoned(group_of(kind))
    out = recur(storage, batch_of([(0, 37, 5, 0, 37)]), inputs, weights, layer=1)
    expected, state = recurrence(kind, inputs, weights)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state_of(storage, 5, 1), state, rtol=1e-4, atol=1e-5)
    untouched = storage.data.clone()
    untouched[5, 1] = torch.nan
    assert untouched.isnan().all()


def assert_run(kind, dtype, storage_dtype, seed, *, tolerance):
    """Outputs and written blocks of random steps are those of runs from position 0 on."""
    weights, group = weights_of(kind, dtype, seed), group_of(kind, storage_dtype)
    storage, schedule = poisoned(group), Schedule(group, dtype, seed, most_tokens=12)
    tail, num_snapshots, num_pending = kind.conv_width - 1, 0, 0
    for _ in range(12):
        step = schedule.step()
        outputs = recur(storage, step.batch, step.inputs, weights).float()
        num_snapshots += len(step.batch.snapshots)
        num_pending += int((step.batch.stops > step.batch.settles).sum())
        lengths = (step.batch.stops - step.batch.starts).tolist()
        for out, history in zip(outputs.split(lengths), step.histories, strict=True):
            if len(out):
                expected = recurrence(kind, history, weights)[0][-len(out) :]
                torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
        for block, history, position in step.blocks:
            known = torch.cat((torch.zeros(tail, kind.width), history.float()))[position:][: storage.num_inputs]
            found = inputs_of(storage, block)[: len(known)].float()
            assert torch.equal(found, known.to(storage.data.dtype).float())
            if kind.key_dim and position:
                expected = recurrence(kind, history[:position], weights)[1]
                torch.testing.assert_close(state_of(storage, block).float(), expected, rtol=tolerance, atol=tolerance)
    assert num_snapshots > 5 and num_pending > 5


@each_kind
def test_chunks_pending_inputs_and_snapshots_change_no_output(kind):
    assert_run(kind, torch.float32, "float32", 3, tolerance=2e-5)


@pytest.mark.parametrize("name", ["delta", "kda", "mamba2", "convolution"])
def test_a_storage_in_bfloat16_changes_outputs_by_its_rounding(name):
    assert_run(KINDS[name], torch.bfloat16, "bfloat16", 4, tolerance=0.06)


@each_kind
def test_chunks_without_tokens_or_without_a_block_write_nothing(kind):
    weights = weights_of(kind)
    storage = poisoned(group_of(kind))
    nothing = batch_of([(0, 0, 2, 0, 0), (0, 1, -1, 0, 1), (7, 7, 3, 6, 7), (0, 0, -1, 0, 0)])
    recur(storage, nothing, torch.randn(1, kind.width), weights)
    assert storage.data.isnan().all()


@pytest.mark.parametrize("name", ["delta", "kda", "mamba2"])
def test_a_kept_token_that_is_replaced_leaves_no_trace(name):
    """A draft is computed and not applied; another token takes its place."""
    kind, weights = KINDS[name], weights_of(KINDS[name])
    tokens = torch.randn(8, kind.width)
    storage = poisoned(group_of(kind))
    recur(storage, batch_of([(0, 6, 1, 0, 5)]), torch.cat((tokens[:5], 9 * torch.randn(1, kind.width))), weights)
    out = recur(storage, batch_of([(5, 8, 1, 5, 8)]), tokens[5:], weights)
    expected, state = recurrence(kind, tokens, weights)
    torch.testing.assert_close(out, expected[5:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state_of(storage, 1), state, rtol=1e-4, atol=1e-5)


def test_copies_read_all_sources_before_a_target_is_written():
    storage = REFERENCE.allocate_states(group_of(KINDS["delta"]), CPU)
    storage.data.copy_(torch.arange(24.0)[:, None, None].expand_as(storage.data))
    REFERENCE.copy_states(storage, torch.tensor([[1, 2], [2, 3], [3, 1], [5, 9]]))
    numbers = np.arange(24)
    numbers[[2, 3, 1, 9]] = [1, 2, 3, 5]
    assert torch.equal(storage.data, torch.tensor(numbers).float()[:, None, None].expand_as(storage.data))
    assert storage.by_block.shape[0] == 24
