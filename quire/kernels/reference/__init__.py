"""Kernels in plain torch: the specification against which every other kernel module is tested."""

import torch

from quire.kernels.contract import Demands, Recorder
from quire.kernels.reference.blocks import allocate, copy_blocks, pack, unpack
from quire.kernels.reference.likelihood import logprobs
from quire.kernels.reference.paged import GATHERED_BYTES as SCRATCH_BYTES
from quire.kernels.reference.paged import attention, plan, rotary_write, write_kv
from quire.kernels.reference.products import embed, experts, gated_linear, linear, room, route, write_rows
from quire.kernels.reference.rowwise import activate, add_rms_norm, gate, layer_norm, rms_norm, rotary, rotation
from quire.kernels.reference.sampling import sample

NAME = "reference"
RESIDENT = False


recorder: Recorder | None = None


def refusal(demands: Demands) -> str | None:
    """None: plain torch meets all requirements."""
    del demands
    return None


def use_threads(number: int) -> None:
    """Set the number of torch threads."""
    torch.set_num_threads(number)


def rest() -> None:
    """Does nothing: this module keeps no workspace."""


__all__ = [
    "NAME",
    "RESIDENT",
    "SCRATCH_BYTES",
    "activate",
    "add_rms_norm",
    "allocate",
    "attention",
    "copy_blocks",
    "embed",
    "experts",
    "gate",
    "gated_linear",
    "layer_norm",
    "linear",
    "logprobs",
    "pack",
    "plan",
    "recorder",
    "refusal",
    "rest",
    "rms_norm",
    "room",
    "rotary",
    "rotary_write",
    "rotation",
    "route",
    "sample",
    "unpack",
    "use_threads",
    "write_kv",
    "write_rows",
]
