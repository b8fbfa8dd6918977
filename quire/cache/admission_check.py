"""Whether there are enough blocks to admit a sequence, and the result of an admission."""

from collections.abc import Sequence
from typing import NamedTuple

from quire.cache.block_pool import BlockPool
from quire.cache.block_table import ABSENT, BlockTable
from quire.cache.prefix.index import NO_MATCH, EvictionCause, PrefixMatch
from quire.config import CacheConfig
from quire.core.explanation import Miss


class Admission(NamedTuple):
    """The block table of an admitted sequence."""

    table: BlockTable
    num_tokens: int  # leading tokens whose KV need not be computed
    num_shared_blocks: int
    num_copied_tokens: int
    miss: Miss | None  # why the prefix match ended; None if the host pool had more tokens than the index
    num_swapped_tokens: int = 0  # of `num_tokens`, those that are copied from the host pool
    num_swapped_bytes: int = 0
    num_kv_tokens: int = 0  # leading tokens whose keys and values matched, before the match was cut at a snapshot
    state_position: int | None = None  # of the snapshot of recurrent states that it starts from; None without one

    @property
    def is_swapping_in(self) -> bool:
        """Whether the planned step copies some of its KV from the host. That KV is valid once the Moves are done."""
        return self.num_swapped_tokens > 0


class AdmissionLimits(NamedTuple):
    """The arguments of KVCache.admit that say how many blocks the sequence needs, and `cause`."""

    num_tokens: int
    limit: int
    max_new_positions: int
    watermark_blocks: Sequence[int] | None
    cause: EvictionCause


def fitting_match(
    config: CacheConfig, pools: Sequence[BlockPool], match: PrefixMatch, limits: AdmissionLimits
) -> PrefixMatch | None:
    """`match`, or the part of it with which there are enough blocks for the sequence. None if there are not enough.

    If the blocks are too few for both a partly matching block and its copy, the copy is left out: waiting might never
    make space for both.
    """
    if _has_blocks_for_match(config, pools, match, limits):
        return match
    if not match.partial:
        return None
    num_tokens = len(match.blocks[0]) * config.block_size
    less = match._replace(num_tokens=num_tokens, partial=())
    lacks_window = any(
        ABSENT in blocks[config.first_attended_block(g, num_tokens) :] for g, blocks in enumerate(match.blocks)
    )
    if lacks_window or config.states is not None:  # the next query would attend to absent blocks, or lack its state
        less = NO_MATCH._replace(num_public=match.num_public)
    return less if _has_blocks_for_match(config, pools, less, limits) else None


def _has_blocks_for_match(
    config: CacheConfig, pools: Sequence[BlockPool], match: PrefixMatch, limits: AdmissionLimits
) -> bool:
    """Whether enough blocks are available beside those of `match`, which are not idle once they are shared."""
    num_shared = len(match.blocks[0]) if match.blocks else 0
    stop = min(limits.limit, match.num_tokens + limits.max_new_positions)
    needed, taken = [], []
    for group in range(len(pools)):
        needed.append(config.num_blocks(group, stop, limits.num_tokens) - num_shared)
        shared = match.blocks[group][config.first_attended_block(group, match.num_tokens) :] if match.blocks else ()
        taken.append([*shared, *match.partial[group : group + 1]])
    return has_available_blocks(pools, needed, taken, limits.watermark_blocks)


def has_available_blocks(
    pools: Sequence[BlockPool],
    needed: Sequence[int],
    in_use: Sequence[Sequence[int]],
    watermark_blocks: Sequence[int] | None,
) -> bool:
    """Whether each group has `needed` plus `watermark_blocks` blocks available without evicting those of `in_use`."""
    for group, (pool, some) in enumerate(zip(pools, in_use, strict=True)):
        wanted = needed[group] + (watermark_blocks[group] if watermark_blocks else 0)
        if wanted + len(some) <= pool.num_available:
            continue  # enough even if all of them are idle
        if wanted > pool.num_available - sum(block != ABSENT and pool.is_idle(block) for block in some):
            return False
    return True
