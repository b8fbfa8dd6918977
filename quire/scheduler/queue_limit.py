"""Queue limit: rejects requests while too many wait, with a Retry-After.

Retry-After is the predicted time until the queue, plus clients rejected before, has drained. Nothing is reserved: any
request that arrives below the limit is accepted.
"""

from collections.abc import Iterator

from quire.cache.kv_cache import KVCache
from quire.config import SchedulerConfig
from quire.core.request import Request
from quire.cost.queue_wait import MeanOutputLength, QueuedRequest, QueueForecast, QueueSimulation, SimulatedEngine, Work
from quire.cost.step_time import CostModel
from quire.errors import QueueFull
from quire.scheduler.lifecycle import SchedulerState
from quire.scheduler.sequence import Sequence

MAX_EXPECTED_RETRIES = 512  # rejected requests that are expected to return; bounds Retry-After in a flood
_DEFAULT_RETRY_AFTER = 1.0  # seconds of Retry-After before any step time is known
_MAX_FORECAST_AGE = 0.05  # age limit of a forecast, as a share of the wait that it predicted last


class QueueLimit:
    """Rejects requests beyond the queue limit, unless an earlier engine has accepted them."""

    def __init__(self, config: SchedulerConfig, cache: KVCache, state: SchedulerState, costs: CostModel) -> None:
        self._config = config
        self._cache = cache
        self._state = state
        self._costs = costs
        self._lengths = MeanOutputLength()
        self._rejected: dict[
            str, tuple[float, QueuedRequest]
        ] = {}  # by rejected request id: when it should return, its turn
        self._forecast = QueueForecast(QueueSimulation(SimulatedEngine(1, 1, 1.0, 0.0, 0.0), []), [], 0, 0)
        self._forecast_at, self._forecast_step, self._forecast_seconds = (
            0.0,
            -1,
            0.0,
        )  # of the line: time, next step, last prediction

    def ended(self, seq: Sequence) -> None:
        """Record the output length of a sequence that ended, for the mean length."""
        if seq.request.may_end_early:
            self._lengths.observe(seq.num_generated)

    def check(self, request: Request, step: int, now: float) -> None:
        """Raises QueueFull for a request beyond the limit. If no new request waits, one of any length is accepted.

        step: id of the next step to be planned.
        """
        new_requests, config = self._state.new_requests, self._config
        if request.was_accepted or not new_requests:
            return
        too_many = _above(len(new_requests) + 1, config.max_queued_requests)
        too_long = _above(new_requests.num_tokens + len(request.prompt), config.max_queued_tokens)
        if not (too_many or too_long):
            return
        seconds = self._retry_after(request, step, now)
        name = (
            "max_queued_requests" if too_many else "max_queued_tokens"
        )  # the message must not reveal the number of other requests
        raise QueueFull(f"the queue is full ({name} {getattr(config, name)}); try again in {seconds:.3g} s", seconds)

    def add(self, request: Request, now: float) -> None:
        """Add an accepted request to the forecast."""
        self._remove_returned(request.id, now)
        if self._rejected:
            self._forecast.append(self._turn(request))
        else:
            self._forecast_step = -1  # no rejected request: the line is built again when it is needed

    def _retry_after(self, request: Request, step: int, now: float) -> float:
        """Predicted seconds until a rejected request would fit. Appends it to the line."""
        if not self._costs.step_time.per_token:
            return _DEFAULT_RETRY_AFTER
        self._remove_returned(request.id, now)
        if self._forecast_step < 0 or (
            step != self._forecast_step and now - self._forecast_at >= _MAX_FORECAST_AGE * self._forecast_seconds
        ):
            self._forecast_at, self._forecast_step = now, step
            new_requests, rejected = self._state.new_requests, [turn for _, turn in self._rejected.values()]
            self._forecast = QueueForecast(
                self._simulation(),
                self._waiting_turns(rejected),
                len(new_requests) + len(rejected),
                new_requests.num_tokens + sum(turn.num_prompt_tokens or 0 for turn in rejected),
            )
        most, tokens = self._config.max_queued_requests, self._config.max_queued_tokens
        self._forecast_seconds = self._forecast.seconds_until(
            0 if most is None else self._forecast.num_requests + 1 - most,
            0 if tokens is None else self._forecast.num_tokens + len(request.prompt) - tokens,
        )
        at = max(self._forecast_at + self._forecast_seconds, now) + self._costs.decode_step_seconds
        if len(self._rejected) < MAX_EXPECTED_RETRIES:
            self._rejected[request.id] = at, self._turn(request)
            self._forecast.append(self._rejected[request.id][1])
        return at - now

    def _remove_returned(self, request_id: str, now: float) -> None:
        """Remove a request that has returned, and rejected requests whose time has passed, from the line."""
        if request_id in self._rejected:
            self._forecast.remove(self._rejected.pop(request_id)[1])
        while self._rejected and next(iter(self._rejected.values()))[0] <= now:
            self._forecast.remove(self._rejected.pop(next(iter(self._rejected)))[1])

    # Inputs of the forecast

    def _simulation(self) -> QueueSimulation:
        """The simulation with the current limits, costs and running sequences."""
        pace, config, pools = self._costs.step_time, self._config, self._cache.pools
        groups = [i for i, group in enumerate(self._cache.config.groups) if not group.window]
        num_slots = min(
            ((pools[i].num_blocks - self._state.watermark_blocks[i]) * self._cache.block_size for i in groups),
            default=float("inf"),
        )
        budget = pace.tokens_within(config.step_seconds, config.max_num_batched_tokens)
        machine = SimulatedEngine(config.max_num_seqs, budget, num_slots, pace.fixed, pace.per_token)
        return QueueSimulation(machine, self._running_work())

    def _running_work(self) -> list[Work]:
        """The remaining work of each running sequence. Sequences that may end early are expected to end one by one.

        Their ends are modelled as random: of U sequences the first is expected after 1 / U of the mean length, the next
        one 1 / (U - 1) of it later.
        """
        works, running = [], self._state.running_queue.running
        num_unsure, share = sum(seq.request.may_end_early for seq in running), 0.0
        for seq in running:
            if seq.request.may_end_early:
                share += 1 / num_unsure
                num_unsure -= 1
            length = len(seq.tokens)
            works.append(Work(max(0, length - seq.num_computed), self._outputs(seq, share), length))
        return works

    def _waiting_turns(self, rejected: list[QueuedRequest]) -> Iterator[QueuedRequest]:
        """Turns of the waiting sequences by arrival, whatever the policy, then those of rejected requests."""
        new_requests = self._state.new_requests
        waiting = [(seq, seq.request.id in new_requests) for seq in self._state.sequences.values() if seq.row < 0]
        return self._turns_of(waiting, rejected)

    def _turns_of(
        self, sequences: list[tuple[Sequence, bool]], rejected: list[QueuedRequest]
    ) -> Iterator[QueuedRequest]:
        before = ""
        for seq, new in sequences:
            first = seq.request.id != before
            before = seq.request.id
            yield QueuedRequest([self._work(seq, first=first)], len(seq.request.prompt) if first and new else None)
        yield from rejected

    def _turn(self, request: Request) -> QueuedRequest:
        """The turn of a request that has no sequences yet."""
        sequences = [Sequence(-1, request, i, 0.0) for i in range(request.num_sequences)]
        return QueuedRequest([self._work(seq, first=seq.index == 0) for seq in sequences], len(request.prompt))

    def _work(self, seq: Sequence, *, first: bool) -> Work:
        """The work of a waiting sequence. first: it computes the positions that all sequences of its request share."""
        accounts = self._state.request_stats
        new = len(seq.tokens) - (0 if first else seq.num_shared)
        if first and not seq.has_run:
            new -= int(len(seq.request.prompt) * accounts.num_hit_tokens / max(1, accounts.num_query_tokens))
        return Work(1 if seq.swapped else max(1, new), self._outputs(seq, 1.0), new)

    def _outputs(self, seq: Sequence, share: float) -> float:
        """Expected remaining output tokens of a sequence. share: of the mean length, if it may end early."""
        most, mean = max(0, seq.max_length - len(seq.tokens)), self._lengths.mean
        if mean is None or not seq.request.may_end_early:
            return most
        return min(most, max(share * mean, seq.min_length - len(seq.tokens)))


def _above(number: int, bound: int | None) -> bool:
    return bound is not None and number > bound
