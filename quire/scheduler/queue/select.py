"""The queue for each policy."""

from quire.cache.incremental_match import Matching
from quire.cache.kv_cache import KVCache
from quire.config import SchedulerConfig
from quire.errors import ConfigError
from quire.scheduler.queue.dfs_weight import DepthFirst
from quire.scheduler.queue.fair import Fair
from quire.scheduler.queue.fcfs import Ranked
from quire.scheduler.queue.prefix_aware import Matches, Weighed
from quire.scheduler.queue.waiting_queue import Queue

# What a tenant that was away may be owed: the tokens of so many steps. With less, a burst of a tenant that uses a
# quarter of the machine waits for its turn behind a flood (docs/policies.md).
_STEPS_OF_CREDIT = 8


def new_queue(config: SchedulerConfig, cache: KVCache) -> Queue:
    """An empty one. Raises ConfigError for an order that the cache's index cannot give."""
    if config.policy == "fair":
        return Fair(_STEPS_OF_CREDIT * config.max_num_batched_tokens)
    if config.policy in ("fcfs", "priority") or cache.config.prefix_index == "none":  # where nothing matches
        return Ranked()
    matching = Matching(cache)
    if config.policy == "dfs-weight":
        if not matching.follows_tree:
            raise ConfigError(
                "policy 'dfs-weight' goes through the radix tree, and this cache's index is another one or has "
                "windows; use policy 'lpm', or prefix_index 'radix'"
            )
        return DepthFirst(Matches(matching))
    weight = config.wait_weight if config.policy == "cache-aware" else 0.0
    return Weighed(Matches(matching), cache.block_size, weight)


def class_of(config: SchedulerConfig, priority: int) -> int:
    """The class of a request that asks for this priority; less goes first."""
    return priority if config.policy == "priority" else 0
