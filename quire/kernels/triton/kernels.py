"""The kernel contract implemented by the Triton kernels, with one object per mode: ordinary or deterministic."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.config import KVGroup
from quire.kernels import reference
from quire.kernels.contract import Batch, Demands, Draws, Packed, Recorder, Rotation, Storage, Weight
from quire.kernels.triton import attention, blocks, experts, likelihood, products, routing, rowwise, sampling
from quire.kernels.triton import plan as planning
from quire.kernels.triton.attention import SCRATCH_BYTES
from quire.kernels.triton.blocks import TOKENS_TOGETHER
from quire.kernels.triton.launch import INTERPRETED
from quire.kernels.triton.plan import TritonPlan
from quire.kernels.triton.recording import Recording

LARGEST_HEAD = 256
FP8_FROM = (8, 9)  # compute capability


class TritonKernels:
    """Triton kernels. strict: deterministic, which excludes split contexts and matrix libraries."""

    NAME = "triton"
    RESIDENT = True
    SCRATCH_BYTES = SCRATCH_BYTES  # partial results of split contexts

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self.recorder: Recorder | None = None if strict or INTERPRETED else Recording()

    def refusal(self, demands: Demands) -> str | None:
        """Why the module does not meet the requirements, or None if it does."""
        if demands.device.type != "cuda" and not INTERPRETED:
            return f"it runs on cuda, not on {demands.device.type}, but in Triton's interpreter"
        if demands.device.type == "cuda" and (why := _too_old(demands)) is not None:
            return why
        if demands.block_size % TOKENS_TOGETHER:
            return f"block_size {demands.block_size} is no multiple of {TOKENS_TOGETHER}"
        if max(demands.head_dims) > LARGEST_HEAD:
            return f"heads of {max(demands.head_dims)} are larger than {LARGEST_HEAD}"
        return None

    def use_threads(self, number: int) -> None:
        """Set the number of torch threads, which prepare steps on the host."""
        torch.set_num_threads(number)

    def rest(self) -> None:
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
        return attention.attention(storage, layer, q, plan, scale, softcap, strict=self._strict)

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

    def room(self, shape: Sequence[int], dtype: torch.dtype, parts: int = 1) -> None:
        """None: products read plain tensors."""
        reference.room(shape, dtype, parts)

    def write_rows(self, weight: Packed, rows: Tensor, start: int, index: int = 0) -> None:
        """Raises TypeError if the weight is packed: this module has no packed weights."""
        reference.write_rows(weight, rows, start, index)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """See `products`."""
        return products.linear(x, weight, bias, strict=self._strict)

    def gated_linear(self, x: Tensor, weight: Weight, bias: Tensor | None, activation: str) -> Tensor:
        """See `products`."""
        return products.gated_linear(x, weight, bias, activation, strict=self._strict)

    def embed(self, ids: Tensor, weight: Weight, scale: float = 1.0) -> Tensor:
        """See `products`."""
        return products.embed(ids, weight, scale)

    def route(self, logits: Tensor, k: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
        """See `routing`."""
        return routing.route(logits, k, normalise=normalise)

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, up: Weight, down: Weight, activation: str) -> Tensor:
        """See `experts`."""
        return experts.experts(x, ids, weights, up, down, activation, strict=self._strict)

    def sample(self, logits: Tensor, draws: Draws) -> Tensor:
        """See `sampling`."""
        return sampling.sample(logits, draws)

    def logprobs(self, logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `likelihood`."""
        return likelihood.logprobs(logits, tokens, k)


def _too_old(demands: Demands) -> str | None:
    """Why the CUDA device cannot be used, or None: it is not the current one, or lacks fp8."""
    index = torch.cuda.current_device() if demands.device.index is None else demands.device.index
    if index != torch.cuda.current_device():
        return f"it runs on the current device, cuda:{torch.cuda.current_device()}, not on cuda:{index}"
    capability = torch.cuda.get_device_capability(index)
    if demands.kv_dtype == "fp8_e4m3" and capability < FP8_FROM:
        needed, found = (".".join(map(str, version)) for version in (FP8_FROM, capability))
        return f"fp8 needs compute capability {needed}, and this device has {found}"
    return None
