"""Paged attention of the Triton kernels: decode beside memory bandwidth, prefill beside the matrix product rate.

Heads are those of Llama-3.1-8B. A case has so many layers that its keys and values are larger than any cache; each
layer is computed in turn, as in a model. The peers are the same kernel with blocks in order, torch's attention over
contiguous keys and values, and FlashInfer over the same scattered blocks if it is installed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu import clock
from benchmarks.gpu.part import Part
from benchmarks.gpu.processes import Row, Settings
from quire.core.kv_groups import KVGroup, kv_kind
from quire.kernels.contract import Batch, Storage
from quire.kernels.triton.kernels import TRITON as kernels

BLOCK_SIZE = 16
COLD_BYTES = 2**29  # of keys and values: more than any cache
MOST_LAYERS = 64
WRITTEN_AT_ONCE = 2**14  # tokens
SHARE_OF_MEMORY = 0.85  # of free memory
FIRST = [(32, 4096), (1, 65536)]  # the cases with goals
DECODES = [(batch, context) for context in (1024, 4096, 8192, 32768, 65536) for batch in (1, 8, 32, 64, 256)]
PREFILLS = [(0, 2048), (0, 8192), (8192, 2048), (8192, 8192)]  # context, tokens of the chunk


@dataclass(frozen=True)
class Heads:
    """Heads of one layer."""

    num: int
    num_kv: int
    dim: int


LLAMA_8B = Heads(32, 8, 128)
TINY = Heads(4, 2, 32)


def measure(part: Part, settings: Settings) -> None:
    """A row for each pair of batch and context, and for each prefill chunk."""
    heads = TINY if settings.tiny else LLAMA_8B
    decodes = [(2, 20)] if settings.tiny else FIRST + [case for case in DECODES if case not in FIRST]
    prefills = [(16, 8)] if settings.tiny else PREFILLS
    bench = Bench(part, settings, heads)

    def decode_all(cases: list[tuple[int, int]]) -> None:
        for batch, context in cases:
            part.attempt(decode_name(batch, context), lambda b=batch, c=context: bench.decode(b, c))

    decode_all(decodes[: len(FIRST)])
    for start, tokens in prefills:
        part.attempt(f"prefill of {tokens} at {start}", lambda s=start, t=tokens: bench.prefill(s, t))
    decode_all(decodes[len(FIRST) :])
    if find_spec("flashinfer") is None:
        part.skip("flashinfer", "it is not installed")
        return
    for batch, context in decodes:  # last, because its compilation is slow
        what = f"{decode_name(batch, context)}, flashinfer"
        part.attempt(what, lambda b=batch, c=context: bench.flashinfer(b, c))


def decode_name(batch: int, context: int) -> str:
    """Name of a decode row."""
    return f"decode, batch {batch}, context {context}"


class Bench:
    """Cases with one shape of heads on one device."""

    def __init__(self, part: Part, settings: Settings, heads: Heads) -> None:
        self.part = part
        self.device = settings.device
        self.heads = heads
        self.cold_bytes = 0 if settings.tiny else COLD_BYTES

    def decode(self, batch: int, context: int) -> None:
        """One query for each of `batch` sequences."""
        what, heads = decode_name(batch, context), self.heads
        width = -(-context // BLOCK_SIZE)
        kv_bytes, layers = self._kv_bytes(batch, context), self._layers(batch, context)
        self._require(1.7 * layers * kv_bytes)  # in 16 and 8 bits; torch needs it once more later
        order = _scattered(batch, width)
        q = torch.randn(batch, heads.num, heads.dim, device=self.device).to(torch.bfloat16)
        stored = [self._storage(dtype, batch * width, layers) for dtype in ("bfloat16", "fp8_e4m3")]
        scattered, in_order = (
            Batch(*_spans(batch, context - 1, context), tables)
            for tables in (order, np.arange(order.size).reshape(order.shape))
        )
        ours = [
            self._attention(stored[0], q, scattered),
            self._attention(stored[0], q, in_order),
            self._attention(stored[1], q, scattered),
        ]
        paged, contiguous, in_8_bits = (time / layers for time in clock.seconds(ours, self.device))
        copied = self.part.limits.get("copy_gb_per_second")
        rate = kv_bytes / paged / 1e9
        small_rate = kv_bytes * (heads.dim + 4) / (2 * heads.dim) / in_8_bits / 1e9  # with the scales
        row = self.part.row(
            what,
            us=1e6 * paged,
            gb_per_second=rate,
            share_of_copy=rate / copied if copied else None,
            paged_over_contiguous=paged / contiguous,
            fp8_us=1e6 * in_8_bits,
            fp8_gb_per_second=small_rate,
            fp8_share_of_copy=small_rate / copied if copied else None,
            fp8_speedup=paged / in_8_bits,
        )
        del stored, ours
        peer = f"{what}, sdpa"
        self.part.attempt(peer, lambda: self._peer(row, "sdpa", lambda: self._sdpa(q, context, layers), paged, layers))

    def flashinfer(self, batch: int, context: int) -> None:
        """Add FlashInfer's time with the same queries and blocks to an existing row."""
        row = self.part.row(decode_name(batch, context))
        if "us" not in row:
            raise LookupError("there is nothing to set it beside")
        layers = self._layers(batch, context)
        self._require(1.2 * layers * self._kv_bytes(batch, context))
        order = _scattered(batch, -(-context // BLOCK_SIZE))
        q = torch.randn(batch, self.heads.num, self.heads.dim, device=self.device).to(torch.bfloat16)
        self._peer(row, "flashinfer", lambda: self._flashinfer(q, order, context, layers), row["us"] / 1e6, layers)

    def _kv_bytes(self, batch: int, context: int) -> int:
        """KV bytes of one layer, in bfloat16."""
        return 2 * batch * context * self.heads.num_kv * self.heads.dim * 2

    def _layers(self, batch: int, context: int) -> int:
        return max(1, min(MOST_LAYERS, -(-self.cold_bytes // self._kv_bytes(batch, context))))

    def prefill(self, start: int, tokens: int) -> None:
        """One chunk of a prompt behind `start` computed positions."""
        heads, stop = self.heads, start + tokens
        width = -(-stop // BLOCK_SIZE)
        order = _scattered(1, width)
        q = torch.randn(tokens, heads.num, heads.dim, device=self.device).to(torch.bfloat16)
        stored = [self._storage(dtype, width, 1) for dtype in ("bfloat16", "fp8_e4m3")]
        batch = Batch(*_spans(1, start, stop), order)
        paged, in_8_bits = clock.seconds([self._attention(storage, q, batch) for storage in stored], self.device)
        pairs = (stop * (stop + 1) - start * (start + 1)) // 2
        rate = 4 * pairs * heads.num * heads.dim / paged / 1e12
        best = self.part.limits.get("bf16_tflops")
        row = self.part.row(
            f"prefill of {tokens} at {start}",
            us=1e6 * paged,
            tflops=rate,
            share_of_products=rate / best if best else None,
            fp8_us=1e6 * in_8_bits,
        )
        what = f"prefill of {tokens} at {start}, sdpa"
        self.part.attempt(what, lambda: self._peer(row, "sdpa", lambda: self._sdpa_prefill(q, start), paged, 1))

    def _require(self, num_bytes: float) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()
            free = SHARE_OF_MEMORY * torch.cuda.mem_get_info()[0]
            if num_bytes > free:
                raise MemoryError(f"{num_bytes / 1e9:.0f} GB are needed, {free / 1e9:.0f} GB may be taken")

    def _storage(self, dtype: str, num_blocks: int, layers: int) -> Storage:
        """KV storage with random keys and values."""
        heads = self.heads
        group = KVGroup(tuple(range(layers)), kv_kind(heads.num_kv, heads.dim), dtype, num_blocks, 1)
        storage = kernels.allocate(group, BLOCK_SIZE, torch.device(self.device))
        blocks = np.arange(num_blocks)
        at_once = WRITTEN_AT_ONCE // BLOCK_SIZE
        for some in np.split(blocks, range(at_once, num_blocks, at_once)):
            tokens = len(some) * BLOCK_SIZE
            k, v = torch.randn(2, tokens, heads.num_kv, heads.dim, device=self.device).to(torch.bfloat16)
            plan = kernels.plan(Batch(*_spans(1, 0, tokens), some.reshape(1, -1)), storage)
            for layer in range(layers):
                kernels.rotary_write(storage, layer, k, k, v, None, plan)
        return storage

    def _attention(self, storage: Storage, q: Tensor, batch: Batch) -> Callable[[], object]:
        """Run attention in all layers."""
        plan = kernels.plan(batch, storage)
        layers = range(len(storage.group.layers))
        scale = self.heads.dim**-0.5
        return lambda: [kernels.attention(storage, layer, q, plan, scale) for layer in layers]

    def _peer(self, row: Row, name: str, make: Callable[[], Callable[[], object]], paged: float, layers: int) -> None:
        """Seconds of another attention, and their ratio to ours."""
        self._require(0)
        (seconds,) = clock.seconds([make()], self.device)
        row |= {f"{name}_us": 1e6 * seconds / layers, f"{name}_over_ours": seconds / layers / paged}
        self.part.save()

    def _sdpa(self, q: Tensor, context: int, layers: int) -> Callable[[], object]:
        heads = self.heads
        shape = (layers, len(q), heads.num_kv, context, heads.dim)
        k, v = (torch.empty(shape, device=self.device, dtype=torch.bfloat16).normal_() for _ in range(2))
        queries = q.unsqueeze(2)
        return lambda: [
            scaled_dot_product_attention(queries, k[layer], v[layer], enable_gqa=True) for layer in range(layers)
        ]

    def _sdpa_prefill(self, q: Tensor, start: int) -> Callable[[], object]:
        """Prefill with torch. Keys and values are repeated for shared KV heads before the measured time."""
        heads, stop = self.heads, start + len(q)
        k, v = torch.randn(2, 1, heads.num, stop, heads.dim, device=self.device).to(torch.bfloat16)
        queries = q.transpose(0, 1).unsqueeze(0).contiguous()
        if not start:
            return lambda: scaled_dot_product_attention(queries, k, v, is_causal=True)
        mask = causal_lower_right(len(q), stop)
        return lambda: scaled_dot_product_attention(queries, k, v, attn_mask=mask)

    def _flashinfer(self, q: Tensor, order: np.ndarray, context: int, layers: int) -> Callable[[], object]:
        heads, (batch, width) = self.heads, order.shape
        wrapper = _flashinfer_decode(self.device)
        shape = (layers, batch * width, 2, heads.num_kv, BLOCK_SIZE, heads.dim)
        kv = torch.empty(shape, device=self.device, dtype=torch.bfloat16).normal_()
        starts = torch.arange(batch + 1, dtype=torch.int32) * width
        last = torch.full((batch,), context - (width - 1) * BLOCK_SIZE, dtype=torch.int32)
        wrapper.plan(
            starts.to(self.device),
            torch.from_numpy(order.ravel().astype(np.int32)).to(self.device),
            last.to(self.device),
            heads.num,
            heads.num_kv,
            heads.dim,
            BLOCK_SIZE,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )
        return lambda: [wrapper.run(q, kv[layer]) for layer in range(layers)]


@cache
def _flashinfer_decode(device: str) -> Any:  # noqa: ANN401 -- an optional package
    import flashinfer  # noqa: PLC0415

    workspace = torch.empty(2**27, dtype=torch.uint8, device=device)
    return flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)


def _spans(batch: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full(batch, start), np.full(batch, stop)


def _scattered(batch: int, width: int) -> np.ndarray:
    """Block tables in random order."""
    return np.random.default_rng(0).permutation(batch * width).reshape(batch, width)
