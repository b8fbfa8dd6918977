"""Ways: how those who lose their blocks come by them again, by copying them to the host and back or by computing them.

The cheaper way is taken, by what copies and computing took on this machine so far. Decides nothing about who has to
leave, nor when.
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
    """What was decided for sequences that leave together."""

    how: Literal["recompute", "swap"]
    why: str
    num_bytes: Mapping[int, int] = {}  # copied to the host, by sequence; blocks that they share count once
    recompute_seconds: float | None = None  # predicted, of all of them; None where nothing was predicted
    copy_seconds: float | None = None  # the same, out and back


VOID = Way("recompute", "what it had is void")
NOTHING_LOST = Way("recompute", "nothing is lost")


class Ways:
    """Decides, and has the cache prepare the copies."""

    def __init__(self, mode: PreemptionMode, cache: KVCache, costs: Costs) -> None:
        self._mode = mode
        self._cache = cache
        self._costs = costs

    def take(self, leaving: Listing[Sequence]) -> Way:
        """The way for sequences of one request that are about to lose their tables."""
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
        """What they share is computed once."""
        first, *others = leaving
        seconds = self._costs.recompute_seconds(first.num_kept)
        for seq in others:
            num_shared = min(seq.num_shared, seq.num_kept)
            seconds += self._costs.recompute_seconds(seq.num_kept - num_shared, num_shared)
        return seconds
