"""The kernel contract implemented by the Triton kernels, with one object per mode: ordinary or deterministic."""

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
from quire.kernels.triton import attention, blocks, experts, likelihood, products, routing, rowwise, sampling
from quire.kernels.triton import plan as planning
from quire.kernels.triton.attention import SCRATCH_BYTES
from quire.kernels.triton.blocks import BLOCK_SIZE_MULTIPLE
from quire.kernels.triton.launch import INTERPRETED
from quire.kernels.triton.plan import TritonPlan
from quire.kernels.triton.step_capture import CudaGraphCapture

MAX_HEAD_DIM = 256
MIN_FP8_CAPABILITY = (8, 9)  # compute capability


class TritonKernels:
    """Triton kernels. deterministic: excludes split contexts and matrix libraries."""

    NAME = "triton"
    USES_RESIDENT_TABLES = True
    SCRATCH_BYTES = SCRATCH_BYTES  # partial results of split contexts

    def __init__(self, *, deterministic: bool) -> None:
        self._deterministic = deterministic
        self.step_capture: StepCapture | None = None if deterministic or INTERPRETED else CudaGraphCapture()

    def unsupported_reason(self, requirements: Requirements) -> str | None:
        """Why the module does not meet the requirements, or None if it does."""
        if requirements.device.type != "cuda" and not INTERPRETED:
            return f"it runs on cuda, and on {requirements.device.type} only in Triton's interpreter"
        if requirements.device.type == "cuda" and (why := _device_unsupported_reason(requirements)) is not None:
            return why
        if requirements.block_size % BLOCK_SIZE_MULTIPLE:
            return f"block_size {requirements.block_size} is not a multiple of {BLOCK_SIZE_MULTIPLE}"
        if max(requirements.head_dims) > MAX_HEAD_DIM:
            return f"heads of {max(requirements.head_dims)} are larger than {MAX_HEAD_DIM}"
        return None

    def use_threads(self, number: int) -> None:
        """Set the number of torch threads, which prepare steps on the host."""
        torch.set_num_threads(number)

    def release_workspace(self) -> None:
        """Does nothing: torch's allocator manages the memory."""

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

    def plan(self, batch: Batch, storage: Storage) -> TritonPlan:
        """See `plan`."""
        return planning.plan(batch, storage)

    def rotary_write(
        self,
        storage: Storage,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotation: Rotation | None,
        plan: TritonPlan,
    ) -> Tensor:
        """See `writing`."""
        return blocks.rotary_write(storage, layer, q, k, v, rotation, plan)

    def attention(
        self, storage: Storage, layer: int, q: Tensor, plan: TritonPlan, scale: float, softcap: float = 0.0
    ) -> Tensor:
        """See `attention`."""
        return attention.attention(storage, layer, q, plan, scale, softcap, deterministic=self._deterministic)

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

    def allocate_weight(self, shape: Sequence[int], dtype: torch.dtype, parts: int = 1) -> None:
        """None: products read plain tensors."""
        reference.allocate_weight(shape, dtype, parts)

    def write_rows(self, weight: PackedWeight, rows: Tensor, start: int, index: int = 0) -> None:
        """Raises TypeError if the weight is packed: this module has no packed weights."""
        reference.write_rows(weight, rows, start, index)

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
        """See `routing`."""
        return routing.route(logits, k, normalise=normalise)

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, up: Weight, down: Weight, activation: str) -> Tensor:
        """See `experts`."""
        return experts.experts(x, ids, weights, up, down, activation, deterministic=self._deterministic)

    def sample(self, logits: Tensor, sampling_metadata: SamplingMetadata) -> Tensor:
        """See `sampling`."""
        return sampling.sample(logits, sampling_metadata)

    def logprobs(self, logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `likelihood`."""
        return likelihood.logprobs(logits, tokens, k)


def _device_unsupported_reason(requirements: Requirements) -> str | None:
    """Why the CUDA device cannot be used, or None: it is not the current one, or lacks fp8."""
    index = torch.cuda.current_device() if requirements.device.index is None else requirements.device.index
    if index != torch.cuda.current_device():
        return f"it runs on the current device, cuda:{torch.cuda.current_device()}, not on cuda:{index}"
    capability = torch.cuda.get_device_capability(index)
    if requirements.kv_dtype == "fp8_e4m3" and capability < MIN_FP8_CAPABILITY:
        needed, found = (".".join(map(str, version)) for version in (MIN_FP8_CAPABILITY, capability))
        return f"fp8 needs compute capability {needed}, and this device has {found}"
    return None
