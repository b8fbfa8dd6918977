"""Request stats: explanations of requests, events, counters.

The latest ended and rejected requests are kept. Beyond the limit, the oldest of the tenant with the most is dropped, so
that a tenant cannot infer the number of other tenants' requests from what is kept of its own.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import msgspec
from msgspec import structs

from quire.cache.admission_check import Admission
from quire.cache.manager import KVCacheManager
from quire.config import MAX_SPECULATIVE_TOKENS
from quire.core.events import (
    AdmissionSlowed,
    Admitted,
    Arrived,
    Event,
    Evicted,
    Finished,
    PinsRefused,
    PinsYielded,
    Preempted,
    Refused,
    StepFailed,
)
from quire.core.explanation import DraftCounts, Eviction, Explanation, Miss, Preemption, Rejection, SkipReason
from quire.core.output import EndCause
from quire.core.request import Request
from quire.errors import DeadlineUnreachable, QueueFull
from quire.scheduler.preemption import PreemptionDecision
from quire.scheduler.request_state import RequestState
from quire.scheduler.sequence import Sequence

WaitCause = Literal[
    "step",  # only the step that was running
    "tokens",  # the step's token budget was used up
    "rows",  # max_num_seqs sequences were running
    "memory",  # KV blocks were short
    "in_flight",  # the head was preempted, and in-flight steps or its swap-out were not over
    "state",  # the head can start in the next step from a recurrent state that the step wrote
    "failure",  # a step had failed, and its sequences ran one by one
    "prompt",  # another sequence of the request computed the prompt
    "constraint",  # the constraint of the request was being compiled
    # other prerequisites have their own names
]


class QueueTimes:
    """Cumulative queue time by cause, in seconds. The difference of two snapshots is the time between them."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._cause: WaitCause = "step"
        self._since = 0.0

    @property
    def cause(self) -> WaitCause:
        """The current cause."""
        return self._cause

    def set_cause(self, cause: WaitCause, now: float) -> None:
        """Set the current cause."""
        self._advance(now)
        self._cause = cause

    def snapshot(self, now: float) -> dict[str, float]:
        """A snapshot: seconds by cause."""
        self._advance(now)
        return dict(self._seconds)

    def since(self, snapshot: dict[str, float], now: float) -> dict[str, float]:
        """Seconds by cause since a snapshot; causes without time are left out."""
        self._advance(now)
        passed = {cause: seconds - snapshot.get(cause, 0.0) for cause, seconds in self._seconds.items()}
        return {cause: seconds for cause, seconds in passed.items() if seconds > 0}

    def _advance(self, now: float) -> None:
        if now > self._since:
            self._seconds[self._cause] = self._seconds.get(self._cause, 0.0) + now - self._since
            self._since = now


_NO_DRAFTS = DraftCounts()
MOST_EVENTS = 4096
MOST_ENDED = 4096  # kept per tenant
MOST_ENDED_OF_ALL = 16384
MOST_EVICTIONS = 8  # listed per request


@dataclass(slots=True)
class _Tenant:
    """Counts of a tenant with unfinished requests."""

    num_open: int = 0
    num_waiting: int = 0  # queued sequences
    num_admitted: int = 0  # requests, since it last had none unfinished


class Totals(msgspec.Struct):
    """Counters of one tenant since the start."""

    prompt_tokens: int = 0  # found in the prefix cache at the first admission of their request, or computed
    output_tokens: int = 0  # of ended sequences
    cached_tokens: int = 0  # those found, among prompt_tokens and queried_tokens
    queried_tokens: int = 0  # prompt tokens at the first admission of their request
    preemptions: int = 0  # of sequences
    finished: int = 0  # requests


class RequestStats:
    """Explanations by request, recent events, and counters that never fall."""

    def __init__(self, policy: str, requests: Mapping[str, RequestState]) -> None:
        """requests: the unfinished requests by id, which the scheduler state updates."""
        self.events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self.num_preemptions = 0
        self.num_watermark_raises = 0  # times that the blocks per running sequence of the watermark were raised
        self.num_query_tokens = 0  # prompt tokens at the first admission of their request
        self.num_hit_tokens = 0  # those of them that were found in the prefix cache
        self.num_snapshot_hits = 0  # requests that started from a snapshot of recurrent states at their first admission
        self.num_stateless_tokens = 0  # prompt tokens whose KV matched then behind the last snapshot
        self.num_prompt_tokens = 0  # those found, and those that committed steps computed; each position once
        self.counted_in_part: dict[str, Explanation] = {}  # of unfinished requests whose prompt was counted in part
        self.drafts: dict[str, DraftCounts] = {}  # verified, by drafter
        self._chains_by_accepted = [0] * (MAX_SPECULATIVE_TOKENS + 1)  # verified chains, by number of accepted drafts
        self._requests = requests
        self._ended: dict[str, Explanation] = {}
        self._ended_by_tenant: dict[str, deque[str]] = {}  # request ids, oldest first
        self._queue_times = QueueTimes()
        self._snapshots: dict[int, dict[str, float]] = {}  # snapshot of the waits when a sequence was queued
        self._policy = policy
        self.num_admitted = 0
        self._tenants: dict[str, _Tenant] = {}
        self.totals: dict[str, Totals] = {}  # by tenant; there are not more tenants than API keys

    def explain(self, request_id: str, seq_ids: Iterable[int], now: float) -> Explanation | None:
        """A copy of a request's explanation; None if it is unknown or dropped. seq_ids: its unfinished sequences."""
        found = self._find(request_id)
        if found is None:
            return None
        explanation = structs.replace(
            found,
            waited=dict(found.waited),
            preemptions=list(found.preemptions),
            evictions=list(found.evictions),
            drafts=dict(found.drafts),
            proposals_skipped=dict(found.proposals_skipped),
        )
        for seq_id in seq_ids:
            if seq_id in self._snapshots:
                self._record_waited(explanation, self._queue_times.since(self._snapshots[seq_id], now))
        return explanation

    def arrived(self, request: Request, now: float) -> tuple[Explanation, int]:
        """Record the arrival of a request. Returns its explanation, and the admitted requests of its tenant."""
        self.events.append(Arrived(now, request.id, len(request.prompt)))
        tenant = self._tenants.setdefault(request.namespace.tenant, _Tenant())
        tenant.num_open += 1
        about = (request.id, request.namespace.tenant, now, len(request.prompt))
        num_done = len(request.prompt) if request.known_outputs else request.num_counted
        explanation = Explanation(
            *about,
            policy=self._policy,
            place=tenant.num_waiting,
            num_prompt_done=num_done,
            adapter=request.adapter_name,
            adapter_digest=request.namespace.adapter,
        )
        return explanation, tenant.num_admitted

    def rejected(self, request: Request, error: DeadlineUnreachable | QueueFull, now: float) -> None:
        """Record the rejection of a request."""
        match error:
            case DeadlineUnreachable():
                refusal = Rejection("deadline", error.predicted, error.deadline, str(error))
            case QueueFull():
                refusal = Rejection("queue_full", error.retry_after, request.scheduling_params.deadline, str(error))
        self.events.append(Refused(now, request.id, refusal.reason, refusal.predicted_seconds, refusal.asked_seconds))
        tenant = self._tenants.get(request.namespace.tenant)
        explanation = Explanation(
            *(request.id, request.namespace.tenant, now, len(request.prompt)),
            state="refused",
            policy=self._policy,
            place=0 if tenant is None else tenant.num_waiting,
            finished=now,
            refusal=refusal,
            adapter=request.adapter_name,
            adapter_digest=request.namespace.adapter,
        )
        self._keep_ended(explanation)

    def queued(self, seq: Sequence, now: float) -> None:
        """Record that a sequence was queued."""
        self._tenants[seq.request.namespace.tenant].num_waiting += seq.id not in self._snapshots
        self._snapshots[seq.id] = self._queue_times.snapshot(now)

    def ready(self, state: RequestState, what: str, now: float) -> None:
        """Record that a prerequisite of a request is ready, for which it has waited."""
        self._record_waited(state.explanation, {what: state.ready(what, now)})

    def held(self, seq: Sequence) -> None:
        """Record that a sequence is held, so it does not wait."""
        self._remove_snapshot(seq)

    @property
    def accepted_by_place(self) -> tuple[int, ...]:
        """Accepted drafts by place in their chain."""
        of_at_least = list(accumulate(self._chains_by_accepted[:0:-1]))
        return tuple(reversed(of_at_least))

    @property
    def wait_cause(self) -> WaitCause:
        """The cause for which the queue waits now."""
        return self._queue_times.cause

    def queue_seconds(self, request_id: str) -> float | None:
        """Seconds from arrival to the first admission; None before it."""
        explanation = self._requests[request_id].explanation
        return None if explanation.admitted is None else explanation.admitted - explanation.arrived

    def set_wait_cause(self, cause: WaitCause, now: float) -> None:
        """Set the cause for which the queue waits from now on."""
        self._queue_times.set_cause(cause, now)

    def admitted(self, seq: Sequence, admission: Admission, now: float) -> None:
        """Record that a sequence was admitted from the queue."""
        state = self._requests[seq.request.id]
        explanation = state.explanation
        if explanation.admitted is None:
            tenant = self._tenants[seq.request.namespace.tenant]
            meanwhile = tenant.num_admitted - state.num_admitted_before
            num_cached = min(admission.num_tokens, len(seq.request.prompt))
            explanation.num_passed_by = max(0, meanwhile - explanation.place)
            tenant.num_admitted += 1
            self.num_admitted += 1
            explanation.num_cached_tokens = num_cached
            explanation.num_shared_blocks = admission.num_shared_blocks
            explanation.num_copied_tokens = admission.num_copied_tokens
            explanation.num_kv_tokens = min(admission.num_kv_tokens, len(seq.request.prompt))
            explanation.state_position = admission.state_position
            self.num_snapshot_hits += admission.state_position is not None
            self.num_stateless_tokens += max(0, admission.num_kv_tokens - admission.num_tokens)
            explanation.miss = _miss(seq, admission)
            num_queried = 0 if explanation.num_prompt_done else len(seq.request.prompt)
            num_hits = self._count_prompt(state, num_cached)
            self.num_query_tokens += num_queried
            self.num_hit_tokens += num_hits
            totals = self._totals(seq.request)
            totals.queried_tokens += num_queried
            totals.cached_tokens += num_hits
        swapped = (admission.num_swapped_tokens, admission.num_swapped_bytes)
        self._record_recomputed(explanation, seq, admission.num_tokens, swapped)
        self._record_waited(explanation, self._queue_times.since(self._remove_snapshot(seq) or {}, now))
        self._record_running(seq, admission.num_tokens, admission, now)

    def computed(self, seq: Sequence, stop: int) -> None:
        """Record that a committed chunk of a prompt ends at position `stop`.

        A sequence that samples nothing does not compute the last token of its prompt, which counts as computed too.
        """
        self._count_prompt(self._requests[seq.request.id], stop if stop < seq.limit else seq.num_prompt_tokens)

    def _count_prompt(self, state: RequestState, num_tokens: int) -> int:
        """Count the first `num_tokens` positions of a prompt as done. Returns how many were not counted before.

        Each position is counted once, however many sequences share it, and however often it is computed again.
        """
        explanation = state.explanation
        num_new = max(0, min(num_tokens, explanation.num_prompt_tokens) - explanation.num_prompt_done)
        explanation.num_prompt_done += num_new
        if 0 < explanation.num_prompt_done < explanation.num_prompt_tokens:
            self.counted_in_part[explanation.request_id] = explanation
        else:
            self.counted_in_part.pop(explanation.request_id, None)
        self.num_prompt_tokens += num_new
        self._totals(state.request).prompt_tokens += num_new
        return num_new

    def branched(self, seq: Sequence, num_tokens: int, now: float) -> None:
        """Record that a sequence was branched or forked from another one of its request."""
        explanation = self._requests[seq.request.id].explanation
        noted = self._remove_snapshot(seq)
        self._record_recomputed(explanation, seq, num_tokens)
        waited = {"prompt": now - seq.queued_at} if noted is None else self._queue_times.since(noted, now)
        self._record_waited(explanation, waited)
        self._record_running(seq, num_tokens, None, now)

    def preempted(self, seq: Sequence, reason: str, decision: PreemptionDecision, now: float, *, last: bool) -> None:
        """Record that a sequence was preempted. last: no sequence of its request runs any more."""
        explanation = self._requests[seq.request.id].explanation
        if last:
            explanation.state = "waiting"
        self.num_preemptions += 1
        self._totals(seq.request).preemptions += 1
        taken = (
            decision.mode,
            decision.reason,
            decision.num_bytes.get(seq.id, 0),
            decision.recompute_seconds,
            decision.copy_seconds,
        )
        self.events.append(Preempted(now, seq.request.id, seq.id, seq.num_computed, reason, *taken))
        explanation.preemptions.append(Preemption(now, seq.index, reason, seq.num_computed, None, *taken))

    def watermark_changed(self, num_blocks: int, now: float, *, more: bool) -> None:
        """Record a change of the watermark's blocks per running sequence. more: whether they were raised."""
        self.num_watermark_raises += more
        self.events.append(AdmissionSlowed(now, "", num_blocks))

    def failed(self, step_id: int, error: str, now: float) -> None:
        """Record a failed step."""
        self.events.append(StepFailed(now, "", step_id, error))

    def verified(self, seq: Sequence, drafter: str, num_drafts: int, num_accepted: int) -> None:
        """Record a verified chain of drafts."""
        drafts = self._requests[seq.request.id].explanation.drafts
        for counts in (drafts, self.drafts):
            counts[drafter] = counts.get(drafter, _NO_DRAFTS).with_chain(num_drafts, num_accepted)
        self._chains_by_accepted[num_accepted] += 1

    def skipped(self, seq: Sequence, reason: SkipReason) -> None:
        """Record a proposal of which no draft is verified."""
        skipped = self._requests[seq.request.id].explanation.proposals_skipped
        skipped[reason] = skipped.get(reason, 0) + 1

    def take_cache_events(self, cache: KVCacheManager, now: float) -> None:
        """Take the events and evictions of the cache since the last call."""
        for event in cache.take_pin_events():
            self.events.append(event)
            self._record_pins(event)
        policy = cache.config.eviction
        for cause, num_blocks, reason in cache.take_evictions():
            self.events.append(Evicted(now, cause.request_id, num_blocks, policy, reason.numbers))
            explanation = self._find(cause.request_id)
            if explanation is None:
                continue
            explanation.num_evicted_blocks += num_blocks
            if len(explanation.evictions) < MOST_EVICTIONS:
                numbers = reason.numbers if reason.tenant == explanation.tenant else {}
                explanation.evictions.append(Eviction(now, num_blocks, policy, numbers))

    def record_blocks(self, request_id: str, num_unshared: int, num_own: int) -> None:
        """Record a request's blocks without sharing, and with it. The larger measurement is kept."""
        explanation = self._requests[request_id].explanation
        if num_unshared > explanation.num_blocks_unshared:
            explanation.num_blocks_unshared, explanation.num_blocks_own = num_unshared, num_own

    def ended(self, seq: Sequence, cause: EndCause, now: float, *, last: bool) -> None:
        """Record the end of a sequence. last: it was the last unfinished one of its request."""
        self.events.append(Finished(now, seq.request.id, seq.id, cause, seq.num_generated))
        self._totals(seq.request).output_tokens += seq.num_generated
        noted, state = self._remove_snapshot(seq), self._requests[seq.request.id]
        if noted is not None:
            self._record_waited(state.explanation, self._queue_times.since(noted, now))
        if last:
            self.request_ended(state, cause, now)

    def request_ended(self, state: RequestState, cause: EndCause, now: float) -> None:
        """Record the end of a request."""
        explanation = state.explanation
        self.counted_in_part.pop(explanation.request_id, None)
        explanation.state, explanation.finished, explanation.finish_reason = "finished", now, cause
        tenant = self._tenants[explanation.tenant]
        tenant.num_open -= 1
        self._totals(state.request).finished += 1
        if not tenant.num_open:
            del self._tenants[explanation.tenant]
        self._keep_ended(explanation)

    def _totals(self, request: Request) -> Totals:
        tenant = request.namespace.tenant
        if tenant not in self.totals:
            self.totals[tenant] = Totals()
        return self.totals[tenant]

    def _find(self, request_id: str) -> Explanation | None:
        state = self._requests.get(request_id)
        return self._ended.get(request_id) if state is None else state.explanation

    def _record_pins(self, event: Event) -> None:
        explanation = self._find(event.request_id)
        match event:
            case PinsRefused() if explanation is not None:
                explanation.num_blocks_not_pinned += event.num_blocks
            case PinsYielded() if explanation is not None:
                explanation.num_pinned_blocks_yielded += event.num_blocks

    def _remove_snapshot(self, seq: Sequence) -> dict[str, float] | None:
        """Remove the snapshot of a sequence that leaves the queue, and return it; None if it was not queued."""
        noted = self._snapshots.pop(seq.id, None)
        if noted is not None:
            self._tenants[seq.request.namespace.tenant].num_waiting -= 1
        return noted

    def _keep_ended(self, ended: Explanation) -> None:
        ids = self._ended_by_tenant.setdefault(ended.tenant, deque())
        if ended.request_id not in self._ended:
            ids.append(ended.request_id)
        self._ended[ended.request_id] = ended
        if len(ids) <= MOST_ENDED and len(self._ended) <= MOST_ENDED_OF_ALL:
            return
        if len(ids) <= MOST_ENDED:
            ids = max(self._ended_by_tenant.values(), key=len)
        del self._ended[ids.popleft()]

    def _record_running(self, seq: Sequence, num_tokens: int, admission: Admission | None, now: float) -> None:
        explanation = self._requests[seq.request.id].explanation
        explanation.state = "running"
        if explanation.admitted is None:
            explanation.admitted = now
        miss = None if admission is None else _miss(seq, admission)
        self.events.append(Admitted(now, seq.request.id, seq.id, now - seq.queued_at, num_tokens, miss))

    def _record_waited(self, explanation: Explanation, waited: dict[str, float]) -> None:
        for cause, seconds in waited.items():
            explanation.waited[cause] = explanation.waited.get(cause, 0.0) + seconds

    def _record_recomputed(
        self, explanation: Explanation, seq: Sequence, num_found: int, swapped: tuple[int, int] = (0, 0)
    ) -> None:
        """Set the cost in tokens and bytes of a sequence's latest preemption."""
        for i in reversed(range(len(explanation.preemptions))):
            one = explanation.preemptions[i]
            if one.index == seq.index and one.num_recomputed_tokens is None:
                cost = max(0, one.num_lost_tokens - num_found)
                explanation.preemptions[i] = structs.replace(
                    one, num_recomputed_tokens=cost, num_swapped_in_tokens=swapped[0], num_bytes_in=swapped[1]
                )
                return


def _miss(seq: Sequence, admission: Admission) -> Miss | None:
    """Why the prefix match ended. The index cannot tell that a token is computed only for its logits."""
    miss = admission.miss
    if miss is not None and miss.reason == "recomputed" and seq.num_reported >= seq.num_to_report:
        return structs.replace(miss, reason="last_token")
    return miss
