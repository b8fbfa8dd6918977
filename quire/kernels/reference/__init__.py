"""Kernels in plain torch: the specification against which every other kernel module is tested."""

import torch

from quire.kernels.contract import Requirements, StepCapture
from quire.kernels.reference.blocks import allocate, copy_blocks, pack, unpack
from quire.kernels.reference.codes import write_rows
from quire.kernels.reference.likelihood import logprobs
from quire.kernels.reference.paged import GATHERED_BYTES as SCRATCH_BYTES
from quire.kernels.reference.paged import attention, plan, rotary_write, write_kv
from quire.kernels.reference.products import allocate_weight, embed, experts, gated_linear, linear, route
from quire.kernels.reference.rowwise import activate, add_rms_norm, gate, layer_norm, rms_norm, rotary, rotation
from quire.kernels.reference.sampling import sample

NAME = "reference"
USES_RESIDENT_TABLES = False


def unsupported_reason(requirements: Requirements) -> str | None:
    """None: plain torch meets all requirements."""
    del requirements
    return None


def use_threads(number: int) -> None:
    """Set the number of torch threads."""
    torch.set_num_threads(number)


def release_workspace() -> None:
    """Does nothing: this module keeps no workspace."""


def new_step_capture() -> StepCapture | None:
    """None: a captured step would not be faster."""
    return None


__all__ = [
    "NAME",
    "SCRATCH_BYTES",
    "USES_RESIDENT_TABLES",
    "activate",
    "add_rms_norm",
    "allocate",
    "allocate_weight",
    "attention",
    "copy_blocks",
    "embed",
    "experts",
    "gate",
    "gated_linear",
    "layer_norm",
    "linear",
    "logprobs",
    "new_step_capture",
    "pack",
    "plan",
    "release_workspace",
    "rms_norm",
    "rotary",
    "rotary_write",
    "rotation",
    "route",
    "sample",
    "unpack",
    "unsupported_reason",
    "use_threads",
    "write_kv",
    "write_rows",
]
