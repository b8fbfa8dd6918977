"""The deterministic Triton kernels: without split contexts and without matrix libraries.

They use the blocks and weights of the ordinary ones.
"""

from functools import partial

from quire.kernels.contract import StepCapture
from quire.kernels.triton import attention as attention_module
from quire.kernels.triton import experts as experts_module
from quire.kernels.triton import products
from quire.kernels.triton.kernels import (
    NAME,
    SCRATCH_BYTES,
    USES_RESIDENT_TABLES,
    activate,
    add_rms_norm,
    allocate,
    allocate_weight,
    copy_blocks,
    embed,
    layer_norm,
    logprobs,
    pack,
    plan,
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

attention = partial(attention_module.attention, deterministic=True)
linear = partial(products.linear, deterministic=True)
gated_linear = partial(products.gated_linear, deterministic=True)
experts = partial(experts_module.experts, deterministic=True)


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
