"""Recurrent states by the Triton kernels, token by token, against the reference."""

from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from triton_device import DEVICE
from triton_random_tensors import normal, poisoned_empty
from triton_state_blocks import CONVOLUTION, DELTA, KDA, KINDS, MAMBA2, MAX_PENDING, WIDE, States, batch_of

from quire.core.states import StateKind
from quire.kernels.contract import Requirements
from quire.kernels.state_contract import RecurrenceWeights

pytest.importorskip("triton")
from quire.kernels.triton.deterministic import TRITON_DETERMINISTIC
from quire.kernels.triton.kernels import TRITON
from quire.kernels.triton.step_capture import CudaGraphCapture

each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)

# (start, stop, settled, settles), one per chunk
FRESH, DECODE, DRAFTS, PADDING = (0, 5, 0, 5), (40, 41, 39, 40), (9, 13, 7, 10), (0, 1, 0, 1)
STEPS = {
    "fresh": [FRESH, (0, 1, 0, 0), (0, 2, 0, 1)],
    "decoding": [(7, 8, 7, 8), DECODE, (2, 3, 0, 2), (1, 2, 1, 1)],
    "drafts": [DRAFTS, (4, 8, 4, 4), (12, 13, 8, 13)],
    "mixed": [DECODE, (3, 12, 2, 10), DRAFTS, FRESH],
}


@pytest.fixture(scope="module", autouse=True)
def poison():
    """torch.empty gives NaN, so that values which a kernel does not write are found."""
    with patch.object(torch, "empty", poisoned_empty):
        yield


@each_kind
@pytest.mark.parametrize("name", STEPS)
def test_states_and_outputs_are_those_of_the_reference(kind, name):
    States(kind).check(batch_of(STEPS[name]))


@each_kind
@pytest.mark.parametrize(
    ("stored", "dtype"), [("bfloat16", torch.bfloat16), ("float32", torch.bfloat16), ("bfloat16", torch.float32)]
)
def test_states_and_outputs_are_rounded_once(kind, stored, dtype):
    States(kind, stored, dtype).check(batch_of(STEPS["mixed"]))


@each_kind
def test_snapshots_are_written_at_their_positions(kind):
    snapshots = [(0, 1, 6), (0, 3, 7), (0, 5, 8), (2, 11, 9), (3, 9, 10)]
    States(kind).check(batch_of([FRESH, DECODE, (3, 12, 2, 11), (8, 11, 5, 9)], snapshots=snapshots))


@each_kind
def test_chunks_without_tokens_and_padding_chunks_write_nothing(kind):
    chunks = [(5, 5, 3, 5), DECODE, PADDING, (0, 0, 0, 0), FRESH, PADDING]
    States(kind).check(batch_of(chunks, [2, 1, -1, 3, 0, -1]))


def test_mamba2_skips_and_limits_time_steps():
    limits = {"skip": normal(9, 4), "time_limits": (0.3, 0.9)}
    States(MAMBA2, **limits).check(batch_of(STEPS["mixed"]))


@pytest.mark.parametrize("kind", [DELTA, CONVOLUTION], ids=str)
def test_a_convolution_needs_no_bias(kind):
    states = States(kind)
    states.weights = RecurrenceWeights(states.weights.conv_weight, None, states.weights.decay, states.weights.time_bias)
    states.check(batch_of(STEPS["decoding"]))


def test_inputs_may_be_a_view_into_a_wider_tensor():
    states, batch = States(DELTA), batch_of(STEPS["mixed"])
    wide = normal(5, 30, DELTA.width + 7)
    with patch.object(States, "inputs", lambda _, number: wide[:number, 3 : 3 + DELTA.width]):
        states.check(batch)


def test_a_step_follows_another_one():
    """Drafts of which some are accepted, one replaced, then a snapshot behind all."""
    states = States(DELTA)
    for chunk, snapshots in [
        ((0, 4, 0, 1), []),
        ((3, 6, 1, 3), [(0, 3, 5)]),
        ((4, 5, 3, 5), [(0, 5, 6)]),
        ((5, 9, 5, 8), []),
    ]:
        batch = batch_of([chunk], [2], snapshots)
        with patch.object(states, "poison", lambda _: None):
            states.check(batch)


def run(states, kernels, cuts, pending):
    """Outputs and final state of 9 tokens in chunks cut at `cuts`. Up to `pending` tokens are not settled."""
    x, out = states.inputs(9), []
    states.storage.data.zero_()
    settled = 0
    for start, stop in pairwise((0, *cuts, 9)):
        settles = 9 if stop == 9 else max(start, stop - pending)
        plan = kernels.plan_states(batch_of([DECODE, (start, stop, settled, settles)], [4, 3]), states.storage)
        rows = torch.cat((x[:1], x[start:stop]))
        out.append(kernels.recur(states.storage, 0, rows, states.weights, plan)[1:])
        settled = settles
    recurrent = states.storage.data[3, 0, : states.storage.num_recurrent]
    return torch.cat(out), recurrent.clone()


def test_kda_takes_a_prompt_token_by_token():
    States(KDA).check(batch_of([(0, 20, 0, 18), DECODE]))


@pytest.mark.parametrize("kind", [DELTA, MAMBA2, CONVOLUTION], ids=str)
def test_deterministic_kernels_give_the_same_bits_in_any_chunks(kind):
    states = States(kind, input_dtype=torch.bfloat16)
    expected = run(states, TRITON_DETERMINISTIC, (), 0)
    for cuts, pending in [((4, 5), 0), ((2, 5, 7), MAX_PENDING)]:
        for found, wanted in zip(run(states, TRITON_DETERMINISTIC, cuts, pending), expected, strict=True):
            assert torch.equal(found, wanted)


@each_kind
def test_a_captured_plan_is_refilled_in_place(kind):
    states, capture = States(kind), CudaGraphCapture()
    plan = capture.plan_states(batch_of([PADDING] * 6, [-1] * 6), states.storage)
    tensors = plan.table, plan.token_chunks, plan.snapshots
    addresses = [some.data_ptr() for some in tensors]
    for chunks, blocks in [
        ([DECODE, (3, 6, 2, 4), PADDING, PADDING, (0, 0, 0, 0), (0, 0, 0, 0)], [4, 2, -1, -1, -1, -1]),
        ([(1, 2, 1, 2), *[PADDING] * 5], [7, *[-1] * 5]),
    ]:
        batch = batch_of(chunks, blocks)
        capture.refill_states(plan, batch)
        states.check(batch, plan=plan)
    assert [some.data_ptr() for some in tensors] == addresses
    with pytest.raises(ValueError, match="6 chunks of 6 tokens and 0 snapshots cannot hold 1 chunks of 1 tokens"):
        capture.refill_states(plan, batch_of([DECODE]))


def test_keys_of_a_recurrence_may_be_too_long():
    needed = Requirements(DEVICE, "float32", "float32", 16, (64,), state_kind=WIDE)
    longer = StateKind("mamba2", num_value_heads=1, value_dim=4, conv_width=4, num_key_heads=1, key_dim=257)
    assert TRITON.unsupported_reason(needed) is None
    reason = TRITON.unsupported_reason(replace(needed, state_kind=longer))
    assert reason == "keys of 257 numbers in a recurrence are longer than 256"


@pytest.mark.parametrize("pairs", [[(0, 3)], [(0, 3), (3, 5), (2, 0)]])
def test_copies_read_all_sources_before_they_write(pairs):
    states = States(DELTA)
    before = states.storage.data.clone()
    TRITON.copy_states(states.storage, torch.tensor(pairs))
    expected = before.clone()
    for source, target in pairs:
        expected[target] = before[source]
    assert torch.equal(states.storage.data, expected)
