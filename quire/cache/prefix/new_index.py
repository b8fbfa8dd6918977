"""The prefix index that a configuration names."""

from collections.abc import Mapping, Sequence

from quire.cache.block_pool import BlockPool
from quire.cache.prefix.eviction import RecomputeSeconds
from quire.cache.prefix.hash_index import HashIndex
from quire.cache.prefix.index import NoIndex, PrefixIndex
from quire.cache.prefix.radix_index import RadixIndex
from quire.config import CacheConfig


def new_index(
    config: CacheConfig, pools: Sequence[BlockPool], planned_writes: Mapping[int, int], seconds: RecomputeSeconds
) -> PrefixIndex:
    """An empty index. planned_writes and seconds: see RadixIndex."""
    if config.prefix_index == "none":
        return NoIndex()
    if config.prefix_index == "hash":
        return HashIndex(config, pools, planned_writes)
    return RadixIndex(config, pools, planned_writes, seconds)
