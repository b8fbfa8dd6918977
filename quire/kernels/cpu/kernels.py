"""The kernel contract implemented by the C++ kernels."""

import torch
from torch import Tensor

from quire.kernels.contract import (
    Requirements,
    Rotation,
    StepCapture,
    Storage,
    replace_kernels,
    unsupported_kind_reason,
)
from quire.kernels.cpu import _C, blocks
from quire.kernels.cpu.blocks import allocate, copy_blocks, pack, unpack
from quire.kernels.cpu.likelihood import logprobs
from quire.kernels.cpu.low_rank import adapter_width, low_rank, new_adapter_table, pack_adapter, set_adapter
from quire.kernels.cpu.memory import release_workspace
from quire.kernels.cpu.paged import CpuPlan, attention, plan
from quire.kernels.cpu.products import (
    allocate_weight,
    embed,
    experts,
    gated_linear,
    linear,
    multiplies,
    route,
    write_rows,
)
from quire.kernels.cpu.rowwise import (
    activate,
    add_rms_norm,
    concatenate,
    layer_norm,
    multiply_add,
    rms_norm,
    rotate,
    rotation,
    widen,
    xielu,
)
from quire.kernels.cpu.sampling import sample
from quire.kernels.cpu.states import allocate_states, copy_states, plan_states, recur
from quire.kernels.cpu.step_capture import CallListCapture
from quire.kernels.reference import REFERENCE
from quire.kernels.reference.quantized import QUANTIZED

NAME = "cpu"
USES_RESIDENT_TABLES = False
SCRATCH_BYTES = 2**22  # of each thread
MAX_HEAD_DIM = 512
DTYPES = ("float32", "bfloat16")


def unsupported_reason(requirements: Requirements) -> str | None:
    """Why the module does not meet the requirements, or None if it does."""
    if requirements.device.type != "cpu":
        return f"it runs on CPUs, not on {requirements.device.type}"
    if requirements.dtype not in DTYPES:
        return f"it computes in {' and '.join(DTYPES)}, not in {requirements.dtype}"
    if requirements.kv_dtype not in (requirements.dtype, *QUANTIZED):
        kept = ", ".join([requirements.dtype, *QUANTIZED])
        return f"it keeps keys and values in {kept}, not in {requirements.kv_dtype}"
    if requirements.block_size % blocks.PART_TOKENS:
        return f"block_size {requirements.block_size} is not a multiple of {blocks.PART_TOKENS}"
    if (why := unsupported_kind_reason(requirements)) is not None:
        return why
    if max(requirements.head_dims) > MAX_HEAD_DIM:
        return f"heads of {max(requirements.head_dims)} are larger than {MAX_HEAD_DIM}"
    for scheme in requirements.schemes:
        if not multiplies(scheme):
            return f"it does not multiply weights in {scheme}"
    return None


def use_threads(number: int) -> None:
    """Set the number of threads of torch and of the C++ kernels."""
    torch.set_num_threads(number)
    _C.set_threads(number)


def new_step_capture() -> StepCapture | None:
    """See Kernels."""
    return CallListCapture()


def rotary_write(
    storage: Storage, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None, plan: CpuPlan
) -> Tensor:
    """See Kernels."""
    return blocks.rotary_write(storage, layer, q, k, v, rotation, plan.slots)


def description() -> str:
    """The name of the build in use, which is the best one that runs on this machine."""
    return f"{_C.builds()[0]} build"


CPU = replace_kernels(
    REFERENCE,
    NAME=NAME,
    USES_RESIDENT_TABLES=USES_RESIDENT_TABLES,
    SCRATCH_BYTES=SCRATCH_BYTES,
    activate=activate,
    adapter_width=adapter_width,
    add_rms_norm=add_rms_norm,
    allocate=allocate,
    allocate_states=allocate_states,
    allocate_weight=allocate_weight,
    attention=attention,
    concatenate=concatenate,
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
    use_threads=use_threads,
    widen=widen,
    write_rows=write_rows,
    xielu=xielu,
)
