"""The kernel contract implemented by the Triton kernels."""

import torch

from quire.kernels.contract import Requirements, StepCapture, replace_kernels, unsupported_kind_reason
from quire.kernels.reference import REFERENCE
from quire.kernels.triton.attention import SCRATCH_BYTES, attention
from quire.kernels.triton.blocks import BLOCK_SIZE_MULTIPLE, allocate, copy_blocks, pack, rotary_write, unpack
from quire.kernels.triton.code_weights import unsupported_scheme_reason, write_rows
from quire.kernels.triton.experts import experts
from quire.kernels.triton.launch import INTERPRETED
from quire.kernels.triton.likelihood import logprobs
from quire.kernels.triton.low_rank import adapter_width, low_rank, new_adapter_table, pack_adapter, set_adapter
from quire.kernels.triton.plan import plan
from quire.kernels.triton.products import allocate_weight, embed, gated_linear, linear
from quire.kernels.triton.routing import route
from quire.kernels.triton.rowwise import (
    activate,
    add_rms_norm,
    layer_norm,
    multiply_add,
    rms_norm,
    rotation,
    widen,
    xielu,
)
from quire.kernels.triton.sampling import sample
from quire.kernels.triton.state_plan import plan_states
from quire.kernels.triton.states import copy_states, recur, unsupported_state_reason
from quire.kernels.triton.step_capture import CudaGraphCapture
from quire.kernels.triton.writing import rotate

NAME = "triton"
USES_RESIDENT_TABLES = True
MAX_HEAD_DIM = 512
MIN_FP8_CAPABILITY = (8, 9)  # compute capability


def unsupported_reason(requirements: Requirements) -> str | None:
    """Why the module does not meet the requirements, or None if it does."""
    if requirements.device.type != "cuda" and not INTERPRETED:
        return f"it runs on cuda, and on {requirements.device.type} only in Triton's interpreter"
    if requirements.device.type == "cuda" and (why := _device_unsupported_reason(requirements)) is not None:
        return why
    if requirements.kv_dtype == "int4":
        return "it does not keep keys and values in int4"
    if requirements.block_size % BLOCK_SIZE_MULTIPLE:
        return f"block_size {requirements.block_size} is not a multiple of {BLOCK_SIZE_MULTIPLE}"
    for scheme in requirements.schemes:
        if (why := unsupported_scheme_reason(scheme)) is not None:
            return why
    if (why := unsupported_kind_reason(requirements)) is not None:
        return why
    if (why := unsupported_state_reason(requirements.state_kind)) is not None:
        return why
    if max(requirements.head_dims) > MAX_HEAD_DIM:
        return f"heads of {max(requirements.head_dims)} are larger than {MAX_HEAD_DIM}"
    return None


def release_workspace() -> None:
    """Does nothing: torch's allocator manages the memory."""


def new_step_capture() -> StepCapture | None:
    """See Kernels."""
    return None if INTERPRETED else CudaGraphCapture()


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


TRITON = replace_kernels(
    REFERENCE,
    NAME=NAME,
    USES_RESIDENT_TABLES=USES_RESIDENT_TABLES,
    SCRATCH_BYTES=SCRATCH_BYTES,
    activate=activate,
    adapter_width=adapter_width,
    add_rms_norm=add_rms_norm,
    allocate=allocate,
    allocate_weight=allocate_weight,
    attention=attention,
    copy_blocks=copy_blocks,
    copy_states=copy_states,
    embed=embed,
    experts=experts,
    gated_linear=gated_linear,
    layer_norm=layer_norm,
    linear=linear,
    logprobs=logprobs,
    low_rank=low_rank,
    multiply_add=multiply_add,
    new_adapter_table=new_adapter_table,
    new_step_capture=new_step_capture,
    pack=pack,
    pack_adapter=pack_adapter,
    plan=plan,
    plan_states=plan_states,
    recur=recur,
    release_workspace=release_workspace,
    rms_norm=rms_norm,
    rotary_write=rotary_write,
    rotate=rotate,
    rotation=rotation,
    route=route,
    sample=sample,
    set_adapter=set_adapter,
    unpack=unpack,
    unsupported_reason=unsupported_reason,
    widen=widen,
    write_rows=write_rows,
    xielu=xielu,
)
