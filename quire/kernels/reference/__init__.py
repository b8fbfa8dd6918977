"""Kernels in plain torch: the specification that every other kernel module is tested against."""

import torch

from quire.kernels.reference.blocks import allocate, copy_blocks, pack, unpack
from quire.kernels.reference.mixture import experts
from quire.kernels.reference.paged import GATHERED_BYTES as SCRATCH_BYTES
from quire.kernels.reference.paged import attention, plan, write_kv
from quire.kernels.reference.rowwise import activate, add_rms_norm, gate, layer_norm, linear, rms_norm, rotary
from quire.kernels.reference.sampling import sample

NAME = "reference"


def refusal(device: torch.device) -> str | None:
    """None: plain torch runs wherever torch does."""
    del device
    return None


__all__ = [
    "NAME",
    "SCRATCH_BYTES",
    "activate",
    "add_rms_norm",
    "allocate",
    "attention",
    "copy_blocks",
    "experts",
    "gate",
    "layer_norm",
    "linear",
    "pack",
    "plan",
    "refusal",
    "rms_norm",
    "rotary",
    "sample",
    "unpack",
    "write_kv",
]
