"""Deadlines: what cannot be in time is not begun. Reads no clock; what work takes is what the costs say.

The forecast is hopeful: it counts the prompts that come before a request, less the share that was found of those before
them, its own prompt, and a step as steps were lately for each token that it generates for certain. What is taken in
may still be late, and where the future is better than the past, something may be refused that would have been in time.
"""

from heapq import heapify, heappop, heappush

from quire.cache.kv_cache import KVCache
from quire.config import SchedulerConfig
from quire.core.request import Request
from quire.cost.step_time import Costs
from quire.errors import DeadlineUnreachable
from quire.scheduler.lifecycle import Lives
from quire.scheduler.queue.select import class_of
from quire.scheduler.sequence import Sequence

_ENOUGH = 32  # requests that were admitted, until their share of tokens found says something about those who wait


class Deadlines:
    """Requests that are of no use after some time."""

    def __init__(self, config: SchedulerConfig, cache: KVCache, lives: Lives, costs: Costs) -> None:
        self._config = config
        self._cache = cache
        self._lives = lives
        self._costs = costs
        # (when it is too late to begin, id of sequence 0, when it came, request), of those that ended some, too
        self._due: list[tuple[float, int, float, str]] = []
        self._late: dict[str, int] = {}  # of those, the ones that had begun, and the id of their sequence 0

    def check(self, request: Request) -> None:
        """Raises DeadlineUnreachable for a request that cannot be in time. Changes nothing.

        While nothing runs none is refused: trying costs nobody anything, and what the costs say may be wrong, and is
        only put right by steps that run. What was accepted before is not refused later.
        """
        deadline = request.terms.deadline
        if deadline is None or request.was_accepted or not self._lives.rows.running:
            return
        needed = self._forecast(request)
        if needed >= deadline:
            raise DeadlineUnreachable(needed, deadline)

    def add(self, first: Sequence, now: float) -> None:
        """A request was taken in."""
        deadline = first.request.terms.deadline
        if deadline is None:
            return
        alone = len(self._lives.sequences) == first.request.num_open
        due = now + deadline if alone else self._latest_start(first, now)  # one alone begins, whatever the costs say
        heappush(self._due, (due, first.id - first.index, now, first.request.id))
        if len(self._due) > 2 * len(self._lives.sequences) + 64:
            self._due = [one for one in self._due if self._members(one[3], one[1])]
            heapify(self._due)

    def missed(self, now: float) -> list[str]:
        """Requests that wait, all their sequences, and cannot be in time any more. Each is told once."""
        while self._due and self._due[0][0] <= now:
            _, seq_id, arrived, request_id = heappop(self._due)
            members = self._members(request_id, seq_id)
            if not members:
                continue
            latest = self._latest_start(members[0], arrived)
            if latest > now:  # computing has become faster since, or more of the prompt is there
                heappush(self._due, (latest, seq_id, arrived, request_id))
            else:
                self._late[request_id] = seq_id
        missed = []
        for request_id, seq_id in list(self._late.items()):
            members = self._members(request_id, seq_id)
            if any(seq.row >= 0 for seq in members):
                continue
            del self._late[request_id]
            if members:
                missed.append(request_id)
        return missed

    def _members(self, request_id: str, first_id: int) -> list[Sequence]:
        """Unfinished sequences of a request; none where it has ended and another one has its id."""
        members = self._lives.families.members(request_id)
        num_ids = members[0].request.num_sequences if members else 0
        return members if members and first_id <= members[0].id < first_id + num_ids else []

    def _forecast(self, request: Request) -> float:
        """Seconds until its last token, if it came now; 0 where nothing is known yet."""
        first = Sequence(-1, request, 0, 0.0, class_of(self._config, request.terms.priority))
        running = sum(
            max(0, len(seq.request.prompt) - seq.num_computed)
            for seq in self._lives.rows.running
            if self._goes_on(seq, first)
        )
        accounts = self._lives.accounts
        if self._cache.config.prefix_index != "none" and accounts.num_admitted < _ENOUGH:
            return self._own_seconds(first, running)  # who waits may have everything in common
        found = accounts.num_hit_tokens / max(1, accounts.num_query_tokens)
        waiting = int(self._lives.queue.num_tokens_before(first) * (1 - found))
        return self._own_seconds(first, running + waiting)

    def _goes_on(self, running: Sequence, first: Sequence) -> bool:
        """Whether one that runs is sure to be served before a new one."""
        if self._config.policy == "fair":
            return running.request.namespace.tenant == first.request.namespace.tenant
        return running.rank[0] <= first.rank[0]

    def _latest_start(self, seq: Sequence, arrived: float) -> float:
        deadline = seq.request.terms.deadline
        assert deadline is not None, "only those that have one are watched"
        return arrived + deadline - self._own_seconds(seq, 0)

    def _own_seconds(self, seq: Sequence, num_before: int) -> float:
        """To compute so many tokens of others, what of its prompt is not there, and what it certainly generates."""
        request = seq.request
        found = seq.reusable  # of one whose KV is in host memory
        if not seq.swapped and found > 0:
            found = self._cache.index.find(request.namespace, seq.tokens[:found]).num_tokens
        prompt = max(1, len(request.prompt) - found)
        least = max(request.params.min_tokens, 1) if request.may_end_early else max(request.max_tokens, 1)
        outputs = max(0, least - 1 - seq.num_generated)
        return self._costs.first_token_seconds(num_before, prompt) + self._costs.output_seconds(outputs)
