"""Selection of the waiting queue by policy."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from quire.cache.manager import KVCacheManager
from quire.config import Policy, SchedulerConfig
from quire.scheduler.queue.fair import FairQueue
from quire.scheduler.queue.fcfs import RankedQueue
from quire.scheduler.queue.prefix_aware import PrefixAwareQueue
from quire.scheduler.queue.waiting_queue import Queue

# Credit of a returning tenant under `fair`, in steps of max_num_batched_tokens. With less, a burst of a tenant that
# uses a quarter of the capacity waits behind a flood of another tenant (docs/policies.md).
_STEPS_OF_CREDIT = 8


def new_queue(config: SchedulerConfig, cache: KVCacheManager) -> Queue:
    """An empty queue."""
    return QUEUES[config.policy](config, cache)


def _prefix_aware(cache: KVCacheManager, wait_weight: float) -> Queue:
    """A queue by prefix matches; without an index there are none to order by."""
    return RankedQueue() if cache.config.prefix_index == "none" else PrefixAwareQueue(cache, wait_weight)


QUEUES: Mapping[Policy, Callable[[SchedulerConfig, KVCacheManager], Queue]] = MappingProxyType(
    {
        "fcfs": lambda _config, _cache: RankedQueue(),
        "priority": lambda _config, _cache: RankedQueue(),
        "fair": lambda config, _cache: FairQueue(_STEPS_OF_CREDIT * config.max_num_batched_tokens),
        "lpm": lambda _config, cache: _prefix_aware(cache, 0.0),
        "cache-aware": lambda config, cache: _prefix_aware(cache, config.wait_weight),
    }
)


def priority_class(config: SchedulerConfig, priority: int) -> int:
    """The priority class of a request; the lowest runs first."""
    return priority if config.policy == "priority" else 0
