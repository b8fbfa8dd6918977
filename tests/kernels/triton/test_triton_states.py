"""Recurrent states by the Triton kernels, against the reference."""

from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
import torch
from triton_device import DEVICE
from triton_random_tensors import ROUNDING, normal, poisoned_empty

from quire.core.states import StateGroup, StateKind
from quire.kernels.reference import REFERENCE
from quire.kernels.state_contract import RecurrenceWeights, StateBatch, StateStorage

pytest.importorskip("triton")
from quire.kernels.triton.deterministic import TRITON_DETERMINISTIC
from quire.kernels.triton.kernels import TRITON
from quire.kernels.triton.step_capture import CudaGraphCapture

NUM_BLOCKS = 12
MAX_PENDING = 4
DELTA = StateKind("delta", num_value_heads=4, value_dim=6, conv_width=4, num_key_heads=2, key_dim=5)
MAMBA2 = StateKind("mamba2", num_value_heads=4, value_dim=8, conv_width=4, num_key_heads=2, key_dim=16)
WIDE = StateKind("delta", num_value_heads=1, value_dim=20, conv_width=2, num_key_heads=1, key_dim=256)
CONVOLUTION = StateKind("convolution", num_value_heads=1, value_dim=40, conv_width=3)
KINDS = {"delta": DELTA, "mamba2": MAMBA2, "wide keys": WIDE, "convolution": CONVOLUTION}
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


class States:
    """State blocks with random numbers, and NaN where no kernel may read; weights and inputs."""

    def __init__(self, kind, dtype="float32", input_dtype=torch.float32, *, seed=0, **weights):
        self.kind, self.input_dtype, self.seed = kind, input_dtype, seed
        self.group = StateGroup(2, kind, dtype, NUM_BLOCKS, MAX_PENDING, 0)
        self.storage = TRITON.allocate_states(self.group, DEVICE)
        self.storage.data.copy_(normal(seed, *self.storage.data.shape) / 2)
        heads = kind.num_value_heads
        self.weights = RecurrenceWeights(
            normal(1, kind.num_channels, kind.conv_width, dtype=input_dtype),
            normal(2, kind.num_channels, dtype=input_dtype),
            *() if kind.rule == "convolution" else (-normal(3, heads).exp() / 4, normal(4, heads)),
            **weights,
        )

    def inputs(self, number):
        return normal(self.seed + 5, number, self.kind.width, dtype=self.input_dtype)

    def poison(self, batch):
        """Write NaN where blocks have undefined numbers, and zeros at positions below 0."""
        tail = self.kind.conv_width - 1
        for start, block, settled in zip(batch.starts, batch.blocks, batch.settled, strict=True):
            if block >= 0:
                data = self.storage.data[block]
                inputs = data[:, self.storage.num_recurrent :].view(2, -1, self.kind.width)
                inputs[:, : max(tail - settled, 0)] = 0
                inputs[:, tail + start - settled :] = torch.nan
                if start == 0:
                    data.fill_(torch.nan)
        for block in batch.snapshots[:, 2]:
            self.storage.data[block] = torch.nan

    def on_cpu(self):
        return StateStorage(self.group, self.storage.data.cpu().clone())

    def check(self, batch, kernels=TRITON, layer=1, plan=None):
        """Assert that outputs and all blocks are those of the reference."""
        self.poison(batch)
        slow, x = self.on_cpu(), self.inputs(int((batch.stops - batch.starts).sum()))
        names = ("conv_weight", "conv_bias", "decay", "time_bias", "skip")
        tensors = {name: getattr(self.weights, name) for name in names}
        weights = RecurrenceWeights(
            **{name: some if some is None else some.cpu() for name, some in tensors.items()},
            time_limits=self.weights.time_limits,
        )
        expected = REFERENCE.recur(slow, layer, x.cpu(), weights, REFERENCE.plan_states(batch, slow))
        plan = kernels.plan_states(batch, self.storage) if plan is None else plan
        found = kernels.recur(self.storage, layer, x, self.weights, plan)
        used = torch.from_numpy(np.repeat(batch.blocks >= 0, batch.stops - batch.starts))
        assert found.dtype == x.dtype
        assert_close(found.cpu()[used], expected[used])
        assert_close(self.storage.data.cpu(), slow.data)


def assert_close(found, expected):
    error = max(2 * ROUNDING[expected.dtype], 1e-5)
    torch.testing.assert_close(found, expected, rtol=error, atol=error, equal_nan=True)


def batch_of(chunks, blocks=None, snapshots=()):
    """chunks: (start, stop, settled, settles). snapshots: (chunk, position, block)."""
    starts, stops, settled, settles = np.array(chunks, np.int64).T
    blocks = np.arange(len(chunks), dtype=np.int64)[::-1] if blocks is None else np.array(blocks)
    return StateBatch(starts, stops, blocks, settled, settles, np.array(snapshots, np.int64).reshape(-1, 3))


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
    """Outputs and final state of 12 tokens in chunks cut at `cuts`. Up to `pending` tokens are not settled."""
    x, out = states.inputs(12), []
    states.storage.data.zero_()
    settled = 0
    for start, stop in pairwise((0, *cuts, 12)):
        settles = 12 if stop == 12 else max(start, stop - pending)
        plan = kernels.plan_states(batch_of([DECODE, (start, stop, settled, settles)], [4, 3]), states.storage)
        rows = torch.cat((x[:1], x[start:stop]))
        out.append(kernels.recur(states.storage, 0, rows, states.weights, plan)[1:])
        settled = settles
    recurrent = states.storage.data[3, 0, : states.storage.num_recurrent]
    return torch.cat(out), recurrent.clone()


@each_kind
def test_deterministic_kernels_give_the_same_bits_in_any_chunks(kind):
    states = States(kind, input_dtype=torch.bfloat16)
    expected = run(states, TRITON_DETERMINISTIC, (), 0)
    for cuts, pending in [((5,), 0), ((5, 6, 7), 1), ((2, 6, 9), MAX_PENDING)]:
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


@pytest.mark.parametrize("pairs", [[(0, 3)], [(0, 3), (3, 5), (2, 0)]])
def test_copies_read_all_sources_before_they_write(pairs):
    states = States(DELTA)
    before = states.storage.data.clone()
    TRITON.copy_states(states.storage, torch.tensor(pairs))
    expected = before.clone()
    for source, target in pairs:
        expected[target] = before[source]
    assert torch.equal(states.storage.data, expected)
