"""The host pool: how many blocks of host memory preempted sequences can be swapped to. Knows bytes, no device."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from quire.cost.memory_plan import Line, MemoryPlan, parse_memory, size
from quire.errors import ConfigError

DEFAULT = 4 * 2**30  # bytes beside a device with memory of its own
_LARGEST_SHARE = 0.25  # of the host's memory, where nobody asked for a size
_GIB = 2**30
_NUMBER = re.compile(r"\s*\d+(\.\d+)?\s*")
_MOST_GIB = 4096  # a larger number is one of bytes


class HostPool(NamedTuple):
    """Blocks of each group, and the line that says so."""

    num_blocks: tuple[int, ...]
    line: Line | None  # None where there is no pool


def parse_swap_space(text: str) -> int:
    """Bytes of '4GiB' or '500MB'. A plain number is one of GiB, as vLLM has it, or from 4096 on one of bytes."""
    if _NUMBER.fullmatch(text):
        number = float(text)
        return int(number * _GIB if number < _MOST_GIB else number)
    try:
        return int(parse_memory(text, 0))
    except ConfigError as error:
        raise ConfigError(
            f"swap_space must be bytes ('4GiB', '500MB') or a number of GiB ('4'), not {text!r}"
        ) from error


def plan_host_pool(plan: MemoryPlan, *, asked: str | None, default: int, available: int) -> HostPool:
    """Divide host memory among the groups as the device's blocks are divided.

    default: bytes where nobody asked; less where the host has little. available: bytes of host memory that nothing
    else in the plan uses. Raises ConfigError for more than there is, and for less than a block of each group.
    """
    nothing = HostPool((0,) * len(plan.num_blocks), None)
    wanted = min(default, int(available * _LARGEST_SHARE)) if asked is None else parse_swap_space(asked)
    if wanted <= 0:
        return nothing
    if wanted > available:
        raise ConfigError(f"swap_space={asked} is more than the {size(available)} of host memory available")
    block_bytes = [kv.bytes_per_token * plan.demand.block_size for kv in plan.demand.kv]
    num_blocks = _divide(plan.num_blocks, block_bytes, wanted)
    if not all(num_blocks):
        if asked is None:
            return nothing
        raise ConfigError(
            f"swap_space={asked} holds no block of {size(sum(block_bytes))}; give it more, or 0 to have no host pool"
        )
    taken = sum(num * one for num, one in zip(num_blocks, block_bytes, strict=True))
    blocks = " and ".join(map(str, num_blocks))
    asked_by = "by default" if asked is None else f"swap_space={asked}"
    why = f"{blocks} blocks of {plan.demand.block_size} tokens in host memory, {asked_by}; no part of memory"
    return HostPool(num_blocks, Line("host pool", taken, why))


def _divide(device_blocks: Sequence[int], block_bytes: Sequence[int], wanted: int) -> tuple[int, ...]:
    whole = sum(num * one for num, one in zip(device_blocks, block_bytes, strict=True))
    return tuple(num * wanted // whole for num in device_blocks)
