"""Deterministic kernels in plain torch: the result bits of a token do not depend on the rest of the batch.

They depend neither on other tokens nor on their number, nor on how a sequence is cut into chunks, nor on the number of
threads. Storage has the layout of `reference`, so both modules can use the same blocks. Two causes of such dependence
are avoided:

- A matrix library adds in an order that depends on the shape, the threads and the index of a row. Here both operands
  are rounded to fixed point first, so that sums of up to 256 products are exact and their order does not matter
  (`exact.product`). Attention (`tiled`) and norms (`exact.exact_sum`) do the same.
- Exponentials and similar functions differ between the body and the tail of a vector loop, so they are applied to
  whole vectors only (`exact.apply_to_whole_vectors`). Sums, products, quotients and roots are always correctly rounded.

The libraries must provide IEEE 754 float64 products, fused or not; elementwise functions that treat all numbers of
whole vectors alike; and softmax and sums over a row (`route`, `sample`, `logprobs` of the reference) that treat each
row alike.
"""

from quire.kernels.deterministic.products import experts, gated_linear, linear
from quire.kernels.deterministic.rowwise import activate, add_rms_norm, gate, layer_norm, rms_norm, rotary
from quire.kernels.deterministic.tiled import SCRATCH_BYTES, attention, plan, rotary_write, write_kv
from quire.kernels.reference import (
    allocate,
    allocate_weight,
    copy_blocks,
    embed,
    logprobs,
    new_step_capture,
    pack,
    release_workspace,
    rotation,
    route,
    sample,
    unpack,
    unsupported_reason,
    use_threads,
    write_rows,
)

NAME = "invariant"
USES_RESIDENT_TABLES = False

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
