"""Kernels whose result for a token does not depend on what else is computed with it, bit for bit.

They keep the contract, and storage in the layout of `reference`, so both can work on the same blocks. Not
on other tokens, not on their number, not on how a sequence is cut into chunks, and not on the number of
threads: that takes shapes that are always the same, sums in an order of our own, and several times as long.

What makes a result depend on company, and what is done here instead:

- A product of matrices adds up in an order that the library picks by shape and threads. Here every
  product has one shape for each weight, with few enough terms for the libraries never to share out a sum
  (`products`, `tiled`). That a row's place in such a shape does not matter is no promise of theirs; tests
  check it.
- Sums over an axis are pairwise, by whole tensors (`exact.tree_sum`).
- Exponentials and their kin differ between the body and the tail of a vector loop, so they see nothing
  but whole vectors (`exact.by_vectors`). Sums, products and roots are correctly rounded anywhere.
"""

from quire.kernels.invariant.products import experts, gated_linear, linear
from quire.kernels.invariant.rowwise import activate, add_rms_norm, gate, layer_norm, rms_norm, rotary
from quire.kernels.invariant.tiled import SCRATCH_BYTES, attention, plan, rotary_write, write_kv
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
