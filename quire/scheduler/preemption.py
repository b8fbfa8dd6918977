"""Preemption mode: whether the KV of preempted sequences is swapped or recomputed.

Mode `auto` takes the faster one by the cost model, or swap while copy times are unknown. `batch`
and `budget_sharing` select the victim.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Listing
from math import isfinite
from typing import Literal, NamedTuple

from quire.cache.kv_cache import KVCache
from quire.config import PreemptionMode
from quire.cost.step_time import CostModel
from quire.scheduler.sequence import Sequence


class PreemptionDecision(NamedTuple):
    """The decision for sequences that are preempted together, with its reason."""

    mode: Literal["recompute", "swap"]
    reason: str
    num_bytes: Mapping[int, int] = {}  # copied to the host, by sequence id; shared blocks count for the first
    recompute_seconds: float | None = None  # predicted for all of them; None without a prediction
    copy_seconds: float | None = None  # predicted for both directions; None without a prediction


KV_INVALID = PreemptionDecision("recompute", "its KV is invalid")
NO_KV_LOST = PreemptionDecision("recompute", "it has no KV to lose")


class PreemptionPlanner:
    """Selects swap or recompute, and plans the copies of a swap."""

    def __init__(self, mode: PreemptionMode, cache: KVCache, costs: CostModel) -> None:
        self._mode = mode
        self._cache = cache
        self._costs = costs

    def decide(self, victims: Listing[Sequence]) -> PreemptionDecision:
        """The decision for sequences of one request, which the caller then requeues. A swap is planned in the cache."""
        if self._mode == "recompute":
            return PreemptionDecision("recompute", "configured")
        if victims[0].request.beams is not None:
            return PreemptionDecision("recompute", "beams of a search are not swapped")
        if not self._cache.host_pools.num_blocks:
            return PreemptionDecision("recompute", "there is no host pool")
        lengths = {seq.id: seq.num_resumable for seq in victims}
        sizes = self._cache.swap_bytes(lengths)
        if not any(sizes.values()):
            return NO_KV_LOST
        again, copies = self._recompute_seconds(victims), sum(self._costs.copy_seconds(sum(sizes.values())))
        predicted = again, copies if isfinite(copies) else None
        if self._mode == "auto" and isfinite(copies) and copies >= again:
            return PreemptionDecision("recompute", "copies would take longer", {}, *predicted)
        if not self._cache.swap_out(lengths):
            return PreemptionDecision("recompute", "the host pool has no room", {}, *predicted)
        if self._mode == "swap":
            return PreemptionDecision("swap", "configured", sizes, *predicted)
        why = "recomputing would take longer" if isfinite(copies) else "the copy time has not been measured yet"
        return PreemptionDecision("swap", why, sizes, *predicted)

    def _recompute_seconds(self, victims: Listing[Sequence]) -> float:
        """Predicted seconds to recompute all sequences; their shared positions count once."""
        first, *others = victims
        seconds = self._costs.recompute_seconds(first.num_resumable)
        for seq in others:
            num_shared = min(seq.num_shared, seq.num_resumable)
            seconds += self._costs.recompute_seconds(seq.num_resumable - num_shared, num_shared)
        return seconds
