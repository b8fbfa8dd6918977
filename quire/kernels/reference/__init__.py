"""Kernels in plain torch: the specification against which every other kernel module is tested."""

import torch

from quire.kernels.contract import Requirements, StepCapture, new_kernels
from quire.kernels.reference.blocks import allocate, copy_blocks, pack, unpack
from quire.kernels.reference.codes import write_rows
from quire.kernels.reference.likelihood import logprobs
from quire.kernels.reference.low_rank import adapter_width, low_rank, new_adapter_table, pack_adapter, set_adapter
from quire.kernels.reference.paged import GATHERED_BYTES as SCRATCH_BYTES
from quire.kernels.reference.paged import attention, plan, rotary_write
from quire.kernels.reference.products import allocate_weight, embed, experts, gated_linear, linear, route
from quire.kernels.reference.rowwise import (
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
from quire.kernels.reference.sampling import sample
from quire.kernels.reference.states import allocate_states, copy_states, plan_states, recur

NAME = "reference"
USES_RESIDENT_TABLES = False


def unsupported_reason(requirements: Requirements) -> str | None:
    """Plain torch meets all requirements but planes of several sizes, which have no canonical layout."""
    for kind in requirements.kv_kinds:
        if len(set(kind.planes)) > 1:
            return f"planes of {kind.planes} numbers have no canonical layout"
    return None


def use_threads(number: int) -> None:
    """Set the number of torch threads."""
    torch.set_num_threads(number)


def release_workspace() -> None:
    """Does nothing: this module keeps no workspace."""


def new_step_capture() -> StepCapture | None:
    """None: a captured step would not be faster."""
    return None


REFERENCE = new_kernels(
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
