"""Which order leaves are given up in: CacheConfig.eviction."""

from collections.abc import Callable

from quire.cache.prefix.by_tenant import LeavesByTenant
from quire.cache.prefix.eviction import LeastFrequent, LeastRecent, LeastWanted, Leaves, Order, OrderedLeaves
from quire.cache.prefix.eviction_by_cost import LeavesByWorth, Seconds
from quire.cache.prefix.uses import Clock
from quire.config import CacheConfig

_ORDERS: dict[str, Callable[[Clock], Order]] = {"lru": LeastRecent, "lfu": LeastFrequent}


def leaves_in_order(config: CacheConfig, clock: Clock, seconds: Seconds) -> Leaves:
    """No leaves yet. seconds: to compute tokens again, for order "cost"."""
    if config.eviction == "priority":
        return OrderedLeaves(LeastWanted(clock))
    if config.eviction in _ORDERS:
        return LeavesByTenant(_ORDERS[config.eviction](clock), clock)
    block_bytes = sum(group.bytes_per_block for group in config.groups)
    horizon = max(group.num_blocks for group in config.groups)
    return LeavesByWorth(clock, seconds, config.block_size, block_bytes, horizon)
