"""The deterministic C++ kernels: without AMX tile registers for floats, and without contexts split over threads.

They use the blocks and weights of the ordinary ones.
"""

from functools import partial

from quire.kernels.contract import StepCapture
from quire.kernels.cpu import paged, products
from quire.kernels.cpu.kernels import (
    NAME,
    SCRATCH_BYTES,
    USES_RESIDENT_TABLES,
    activate,
    add_rms_norm,
    allocate,
    allocate_weight,
    attention,
    copy_blocks,
    embed,
    layer_norm,
    logprobs,
    pack,
    release_workspace,
    rms_norm,
    rotary_write,
    rotation,
    route,
    sample,
    unpack,
    unsupported_reason,
    use_threads,
    write_rows,
)

plan = partial(paged.plan, deterministic=True)
linear = partial(products.linear, deterministic=True)
gated_linear = partial(products.gated_linear, deterministic=True)
experts = partial(products.experts, deterministic=True)


def new_step_capture() -> StepCapture | None:
    """None: deterministic sequences run without captured steps."""
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
    "gated_linear",
    "layer_norm",
    "linear",
    "logprobs",
    "new_step_capture",
    "pack",
    "plan",
    "release_workspace",
    "rms_norm",
    "rotary_write",
    "rotation",
    "route",
    "sample",
    "unpack",
    "unsupported_reason",
    "use_threads",
    "write_rows",
]
