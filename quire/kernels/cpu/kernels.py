"""The kernel contract implemented by the C++ kernels, with one object per mode: ordinary or deterministic."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.config import KVGroup
from quire.kernels import reference
from quire.kernels.contract import (
    Batch,
    PackedWeight,
    Requirements,
    Rotation,
    SamplingMetadata,
    StepCapture,
    Storage,
    Weight,
)
from quire.kernels.cpu import _C, blocks, likelihood, memory, paged, products, rowwise, sampling
from quire.kernels.cpu.step_capture import CallListCapture

MAX_HEAD_DIM = 256
DTYPES = ("float32", "bfloat16")


class CpuKernels:
    """C++ kernels. deterministic: excludes AMX tile registers and contexts split over threads."""

    NAME = "cpu"
    USES_RESIDENT_TABLES = False
    SCRATCH_BYTES = 2**22  # of each thread

    def __init__(self, *, deterministic: bool) -> None:
        self._deterministic = deterministic
        self.step_capture: StepCapture | None = None if deterministic else CallListCapture()

    def unsupported_reason(self, requirements: Requirements) -> str | None:
        """Why the module does not meet the requirements, or None if it does."""
        if requirements.device.type != "cpu":
            return f"it runs on CPUs, not on {requirements.device.type}"
        if requirements.dtype not in DTYPES:
            return f"it computes in {' and '.join(DTYPES)}, not in {requirements.dtype}"
        if requirements.kv_dtype != requirements.dtype:
            return f"it keeps keys and values in {requirements.dtype}, not in {requirements.kv_dtype}"
        if requirements.block_size % blocks.PART_TOKENS:
            return f"block_size {requirements.block_size} is not a multiple of {blocks.PART_TOKENS}"
        if max(requirements.head_dims) > MAX_HEAD_DIM:
            return f"heads of {max(requirements.head_dims)} are larger than {MAX_HEAD_DIM}"
        return None

    def use_threads(self, number: int) -> None:
        """Set the number of threads of torch and of the C++ kernels."""
        torch.set_num_threads(number)
        _C.set_threads(number)

    def release_workspace(self) -> None:
        """See `memory`."""
        memory.release_workspace()

    def allocate(self, group: KVGroup, block_size: int, device: torch.device) -> Storage:
        """See `blocks`."""
        return blocks.allocate(group, block_size, device)

    def pack(self, storage: Storage, blocks_: Tensor) -> Tensor:
        """See `blocks`."""
        return blocks.pack(storage, blocks_)

    def unpack(self, storage: Storage, blocks_: Tensor, canonical: Tensor) -> None:
        """See `blocks`."""
        blocks.unpack(storage, blocks_, canonical)

    def copy_blocks(self, storage: Storage, pairs: Tensor, num_tokens: int) -> None:
        """See `blocks`."""
        blocks.copy_blocks(storage, pairs, num_tokens)

    def plan(self, batch: Batch, storage: Storage) -> paged.CpuPlan:
        """See `paged`."""
        return paged.plan(batch, storage, deterministic=self._deterministic)

    def rotary_write(
        self,
        storage: Storage,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotation: Rotation | None,
        plan: paged.CpuPlan,
    ) -> Tensor:
        """See `blocks`."""
        return blocks.rotary_write(storage, layer, q, k, v, rotation, plan.slots)

    def attention(
        self, storage: Storage, layer: int, q: Tensor, plan: paged.CpuPlan, scale: float, softcap: float = 0.0
    ) -> Tensor:
        """See `paged`."""
        return paged.attention(storage, layer, q, plan, scale, softcap)

    def rotation(self, positions: Tensor, frequencies: Tensor, magnitude: float) -> Rotation:
        """See `rowwise`."""
        return rowwise.rotation(positions, frequencies, magnitude)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `rowwise`."""
        return rowwise.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `rowwise`."""
        return rowwise.add_rms_norm(x, residual, weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """See `rowwise`."""
        return rowwise.layer_norm(x, weight, bias, eps)

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """See `rowwise`."""
        return rowwise.activate(x, activation)

    def allocate_weight(self, shape: Sequence[int], dtype: torch.dtype, parts: int = 1) -> PackedWeight:
        """See `products`."""
        return products.allocate_weight(shape, dtype, parts)

    def write_rows(self, weight: PackedWeight, rows: Tensor, start: int, index: int = 0) -> None:
        """See `products`."""
        products.write_rows(weight, rows, start, index)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """See `products`."""
        return products.linear(x, weight, bias, deterministic=self._deterministic)

    def gated_linear(self, x: Tensor, weight: Weight, bias: Tensor | None, activation: str) -> Tensor:
        """See `products`."""
        return products.gated_linear(x, weight, bias, activation, deterministic=self._deterministic)

    def embed(self, ids: Tensor, weight: Weight, scale: float = 1.0) -> Tensor:
        """See `products`."""
        return products.embed(ids, weight, scale)

    def route(self, logits: Tensor, k: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
        """See `reference`: torch is used, because its time is negligible compared with the experts."""
        return reference.route(logits, k, normalise=normalise)

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, up: Weight, down: Weight, activation: str) -> Tensor:
        """See `products`."""
        return products.experts(x, ids, weights, up, down, activation, deterministic=self._deterministic)

    def sample(self, logits: Tensor, sampling_metadata: SamplingMetadata) -> Tensor:
        """See `sampling`."""
        return sampling.sample(logits, sampling_metadata)

    def logprobs(self, logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `likelihood`."""
        return likelihood.logprobs(logits, tokens, k)


def description() -> str:
    """The name of the build in use, which is the best one that runs on this machine."""
    return f"{_C.builds()[0]} build"
