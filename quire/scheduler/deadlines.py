"""Deadlines: requests that cannot meet theirs are rejected, or aborted while they wait.

The forecast by the cost model is optimistic. It counts the prompt tokens before a request, less the cache hit rate so
far; its own prompt; and a recent step time for each token that it certainly generates. An accepted request may still
miss its deadline. A rejected one might have met it if later steps are faster than recent ones.
"""

from heapq import heapify, heappop, heappush

from quire.cache.kv_cache import KVCache
from quire.config import SchedulerConfig
from quire.core.request import Request
from quire.cost.step_time import CostModel
from quire.errors import DeadlineUnreachable
from quire.scheduler.lifecycle import SchedulerState
from quire.scheduler.queue.select import priority_class
from quire.scheduler.sequence import Sequence

_MIN_ADMITTED = 32  # admitted requests, from which on their cache hit rate is used for waiting requests


class Deadlines:
    """The requests with a deadline."""

    def __init__(self, config: SchedulerConfig, cache: KVCache, state: SchedulerState, costs: CostModel) -> None:
        self._config = config
        self._cache = cache
        self._state = state
        self._costs = costs
        # heap of (latest start, id of sequence 0, arrival, request id); entries of ended requests may remain
        self._by_latest_start: list[tuple[float, int, float, str]] = []
        self._overdue: dict[str, int] = {}  # requests beyond their latest start, with the id of sequence 0

    def check(self, request: Request) -> None:
        """Raises DeadlineUnreachable for a request that cannot meet its deadline. Changes nothing.

        If nothing runs, no request is rejected: it delays no other one, and only steps that run correct the cost model.
        A request that an earlier engine accepted is not rejected either.
        """
        deadline = request.terms.deadline
        if deadline is None or request.was_accepted or not self._state.running_queue.running:
            return
        needed = self._forecast(request)
        if needed >= deadline:
            raise DeadlineUnreachable(needed, deadline)

    def add(self, first: Sequence, now: float) -> None:
        """Track the deadline of an accepted request. first: its first sequence; now: its arrival in seconds."""
        deadline = first.request.terms.deadline
        if deadline is None:
            return
        alone = len(self._state.sequences) == first.request.num_unfinished
        due = now + deadline if alone else self._latest_start(first, now)  # a request alone always starts
        heappush(self._by_latest_start, (due, first.id - first.index, now, first.request.id))
        if len(self._by_latest_start) > 2 * len(self._state.sequences) + 64:
            self._by_latest_start = [one for one in self._by_latest_start if self._members(one[3], one[1])]
            heapify(self._by_latest_start)

    def missed(self, now: float) -> list[str]:
        """Ids of requests without a running sequence that cannot meet their deadline any more. Returns each id once."""
        while self._by_latest_start and self._by_latest_start[0][0] <= now:
            _, seq_id, arrived, request_id = heappop(self._by_latest_start)
            members = self._members(request_id, seq_id)
            if not members:
                continue
            latest = self._latest_start(members[0], arrived)
            if latest > now:  # steps have become faster, or the prefix match longer
                heappush(self._by_latest_start, (latest, seq_id, arrived, request_id))
            else:
                self._overdue[request_id] = seq_id
        missed = []
        for request_id, seq_id in list(self._overdue.items()):
            members = self._members(request_id, seq_id)
            if any(seq.row >= 0 for seq in members):
                continue
            del self._overdue[request_id]
            if members:
                missed.append(request_id)
        return missed

    def _members(self, request_id: str, first_id: int) -> list[Sequence]:
        """Unfinished sequences of a request; empty if it has ended, even if a later request has the same id."""
        members = self._state.sequence_groups.members(request_id)
        num_ids = members[0].request.num_sequences if members else 0
        return members if members and first_id <= members[0].id < first_id + num_ids else []

    def _forecast(self, request: Request) -> float:
        """Predicted seconds until the last token of a new request; 0 without observations."""
        first = Sequence(-1, request, 0, 0.0, priority_class(self._config, request.terms.priority))
        running = sum(
            max(0, len(seq.request.prompt) - seq.num_computed)
            for seq in self._state.running_queue.running
            if self._runs_before(seq, first)
        )
        accounts = self._state.request_stats
        if self._cache.config.prefix_index != "none" and accounts.num_admitted < _MIN_ADMITTED:
            return self._own_seconds(first, running)  # waiting prompts may be cached completely
        found = accounts.num_hit_tokens / max(1, accounts.num_query_tokens)
        waiting = int(self._state.queue.num_tokens_before(first) * (1 - found))
        return self._own_seconds(first, running + waiting)

    def _runs_before(self, running: Sequence, first: Sequence) -> bool:
        """Whether a running sequence is certainly served before a new request."""
        if self._config.policy == "fair":
            return running.request.namespace.tenant == first.request.namespace.tenant
        return running.rank[0] <= first.rank[0]

    def _latest_start(self, seq: Sequence, arrived: float) -> float:
        deadline = seq.request.terms.deadline
        assert deadline is not None, "only requests with a deadline are tracked"
        return arrived + deadline - self._own_seconds(seq, 0)

    def _own_seconds(self, seq: Sequence, num_before: int) -> float:
        """Predicted seconds for `num_before` tokens of others, the uncached prompt and the fewest output tokens."""
        request = seq.request
        found = seq.reusable  # if it is swapped
        if not seq.swapped and found > 0:
            found = self._cache.index.match_prefix(request.namespace, seq.tokens[:found]).num_tokens
        prompt = max(1, len(request.prompt) - found)
        least = max(request.params.min_tokens, 1) if request.may_end_early else max(request.max_tokens, 1)
        outputs = max(0, least - 1 - seq.num_generated)
        return self._costs.first_token_seconds(num_before, prompt) + self._costs.output_seconds(outputs)
