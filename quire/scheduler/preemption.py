"""Preemption: which running sequence loses its blocks, and whether its KV is swapped or recomputed.

Mode `auto` takes the faster one by the cost model, or swap while copy times are unknown.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Listing
from math import isfinite
from typing import Literal, NamedTuple

from quire.cache.manager import KVCacheManager
from quire.config import PreemptionMode
from quire.cost.step_time import CostModel
from quire.scheduler.queue.fair import PROMPT_WEIGHT, FairQueue
from quire.scheduler.queue.waiting_queue import Queue
from quire.scheduler.sequence import Sequence


def default_victim(running: Listing[Sequence]) -> Sequence:
    """The sequence of the worst class that arrived last. It loses its blocks first when blocks are short."""
    return running[-1]


def tenant_of(seq: Sequence) -> str:
    """The tenant of a sequence."""
    return seq.request.namespace.tenant


class Victims(NamedTuple):
    """The running sequences of which one may be preempted for the head of the queue."""

    running: Listing[Sequence]  # in the order of rank
    may_preempt: Callable[[Sequence], bool]  # False for a sequence whose request was preempted since its last token
    num_leaving: Callable[[Sequence], int]  # rows that are freed if the sequence is preempted


def victim_by_class(victims: Victims, _: Queue, head: Sequence) -> Sequence | None:
    """The last sequence of the worst running class, if that class is worse than the head's.

    It may be preempted again and again: classes are ordered, so no two requests preempt each other forever.
    """
    running = victims.running
    return running[-1] if running and running[-1].rank[0] > head.rank[0] else None


def _victim_by_rows(victims: Victims, head: Sequence) -> Sequence | None:
    """The last sequence of the tenant with the most rows after whose preemption it has more than the head's tenant.

    If the head's tenant has no row, any sequence qualifies. None if the head's tenant has at most one row less.
    """
    counts = Counter(map(tenant_of, victims.running))
    tenant, most = max(counts.items(), key=lambda one: one[1], default=("", 0))
    own = counts[tenant_of(head)]
    if most <= own + 1:
        return None
    theirs = (seq for seq in reversed(victims.running) if tenant_of(seq) == tenant and victims.may_preempt(seq))
    return next((seq for seq in theirs if not own or most - victims.num_leaving(seq) > own), None)


def _victim_by_service(victims: Victims, queue: Queue, head: Sequence) -> Sequence | None:
    """The last sequence of the tenant served most, if its counter is not below the head's tenant's plus the prompt.

    Its preemption frees no more rows than the head's request has sequences. So bursts of a tenant below its share do
    not wait. A tenant keeps its last row if the head's tenant has a row, so that a burst does not stop its only stream.
    """
    counters = {tenant: tenant_service(queue, tenant) for tenant in map(tenant_of, victims.running)}
    tenant, most = max(counters.items(), key=lambda one: one[1], default=("", 0))
    if tenant == tenant_of(head) or most < tenant_service(queue, tenant_of(head)) + PROMPT_WEIGHT * len(head.tokens):
        return None
    counts = Counter(map(tenant_of, victims.running))
    most_rows = head.request.num_sequences
    if counts[tenant_of(head)]:
        most_rows = min(most_rows, counts[tenant] - 1)
    theirs = (seq for seq in reversed(victims.running) if tenant_of(seq) == tenant and victims.may_preempt(seq))
    return next((seq for seq in theirs if victims.num_leaving(seq) <= most_rows), None)


def victim_by_tenant(victims: Victims, queue: Queue, head: Sequence) -> Sequence | None:
    """The victim under the policy `fair`: by rows, else by service."""
    return _victim_by_rows(victims, head) or _victim_by_service(victims, queue, head)


def tenant_service(queue: Queue, tenant: str) -> int:
    """The service that a tenant received, in the units of the policy `fair`."""
    assert isinstance(queue, FairQueue), "sharing by tenant needs the queue of the policy 'fair'"
    return queue.counter(tenant)


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

    def __init__(self, mode: PreemptionMode, cache: KVCacheManager, costs: CostModel) -> None:
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
