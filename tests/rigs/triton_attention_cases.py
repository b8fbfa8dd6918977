"""Cases for paged attention in Triton, with their results by dense float64 products. Needs the package triton."""

import numpy as np
import torch
from kv_groups import kv_group
from triton_device import DEVICE

from quire.kernels.contract import DTYPES, Batch, ResidentTables, Storage
from quire.kernels.reference.quantized import dequantize, quantize
from quire.kernels.triton import attention as module
from quire.kernels.triton.plan import plan as make_plan

NOWHERE = 2**30  # a block that does not exist
TOLERANCES = {"float32": 2e-5, "float16": 3e-3, "bfloat16": 0.02}


class Case:
    """Sequences with given keys and values in blocks, NaN everywhere else, and queries of some positions."""

    def __init__(
        self, seed, spans, *, kv_heads=2, shared=2, dim=64, size=16, dtype="float32", stored=None, window=0, common=0
    ):
        """spans: (start, stop) of each chunk. common: leading blocks that all sequences share."""
        self.random = np.random.default_rng(seed)
        self.spans, self.window, self.dtype, self.stored = spans, window, dtype, stored or dtype
        needed = [-(-stop // size) for _, stop in spans]
        group = kv_group((0, 1), kv_heads, dim, self.stored, sum(needed) + 3, 1, window=window)
        shape = (2, 2, group.num_blocks, kv_heads)
        if stored:
            data = torch.full((*shape, size * (dim + 4)), 255, dtype=torch.uint8)
        else:
            data = torch.full((*shape, size, dim), torch.nan, dtype=DTYPES[dtype])
        self.storage = Storage(group, size, data.to(DEVICE))
        ids = self.random.permutation(group.num_blocks)
        self.tables = np.full((len(spans), max(needed) + 2), NOWHERE)
        self.kv, self.q = [], []
        before = 0
        for i, (start, stop) in enumerate(spans):
            self.tables[i, : needed[i]] = ids[before:][: needed[i]]
            before += needed[i]
            self.kv.append(self.draw(2, stop, kv_heads, dim))
            self.q.append(self.draw(stop - start, kv_heads * shared, dim))
            if common:
                self.tables[i, :common] = self.tables[0, :common]
                self.kv[i][:, : common * size] = self.kv[0][:, : common * size]
            self.store(i)
            lost = max(0, start - window + 1) // size if window else 0
            self.tables[i, :lost] = -1

    def draw(self, *shape):
        return torch.from_numpy(self.random.standard_normal(shape)).to(DTYPES[self.dtype])

    def store(self, i):
        """Write into layer 1 the KV of the i-th sequence from the window of its first query on."""
        start, stop = self.spans[i]
        size, dim = self.storage.block_size, self.storage.group.kind.head_dim
        layer = self.storage.data[1].cpu()
        for p in range(max(0, start - self.window + 1) if self.window else 0, stop):
            blocks, place = layer[:, self.tables[i, p // size]], p % size
            if self.stored == self.dtype:
                blocks[:, :, place] = self.kv[i][:, p]
            else:
                one = quantize(self.kv[i][:, p], self.stored)
                blocks[:, :, place * dim : (place + 1) * dim] = one[..., :dim]
                blocks[:, :, size * dim + 4 * place :][..., :4] = one[..., dim:]
        self.storage.data[1] = layer.to(DEVICE)

    def batch(self):
        starts, stops = (np.array(column, np.int64) for column in zip(*self.spans, strict=True))
        return Batch(starts, stops, self.tables)

    def run(self, plan=None, softcap=0.0, scale=0.2, *, strict=False):
        """The output of all chunks, on the CPU. Queries are views into a wider product."""
        plan = make_plan(self.batch(), self.storage) if plan is None else plan
        q = torch.cat(self.q).to(DEVICE)
        product = torch.full((len(q), q.shape[1] * q.shape[2] + 16), torch.nan, dtype=q.dtype, device=DEVICE)
        product[:, 8:-8] = q.flatten(1)
        q = product[:, 8:-8].unflatten(1, q.shape[1:])
        return module.attention(self.storage, 1, q, plan, scale, softcap, deterministic=strict).cpu()

    def expected(self, softcap=0.0, scale=0.2):
        kv = self.kv
        if self.stored != self.dtype:
            kv = [dequantize(quantize(x, self.stored), self.stored) for x in kv]
        each = zip(self.q, kv, self.spans, strict=True)
        return torch.cat([dense(q, *x, span, scale, softcap, self.window) for q, x, span in each])

    def check(self, plan=None, softcap=0.0, *, strict=False):
        out = self.run(plan, softcap, strict=strict)
        assert out.dtype == DTYPES[self.dtype]
        torch.testing.assert_close(out.double(), self.expected(softcap), atol=TOLERANCES[self.dtype], rtol=0.01)
        return out


def dense(q, k, v, span, scale, softcap, window):
    """q (queries, heads, dim) of a span's positions, k and v (keys, KV heads, dim); the result in float64."""
    shared = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(shared, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    ages = torch.arange(*span)[:, None] - torch.arange(span[1])
    seen = (ages >= 0) & (ages < window) if window else ages >= 0
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).flatten(1)


def resident(batch, rows, num_rows):
    """The batch with its block tables in rows of a device table. Entries of other rows do not exist."""
    tables = torch.full((num_rows, batch.tables.shape[1] + 1), NOWHERE, dtype=torch.int32)
    tables[list(rows), :-1] = torch.from_numpy(batch.tables).to(torch.int32)
    nothing = np.empty((len(batch.starts), 0), np.int64)
    return Batch(batch.starts, batch.stops, nothing, ResidentTables(tables.to(DEVICE), np.array(rows)))
