"""Deadlines: requests that cannot meet theirs are rejected, or aborted while they wait.

The forecast by the cost model is optimistic. It counts the prompt tokens before a request, less the cache hit rate so
far; its own prompt; and a recent step time for each token that it certainly generates. An accepted request may still
miss its deadline. A rejected one might have met it if later steps are faster than recent ones.
"""

from heapq import heapify, heappop, heappush
from math import inf

from quire.cache.manager import KVCacheManager
from quire.config import SchedulerConfig
from quire.core.request import Request
from quire.cost.step_time import CostModel
from quire.errors import DeadlineUnreachable
from quire.scheduler.budget_sharing import MAX_COMPARED, size_class
from quire.scheduler.lifecycle import SchedulerState
from quire.scheduler.queue.select import priority_class
from quire.scheduler.request_state import RequestState
from quire.scheduler.sequence import Sequence

_MIN_ADMITTED = 32  # admitted requests, from which on their cache hit rate is used for waiting requests


class Deadlines:
    """The requests with a deadline."""

    def __init__(self, config: SchedulerConfig, cache: KVCacheManager, state: SchedulerState, costs: CostModel) -> None:
        self._config = config
        self._cache = cache
        self._state = state
        self._costs = costs
        # heap of (latest start, id of the first sequence, request); ended requests may remain
        self._by_latest_start: list[tuple[float, int, RequestState]] = []
        # the same of requests that wait for prerequisites, with a count; those that wait no longer may remain
        self._unready: list[tuple[float, int, RequestState]] = []
        self._num_unready = 0  # so far
        self._overdue: list[RequestState] = []  # requests beyond their latest start; ended ones may remain

    def check(self, request: Request) -> None:
        """Raises DeadlineUnreachable for a request that cannot meet its deadline. Changes nothing.

        If nothing runs, no request is rejected: it delays no other one, and only steps that run correct the cost model.
        A request that an earlier engine accepted is not rejected either.
        """
        deadline = request.scheduling_params.deadline
        if deadline is None or request.was_accepted or not self._state.running_queue.running:
            return
        needed = self._forecast(request)
        if needed >= deadline:
            raise DeadlineUnreachable(needed, deadline)

    def add(self, state: RequestState) -> None:
        """Track the deadline of a request that is queued."""
        deadline = state.request.scheduling_params.deadline
        if deadline is None:
            return
        alone = len(self._state.sequences) == state.request.num_unfinished
        due = state.arrived + deadline if alone else self._latest_start(state)  # a request alone always starts
        heappush(self._by_latest_start, (due, state.sequences[0].id, state))
        if len(self._by_latest_start) > 2 * len(self._state.sequences) + 64:
            self._by_latest_start = [one for one in self._by_latest_start if one[2].sequences]
            heapify(self._by_latest_start)

    def add_unready(self, state: RequestState) -> None:
        """Track the deadline of a request that waits for prerequisites."""
        deadline = state.request.scheduling_params.deadline
        if deadline is None:
            return
        self._num_unready += 1
        heappush(self._unready, (state.arrived + deadline, self._num_unready, state))
        if len(self._unready) > 2 * self._state.num_unready + 64:
            self._unready = [one for one in self._unready if self._is_unready(one[2])]
            heapify(self._unready)

    def _is_unready(self, state: RequestState) -> bool:
        """Whether a request still waits for prerequisites."""
        return bool(state.waits_for) and self._state.requests.get(state.request.id) is state

    def missed(self, now: float) -> list[RequestState]:
        """Requests without a running sequence that cannot meet their deadline any more. Returns each of them once."""
        missed = []
        while self._unready and self._unready[0][0] <= now:
            _, _, state = heappop(self._unready)
            if self._is_unready(state):
                missed.append(state)
        return missed + self._missed_queued(now)

    def _missed_queued(self, now: float) -> list[RequestState]:
        """Those of `missed` that wait for no prerequisites."""
        while self._by_latest_start and self._by_latest_start[0][0] <= now:
            _, seq_id, state = heappop(self._by_latest_start)
            if not state.sequences:
                continue
            latest = self._latest_start(state)
            if latest > now:  # steps have become faster, or the prefix match longer
                heappush(self._by_latest_start, (latest, seq_id, state))
            else:
                self._overdue.append(state)
        if not self._overdue:
            return []
        started = [state for state in self._overdue if any(seq.row >= 0 for seq in state.sequences)]
        missed = [state for state in self._overdue if state.sequences and state not in started]
        self._overdue = started
        return missed

    def _forecast(self, request: Request) -> float:
        """Predicted seconds until the last token of a new request; 0 without observations."""
        first = Sequence(-1, request, 0, 0.0, priority_class(self._config, request.scheduling_params.priority))
        # it passes longer prompts if a row is free
        own_class = size_class(self._num_uncached(first)) if self._state.running_queue.num_free_rows else inf
        running = sum(
            max(0, len(seq.request.prompt) - seq.num_computed)
            for seq in self._state.running_queue.running
            if self._runs_before(seq, first) and size_class(seq.num_lacking) <= own_class
        )
        accounts = self._state.request_stats
        if self._cache.config.prefix_index != "none" and accounts.num_admitted < _MIN_ADMITTED:
            return self._own_seconds(first, running)  # waiting prompts may be cached completely
        found = accounts.num_hit_tokens / max(1, accounts.num_query_tokens)
        waiting = int(self._state.queue.num_tokens_before(first) * (1 - found) * self._share_before(own_class))
        return self._own_seconds(first, running + waiting)

    def _share_before(self, own_class: float) -> float:
        """The share of waiting tokens in prompts that a request does not pass, from those that are next."""
        counts = [len(seq.tokens) for seq in self._state.queue.first(MAX_COMPARED)]
        return sum(count for count in counts if size_class(count) <= own_class) / max(1, sum(counts))

    def _runs_before(self, running: Sequence, first: Sequence) -> bool:
        """Whether a running sequence is certainly served before a new request."""
        if self._config.policy == "fair":
            return running.request.namespace.tenant == first.request.namespace.tenant
        return running.rank[0] <= first.rank[0]

    def _latest_start(self, state: RequestState) -> float:
        deadline = state.request.scheduling_params.deadline
        assert deadline is not None, "only requests with a deadline are tracked"
        return state.arrived + deadline - self._own_seconds(state.sequences[0], 0)

    def _own_seconds(self, seq: Sequence, num_before: int) -> float:
        """Predicted seconds for `num_before` tokens of others, the uncached prompt and the fewest output tokens."""
        request, prompt = seq.request, self._num_uncached(seq)
        least = max(request.params.min_tokens, 1) if request.may_end_early else max(request.max_tokens, 1)
        outputs = max(0, least - 1 - seq.num_generated)
        return self._costs.first_token_seconds(num_before, prompt) + self._costs.output_seconds(outputs)

    def _num_uncached(self, seq: Sequence) -> int:
        """Prompt tokens to compute."""
        found = seq.reusable  # if it is swapped
        if not seq.swapped and found > 0:
            found = self._cache.match_prefix(seq.request.namespace, seq.tokens[:found]).num_tokens
        return max(1, len(seq.request.prompt) - found)
