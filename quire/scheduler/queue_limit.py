"""Queue limit: rejects requests while too many wait, with a Retry-After.

A request that exceeds a bound is accepted nevertheless if its flow, with it, stays within an equal part of the bound:
the bound divided by the number of flows of which new requests wait. Flows are those of budget sharing; for other
policies all requests are of one flow. No waiting request is evicted, so that k flows together can exceed the bound,
up to bound * (1 + 1/2 + ... + 1/k), until the requests of the first ones have run.

Retry-After is the predicted time until there is room in the whole queue, or in the flow's part of it, after the
flow's clients that were rejected before. It is the number of sequences that have to start before, times the mean
tokens of a sequence, at the engine's speed. Nothing is reserved: any request that arrives below the limit is accepted.
"""

from math import ceil, inf
from typing import NamedTuple

from quire.cache.manager import KVCacheManager
from quire.config import SchedulerConfig
from quire.core.request import Request
from quire.cost.step_time import CostModel
from quire.errors import MAX_EXPECTED_RETRIES, QueueFull
from quire.scheduler.budget_sharing import SHARING_RULES, Flow
from quire.scheduler.lifecycle import RequestCount, SchedulerState
from quire.scheduler.sequence import Sequence
from quire.scheduler.step_budget import StepBudget

_DEFAULT_RETRY_AFTER = 1.0  # seconds of Retry-After before any step time is known
_UNLIMITED = 2**62  # requests or tokens, where an option sets no bound
_OUTPUT_DECAY = 0.98  # weight of a sequence when the next one ends


class _ExpectedRetries:
    """Rejected requests of a flow that should return, in the order of their rejection."""

    def __init__(self) -> None:
        self.num_tokens = 0  # prompt tokens of all
        self._requests: dict[str, tuple[float, int]] = {}  # by id: when it should return, prompt tokens

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request, returns: float) -> None:
        """Add a rejected request. returns: the time of its expected return."""
        self._requests[request.id] = returns, len(request.prompt)
        self.num_tokens += len(request.prompt)

    def remove_returned(self, request_id: str, now: float) -> None:
        """Remove a request that has returned, and the first ones as long as their time has passed."""
        if request_id in self._requests:
            self._remove(request_id)
        while self._requests:
            first, (returns, _) = next(iter(self._requests.items()))
            if returns > now:
                return
            self._remove(first)

    def _remove(self, request_id: str) -> None:
        self.num_tokens -= self._requests.pop(request_id)[1]


class _OtherFlow(NamedTuple):
    """The waiting requests of another flow, and how many of them leave while one of the own flow leaves."""

    waiting: RequestCount
    pace: float  # infinite: all of them leave before


class QueueLimit:
    """Rejects requests beyond the queue limit, unless an earlier engine has accepted them."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCacheManager,
        state: SchedulerState,
        costs: CostModel,
        step_budget: StepBudget,
    ) -> None:
        self._config = config
        self._step_budget = step_budget
        self._cache = cache
        self._state = state
        self._costs = costs
        requests, tokens = config.max_queued_requests, config.max_queued_tokens
        self._bounds = RequestCount(
            _UNLIMITED if requests is None else requests, _UNLIMITED if tokens is None else tokens
        )
        self._retries: dict[Flow, _ExpectedRetries] = {}
        self._num_ended = self._num_outputs = 0.0  # sequences that ended, and their output tokens, decayed

    def ended(self, seq: Sequence) -> None:
        """Record the output length of a sequence that ended, for the mean length."""
        self._num_ended = self._num_ended * _OUTPUT_DECAY + 1
        self._num_outputs = self._num_outputs * _OUTPUT_DECAY + seq.num_generated

    def check(self, request: Request, now: float) -> None:
        """Raises QueueFull for a request beyond the limit. If no new request waits, one of any length is accepted."""
        new_requests, config = self._state.new_requests, self._config
        if request.was_accepted or not new_requests:
            return
        flow = new_requests.flow_of(request)
        own = new_requests.by_flow.get(flow, RequestCount())
        num_flows = len(new_requests.by_flow) + (not own.num_requests)
        too_many, too_long = (
            total + more > bound and (count + more) * num_flows > bound
            for bound, total, count, more in zip(
                self._bounds, new_requests.total, own, (1, len(request.prompt)), strict=True
            )
        )
        if not (too_many or too_long):
            return
        seconds, spacing = self._retry_after(request, flow, now)
        name = (
            "max_queued_requests" if too_many else "max_queued_tokens"
        )  # the message must not reveal the number of other requests
        sharing = SHARING_RULES.get(config.policy)
        shared = f", shared by {sharing.flows}" if sharing else ""
        # the next request may be shorter, or name another class
        applies_to_next = too_many and config.policy != "priority"
        raise QueueFull(
            f"the queue is full ({name} {getattr(config, name)}{shared})", seconds, spacing if applies_to_next else None
        )

    def add(self, request: Request, now: float) -> None:
        """Stop expecting the retry of an accepted request."""
        retries = self._retries.get(self._state.new_requests.flow_of(request))
        if retries is not None:
            retries.remove_returned(request.id, now)

    def _retry_after(self, request: Request, flow: Flow, now: float) -> tuple[float, float]:
        """Predicted seconds until a rejected request would fit, and how much later the next one would.

        Expects the request to return then.
        """
        if not self._costs.step_time.per_token:
            return _DEFAULT_RETRY_AFTER, 0.0
        retries, waiting, others = self._retries_of(flow), self._state.new_requests.total, self._others(flow)
        retries.remove_returned(request.id, now)
        num_requests, num_tokens = waiting.num_requests + len(retries), waiting.num_tokens + retries.num_tokens
        mean_prompt = num_tokens / num_requests
        bounds, length = self._bounds, len(request.prompt)
        by_requests = _num_leaving(
            bounds.num_requests, num_requests, 1, [(one.num_requests, pace) for one, pace in others]
        )
        by_tokens = _num_leaving(
            bounds.num_tokens, num_tokens, length, [(one.num_tokens, pace) for one, pace in others]
        )
        num_leaving = max(by_requests, ceil(by_tokens / mean_prompt))
        mean_outputs = self._num_outputs / self._num_ended if self._num_ended else request.max_tokens
        until_left = self._seconds_until_left(num_leaving, mean_prompt, mean_outputs)
        spacing = self._seconds_until_left(num_leaving + 1, mean_prompt, mean_outputs) - until_left
        seconds = until_left + self._costs.decode_step_seconds
        if len(retries) < max(1, MAX_EXPECTED_RETRIES // len(self._state.new_requests.by_flow)):
            retries.add(request, now + seconds)
        return seconds, spacing

    def _retries_of(self, flow: Flow) -> _ExpectedRetries:
        """The expected retries of a flow. A new one replaces those of flows of which no new request waits."""
        if flow not in self._retries:
            waiting = self._state.new_requests.by_flow
            self._retries = {one: retries for one, retries in self._retries.items() if one in waiting}
            self._retries[flow] = _ExpectedRetries()
        return self._retries[flow]

    def _others(self, flow: Flow) -> list[_OtherFlow]:
        """The other flows of which new requests wait. Tenants take turns; better classes leave before."""
        counts = ((one, count) for one, count in self._state.new_requests.by_flow.items() if one != flow)
        if self._config.policy == "priority":
            return [_OtherFlow(count, inf if int(one or 0) < int(flow or 0) else 0.0) for one, count in counts]
        return [_OtherFlow(count, 1.0) for _, count in counts]

    def _seconds_until_left(self, num_requests: int, mean_prompt: float, mean_outputs: float) -> float:
        """Predicted seconds until `num_requests` requests have left the queue.

        As many sequences run at once as rows, memory and the token budget allow. They share the fixed time of a step.
        The first ones take the free rows at once. Then one starts when another one ends.
        """
        config, state, pace = self._config, self._state, self._costs.step_time
        num_running, accounts = len(state.running_queue.running), state.request_stats
        per_request = max(1.0, (len(state.sequences) - num_running) / len(state.new_requests))  # sequences
        hit_rate = accounts.num_hit_tokens / max(1, accounts.num_query_tokens)
        num_new = max(1.0, mean_prompt * (1 - hit_rate) / per_request)
        num_rows = max(1.0, min(config.max_num_seqs, self._kv_capacity() / (mean_prompt + mean_outputs)))
        prompt_steps = num_new / max(1.0, self._step_budget.spare(num_rows, decoding=True))
        num_concurrent = min(num_rows, 1 + mean_outputs / prompt_steps)
        num_starts = num_requests * per_request - max(0.0, num_concurrent - num_running)
        seconds_of_step = pace.fixed * (prompt_steps + mean_outputs) / num_concurrent
        return max(0.0, num_starts) * (seconds_of_step + pace.per_token * (num_new + mean_outputs))

    def _kv_capacity(self) -> float:
        """Tokens that the block pools hold below the admission watermark; infinite if all groups have windows."""
        return min(
            (
                (self._cache.pools[i].num_blocks - self._state.watermark_blocks[i]) * self._cache.block_size
                for i, group in enumerate(self._cache.config.groups)
                if not group.kind.drops_blocks
            ),
            default=inf,
        )


def _num_leaving(bound: int, total: int, more: int, others: list[tuple[int, float]]) -> int:
    """How many have to leave until `more` fit: into the bound, or into the flow's equal part of it.

    others: of each other flow, how many wait, and how many of these leave while one of the own flow leaves.
    """
    num_leaving, share = total + more - bound, bound // (len(others) + 1)
    own = total - sum(count for count, _ in others) + more - share
    if own <= 0:
        return 0
    if more > share:
        return num_leaving
    return min(num_leaving, own + int(sum(min(count, own * pace) for count, pace in others)))
