"""One KV pool for the Triton kernels and one for the reference, which must agree."""

import numpy as np
import pytest
import torch
from kv_groups import kv_group
from triton_device import DEVICE

from quire.kernels.contract import DTYPES, Batch, Storage
from quire.kernels.reference.quantized import MAX_QUANTIZED, SCALE_BYTES, dequantize, quantize
from quire.kernels.reference.rowwise import rotary

pytest.importorskip("triton")
from quire.kernels.triton import blocks
from quire.kernels.triton.plan import plan

NUM_BLOCKS = 12

ALL = torch.arange(NUM_BLOCKS)

ROUNDING = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def group_of(dtype, *, layers=2, heads=2, head_dim=20):
    return kv_group(tuple(range(layers)), heads, head_dim, dtype, NUM_BLOCKS, 1)


class Pair:
    """Blocks of the kernels and of the reference with the same random bytes, some of them NaN."""

    def __init__(self, group, block_size, seed=0):
        self.group, self.block_size = group, block_size
        self.random = torch.Generator().manual_seed(seed)
        self.numpy = np.random.default_rng(seed)
        self.fast = blocks.allocate(group, block_size, DEVICE)
        shape = (len(group.layers), 2, NUM_BLOCKS, block_size, group.kind.num_kv_heads, group.kind.head_dim)
        if group.dtype in MAX_QUANTIZED:
            shape = (*shape[:-1], group.kind.head_dim + SCALE_BYTES)
            canonical = torch.randint(0, 256, shape, generator=self.random, dtype=torch.uint8)
            canonical[..., -1] |= 0x7F  # a scale that is NaN or nearly
        else:
            canonical = self.normal(*shape, dtype=DTYPES[group.dtype])
            canonical[self.normal(*shape) > 2] = torch.nan
        self.slow = Storage(group, block_size, canonical)
        blocks.unpack(self.fast, ALL, canonical.to(DEVICE))

    def normal(self, *shape, dtype=torch.float32):
        return torch.randn(shape, generator=self.random).to(dtype)

    def number(self, low, high):
        return int(self.numpy.integers(low, high + 1))

    def check(self):
        """Asserts equal numbers everywhere, bit for bit except for the sign of zero."""
        assert torch.equal(self.numbers(blocks.pack(self.fast, ALL).cpu()), self.numbers(self.slow.data))

    def numbers(self, canonical):
        assert canonical.shape == self.slow.data.shape
        assert canonical.dtype == self.slow.data.dtype
        if self.group.dtype in MAX_QUANTIZED:
            scales = canonical[..., -SCALE_BYTES:].contiguous().view(torch.float32)
            canonical = torch.cat((dequantize(canonical, self.group.dtype), scales), -1)
        return canonical.nan_to_num(123)

    def batch(self, most=3):
        """Chunks in scattered blocks. Unused table entries are -1 or arbitrary."""
        free = self.numpy.permutation(NUM_BLOCKS).tolist()
        starts, stops, tables = [], [], []
        for _ in range(self.number(1, most)):
            start = self.number(0, 2) * self.block_size + self.number(0, self.block_size - 1) * self.number(0, 1)
            stop = start + self.number(1, 12)
            used = range(start // self.block_size, (stop - 1) // self.block_size + 1)
            table = self.numpy.integers(-1, NUM_BLOCKS, 6)
            table[list(used)] = [free.pop() for _ in used]
            starts, stops, tables = [*starts, start], [*stops, stop], [*tables, table]
        return Batch(np.array(starts), np.array(stops), np.array(tables))

    def store(self, layer, k, v, batch):
        """Store as `rotary_write` does, one token at a time. k is rotated."""
        data = self.slow.data[layer]
        token = 0
        for start, stop, table in zip(batch.starts, batch.stops, batch.tables, strict=True):
            for position in range(start, stop):
                block, place = table[position // self.block_size], position % self.block_size
                if block >= 0:
                    if place == 0:
                        data[:, block] = 0
                    data[0, block, place], data[1, block, place] = self.stored(k[token]), self.stored(v[token])
                token += 1

    def stored(self, x):
        return quantize(x, self.group.dtype) if self.group.dtype in MAX_QUANTIZED else x.to(self.slow.data.dtype)

    def qkv(self, num_tokens, num_heads, dtype):
        """Queries, keys and values as views of one product."""
        kv_heads = self.group.kind.num_kv_heads
        product = self.normal(num_tokens, num_heads + 2 * kv_heads, self.group.kind.head_dim, dtype=dtype).to(DEVICE)
        return product.tensor_split((num_heads, num_heads + kv_heads), 1)

    def rotation(self, num_tokens, half):
        angles = 3 * self.normal(num_tokens, half)
        return angles.cos().to(DEVICE), angles.sin().to(DEVICE)

    def write(self, batch, num_heads, half, dtype, layer=0):
        """Rotate and write in both, and compare the rotated values."""
        step = plan(batch, self.fast)
        num_tokens = len(step.chunks)
        q, k, v = self.qkv(num_tokens, num_heads, dtype)
        before, rotation = k.clone(), self.rotation(num_tokens, half)
        turned = blocks.rotary_write(self.fast, layer, q, k, v, rotation, step)
        assert torch.equal(k, before)
        turned_k = blocks.rotary_write(self.fast, layer, k, k, v, rotation, step)  # keys as queries: the same bits
        for result, x in ((turned, q), (turned_k, k)):
            expected, _ = rotary(x.cpu(), x.cpu(), *(part.cpu() for part in rotation))
            torch.testing.assert_close(result.cpu(), expected, rtol=ROUNDING[dtype], atol=1e-6)
            assert torch.equal(result[..., 2 * half :], x[..., 2 * half :])
        self.store(layer, turned_k.cpu(), v.cpu(), batch)
        self.check()
