"""Where a request is placed: on the replica where it costs the fewest seconds of waiting, its own and that of others.

    score = predicted seconds to the first token of the request
          + predicted seconds by which it delays other requests:
            those that arrive while its prompt and the prompts before it are computed, and those that generate tokens

All follow from the cost model, the rate of arrivals and what was placed on each replica. There are no thresholds: a
replica that has the prompt in its cache is chosen as long as the queue there is shorter than what a second computation
of the prompt costs. A second between further tokens counts less than one before a first token (_FIRST_OVER_FURTHER).

Nothing here reads a clock or draws a number, so that the same calls give the same placements (`routing_journal.py`).
"""

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from math import ceil, inf

import msgspec

from quire.cache.key_report import KeyChanges
from quire.config import Routing
from quire.core.block_keys import state_key
from quire.core.explanation import Placement, RoutingCandidate
from quire.cost.step_time import CostFigures
from quire.fleet.cached_keys import MOST_KEYS, CachedKeys

MOST_CANDIDATES = 2**15  # that are kept for explanations, about 4 MB
MOST_PROGRAMS = 16_384  # whose replica is remembered
# A first token may take as long as this many further tokens: 500 and 50 ms are usual limits. So a delay that is spread
# over n further tokens counts this many n-ths of a delay of a first token.
_FIRST_OVER_FURTHER = 10
_ARRIVAL_SECONDS = 30.0  # in which the weight of an arrival falls to a half, and later less quickly
_PREFILL_DECAY = 0.99  # weight of the mean prefill when another request is placed
_HOLD_DECAY = 0.95  # weight of the mean time of a request when another one ends
_MOST_HOLD = 10.0  # times the mean, the most for one request: that of a client that does not read takes long
# until an engine has measured: what matters is that a token costs something, and a step more
UNMEASURED = CostFigures(1e-4, 0.0, 1e-3, 1e-2, None, None)


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The replicas, which are all alike."""

    routing: Routing
    num_replicas: int
    block_size: int
    num_blocks: int  # of KV
    max_num_seqs: int
    max_num_batched_tokens: int
    most_keys: int = MOST_KEYS
    has_states: bool = False  # the model has recurrent states: a cached prompt counts up to its deepest snapshot


class RoutedRequest(msgspec.Struct, frozen=True, array_like=True):
    """What a router knows of a request."""

    id: str
    num_tokens: int  # to be found in a cache or computed: the prompt, and the known output of one that moves
    num_sequences: int = 1
    keys: list[bytes] = []  # of the whole blocks of the prompt that can match
    program: str = ""  # of its tenant, or empty


def mean_costs(several: Sequence[CostFigures]) -> CostFigures:
    """The mean of figures of alike replicas, without those of copies. UNMEASURED if none has computed a prompt."""
    several = [one for one in several if one.prompt_seconds_per_token > 0]
    if not several:
        return UNMEASURED

    def mean(values: Iterable[float]) -> float:
        return sum(values) / len(several)

    return CostFigures(
        mean(one.prompt_seconds_per_token for one in several),
        mean(one.prompt_seconds_per_pair for one in several),
        mean(one.prompt_seconds_per_step for one in several),
        mean(one.step_seconds for one in several),
        None,
        None,
    )


class _Mean:
    """A mean in which each further value lowers the weight of those before it; 0 without one."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._weight = self._total = self.value = 0.0

    def add(self, value: float) -> None:
        self._weight = self._weight * self._decay + 1
        self._total = self._total * self._decay + value
        self.value = self._total / self._weight


class _Rate:
    """Arrivals per second, of which the older ones count less."""

    def __init__(self, seconds: float) -> None:
        """seconds: in which the weight of an arrival falls to a half."""
        self._seconds = seconds
        self._weight = 0.0
        self._first = self._last = 0.0

    def add(self, now: float) -> None:
        if not self._weight:
            self._first = self._last = now
        self._weight = self._aged(now) + 1
        self._last = now

    def at(self, now: float) -> float:
        """The rate; infinite if all have arrived at once, 0 before the second one."""
        others, span = self._aged(now) - 1, min(self._seconds, now - self._first)
        if others <= 0:
            return 0.0
        return others / span if span > 0 else inf

    def _aged(self, now: float) -> float:
        return self._weight / (1 + max(0.0, now - self._last) / self._seconds)


class _Placed(msgspec.Struct):
    """A request on a replica."""

    replica: int
    num_sequences: int
    num_blocks: float
    num_missing: int  # tokens to compute when it was placed
    num_tokens: int
    expected: list[bytes]  # keys that count as those that its replica computes
    placed_at: float
    predicted_seconds: float  # until its first token
    num_left: int  # of the missing tokens, those that are not computed
    left_seconds: float  # of these
    first_token_at: float | None = None


class _Replica(msgspec.Struct):
    """The sums over the requests on a replica."""

    num_requests: int = 0
    num_sequences: int = 0
    num_blocks: float = 0.0
    num_begun: int = 0  # sequences of requests that have a token
    num_missing: int = 0  # prompt tokens of the others that are not computed
    prefill_seconds: float = 0.0  # of these tokens
    placed: int = 0  # number of its last placement


ERROR_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)  # seconds


class RoutingStats(msgspec.Struct):
    """Counters of a replica since the start.

    errors: of first tokens, by the difference of their predicted and actual seconds: one number for each of
    ERROR_BUCKETS, and one beyond.
    """

    num_placed: int = 0  # requests
    num_tokens: int = 0  # of them
    num_cached_tokens: int = 0  # those that the replica had, as far as was known
    error_seconds: float = 0.0  # sum of the differences
    errors: list[int] = msgspec.field(default_factory=lambda: [0] * (len(ERROR_BUCKETS) + 1))


class Router:
    """Chooses replicas, which are numbers from 0 on. Times are seconds of one clock."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.keys = CachedKeys(config.num_replicas, config.most_keys, has_states=config.has_states)
        self.placements: OrderedDict[str, Placement] = OrderedDict()  # the last ones, by request
        self.stats = [RoutingStats() for _ in range(config.num_replicas)]
        self._costs = UNMEASURED
        self._replicas = [_Replica() for _ in range(config.num_replicas)]
        self._requests: dict[str, _Placed] = {}
        self._expected: dict[bytes, int] = {}  # key -> a bit for each replica that computes it for a request
        self._num_expecting = [Counter[bytes]() for _ in range(config.num_replicas)]  # requests that compute a key
        self._programs: OrderedDict[str, int] = OrderedDict()  # -> replica of the last request
        self._num_placed = 0
        self._arrivals = _Rate(_ARRIVAL_SECONDS)
        self._prefill = _Mean(_PREFILL_DECAY)  # seconds of a request's missing tokens
        self._hold = _Mean(_HOLD_DECAY)  # seconds of a request from its first token to its end

    # Inputs

    def set_costs(self, costs: CostFigures) -> None:
        """The costs of steps, which are the same for all replicas. No cost may be negative, nor that of a token 0."""
        self._costs = costs

    def update_keys(self, replica: int, changes: KeyChanges) -> None:
        """A replica has reported what its cache has."""
        self.keys.update(replica, changes)

    def lose_cache(self, replica: int) -> None:
        """The engine of a replica has ended, and its cache with it. Its requests are removed one by one."""
        self.keys.forget(replica)

    def place(
        self,
        request: RoutedRequest,
        allowed: Sequence[int],
        num_free: Sequence[int],
        now: float,
        *,
        has_arrived: bool = True,
    ) -> Placement:
        """Place a request on one of the replicas `allowed`. It counts there at once.

        num_free: of each allowed replica, the KV blocks that are neither used nor cached. has_arrived: now; False for a
        request that a replica has refused. A request that is placed already is moved.
        """
        if request.id in self._requests:
            self._take_off(request.id)
        elif has_arrived:
            self._arrivals.add(now)
        found, arrivals = self._match(request), self._arrivals_of_each(len(allowed), now)
        candidates = [self._candidate(replica, request, found[replica], arrivals) for replica in allowed]
        chosen = candidates[self._choose(request, candidates, num_free)]
        placement = Placement(chosen.replica, self.config.routing, candidates, chosen.first_token_seconds)
        self._record(request, chosen, now)
        self.placements[request.id] = placement
        self.placements.move_to_end(request.id)
        if len(self.placements) > max(1, MOST_CANDIDATES // self.config.num_replicas):
            self.placements.popitem(last=False)
        return placement

    def record_progress(self, request_id: str, num_done: int) -> None:
        """The leading `num_done` tokens of a request were found or computed."""
        placed = self._requests.get(request_id)
        if placed is not None and placed.first_token_at is None:
            self._set_left(placed, min(placed.num_left, max(0, placed.num_tokens - num_done)))

    def record_first_token(self, request_id: str, now: float) -> bool:
        """A request has its first token. Returns whether it was placed and had none before; else nothing changes."""
        placed = self._requests.get(request_id)
        if placed is None or placed.first_token_at is not None:
            return False
        placed.first_token_at = now
        self._set_left(placed, 0)
        self._replicas[placed.replica].num_begun += placed.num_sequences
        self._forget_expected(placed)
        actual, stats = now - placed.placed_at, self.stats[placed.replica]
        error = abs(actual - placed.predicted_seconds)
        stats.error_seconds += error
        stats.errors[bisect_left(ERROR_BUCKETS, error)] += 1
        if request_id in self.placements:
            self.placements[request_id] = msgspec.structs.replace(self.placements[request_id], actual_seconds=actual)
        return True

    def is_placed(self, request_id: str, replica: int) -> bool:
        """Whether a request counts on a replica."""
        placed = self._requests.get(request_id)
        return placed is not None and placed.replica == replica

    def remove(self, request_id: str, replica: int, now: float) -> None:
        """A request has ended on a replica, or is no longer placed there."""
        if not self.is_placed(request_id, replica):
            return
        placed = self._take_off(request_id)
        if placed.first_token_at is not None:
            seconds = now - placed.first_token_at
            self._hold.add(min(seconds, _MOST_HOLD * self._hold.value) if self._hold.value else seconds)

    @property
    def is_empty(self) -> bool:
        """Whether no request counts anywhere."""
        idle = all(
            (of.num_requests, of.num_sequences, of.num_blocks, of.num_begun, of.num_missing, of.prefill_seconds)
            == (0, 0, 0.0, 0, 0, 0.0)
            for of in self._replicas
        )
        return idle and not self._requests and not self._expected and not any(self._num_expecting)

    def close(self) -> None:
        """Does nothing: only a router with a journal has something to close."""

    # Choice

    def _choose(self, request: RoutedRequest, candidates: Sequence[RoutingCandidate], num_free: Sequence[int]) -> int:
        """The place of the best candidate."""
        replicas, places = self._replicas, range(len(candidates))
        home = self._programs.get(request.program) if request.program else None

        def load(place: int) -> tuple[int, int, int]:
            of = replicas[candidates[place].replica]
            return of.num_requests, -num_free[place], of.placed

        match self.config.routing:
            case "round-robin":
                return min(places, key=lambda place: replicas[candidates[place].replica].placed)
            case "least-loaded":
                return min(places, key=load)
            case "cache":
                return min(places, key=lambda place: (-candidates[place].num_cached_tokens, load(place)))
        scores = [one.first_token_seconds + one.added_seconds for one in candidates]
        least = min(scores)
        best = [place for place in places if scores[place] == least]
        if len(best) == 1:
            return best[0]
        return min(best, key=lambda place: (candidates[place].replica != home, load(place)))

    def _match(self, request: RoutedRequest) -> list[int]:
        """How many tokens of a request each replica has, or computes for a request before it."""
        most, size = request.num_tokens - 1, self.config.block_size  # the last token is always computed
        return [min(most, size * number) for number in self.keys.num_blocks(request.keys, self._expected)]

    def _arrivals_of_each(self, num_replicas: int, now: float) -> float:
        """Requests per second and replica, at most as many as it can compute."""
        arriving = self._arrivals.at(now) / num_replicas
        return min(arriving, 1 / self._prefill.value) if self._prefill.value else 0.0

    def _candidate(self, replica: int, request: RoutedRequest, num_cached: int, arrivals: float) -> RoutingCandidate:
        of, costs, config = self._replicas[replica], self._costs, self.config
        num_missing, num_new = request.num_tokens - num_cached, request.num_sequences
        prefill = self._prefill_seconds(num_missing, request.num_tokens)
        first = of.prefill_seconds + prefill
        num_steps = ceil((of.num_missing + num_missing) / config.max_num_batched_tokens)
        if of.num_begun:  # the same steps compute their tokens, and one of them is running
            first += (num_steps + 0.5) * costs.step_seconds
        else:
            first += num_steps * costs.prompt_seconds_per_step
        full = max(
            (of.num_sequences + num_new) / config.max_num_seqs,
            (of.num_blocks + self._num_blocks(num_missing, num_new)) / config.num_blocks,
        )
        if full > 1 and of.num_requests:  # it waits until others have ended
            first += (full - 1) * self._hold.value
        added = arrivals * prefill * (of.prefill_seconds + prefill / 2)  # who arrives until the queue is empty waits
        stalls = of.num_begun * prefill  # and as long as it runs, its tokens are computed in the steps of the others
        stalls += of.num_sequences * num_new * self._num_output * costs.prompt_seconds_per_token
        added += min(1.0, _FIRST_OVER_FURTHER / max(1.0, self._num_output)) * stalls
        return RoutingCandidate(replica, num_cached, first, added)

    def _prefill_seconds(self, num_missing: int, num_tokens: int) -> float:
        """Seconds to compute the last `num_missing` of `num_tokens` tokens, in steps that run anyway."""
        costs = self._costs
        pairs = num_missing * (num_tokens - num_missing + (num_missing + 1) / 2)
        return costs.prompt_seconds_per_token * num_missing + costs.prompt_seconds_per_pair * pairs

    @property
    def _num_output(self) -> float:
        """Tokens that a sequence generates, as far as is known: steps between its first token and its end."""
        return self._hold.value / self._costs.step_seconds if self._costs.step_seconds else 0.0

    def _num_blocks(self, num_missing: int, num_sequences: int) -> float:
        """Blocks of its own that a request needs."""
        return (num_missing + num_sequences * self._num_output) / self.config.block_size

    # Records

    def _record(self, request: RoutedRequest, chosen: RoutingCandidate, now: float) -> None:
        self._num_placed += 1
        number, num_missing = chosen.replica, request.num_tokens - chosen.num_cached_tokens
        has = self.keys.num_cached(number, request.keys)
        missing = request.keys[has:]  # also what another request computes, which may be aborted
        if self.config.has_states:  # it leaves a snapshot where its match of keys and values ends
            reached = self.keys.num_cached(number, request.keys, self._expected)
            missing += [state_key(key) for key in request.keys[max(0, reached - 1) : reached]]
        expected = missing if len(self._expected) + len(missing) <= self.config.most_keys else []
        self._num_expecting[number].update(expected)
        bit = 1 << number
        for key in expected:
            self._expected[key] = self._expected.get(key, 0) | bit
        placed = _Placed(
            number,
            request.num_sequences,
            self._num_blocks(num_missing, request.num_sequences),
            num_missing,
            request.num_tokens,
            expected,
            now,
            chosen.first_token_seconds,
            num_left=num_missing,
            left_seconds=self._prefill_seconds(num_missing, request.num_tokens),
        )
        self._requests[request.id] = placed
        self._prefill.add(placed.left_seconds)
        of = self._replicas[number]
        of.num_requests += 1
        of.num_sequences += placed.num_sequences
        of.num_blocks += placed.num_blocks
        of.num_missing += num_missing
        of.prefill_seconds += placed.left_seconds
        of.placed = self._num_placed
        stats = self.stats[number]
        stats.num_placed += 1
        stats.num_tokens += request.num_tokens
        stats.num_cached_tokens += chosen.num_cached_tokens
        if request.program:
            self._programs[request.program] = number
            self._programs.move_to_end(request.program)
            if len(self._programs) > MOST_PROGRAMS:
                self._programs.popitem(last=False)

    def _take_off(self, request_id: str) -> _Placed:
        placed = self._requests.pop(request_id)
        of = self._replicas[placed.replica]
        of.num_requests -= 1
        of.num_sequences -= placed.num_sequences
        of.num_blocks = of.num_blocks - placed.num_blocks if of.num_requests else 0.0
        if placed.first_token_at is None:
            self._set_left(placed, 0)
            self._forget_expected(placed)
        else:
            of.num_begun -= placed.num_sequences
        return placed

    def _set_left(self, placed: _Placed, num_left: int) -> None:
        if placed.num_left == num_left:
            return
        of, seconds = self._replicas[placed.replica], placed.left_seconds * num_left / placed.num_left
        of.num_missing += num_left - placed.num_left
        of.prefill_seconds = of.prefill_seconds + seconds - placed.left_seconds if of.num_missing else 0.0
        placed.num_left, placed.left_seconds = num_left, seconds

    def _forget_expected(self, placed: _Placed) -> None:
        bit, counts = 1 << placed.replica, self._num_expecting[placed.replica]
        for key in placed.expected:
            if counts[key] > 1:
                counts[key] -= 1
                continue
            del counts[key]
            rest = self._expected[key] & ~bit
            if rest:
                self._expected[key] = rest
            else:
                del self._expected[key]
        placed.expected = []
