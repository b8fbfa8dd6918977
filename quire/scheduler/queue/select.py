"""Selection of the waiting queue by policy."""

from quire.cache.manager import KVCacheManager
from quire.config import SchedulerConfig
from quire.scheduler.queue.fair import FairQueue
from quire.scheduler.queue.fcfs import RankedQueue
from quire.scheduler.queue.prefix_aware import PrefixAwareQueue
from quire.scheduler.queue.waiting_queue import Queue

# Credit of a returning tenant under `fair`, in steps of max_num_batched_tokens. With less, a burst of a tenant that
# uses a quarter of the capacity waits behind a flood of another tenant (docs/policies.md).
_STEPS_OF_CREDIT = 8


def new_queue(config: SchedulerConfig, cache: KVCacheManager) -> Queue:
    """An empty queue."""
    if config.policy == "fair":
        return FairQueue(_STEPS_OF_CREDIT * config.max_num_batched_tokens)
    if config.policy in ("fcfs", "priority") or cache.config.prefix_index == "none":  # no matches to order by
        return RankedQueue()
    return PrefixAwareQueue(cache, config.wait_weight if config.policy == "cache-aware" else 0.0)


def priority_class(config: SchedulerConfig, priority: int) -> int:
    """The priority class of a request; the lowest runs first."""
    return priority if config.policy == "priority" else 0
