"""Deadlines: what cannot be in time is not begun. Reads no clock; what work takes is what the costs say.

The forecast is hopeful: it counts the prompts that are certainly before a request, as far as they will not be found,
its own prompt, and a step as steps were lately for each token that it generates for certain. What is taken in may
still be late.
"""

from heapq import heappop, heappush

from quire.cache.kv_cache import KVCache
from quire.config import SchedulerConfig
from quire.core.request import Request
from quire.cost.costs import Costs
from quire.errors import DeadlineUnreachable
from quire.sched.lives import Lives
from quire.sched.queues.choose import class_of
from quire.sched.sequence import Sequence


class Deadlines:
    """Requests that are of no use after some time."""

    def __init__(self, config: SchedulerConfig, cache: KVCache, lives: Lives, costs: Costs) -> None:
        self._config = config
        self._cache = cache
        self._lives = lives
        self._costs = costs
        # (when it is too late to begin, first sequence, when it came, request)
        self._due: list[tuple[float, int, float, str]] = []
        self._late: dict[str, int] = {}  # of those, the ones that had begun, and their first sequence

    def check(self, request: Request) -> None:
        """Raises DeadlineUnreachable for a request that cannot be in time. Changes nothing."""
        deadline = request.terms.deadline
        if deadline is None:
            return
        needed = self._forecast(request)
        if needed >= deadline:
            raise DeadlineUnreachable(needed, deadline)

    def add(self, first: Sequence, now: float) -> None:
        """A request was taken in."""
        if first.request.terms.deadline is not None:
            heappush(self._due, (self._latest_start(first, now), first.id, now, first.request.id))

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
        running = sum(max(0, len(seq.request.prompt) - seq.num_computed) for seq in self._lives.rows.running)
        accounts = self._lives.accounts
        found = accounts.num_hit_tokens / accounts.num_query_tokens if accounts.num_query_tokens else 0.0
        waiting = int(self._lives.queue.num_tokens_before(first) * (1 - found))
        return self._own_seconds(first, running + waiting)

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
        ends_early = bool(request.stop_ids or request.params.stop) and request.beams is None
        least = max(request.params.min_tokens, 1) if ends_early else max(request.max_tokens, 1)
        outputs = max(0, least - 1 - seq.num_generated)
        return self._costs.first_token_seconds(num_before, prompt) + self._costs.output_seconds(outputs)
