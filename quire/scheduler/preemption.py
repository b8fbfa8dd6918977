"""Preemption mode: whether the KV of preempted sequences is swapped or recomputed.

Mode `auto` takes the faster one by the cost model, or swap while copy times are unknown. The caller selects the victim.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Listing
from math import isfinite
from typing import Literal, NamedTuple

from quire.cache.kv_cache import KVCache
from quire.config import PreemptionMode
from quire.cost.step_time import Costs
from quire.scheduler.sequence import Sequence


class Way(NamedTuple):
    """The decision for sequences that are preempted together, with its reason."""

    how: Literal["recompute", "swap"]
    why: str
    num_bytes: Mapping[int, int] = {}  # copied to the host, by sequence id; shared blocks count for the first
    recompute_seconds: float | None = None  # predicted for all of them; None without a prediction
    copy_seconds: float | None = None  # predicted for both directions; None without a prediction


VOID = Way("recompute", "what it had is void")
NOTHING_LOST = Way("recompute", "nothing is lost")


class Ways:
    """Selects swap or recompute, and plans the copies of a swap."""

    def __init__(self, mode: PreemptionMode, cache: KVCache, costs: Costs) -> None:
        self._mode = mode
        self._cache = cache
        self._costs = costs

    def take(self, leaving: Listing[Sequence]) -> Way:
        """The decision for sequences of one request, which the caller then requeues. A swap is planned in the cache."""
        if self._mode == "recompute":
            return Way("recompute", "configured")
        if leaving[0].request.beams is not None:
            return Way("recompute", "the beams of a search go on from each other")
        if not self._cache.host_pools.num_blocks:
            return Way("recompute", "there is no host pool")
        lengths = {seq.id: seq.num_kept for seq in leaving}
        sizes = self._cache.swap_bytes(lengths)
        if not any(sizes.values()):
            return NOTHING_LOST
        again, copies = self._recompute_seconds(leaving), sum(self._costs.copy_seconds(sum(sizes.values())))
        predicted = again, copies if isfinite(copies) else None
        if self._mode == "auto" and isfinite(copies) and copies >= again:
            return Way("recompute", "copies would take longer", {}, *predicted)
        if not self._cache.swap_out(lengths):
            return Way("recompute", "the host pool has no room", {}, *predicted)
        if self._mode == "swap":
            return Way("swap", "configured", sizes, *predicted)
        why = "computing would take longer" if isfinite(copies) else "it is not known yet how long copies take"
        return Way("swap", why, sizes, *predicted)

    def _recompute_seconds(self, leaving: Listing[Sequence]) -> float:
        """Predicted seconds to recompute all sequences; their shared positions count once."""
        first, *others = leaving
        seconds = self._costs.recompute_seconds(first.num_kept)
        for seq in others:
            num_shared = min(seq.num_shared, seq.num_kept)
            seconds += self._costs.recompute_seconds(seq.num_kept - num_shared, num_shared)
        return seconds
