"""Budget sharing between tenants (policy `fair`) or priority classes (policy `priority`).

Every running sequence gets one token per step. Without sharing, the earliest arrivals get all other tokens, so that
long prompts of one tenant delay other tenants for many steps, and no row changes its tenant or class.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Listing
from typing import NamedTuple

from quire.config import Policy
from quire.scheduler.queue.fair import PROMPT_WEIGHT, FairQueue
from quire.scheduler.queue.waiting_queue import Queue
from quire.scheduler.sequence import Sequence

TenantOrClass = str | int  # a tenant, or a priority class


class SharingRule(NamedTuple):
    """A rule of budget sharing: how sequences are grouped, how groups are ordered, and which sequence is preempted."""

    group_of: Callable[[Sequence], TenantOrClass]
    order_of: Callable[[Queue, TenantOrClass], int]  # the lowest is first
    min_fraction: float  # fraction of an equal part that each group gets, if it has that many tokens to compute
    select_victim: Callable[[Listing[Sequence], Queue, Sequence], Sequence | None]  # for the head
    reason: str


def split(
    wanted: Mapping[TenantOrClass, int], total: int, order: Mapping[TenantOrClass, int], min_fraction: float
) -> dict[TenantOrClass, int]:
    """Tokens per group of `total`. wanted: tokens to compute.

    Each group first gets up to `min_fraction` of an equal part. The rest goes to the groups in the order of `order`.
    """
    part = int(total * min_fraction / len(wanted)) if wanted else 0
    shares = {group: min(count, part) for group, count in wanted.items()}
    left = total - sum(shares.values())
    for group in sorted(wanted, key=lambda group: order[group]):
        more = min(wanted[group] - shares[group], left)
        shares[group] += more
        left -= more
    return shares


def _tenant(seq: Sequence) -> TenantOrClass:
    return seq.request.namespace.tenant


def _class(seq: Sequence) -> TenantOrClass:
    return seq.rank[0]


def _victim_by_class(running: Listing[Sequence], _: Queue, head: Sequence) -> Sequence | None:
    """The last sequence of the worst running class, if that class is worse than the head's."""
    return running[-1] if running and running[-1].rank[0] > head.rank[0] else None


def _victim_by_rows(running: Listing[Sequence], head: Sequence) -> Sequence | None:
    """The last sequence of the tenant with the most rows without whose request it has more rows than the head's tenant.

    If the head's tenant has no row, any request qualifies. None if the head's tenant has at most one row less.
    """
    counts = Counter(map(_tenant, running))
    tenant, most = max(counts.items(), key=lambda one: one[1], default=("", 0))
    own = counts[_tenant(head)]
    if most <= own + 1:
        return None
    families = Counter(seq.request.id for seq in running)
    theirs = (seq for seq in reversed(running) if _tenant(seq) == tenant)
    return next((seq for seq in theirs if not own or most - families[seq.request.id] > own), None)


def _victim_by_service(running: Listing[Sequence], queue: Queue, head: Sequence) -> Sequence | None:
    """The last sequence of the tenant served most, if its counter is not below the head's tenant's plus the prompt.

    Its request has no more rows than the head's request has sequences. So bursts of a tenant below its share do not
    wait.
    """
    counters = {tenant: _served(queue, tenant) for tenant in map(_tenant, running)}
    tenant, most = max(counters.items(), key=lambda one: one[1], default=("", 0))
    if tenant == _tenant(head) or most < _served(queue, _tenant(head)) + PROMPT_WEIGHT * len(head.tokens):
        return None
    families = Counter(seq.request.id for seq in running)
    theirs = (seq for seq in reversed(running) if _tenant(seq) == tenant)
    return next((seq for seq in theirs if families[seq.request.id] <= head.request.num_sequences), None)


def _victim_by_tenant(running: Listing[Sequence], queue: Queue, head: Sequence) -> Sequence | None:
    return _victim_by_rows(running, head) or _victim_by_service(running, queue, head)


def _served(queue: Queue, tenant: TenantOrClass) -> int:
    assert isinstance(queue, FairQueue), "sharing by tenant needs the queue of the policy 'fair'"
    return queue.counter(str(tenant))


SHARING_RULES: Mapping[Policy, SharingRule] = {
    "fair": SharingRule(_tenant, _served, 0.25, _victim_by_tenant, "a tenant with fewer rows or less service waits"),
    "priority": SharingRule(
        _class, lambda _, of_class: int(of_class), 0.0, _victim_by_class, "a sequence of a better class waits"
    ),
}


class TokenShares:
    """The tokens of one step for running sequences, beyond one each, that budget sharing grants per group."""

    def __init__(self, sharing: SharingRule, running: Iterable[Sequence], queue: Queue, total: int) -> None:
        """total: tokens to divide. The queue must not be empty: the head's group has a share, too."""
        self._group_of = sharing.group_of
        head = queue.head
        assert head is not None, "the queue is not empty"
        wanted = {sharing.group_of(head): min(queue.num_tokens_before(head), total)}  # with its own tokens
        for seq in running:
            count = min(len(seq.tokens) + seq.num_pending, seq.limit) - seq.num_computed - 1
            if count > 0:
                group = sharing.group_of(seq)
                wanted[group] = wanted.get(group, 0) + count
        order = {group: sharing.order_of(queue, group) for group in wanted}
        self._left = split(wanted, total, order, sharing.min_fraction)

    def allocate(self, seq: Sequence, most: int) -> int:
        """Take up to `most` of the remaining tokens of the sequence's group. Returns their number."""
        group = self._group_of(seq)
        count = min(most, self._left.get(group, 0))
        self._left[group] = self._left.get(group, 0) - count
        return count
