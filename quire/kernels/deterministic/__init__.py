"""Kernels whose result for a token does not depend on what else is computed with it, bit for bit.

They keep the contract, and storage in the layout of `reference`, so both can work on the same blocks. Not
on other tokens, not on their number, not on how a sequence is cut into chunks, and not on the number of
threads. What makes a result depend on company, and what is done here instead:

- A product of matrices adds up in an order that the library picks by shape, threads and the place of a row.
  Here both sides are rounded to fixed point first, so that sums of up to 256 products are exact and their
  order does not matter (`exact.product`). The same goes for attention (`tiled`) and for norms
  (`exact.exact_sum`).
- Exponentials and their kin differ between the body and the tail of a vector loop, so they see nothing
  but whole vectors (`exact.by_vectors`). Sums, products, quotients and roots are correctly rounded anywhere.

Of the libraries this asks for IEEE 754 in float64 products, which may be fused or not, for elementwise
functions that treat all numbers of whole vectors alike, and for softmax and sums over a row (`route`,
`sample`, `logprobs` of the reference) that treat each row alike.
"""

from quire.kernels.deterministic.products import experts, gated_linear, linear
from quire.kernels.deterministic.rowwise import activate, add_rms_norm, gate, layer_norm, rms_norm, rotary
from quire.kernels.deterministic.tiled import SCRATCH_BYTES, attention, plan, rotary_write, write_kv
from quire.kernels.reference import (
    allocate,
    copy_blocks,
    embed,
    logprobs,
    pack,
    recorder,
    refusal,
    rest,
    room,
    rotation,
    route,
    sample,
    unpack,
    use_threads,
    write_rows,
)

NAME = "invariant"
RESIDENT = False

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
