"""Admission: what a sequence begins with, and whether there is room for it. Knows pools and what an index found."""

from collections.abc import Sequence
from typing import NamedTuple

from quire.cache.block_pool import BlockPool
from quire.cache.block_table import ABSENT, BlockTable
from quire.cache.prefix.index import NOTHING_FOUND, Cause, Found
from quire.config import CacheConfig
from quire.core.explanation import Miss


class Admission(NamedTuple):
    """What a sequence begins with."""

    table: BlockTable
    num_tokens: int  # leading ones that need not be computed
    num_shared_blocks: int
    num_copied_tokens: int
    miss: Miss | None  # why they are not more; None where the host had more than the index
    num_swapped_tokens: int = 0  # of them, those that come from the host
    num_swapped_bytes: int = 0

    @property
    def arriving(self) -> bool:
        """Whether some of them are on their way until the step that is being planned is collected."""
        return self.num_swapped_tokens > 0


class Room(NamedTuple):
    """What a sequence asks for: see KVCache.admit."""

    num_tokens: int
    limit: int
    most: int
    spare: Sequence[int] | None
    cause: Cause


def fitting(config: CacheConfig, pools: Sequence[BlockPool], found: Found, room: Room) -> Found | None:
    """What was found, if there is room for a sequence that begins with it; None where blocks are short.

    A block to be copied is left out where there is no room for both it and the copy: there may never be.
    """
    if _has_room(config, pools, found, room):
        return found
    if not found.partial:
        return None
    num_tokens = len(found.blocks[0]) * config.block_size
    less = found._replace(num_tokens=num_tokens, partial=())
    if any(ABSENT in blocks[config.first_seen(g, num_tokens) :] for g, blocks in enumerate(found.blocks)):
        less = NOTHING_FOUND._replace(num_public=found.num_public)  # the next query would see what is gone
    return less if _has_room(config, pools, less, room) else None


def _has_room(config: CacheConfig, pools: Sequence[BlockPool], found: Found, room: Room) -> bool:
    """Whether enough blocks are available beside what was found, which will not be idle then."""
    num_shared = len(found.blocks[0]) if found.blocks else 0
    stop = min(room.limit, found.num_tokens + room.most)
    needed, taken = [], []
    for group in range(len(pools)):
        needed.append(config.num_blocks(group, stop, room.num_tokens) - num_shared)
        shared = found.blocks[group][config.first_seen(group, found.num_tokens) :] if found.blocks else ()
        taken.append([*shared, *found.partial[group : group + 1]])
    return is_room(pools, needed, taken, room.spare)


def is_room(
    pools: Sequence[BlockPool], needed: Sequence[int], taken: Sequence[Sequence[int]], spare: Sequence[int] | None
) -> bool:
    """Whether each group has so many blocks, and `spare` ones, beside blocks that are taken, idle as they may be."""
    for group, (pool, some) in enumerate(zip(pools, taken, strict=True)):
        wanted = needed[group] + (spare[group] if spare else 0)
        if wanted + len(some) <= pool.num_available:
            continue  # whichever of them are idle
        if wanted > pool.num_available - sum(block != ABSENT and pool.is_idle(block) for block in some):
            return False
    return True
