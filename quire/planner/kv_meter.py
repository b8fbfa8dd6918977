"""KVMeter: how much KV memory holds live tokens, and what the rest is, while requests wait for memory.

One definition for every memory manager. Of all blocks of the pool, at a moment in which the head of the queue waits for
memory (no blocks are shared: the workload has no prefix cache, and one sequence for each request):

    live         positions whose KV is computed
    reservation  positions that a running sequence will use later
    internal     positions of a slab, or of blocks, that its sequence never uses
    external     between slabs: what the buddy allocator rounds up, and free memory that nothing waiting fits into, such
                 as the blocks that the admission watermark keeps free
"""

from typing import NamedTuple

from quire.planner.baselines import ContiguousCache
from quire.planner.simulated_engine import SimulatedEngine


class KVShares(NamedTuple):
    """Shares of the pool, of which the first four sum to 1, and of the blocks that sequences hold."""

    live: float
    reservation: float
    internal: float
    external: float
    live_of_held: float  # live positions, as a share of the positions in blocks that sequences hold
    kept_free: float  # part of `external`: free blocks up to the admission watermark

    @property
    def waste(self) -> float:
        """All that is not live."""
        return 1 - self.live


class KVMeter:
    """The `on_step` of a Simulation. It samples every few steps, when they are planned."""

    def __init__(self, *, every: int = 4, only_waiting: bool = True) -> None:
        """only_waiting: sample only while the head of the queue waits for memory, or for a batch to end."""
        self._every = every
        self._only_waiting = only_waiting
        self._num_steps = 0
        self._sums = [0.0] * 6
        self._running = self._num_samples = 0

    @property
    def mean_running(self) -> float:
        """Mean number of running sequences at the samples."""
        return self._running / self._num_samples if self._num_samples else 0.0

    @property
    def shares(self) -> KVShares:
        """Means over the samples; all 0 without any."""
        count = max(1, self._num_samples)
        return KVShares(*(total / count for total in self._sums))

    def __call__(self, engine: SimulatedEngine) -> None:
        """Sample the memory that the planned step has."""
        self._num_steps += 1
        scheduler = engine.scheduler
        waits = scheduler.state.queue.head is not None and scheduler.request_stats.wait_cause == "memory"
        if self._num_steps % self._every or (self._only_waiting and not waits):
            return
        cache = scheduler.cache
        total, size = cache.pools[0].num_blocks * cache.block_size, cache.block_size
        slabs = cache.slabs if isinstance(cache, ContiguousCache) else None
        live = reservation = internal = held = 0
        for seq in scheduler.state.running_queue.running:
            assert seq.table is not None, "it runs"
            computed, final = seq.num_computed, seq.max_length
            has = len(seq.table.blocks[0]) * size
            slab = has if slabs is None else slabs[seq.id]
            live += computed
            reservation += max(0, min(final, slab) - computed)
            internal += max(0, slab - max(final, computed))
            held += has
        external = total - live - reservation - internal
        kept_free = min(cache.pools[0].num_available, scheduler.state.watermark_blocks[0]) * size
        parts = (
            *(part / total for part in (live, reservation, internal, external)),
            live / held if held else 0.0,
            kept_free / total,
        )
        self._sums = [before + part for before, part in zip(self._sums, parts, strict=True)]
        self._running += scheduler.num_running
        self._num_samples += 1
