"""The memory managers that papers compare paging with, as KV caches that the scheduler takes.

Each sequence gets one contiguous slab when it is admitted, as in Orca (Yu et al., 2022), from a buddy allocator
(Knowlton, 1965), as Kwon et al. (PagedAttention, 2023, section 6.1) assume for it. A slab is a run of blocks, so real
kernels read it through an ordinary block table, and a baseline also runs live. Only how much is reserved differs:

    orca-max      as much as the longest sequence
    orca-pow2     the prompt, and the output rounded up to a power of two: an estimate that is wrong by at most 2
    orca-oracle   the prompt and the output, known in advance
    static        as orca-max; a batch is admitted when the whole batch before it has ended (FasterTransformer)

Sequences of a static batch that have ended leave the steps. That is better than FasterTransformer, which computes them
as padding until the batch ends. Slabs share nothing: the samples of a request compute its prompt once each. A beam
search reserves a slab for each beam, and a beam that continues from another one gets a copy of its KV.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

from quire.cache.admission_check import Admission, AdmissionLimits
from quire.cache.block_pool import BlockPool, Pools
from quire.cache.block_table import BlockTable
from quire.cache.kv_cache import KVCache
from quire.cache.manager import KVCacheManager
from quire.cache.prefix.index import NO_MATCH
from quire.config import CacheConfig, SchedulerConfig
from quire.core.explanation import Miss
from quire.core.step import Move
from quire.errors import ConfigError, nearest
from quire.planner.simulated_engine import EngineSetup, LengthOf, NewCache


class BuddyPool(BlockPool):
    """Blocks in runs of a power of two, at multiples of their length. A freed run is joined with its free buddy."""

    __slots__ = ("_num_free", "_runs", "promised")

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.promised: set[int] = set()  # blocks of slabs that no table has, and that a beam search reserves
        self._num_free = 0
        self._runs: list[set[int]] = [set() for _ in range(num_blocks.bit_length())]  # starts of free runs, by order
        for block in range(num_blocks):
            self._free_block(block)

    @property
    def num_free(self) -> int:
        """See BlockPool."""
        return self._num_free

    @property
    def num_available(self) -> int:
        """See BlockPool. No block is ever idle."""
        return self._num_free

    def allocate_run(self, count: int) -> list[int] | None:
        """Allocate the smallest run with `count` blocks, all of it. None if there is none, however many are free."""
        wanted = (count - 1).bit_length()
        order = next((order for order in range(wanted, len(self._runs)) if self._runs[order]), None)
        if order is None:
            return None
        start = min(self._runs[order])
        self._runs[order].remove(start)
        while order > wanted:  # the upper half stays free
            order -= 1
            self._runs[order].add(start + (1 << order))
        run = list(range(start, start + (1 << wanted)))
        for block in run:
            self._refs[block] = 1
        self._num_free -= len(run)
        return run

    def allocate(self) -> int:
        """See BlockPool."""
        return self.allocate_many(1)[0]

    def allocate_many(self, count: int) -> list[int]:
        """See BlockPool. The blocks are single runs."""
        runs = [self.allocate_run(1) for _ in range(count)]
        return [block for run in runs if run is not None for block in run]

    def decr_ref(self, block: int) -> None:
        """See BlockPool."""
        super().decr_ref(block)
        if not self._refs[block]:
            self._free_block(block)

    def _free_block(self, block: int) -> None:
        order, start = 0, block
        while order < len(self._runs) - 1 and (buddy := start ^ (1 << order)) in self._runs[order]:
            self._runs[order].remove(buddy)
            start, order = min(start, buddy), order + 1
        self._runs[order].add(start)
        self._num_free += 1
        self._free.clear()  # the stack of BlockPool is not used

    def check(self, owners: Mapping[int, int], indexed: Collection[int] = ()) -> list[str]:
        """See BlockPool."""
        runs = [(start, 1 << order) for order, starts in enumerate(self._runs) for start in starts]
        self._free[:] = [block for start, size in runs for block in range(start, start + size)]
        owners = Counter(owners) + Counter(self.promised)
        wrong = super().check(owners, indexed)
        if len(self._free) != self._num_free:
            wrong.append(f"{self._num_free} blocks are counted as free, but {len(self._free)} are in free runs")
        self._free.clear()
        return wrong


Slab = list[list[int]]  # a run of blocks for each group


class ContiguousCache(KVCache):
    """A slab of contiguous memory for each sequence, without sharing, prefix cache and growth."""

    def __init__(self, config: CacheConfig, reserve: Callable[[str, int], int], *, num_beams: int = 1) -> None:
        """reserve: request id and known tokens -> positions to reserve. num_beams: slabs of a request."""
        super().__init__(config)
        self.slabs: dict[int, int] = {}  # reserved positions by sequence id
        self._reserve = reserve
        self._num_beams = num_beams
        self._requests: dict[int, str] = {}  # request id by sequence id
        self._spare: dict[str, list[Slab]] = {}  # slabs of a beam search that no beam has, by request id

    def _new_pools(self, config: CacheConfig) -> Pools:
        self._buddies = [BuddyPool(group.num_blocks) for group in config.groups]
        return Pools(self._buddies)

    def _try_admit(self, seq_id: int, table: BlockTable, reusable: int, limits: AdmissionLimits) -> Admission | None:
        """Create a table with a slab. None if there is no run that is long enough."""
        request_id = limits.cause.request_id
        positions = max(self._reserve(request_id, limits.num_tokens), limits.num_tokens + 1)
        slab = self._take_spare(request_id) or self._allocate_slabs(request_id, positions)
        if slab is None:
            return None
        self._add_table(seq_id, table, slab, request_id, positions)
        return Admission(table, 0, 0, 0, Miss(0, table.tokens[0], "off") if reusable > 0 else None)

    def _add_table(self, seq_id: int, table: BlockTable, slab: "Slab", request_id: str, positions: int) -> None:
        self._register(seq_id, table)
        self.index.register(table, NO_MATCH)
        table.append(slab, self.block_size)
        self.slabs[seq_id] = positions
        self._requests[seq_id] = request_id

    def _allocate_slabs(self, request_id: str, positions: int) -> "Slab | None":
        """A slab for a sequence; its request keeps those of its other beams. None, without a change, if one is missing.

        The request has no spare slab. Only the first of its beams finds none.
        """
        count = -(-positions // self.block_size)
        slabs: list[Slab] = []
        for _ in range(self._num_beams):
            slab: Slab = []
            slabs.append(slab)
            for pool in self._buddies:
                run = pool.allocate_run(count)
                if run is None:
                    for earlier in slabs:
                        self._free_slab(earlier)
                    return None
                slab.append(run)
        for slab in slabs[1:]:
            self._keep_spare(request_id, slab)
        return slabs[0]

    def _keep_spare(self, request_id: str, slab: "Slab") -> None:
        self._spare.setdefault(request_id, []).append(slab)
        for pool, run in zip(self._buddies, slab, strict=True):
            pool.promised.update(run)

    def _take_spare(self, request_id: str) -> "Slab | None":
        spare = self._spare.get(request_id)
        if not spare:
            return None
        slab = spare.pop()
        for pool, run in zip(self._buddies, slab, strict=True):
            pool.promised.difference_update(run)
        return slab

    def _free_slab(self, slab: "Slab") -> None:
        for pool, run in zip(self._buddies, slab, strict=False):
            for block in run:
                pool.decr_ref(block)

    def fork(self, seq_id: int, new_id: int, num_tokens: int, tokens: Sequence[int] = ()) -> BlockTable:
        """See KVCacheManager. The new table has a slab of its own, into which the KV is copied."""
        parent, request_id = self._tables[seq_id], self._requests[seq_id]
        slab = self._take_spare(request_id)
        assert slab is not None, "a request has a slab for each of its beams"
        table = BlockTable(len(self.pools), tokens, parent.namespace, parent.retention)
        self._add_table(new_id, table, slab, request_id, self.slabs[seq_id])
        for group, (pool, run) in enumerate(zip(self._buddies, slab, strict=True)):
            for place in range(-(-num_tokens // self.block_size)):
                source, begin = parent.blocks[group][place], place * self.block_size
                pool.incr_ref(source)
                self.copies.plan_copy(group, source, min(self.block_size, num_tokens - begin), run[place])
        self.cache_blocks(table, num_tokens, num_tokens)
        self._in_flight.depend_on_newest(table)  # a step in flight may write the sources
        return table

    def branch(self, seq_id: int, new_id: int, num_tokens: int, **_: object) -> BlockTable | None:
        """None: a slab is not shared. The sequence is queued, and computes its prompt itself."""
        return None

    def release(self, seq_id: int, num_tokens: int = 0, *, ended: bool = True) -> None:
        """See KVCacheManager. A beam leaves its slab to the other beams of its search."""
        request_id = self._requests.pop(seq_id)
        if self._num_beams > 1 and request_id in self._requests.values():
            slab = [list(blocks) for blocks in self._tables[seq_id].blocks]
            for pool, run in zip(self._buddies, slab, strict=True):
                for block in run:
                    pool.incr_ref(block)
            self._keep_spare(request_id, slab)
        else:
            while (spare := self._take_spare(request_id)) is not None:
                self._free_slab(spare)
            self._spare.pop(request_id, None)
        super().release(seq_id, num_tokens, ended=ended)
        del self.slabs[seq_id]


class StaticBatchCache(ContiguousCache):
    """Admits a batch in the step in which nothing runs, and nothing else until all of it has ended."""

    _is_running = False

    def _try_admit(self, seq_id: int, table: BlockTable, reusable: int, limits: AdmissionLimits) -> Admission | None:
        return None if self._is_running else super()._try_admit(seq_id, table, reusable, limits)

    def launched(self, step_id: int) -> list[Move]:
        """See KVCacheManager."""
        self._is_running = bool(self._tables)
        return super().launched(step_id)

    def release(self, seq_id: int, num_tokens: int = 0, *, ended: bool = True) -> None:
        """See KVCacheManager."""
        super().release(seq_id, num_tokens, ended=ended)
        self._is_running = bool(self._tables)


class NewBaseline(Protocol):
    """Makes the cache of a baseline."""

    def __call__(
        self, config: CacheConfig, length_of: LengthOf, max_model_len: int, *, num_beams: int = 1
    ) -> KVCacheManager:
        """num_beams: sequences of a beam search, for each of which a request reserves a slab."""


def _max(config: CacheConfig, length_of: LengthOf, max_model_len: int, *, num_beams: int = 1) -> KVCacheManager:
    del length_of
    return ContiguousCache(config, lambda _id, _tokens: max_model_len, num_beams=num_beams)


def _pow2(config: CacheConfig, length_of: LengthOf, max_model_len: int, *, num_beams: int = 1) -> KVCacheManager:
    def reserve(request_id: str, _: int) -> int:
        prompt, output = length_of(request_id)
        return min(max_model_len, prompt + (1 << (output - 1).bit_length()))

    return ContiguousCache(config, reserve, num_beams=num_beams)


def _oracle(config: CacheConfig, length_of: LengthOf, max_model_len: int, *, num_beams: int = 1) -> KVCacheManager:
    del max_model_len
    return ContiguousCache(config, lambda request_id, _tokens: sum(length_of(request_id)), num_beams=num_beams)


def _static(config: CacheConfig, length_of: LengthOf, max_model_len: int, *, num_beams: int = 1) -> KVCacheManager:
    del length_of
    return StaticBatchCache(config, lambda _id, _tokens: max_model_len, num_beams=num_beams)


BASELINES: Mapping[str, NewBaseline] = MappingProxyType(
    {"orca-max": _max, "orca-pow2": _pow2, "orca-oracle": _oracle, "static": _static}
)


def baseline_setup(setup: EngineSetup, name: str) -> tuple[EngineSetup, NewCache]:
    """The setup with what a baseline lacks turned off (prefix cache, swapping, watermark, speculation), and its cache.

    Raises ConfigError for an unknown baseline, and for a model with sliding windows.
    """
    if name not in BASELINES:
        raise ConfigError(f"there is no baseline {name!r:.60}{nearest(name, BASELINES)}; known: {', '.join(BASELINES)}")
    cache, scheduler = baseline_configs(setup.cache, setup.scheduler)
    longest, num_beams = scheduler.max_model_len, max(1, setup.beam_width)

    def new_cache(config: CacheConfig, length_of: LengthOf) -> KVCacheManager:
        return BASELINES[name](config, length_of, longest, num_beams=num_beams)

    return replace(setup, cache=cache, scheduler=scheduler), new_cache


def baseline_configs(cache: CacheConfig, scheduler: SchedulerConfig) -> tuple[CacheConfig, SchedulerConfig]:
    """The configs of a baseline. Raises ConfigError for a model with sliding windows."""
    if cache.dropping:
        raise ConfigError("the baselines have no sliding windows; choose a model without them")
    plain = replace(
        cache,
        prefix_index="none",
        public_prefixes=(),
        eviction="lru",
        groups=tuple(replace(group, num_host_blocks=0) for group in cache.groups),
    )
    return plain, replace(scheduler, watermark=0.0, preemption="recompute", speculation=(), policy="fcfs")
