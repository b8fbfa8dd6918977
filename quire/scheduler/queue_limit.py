"""Queue limit: rejects requests while too many wait, with a Retry-After.

A request that exceeds a bound is accepted nevertheless if its flow, with it, stays within an equal part of the bound:
the bound divided by the number of flows of which new requests wait. Flows are those of budget sharing; for other
policies all requests are of one flow. No waiting request is evicted, so that k flows together can exceed the bound,
up to bound * (1 + 1/2 + ... + 1/k), until the requests of the first ones have run.

Retry-After is the predicted time until there is room in the whole queue, or in the flow's part of it, after the
flow's clients that were rejected before. Nothing is reserved: any request that arrives below the limit is accepted.
"""

from collections import Counter
from collections.abc import Iterator
from math import inf
from typing import NamedTuple

from quire.cache.manager import KVCacheManager
from quire.config import SchedulerConfig
from quire.core.request import Request
from quire.cost.queue_wait import MeanOutputLength, QueuedRequest, QueueForecast, QueueSimulation, SimulatedEngine, Work
from quire.cost.step_time import CostModel
from quire.errors import QueueFull
from quire.scheduler.budget_sharing import SHARING_RULES, Flow
from quire.scheduler.lifecycle import RequestCount, SchedulerState
from quire.scheduler.preemption import tenant_of
from quire.scheduler.sequence import Sequence

MAX_EXPECTED_RETRIES = 512  # rejected requests that are expected to return; bounds Retry-After in a flood
_DEFAULT_RETRY_AFTER = 1.0  # seconds of Retry-After before any step time is known
_UNLIMITED = 2**62  # requests or tokens, where an option sets no bound
_MAX_FORECAST_AGE = 0.05  # age limit of a forecast, as a share of the wait that it predicted last


class _OtherFlow(NamedTuple):
    """The waiting requests of another flow, and how many of them leave while one of the own flow leaves."""

    waiting: RequestCount
    pace: float  # infinite: all of them leave before


class _Line:
    """The forecast of all waiting requests, followed by the rejected requests of one flow that should return."""

    def __init__(self) -> None:
        self.rejected: dict[str, tuple[float, QueuedRequest]] = {}  # by request id: when it should return, its turn
        self._others: list[_OtherFlow] = []
        self._forecast = QueueForecast(QueueSimulation(SimulatedEngine(1, 1, 1.0, 0.0, 0.0), []), [], 0, 0)
        self._built, self._step, self._predicted = 0.0, -1, 0.0  # of the forecast: time, next step, last prediction

    def is_outdated(self, step: int, now: float) -> bool:
        """Whether the forecast has to be built again."""
        return self._step < 0 or (step != self._step and now - self._built >= _MAX_FORECAST_AGE * self._predicted)

    def replace(self, forecast: QueueForecast, others: list[_OtherFlow], step: int, now: float) -> None:
        """Use a new forecast, built at `now`. step: id of the next step to be planned."""
        self._forecast, self._others, self._step, self._built = forecast, others, step, now

    def seconds_until_fits(self, num_tokens: int, bounds: RequestCount, now: float) -> float:
        """Predicted seconds until one more request of the flow, with `num_tokens` prompt tokens, fits."""
        forecast = self._forecast
        self._predicted = forecast.seconds_until(
            self._num_leaving(
                bounds.num_requests, forecast.num_requests, 1, [one.num_requests for one, _ in self._others]
            ),
            self._num_leaving(
                bounds.num_tokens, forecast.num_tokens, num_tokens, [one.num_tokens for one, _ in self._others]
            ),
        )
        return max(self._built + self._predicted - now, 0.0)

    def _num_leaving(self, bound: int, total: int, more: int, others: list[int]) -> int:
        """How many have to leave until `more` fit: into the bound, or into the flow's equal part of it."""
        num_leaving, share = total + more - bound, bound // (len(others) + 1)
        own = total - sum(others) + more - share
        if own <= 0:
            return 0
        if more > share:
            return num_leaving
        meanwhile = (min(one, own * other.pace) for one, other in zip(others, self._others, strict=True))
        return min(num_leaving, own + int(sum(meanwhile)))

    def rejects(self, request: Request, turn: QueuedRequest, returns: float) -> None:
        """Append a rejected request. returns: the time of its expected return."""
        self.rejected[request.id] = returns, turn
        self._forecast.append(turn)

    def append(self, turn: QueuedRequest) -> None:
        """Append an accepted request."""
        self._forecast.append(turn)

    def discard_forecast(self) -> None:
        """Have the forecast built again when it is needed."""
        self._step = -1

    def remove_returned(self, request_id: str, now: float) -> None:
        """Remove a request that has returned, and rejected requests whose time has passed."""
        if request_id in self.rejected:
            self._forecast.remove(self.rejected.pop(request_id)[1])
        while self.rejected and next(iter(self.rejected.values()))[0] <= now:
            self._forecast.remove(self.rejected.pop(next(iter(self.rejected)))[1])


class QueueLimit:
    """Rejects requests beyond the queue limit, unless an earlier engine has accepted them."""

    def __init__(self, config: SchedulerConfig, cache: KVCacheManager, state: SchedulerState, costs: CostModel) -> None:
        self._config = config
        self._cache = cache
        self._state = state
        self._costs = costs
        self._lengths = MeanOutputLength()
        requests, tokens = config.max_queued_requests, config.max_queued_tokens
        self._bounds = RequestCount(
            _UNLIMITED if requests is None else requests, _UNLIMITED if tokens is None else tokens
        )
        self._lines: dict[Flow, _Line] = {}

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
        seconds = self._retry_after(request, flow, step, now)
        name = (
            "max_queued_requests" if too_many else "max_queued_tokens"
        )  # the message must not reveal the number of other requests
        sharing = SHARING_RULES.get(config.policy)
        shared = f", shared by {sharing.flows}" if sharing else ""
        raise QueueFull(
            f"the queue is full ({name} {getattr(config, name)}{shared}); try again in {seconds:.3g} s", seconds
        )

    def add(self, request: Request, now: float) -> None:
        """Add an accepted request to the forecast."""
        line = self._lines.get(self._state.new_requests.flow_of(request))
        if line is not None:
            line.remove_returned(request.id, now)
            if line.rejected:
                line.append(self._turn(request))
            else:
                line.discard_forecast()

    def _retry_after(self, request: Request, flow: Flow, step: int, now: float) -> float:
        """Predicted seconds until a rejected request would fit. Appends it to the line of its flow."""
        if not self._costs.step_time.per_token:
            return _DEFAULT_RETRY_AFTER
        line = self._line(flow)
        line.remove_returned(request.id, now)
        if line.is_outdated(step, now):
            line.replace(self._forecast([turn for _, turn in line.rejected.values()]), self._others(flow), step, now)
        seconds = line.seconds_until_fits(len(request.prompt), self._bounds, now) + self._costs.decode_step_seconds
        if len(line.rejected) < max(1, MAX_EXPECTED_RETRIES // len(self._state.new_requests.by_flow)):
            line.rejects(request, self._turn(request), now + seconds)
        return seconds

    def _line(self, flow: Flow) -> _Line:
        """The line of a flow. A new one replaces the lines of flows of which no new request waits."""
        if flow not in self._lines:
            waiting = self._state.new_requests.by_flow
            self._lines = {one: line for one, line in self._lines.items() if one in waiting}
            self._lines[flow] = _Line()
        return self._lines[flow]

    # Inputs of the forecast

    def _others(self, flow: Flow) -> list[_OtherFlow]:
        """The other flows of which new requests wait. Tenants take turns; better classes leave before."""
        counts = ((one, count) for one, count in self._state.new_requests.by_flow.items() if one != flow)
        if self._config.policy == "priority":
            return [_OtherFlow(count, inf if int(one or 0) < int(flow or 0) else 0.0) for one, count in counts]
        return [_OtherFlow(count, 1.0) for _, count in counts]

    def _forecast(self, rejected: list[QueuedRequest]) -> QueueForecast:
        """A forecast with the current requests. rejected: turns of rejected requests, which are last."""
        total = self._state.new_requests.total
        num_tokens = total.num_tokens + sum(turn.num_prompt_tokens or 0 for turn in rejected)
        waiting = self._waiting_turns(rejected)
        return QueueForecast(self._simulation(), waiting, total.num_requests + len(rejected), num_tokens)

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
        """Turns of the waiting sequences in the order of the flows, then those of rejected requests."""
        requests = self._state.requests
        waiting = [(seq, requests[seq.request.id].is_new) for seq in self._in_order()]
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

    def _in_order(self) -> list[Sequence]:
        """The waiting sequences: by class, or one request of each tenant in turn; for other policies by arrival."""
        waiting = [seq for seq in self._state.sequences.values() if seq.row < 0]
        if self._config.policy == "priority":
            return sorted(waiting, key=lambda seq: seq.rank[0])
        if self._config.policy != "fair":
            return waiting
        num_requests, turns = Counter[str](), dict[str, int]()
        for seq in waiting:
            if seq.request.id not in turns:
                turns[seq.request.id] = num_requests[tenant_of(seq)]
                num_requests[tenant_of(seq)] += 1
        return sorted(waiting, key=lambda seq: turns[seq.request.id])

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
