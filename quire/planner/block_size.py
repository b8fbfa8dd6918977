"""What a block size costs and gives for a workload: empty positions, cached tokens, throughput."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.planner.kv_meter import KVMeter
from quire.planner.simulated_engine import EngineSetup
from quire.planner.simulation import Simulation
from quire.planner.workloads import Workload

SIZES = (16, 32, 64, 128, 256)  # the fast kernels take multiples of 16
_NEGLIGIBLE = 0.01  # of the throughput: smaller differences are no reason for another size


@dataclass(frozen=True, slots=True)
class BlockSizeRow:
    """A workload with one block size, all of it at once."""

    block_size: int
    tokens_per_second: float
    empty_share: float  # of the positions in blocks that running sequences hold
    cached_share: float  # of the prompt tokens
    blocks_per_sequence: float  # length of a block table: what attention kernels walk through


def compare_block_sizes(setup: EngineSetup, workload: Workload, sizes: Sequence[int] = SIZES) -> list[BlockSizeRow]:
    """The workload with each block size, in the same number of bytes."""
    return [_with_size(setup, workload, size) for size in sizes]


def _with_size(setup: EngineSetup, workload: Workload, size: int) -> BlockSizeRow:
    cache, meter = setup.cache, KVMeter(only_waiting=False)
    groups = tuple(
        replace(
            group,
            num_blocks=max(1, group.num_blocks * cache.block_size // size),
            num_host_blocks=group.num_host_blocks * cache.block_size // size,
            bytes_per_block=group.bytes_per_block // cache.block_size * size,
        )
        for group in cache.groups
    )
    limits = replace(setup.scheduler, max_queued_requests=None, max_queued_tokens=None)
    changed = replace(setup, cache=replace(cache, block_size=size, groups=groups), scheduler=limits)
    result = Simulation(changed, on_step=meter).run([replace(session, at=0.0) for session in workload])
    tokens = sum(one.num_prompt + one.num_output / 2 for one in result.requests) / max(1, len(result.requests))
    return BlockSizeRow(size, result.token_rate, 1 - meter.shares.live_of_held, result.hit_rate, tokens / size)


def block_size_advice(rows: Sequence[BlockSizeRow], current: int) -> str:
    """A sentence: which size to use, and why."""
    now = next(row for row in rows if row.block_size == current)
    best = max(rows, key=lambda row: row.tokens_per_second)
    gain = best.tokens_per_second / now.tokens_per_second - 1 if now.tokens_per_second else 0.0
    if gain <= _NEGLIGIBLE:
        return (
            f"Blocks of {current} tokens: no other size gives more than 1 % of throughput. They leave "
            f"{now.empty_share:.1%} of the positions in use empty."
        )
    return (
        f"Blocks of {best.block_size} tokens give {gain:.1%} more throughput than {current}: {best.empty_share:.1%} of "
        f"the positions in use are empty instead of {now.empty_share:.1%}, and {best.cached_share:.1%} of the prompt "
        f"tokens are cached instead of {now.cached_share:.1%}."
    )
