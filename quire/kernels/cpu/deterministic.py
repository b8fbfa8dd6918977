"""The deterministic C++ kernels: without AMX tile registers for floats, and without contexts split over threads.

They use the blocks and weights of the ordinary ones.
"""

from functools import partial

from quire.kernels.contract import replace_kernels
from quire.kernels.cpu import low_rank, paged, products
from quire.kernels.cpu.kernels import CPU
from quire.kernels.reference import REFERENCE

CPU_DETERMINISTIC = replace_kernels(
    CPU,
    plan=partial(paged.plan, deterministic=True),
    linear=partial(products.linear, deterministic=True),
    gated_linear=partial(products.gated_linear, deterministic=True),
    low_rank=partial(low_rank.low_rank, deterministic=True),
    experts=partial(products.experts, deterministic=True),
    new_step_capture=REFERENCE.new_step_capture,  # deterministic sequences run without captured steps
)
