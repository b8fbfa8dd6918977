"""Budget sharing between tenants (policy `fair`) or priority classes (policy `priority`).

Every running sequence gets one token per step. Without sharing, the earliest arrivals get all other tokens, so that
long prompts of one tenant delay other tenants for many steps, and no row changes its tenant or class.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Listing
from typing import NamedTuple

from quire.config import Policy
from quire.scheduler.preemption import tenant_of, tenant_service, victim_by_class, victim_by_tenant
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


def _class(seq: Sequence) -> TenantOrClass:
    return seq.rank[0]


SHARING_RULES: Mapping[Policy, SharingRule] = {
    "fair": SharingRule(
        tenant_of,
        lambda queue, tenant: tenant_service(queue, str(tenant)),
        0.25,
        victim_by_tenant,
        "a tenant with fewer rows or less service waits",
    ),
    "priority": SharingRule(
        _class, lambda _, of_class: int(of_class), 0.0, victim_by_class, "a sequence of a better class waits"
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
