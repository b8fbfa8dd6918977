"""Kernels in plain torch: the specification that every other kernel module is tested against."""

import torch

from quire.kernels.reference.blocks import allocate, copy_blocks, pack, unpack
from quire.kernels.reference.paged import GATHERED_BYTES as SCRATCH_BYTES
from quire.kernels.reference.paged import attention, plan, write_kv
from quire.kernels.reference.rowwise import add_rms_norm, rms_norm, rotary, silu_and_mul
from quire.kernels.reference.sampling import sample

NAME = "reference"


def refusal(device: torch.device) -> str | None:
    """None: plain torch runs wherever torch does."""
    del device
    return None


__all__ = [
    "NAME",
    "SCRATCH_BYTES",
    "add_rms_norm",
    "allocate",
    "attention",
    "copy_blocks",
    "pack",
    "plan",
    "refusal",
    "rms_norm",
    "rotary",
    "sample",
    "silu_and_mul",
    "unpack",
    "write_kv",
]
