"""The deterministic Triton kernels: without split contexts, pieces of recurrences and matrix libraries.

They use the blocks and weights of the ordinary ones.
"""

from functools import partial

from quire.kernels.contract import replace_kernels
from quire.kernels.reference import REFERENCE
from quire.kernels.triton import attention, experts, products, states
from quire.kernels.triton.kernels import TRITON

TRITON_DETERMINISTIC = replace_kernels(
    TRITON,
    attention=partial(attention.attention, deterministic=True),
    linear=partial(products.linear, deterministic=True),
    gated_linear=partial(products.gated_linear, deterministic=True),
    experts=partial(experts.experts, deterministic=True),
    recur=partial(states.recur, deterministic=True),
    new_step_capture=REFERENCE.new_step_capture,  # deterministic sequences run without captured steps
)
