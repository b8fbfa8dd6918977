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

from functools import partial

from quire.kernels.contract import replace_kernels
from quire.kernels.deterministic import products, rowwise, tiled
from quire.kernels.exact import product
from quire.kernels.reference import REFERENCE
from quire.kernels.reference.low_rank import low_rank

DETERMINISTIC = replace_kernels(
    REFERENCE,
    NAME="invariant",
    SCRATCH_BYTES=tiled.SCRATCH_BYTES,
    activate=rowwise.activate,
    add_rms_norm=rowwise.add_rms_norm,
    layer_norm=rowwise.layer_norm,
    rms_norm=rowwise.rms_norm,
    rotate=rowwise.rotate,
    linear=products.linear,
    gated_linear=products.gated_linear,
    low_rank=partial(low_rank, multiply=product),
    experts=products.experts,
    plan=tiled.plan,
    rotary_write=tiled.rotary_write,
    attention=tiled.attention,
)
