"""Budget sharing: which prompts get the tokens of a step.

Every running sequence gets one token per step. Without sharing, the earliest arrivals get all other tokens, so that a
long prompt delays short ones for many steps.

Flows share as in fair queueing: tenants (policy `fair`) or priority classes (policy `priority`). The queue limit counts
per flow, too (`scheduler.queue_limit`). Within a flow, and under the other policies, short prompts are first.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from quire.cache.manager import KVCacheManager
from quire.cache.prefix.index import NO_MATCH
from quire.config import Policy
from quire.core.request import Request
from quire.scheduler.preemption import Victims, tenant_service, victim_by_class, victim_by_tenant
from quire.scheduler.queue.waiting_queue import Queue
from quire.scheduler.sequence import Sequence

Flow = str | int | None  # a tenant, or a priority class; None: all requests, where a policy has no sharing rule
FlowOf = Callable[[Request], Flow]


class SharingRule(NamedTuple):
    """A rule of budget sharing: the flow of a request, the order of flows, and which sequence is preempted."""

    flows: str  # what the flows are, for messages
    flow_of: FlowOf
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


def flow_of(policy: Policy) -> FlowOf:
    """The flow of a request under a policy."""
    return SHARING_RULES[policy].flow_of if policy in SHARING_RULES else _everyone


_Wanted = tuple[Sequence, int, bool]  # a prompt, its tokens to compute, of a running one beyond one, whether it waits


class _Compared(NamedTuple):
    """A sequence when it was compared."""

    num_tokens: int  # to compute
    at_first: int  # these when it was first compared, plus the tokens of all steps that had been divided before
    waits: bool


class Division(NamedTuple):
    """The tokens of one step beyond one for each running sequence, as divided among prompts."""

    running: Mapping[int, int]  # tokens of running sequences, by sequence id
    waiting: list[Sequence]  # waiting sequences that get tokens, in the order of their admission
    unused: int  # tokens that the step leaves, so that it ends sooner


MAX_COMPARED = 32  # waiting sequences that are compared with each other and with running ones
_AGEING = 4  # tokens of steps that pass a prompt, and count as one token less to compute
_SHORT_STEP = 0.5  # a step ends with the prompts that passed others if that leaves at least this part of its tokens


class PromptSharing:
    """Divides the tokens of a step among prompts: the one with the fewest tokens to compute is first.

    A prompt counts as shorter by one token for every four that steps divided and that it did not get. So it is first
    after steps of four times its tokens. Prompts of about the same length (within a power of 4) keep their order:
    running ones, then waiting ones, each in the order of the policy. So prompts with a common prefix are still computed
    one after the other. A sequence that has generated tokens is first.

    Shortest remaining processing time first is the order with the least mean delay (Schrage, "A Proof of the Optimality
    of the Shortest Remaining Processing Time Discipline", 1968).
    """

    def __init__(self, policy: Policy, cache: KVCacheManager, most: int) -> None:
        """most: tokens of one prompt in one step."""
        self._rule = SHARING_RULES.get(policy)
        self._most = most
        self._cache = cache
        self._num_divided = 0  # tokens of all steps that were divided
        self._compared: dict[int, _Compared] = {}  # sequences compared last, by id

    def divide(
        self, running: Iterable[Sequence], waiting: list[Sequence], queue: Queue, total: int, *, fills: bool
    ) -> Division | None:
        """Divide `total` tokens. Returns None if they suffice for all prompts.

        waiting: the first sequences of the queue that can be admitted. fills: whether a prompt that the step does not
        finish gets tokens beside a short one that passed it.
        """
        wanted: list[_Wanted] = [(seq, count, False) for seq in running if (count := seq.num_lacking - 1) > 0]
        if sum(count for _, count, _ in wanted) + sum(len(seq.tokens) for seq in waiting) <= total:
            return None
        wanted += [(seq, self._num_uncached(seq), True) for seq in waiting]
        left, flow_of = self._shares(wanted, queue, total, waits=bool(waiting))
        self._num_divided += total
        given: dict[int, int] = {}
        admitted: list[Sequence] = []
        last_finished: dict[Flow, int] = {}  # the last place, in `wanted`, of those that the step finishes
        cut = set[Flow]()
        for place in self._in_order(wanted):
            seq, count, waits = wanted[place]
            flow = flow_of(seq.request)
            tokens = min(count, left.get(flow, 0), self._most if waits else self._most - 1)
            passed = tokens < count and last_finished.get(flow, -1) > place
            if passed and not fills and left[flow] >= _SHORT_STEP * total:
                cut.add(flow)
                continue
            left[flow] = left.get(flow, 0) - tokens
            if tokens == count:
                last_finished[flow] = max(place, last_finished.get(flow, -1))
            if not waits:
                given[seq.id] = tokens
            elif tokens:
                admitted.append(seq)
        return Division(given, admitted, sum(left.get(flow, 0) for flow in cut))

    def _shares(
        self, wanted: list[_Wanted], queue: Queue, total: int, *, waits: bool
    ) -> tuple[dict[Flow, int], FlowOf]:
        """The tokens of each flow, and the flow of a request. waits: whether waiting prompts can be admitted."""
        if self._rule is None:
            return {None: total}, _everyone
        flow_of, order_of, counts = self._rule.flow_of, self._rule.order_of, dict[Flow, int]()
        if waits and (head := queue.head) is not None:
            counts[flow_of(head.request)] = min(queue.num_tokens_before(head), total)  # with its own tokens
        for seq, count, waits in wanted:
            if not waits:
                flow = flow_of(seq.request)
                counts[flow] = counts.get(flow, 0) + count
        order = {flow: order_of(queue, flow) for flow in counts}
        return split(counts, total, order, self._rule.min_fraction), flow_of

    def _in_order(self, wanted: list[_Wanted]) -> list[int]:
        """The places of the prompts in `wanted`, the shortest prompt first."""
        compared, classes = dict[int, _Compared](), []
        if not any(waits for *_, waits in wanted):  # none can be admitted now: they keep their age
            compared = {seq_id: one for seq_id, one in self._compared.items() if one.waits}
        for seq, count, waits in wanted:
            before = self._compared.get(seq.id)
            at_first = self._num_divided + count if before is None else before.at_first
            compared[seq.id] = _Compared(count, at_first, waits)
            num_passed = self._num_divided + count - at_first
            is_first = seq.has_run if waits else seq.num_generated > 0
            classes.append(-1 if is_first else size_class(count - num_passed // _AGEING))
        self._compared = compared
        return sorted(range(len(wanted)), key=classes.__getitem__)

    def _num_uncached(self, seq: Sequence) -> int:
        """Tokens of a waiting sequence outside its prefix match, as of when it was first compared."""
        before = self._compared.get(seq.id)
        if before is not None and before.waits:
            return before.num_tokens
        reusable = max(seq.reusable, 0)
        match = self._cache.match_prefix(seq.request.namespace, seq.tokens[:reusable]) if reusable else NO_MATCH
        return min(len(seq.tokens), seq.limit) - match.num_tokens


def size_class(num_tokens: int) -> int:
    """The least i with `num_tokens` at most 4**i."""
    return (max(num_tokens - 1, 0).bit_length() + 1) // 2
