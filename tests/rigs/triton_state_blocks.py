"""State blocks of the Triton kernels, compared with the reference after each step."""

import numpy as np
import pytest
import torch
from triton_device import DEVICE
from triton_random_tensors import ROUNDING, normal

from quire.core.states import StateGroup, StateKind
from quire.kernels.reference import REFERENCE
from quire.kernels.state_contract import RecurrenceWeights, StateBatch, StateStorage

pytest.importorskip("triton")
from quire.kernels.triton.kernels import TRITON

NUM_BLOCKS = 12
MAX_PENDING = 4
DELTA = StateKind("delta", num_value_heads=4, value_dim=6, conv_width=4, num_key_heads=2, key_dim=5)
MAMBA2 = StateKind("mamba2", num_value_heads=4, value_dim=8, conv_width=4, num_key_heads=2, key_dim=16)
KDA = StateKind("kda", num_value_heads=4, value_dim=6, conv_width=4, num_key_heads=2, key_dim=5)
WIDE = StateKind("delta", num_value_heads=1, value_dim=20, conv_width=2, num_key_heads=1, key_dim=256)
CONVOLUTION = StateKind("convolution", num_value_heads=1, value_dim=40, conv_width=3)
KINDS = {"delta": DELTA, "kda": KDA, "mamba2": MAMBA2, "wide keys": WIDE, "convolution": CONVOLUTION}


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
            *() if kind.rule == "convolution" else (-normal(3, heads).exp() / 4, normal(4, kind.num_time_biases)),
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
    """Within the rounding of the type, or a few of float32, relative to the largest number."""
    error = max(2 * ROUNDING[expected.dtype], 5e-6)
    largest = float(expected.nan_to_num().abs().max())
    torch.testing.assert_close(found, expected, rtol=error, atol=error * largest, equal_nan=True)


def batch_of(chunks, blocks=None, snapshots=()):
    """chunks: (start, stop, settled, settles). snapshots: (chunk, position, block)."""
    starts, stops, settled, settles = np.array(chunks, np.int64).T
    blocks = np.arange(len(chunks), dtype=np.int64)[::-1] if blocks is None else np.array(blocks)
    return StateBatch(starts, stops, blocks, settled, settles, np.array(snapshots, np.int64).reshape(-1, 3))
