"""Evictions of idle blocks when others need memory, and the record of their causes."""

from collections.abc import Sequence

from quire.cache.block_pool import Pools
from quire.cache.prefix.index import EvictionCause, EvictionRecord, PrefixIndex

_EVICTED_AHEAD = 256  # 1/256 of a pool is evicted in addition to what is needed: each eviction has a fixed cost


class Evictor:
    """Evicts idle blocks of a prefix index."""

    def __init__(self, pools: Pools, index: PrefixIndex) -> None:
        self._pools = pools
        self._index = index
        self._num_evicted_before = 0  # by earlier indexes that were replaced
        self._records: dict[str, EvictionRecord] = {}  # by request id, since they were last taken

    @property
    def num_evicted(self) -> int:
        """Blocks evicted since the start."""
        return self._num_evicted_before + self._index.num_evicted

    def replace_index(self, index: PrefixIndex) -> None:
        """Evict from this index from now on."""
        self._num_evicted_before += self._index.num_evicted
        self._index = index

    def until_free(self, needed: Sequence[int], cause: EvictionCause) -> bool:
        """Evict until `needed` blocks of each group are free, and some blocks more. Returns whether `needed` are."""
        for group, pool in enumerate(self._pools):
            if needed[group] > pool.num_free:
                self.evict(group, needed[group] - pool.num_free + pool.num_blocks // _EVICTED_AHEAD, cause)
        return all(pool.num_free >= count for pool, count in zip(self._pools, needed, strict=True))

    def evict(self, group: int, count: int, cause: EvictionCause) -> None:
        """Evict up to `count` blocks of a group and record the cause."""
        num_blocks = self._index.evict(group, count, cause)
        if not num_blocks:
            return
        reason, before = self._index.take_reason(), self._records.get(cause.request_id)
        if before is None:
            self._records[cause.request_id] = EvictionRecord(cause, num_blocks, reason)
        else:
            self._records[cause.request_id] = before._replace(num_blocks=before.num_blocks + num_blocks)

    def take(self) -> list[EvictionRecord]:
        """Evictions since the last call, one entry per request, in the order of their first eviction."""
        records, self._records = self._records, {}
        return list(records.values())
