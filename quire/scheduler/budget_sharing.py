"""Budget sharing between flows, as in fair queueing: tenants (policy `fair`) or priority classes (policy `priority`).

Every running sequence gets one token per step. Without sharing, the earliest arrivals get all other tokens, so that
long prompts of one tenant delay other tenants for many steps, and no row changes its tenant or class. The queue limit
counts per flow, too (`scheduler.queue_limit`).
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from quire.config import Policy
from quire.core.request import Request
from quire.scheduler.preemption import Victims, tenant_service, victim_by_class, victim_by_tenant
from quire.scheduler.queue.waiting_queue import Queue
from quire.scheduler.sequence import Sequence

Flow = str | int | None  # a tenant, or a priority class; None: all requests, where a policy has no sharing rule


class SharingRule(NamedTuple):
    """A rule of budget sharing: the flow of a request, the order of flows, and which sequence is preempted."""

    flows: str  # what the flows are, for messages
    flow_of: Callable[[Request], Flow]
    order_of: Callable[[Queue, Flow], int]  # the lowest is first
    min_fraction: float  # fraction of an equal part that each flow gets, if it has that many tokens to compute
    select_victim: Callable[[Victims, Queue, Sequence], Sequence | None]  # for the head of the queue
    reason: str


def split(wanted: Mapping[Flow, int], total: int, order: Mapping[Flow, int], min_fraction: float) -> dict[Flow, int]:
    """Tokens per flow of `total`. wanted: tokens to compute.

    Each flow first gets up to `min_fraction` of an equal part. The rest goes to the flows in the order of `order`.
    """
    part = int(total * min_fraction / len(wanted)) if wanted else 0
    shares = {flow: min(count, part) for flow, count in wanted.items()}
    left = total - sum(shares.values())
    for flow in sorted(wanted, key=lambda flow: order[flow]):
        more = min(wanted[flow] - shares[flow], left)
        shares[flow] += more
        left -= more
    return shares


def _tenant(request: Request) -> Flow:
    return request.namespace.tenant


def _class(request: Request) -> Flow:
    return request.scheduling_params.priority


def _everyone(_: Request) -> Flow:
    return None


SHARING_RULES: Mapping[Policy, SharingRule] = {
    "fair": SharingRule(
        "tenants",
        _tenant,
        lambda queue, tenant: tenant_service(queue, str(tenant)),
        0.25,
        victim_by_tenant,
        "a tenant with fewer rows or less service waits",
    ),
    "priority": SharingRule(
        "priority classes",
        _class,
        lambda _, of_class: int(of_class or 0),
        0.0,
        victim_by_class,
        "a sequence of a better class waits",
    ),
}


def flow_of(policy: Policy) -> Callable[[Request], Flow]:
    """The flow of a request under a policy."""
    return SHARING_RULES[policy].flow_of if policy in SHARING_RULES else _everyone


class TokenShares:
    """The tokens of one step for running sequences, beyond one each, that budget sharing grants per flow."""

    def __init__(self, sharing: SharingRule, running: Iterable[Sequence], queue: Queue, total: int) -> None:
        """total: tokens to divide. The queue must not be empty: the head's flow has a share, too."""
        self._flow_of = sharing.flow_of
        head = queue.head
        assert head is not None, "the queue is not empty"
        wanted = {sharing.flow_of(head.request): min(queue.num_tokens_before(head), total)}  # with its own tokens
        for seq in running:
            count = min(len(seq.tokens) + seq.num_pending, seq.limit) - seq.num_computed - 1
            if count > 0:
                flow = sharing.flow_of(seq.request)
                wanted[flow] = wanted.get(flow, 0) + count
        order = {flow: sharing.order_of(queue, flow) for flow in wanted}
        self._left = split(wanted, total, order, sharing.min_fraction)

    def allocate(self, seq: Sequence, most: int) -> int:
        """Take up to `most` of the remaining tokens of the sequence's flow. Returns their number."""
        flow = self._flow_of(seq.request)
        count = min(most, self._left.get(flow, 0))
        self._left[flow] = self._left.get(flow, 0) - count
        return count
