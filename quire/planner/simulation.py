"""Simulation: the real engine, scheduler and KV cache with a modelled runner, in virtual time.

Nothing of the control plane is written a second time here. A simulation can write a journal, which `quire replay`
verifies like that of a server.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count, pairwise
from math import inf
from random import Random
from typing import BinaryIO, Literal, get_args

import numpy as np

from quire.cache.kv_cache import KVCache
from quire.cache.manager import KVCacheManager
from quire.config import CacheConfig, SchedulerConfig
from quire.core.output import Output
from quire.core.request import Beams, Namespace, Request
from quire.core.step import Step
from quire.cost.latency_profile import LatencyProfile
from quire.engine.engine import Engine
from quire.errors import RequestError
from quire.params import BeamSearchParams, SamplingParams
from quire.planner.modelled_runner import ModelledRunner, VirtualClock
from quire.planner.workloads import NO_PARENT, Failures, Session, Turn, Workload, num_requests, tokens_of
from quire.scheduler.beam_search import plan_beams
from quire.scheduler.journal import JournalledScheduler
from quire.scheduler.scheduler import Scheduler

Metric = Literal["ttft", "tpot", "latency"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """The engine that is simulated."""

    scheduler: SchedulerConfig
    cache: CacheConfig
    profile: LatencyProfile
    vocab_size: int = 32_000
    num_samples: int = 1  # sequences of each request; 1: as many as its turn has
    beam_width: int = 0  # of a beam search instead; 0: requests are sampled

    def num_sequences(self, turn: Turn) -> int:
        """Sequences of a request."""
        return self.beam_width or (self.num_samples if self.num_samples > 1 else turn.num_samples)


@dataclass(slots=True)
class RequestResult:
    """What became of a request. Times are seconds of the virtual clock; infinite if the event did not happen."""

    tenant: str
    arrived: float
    num_prompt: int
    first_token: float = inf
    ended: float = inf
    reason: str = ""  # finish reason; "rejected" for a request that was not accepted
    num_output: int = 0  # tokens of all sequences
    num_cached: int = 0  # prompt tokens of the prefix match
    num_sequences: int = 1
    session: int = 0  # place of its session in the workload
    turn: int = 0  # place in the session

    @property
    def ttft(self) -> float:
        """Seconds from arrival to the first token."""
        return self.first_token - self.arrived

    @property
    def latency(self) -> float:
        """Seconds from arrival to the end."""
        return self.ended - self.arrived

    @property
    def output_length(self) -> float:
        """Output tokens of a sequence: the mean, if there are several."""
        return self.num_output / self.num_sequences

    @property
    def tpot(self) -> float:
        """Mean seconds between tokens of a sequence; 0 for a single token."""
        return (self.ended - self.first_token) / (self.output_length - 1) if self.output_length > 1 else 0.0

    @property
    def is_complete(self) -> bool:
        """Whether it has all its output."""
        return self.reason in ("length", "stop")


@dataclass(slots=True, kw_only=True)
class SimulationResult:
    """The requests of a simulation, and means over its time: those of its window, if it has one."""

    requests: list[RequestResult] = field(default_factory=list)
    seconds: float = 0.0  # virtual, until the last request ended, or of the window
    busy_seconds: float = 0.0  # in which a step ran
    num_steps: int = 0
    num_step_tokens: int = 0
    num_preemptions: int = 0
    num_evicted_blocks: int = 0
    row_seconds: float = 0.0  # running sequences, integrated over time
    block_seconds: float = 0.0  # share of KV blocks held by running sequences, integrated over time
    most_running: int = 0  # sequences in one step
    most_kv_use: float = 0.0  # share of KV blocks held by running sequences, at most
    open_requests: tuple[float, ...] = ()  # mean number in each of NUM_BATCHES equal parts of the window
    stopped_early: bool = False  # whether the simulation was stopped before its end

    @property
    def complete(self) -> list[RequestResult]:
        """Requests that have all their output."""
        return [one for one in self.requests if one.is_complete]

    @property
    def mean_running(self) -> float:
        """Mean number of running sequences."""
        return self.row_seconds / self.seconds if self.seconds else 0.0

    @property
    def mean_kv_use(self) -> float:
        """Mean share of KV blocks that running sequences hold."""
        return self.block_seconds / self.seconds if self.seconds else 0.0

    @property
    def request_rate(self) -> float:
        """Completed requests per second."""
        return len(self.complete) / self.seconds if self.seconds else 0.0

    @property
    def token_rate(self) -> float:
        """Output tokens of completed requests per second."""
        return sum(one.num_output for one in self.complete) / self.seconds if self.seconds else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that the prefix cache had."""
        prompts = sum(one.num_prompt for one in self.requests)
        return sum(one.num_cached for one in self.requests) / prompts if prompts else 0.0

    @property
    def steady_rate(self) -> float:
        """Completed requests per second between the first and the last quarter of them."""
        ends = sorted(one.ended for one in self.complete)
        first, last = len(ends) // 4, len(ends) * 3 // 4
        seconds = ends[last] - ends[first] if ends else 0.0
        return (last - first) / seconds if seconds else self.request_rate

    @property
    def normalized_latency(self) -> float:
        """Mean of latency divided by output length, in seconds: the metric of Orca and of PagedAttention."""
        complete = [one for one in self.complete if one.num_output]
        return sum(one.latency / one.output_length for one in complete) / len(complete) if complete else inf

    def percentile(self, metric: Metric, share: float) -> float:
        """The value that `share` of all requests do not exceed. Requests that did not complete count as infinite."""
        values = sorted(
            getattr(one, metric) if one.is_complete else inf for one in self.requests if one.reason != "abort"
        )
        return values[min(len(values) - 1, int(share * len(values)))] if values else inf

    def figures(self) -> dict[str, float]:
        """The figures as plain numbers, for JSON."""
        found: dict[str, float] = {
            "requests": len(self.requests),
            "complete": len(self.complete),
            "seconds": self.seconds,
            "requests_per_second": self.request_rate,
            "output_tokens_per_second": self.token_rate,
            "mean_running": self.mean_running,
            "mean_kv_use": self.mean_kv_use,
            "hit_rate": self.hit_rate,
            "preemptions": self.num_preemptions,
            "steps": self.num_steps,
            "normalized_latency": self.normalized_latency,
        }
        for metric in get_args(Metric):
            for share in (0.5, 0.9, 0.99):
                found[f"{metric}_p{round(100 * share)}"] = self.percentile(metric, share)
        return found


NUM_BATCHES = 8  # equal parts of a window, whose means are compared


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a simulation that counts: requests that arrive in it, and its time."""

    start: float = 0.0  # seconds
    stop: float = inf

    def overlap(self, begin: float, end: float) -> float:
        """Seconds of [begin, end] in the window."""
        return max(0.0, min(end, self.stop) - max(begin, self.start))

    def mean_open(self, requests: Sequence[RequestResult]) -> tuple[float, ...]:
        """Mean number of requests that have arrived and not ended, in each of NUM_BATCHES equal parts."""
        edges = np.linspace(self.start, self.stop, NUM_BATCHES + 1)
        arrived, ended = (np.array([getattr(one, name) for one in requests]) for name in ("arrived", "ended"))
        overlaps = (
            np.clip(np.minimum(ended, stop) - np.maximum(arrived, start), 0, None) for start, stop in pairwise(edges)
        )
        return tuple((NUM_BATCHES * overlap.sum() / (self.stop - self.start)).item() for overlap in overlaps)


LengthOf = Callable[[str], tuple[int, int]]  # request id -> its prompt tokens and its output tokens
NewCache = Callable[[CacheConfig, LengthOf], KVCacheManager]


def paged_cache(config: CacheConfig, length_of: LengthOf) -> KVCacheManager:
    """The KV cache that serves, which does not know how long requests will be."""
    del length_of
    return KVCache(config)


_EVERY = 256  # finished requests between reports of progress


class Simulation:
    """One engine in virtual time. `run` can be called once."""

    def __init__(
        self,
        setup: EngineSetup,
        *,
        new_cache: NewCache = paged_cache,
        journal: BinaryIO | None = None,
        failures: Failures | None = None,
        on_step: Callable[["Simulation"], None] | None = None,
        window: Window | None = None,
        stops_early: Callable[[RequestResult], bool] | None = None,
    ) -> None:
        """new_cache: makes the KV cache, such as that of a baseline. on_step: called with each step planned.

        window: the part of the time that the result is about. stops_early: called when a request has its first token
        and when it ends or is rejected; the simulation stops if it returns True.
        """
        self.clock = VirtualClock()
        self._lengths: dict[str, tuple[int, int]] = {}
        cache = new_cache(setup.cache, self._lengths.__getitem__)
        self.scheduler = (
            Scheduler(setup.scheduler, cache)
            if journal is None
            else JournalledScheduler(setup.scheduler, cache, journal)
        )
        self.results: dict[str, RequestResult] = {}
        self._failures = failures or Failures()
        self._rng = Random(self._failures.seed)
        self._outputs: dict[int, tuple[int, ...]] = {}
        self._runner = ModelledRunner(
            setup.profile,
            setup.cache,
            self.clock,
            max_num_seqs=setup.scheduler.max_num_seqs,
            vocab_size=setup.vocab_size,
            outputs=self._outputs,
            fails=self._fails if self._failures.failed_steps else None,
        )
        self.engine = Engine(self.scheduler, self._runner, vocab_size=setup.vocab_size, clock=self.clock)
        self.scheduler.calibrate(setup.profile.calibration(setup.scheduler.max_num_batched_tokens))
        self._setup = setup
        self._beams = _beams_of(setup)
        self._on_step = on_step
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._open: dict[str, _OpenTurn] = {}
        self._numbers = count()
        self._total = SimulationResult()
        self._window = window or Window()
        self._stops_early = stops_early
        self._last = 0.0  # seconds: until then, the integrals are complete
        self._last_busy = 0.0  # seconds in which a step ran until then
        self._num_running, self._kv_use = 0, 0.0  # of the step planned last

    def run(
        self,
        workload: Workload,
        *,
        until: float = inf,
        advance: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> SimulationResult:
        """Run all sessions, or until `until` seconds. advance(done, total): receives numbers of finished requests."""
        collects = gc.isenabled()
        gc.disable()  # requests leave no cycles of references, and to look for some takes a sixth of the time
        try:
            self._run(workload, until, advance)
        finally:
            if collects:
                gc.enable()
        return self._finished()

    def _run(self, workload: Workload, until: float, advance: Callable[[int, int], None]) -> None:
        total = num_requests(workload)
        for place, session in enumerate(workload):
            self._send_at(session.at, _OpenSession(session, place), 0)
        done = reported = 0
        clock, engine, events = self.clock, self.engine, self._events
        while clock.now < until and not self._total.stopped_early:
            while events and events[0][0] <= clock.now:
                heappop(events)[2]()
            if not engine.has_work:
                if not events:
                    break
                clock.advance_to(events[0][0])
                self._last = clock.now
                continue
            before = clock.now
            outputs = engine.step(self._launched)
            done += self._record(outputs)
            self._integrate()
            if clock.now == before and not outputs and not engine.scheduler.state.in_flight:
                if not events:
                    raise AssertionError("nothing can run, and requests wait")
                clock.advance_to(events[0][0])
            if done >= reported + _EVERY:
                reported = done
                advance(min(done, total), total)
        advance(total, total)

    def _at(self, when: float, action: Callable[[], None]) -> None:
        heappush(self._events, (when, next(self._order), action))

    def _send_at(self, when: float, session: "_OpenSession", index: int) -> None:
        self._at(when, lambda: self._send(when, session, index))

    def _send(self, when: float, session: "_OpenSession", index: int) -> None:
        """Send a turn of a session. It arrived at `when`, while a step may have been running."""
        turn, number = session.session.turns[index], next(self._numbers)
        prompt = list(session.contexts[turn.parent]) if turn.parent != NO_PARENT else []
        for part in turn.new:
            prompt += tokens_of(part, self._setup.vocab_size)
        tenant = session.session.tenant
        num_sequences = self._setup.num_sequences(turn)
        result = RequestResult(
            tenant, when, len(prompt), num_sequences=num_sequences, session=session.place, turn=index
        )
        request_id = str(number)
        self.results[request_id] = result
        self._lengths[request_id] = len(prompt), turn.num_output
        request = Request(
            request_id,
            prompt,
            self._params(turn, number, num_sequences),
            namespace=Namespace(tenant),
            beams=self._beams,
            scheduling_params=turn.scheduling_params,
        )
        try:
            self.engine.add(request)
        except RequestError:
            result.reason = "rejected"
            self._judge(result)
            return
        if turn.output:
            self._outputs[number] = turn.output
        self._open[request_id] = _OpenTurn(session, index, result, prompt, num_sequences)
        patience = turn.patience
        if self._failures.aborted and self._rng.random() < self._failures.aborted:
            patience = min(patience, self._rng.random() * self._failures.abort_seconds)
        if patience < inf:
            self._at(when + patience, lambda: self._abort(request_id))

    def _params(self, turn: Turn, number: int, num_sequences: int) -> SamplingParams:
        return SamplingParams(
            n=num_sequences,
            temperature=1.0 if num_sequences > 1 and not self._setup.beam_width else 0.0,
            max_tokens=turn.num_output,
            seed=number,
            ignore_eos=True,
        )

    def _abort(self, request_id: str) -> None:
        if self._open.pop(request_id, None) is not None:
            self.engine.abort(request_id)
            result = self.results[request_id]
            result.ended, result.reason = self.clock.now, "abort"

    def _record(self, outputs: Sequence[Output]) -> int:
        """Record new tokens. Returns the number of requests that ended."""
        now, ended, open_turns = self.clock.now, 0, self._open
        for output in outputs:
            turn = open_turns.get(output.request_id)
            if turn is None:
                continue
            result, tokens = turn.result, output.token_ids
            if tokens:
                if not result.num_output:
                    result.first_token = now
                    result.num_cached = output.num_cached_tokens
                    self._judge(result)
                result.num_output += len(tokens)
                if turn.keeps_output and not output.index:
                    turn.context += tokens
            if output.end is not None:
                turn.num_open -= 1
                if not turn.num_open:
                    del self._open[output.request_id]
                    result.ended, result.reason = now, str(output.finish_reason)
                    ended += 1
                    self._judge(result)
                    self._continue(turn)
        return ended

    def _judge(self, result: RequestResult) -> None:
        if self._stops_early is not None and self._stops_early(result):
            self._total.stopped_early = True

    def _continue(self, turn: "_OpenTurn") -> None:
        """Plan the turn after one that has ended."""
        session, after = turn.session, turn.index + 1
        session.contexts.append(turn.context)
        if after < len(session.session.turns):
            pause = session.session.turns[after].pause
            self._send_at(self.clock.now + pause, session, after)

    def _launched(self, _: Step) -> None:
        """Note what runs in the step that has been planned."""
        pools = self.scheduler.cache.pools
        self._num_running, self._kv_use = self.scheduler.num_running, 1 - pools.num_available / pools.num_blocks
        if self._on_step is not None:
            self._on_step(self)

    def _integrate(self) -> None:
        """Add the time since the last step to the integrals."""
        total, now, busy = self._total, self.clock.now, self._runner.busy_seconds
        if now == self._last:
            return
        inside = self._window.overlap(self._last, now)
        if inside:
            total.row_seconds += self._num_running * inside
            total.block_seconds += self._kv_use * inside
            total.busy_seconds += (busy - self._last_busy) * inside / (now - self._last)
            total.most_running = max(total.most_running, self._num_running)
            total.most_kv_use = max(total.most_kv_use, self._kv_use)
        self._last, self._last_busy = now, busy

    def _finished(self) -> SimulationResult:
        total, stats, window = self._total, self.engine.stats(), self._window
        requests = list(self.results.values())
        total.requests = [one for one in requests if window.start <= one.arrived < window.stop]
        if window.stop < inf:
            total.seconds = window.overlap(0.0, self.clock.now)
            total.open_requests = window.mean_open(requests)
        else:
            total.seconds = max((one.ended for one in requests if one.ended < inf), default=0.0) - window.start
        total.num_steps, total.num_step_tokens = stats.num_steps, stats.num_step_tokens
        total.num_preemptions, total.num_evicted_blocks = stats.num_preemptions, stats.kv_blocks_evicted
        return total

    def _fails(self, step: Step) -> bool:
        return bool(len(step.chunks)) and self._rng.random() < self._failures.failed_steps


def _beams_of(setup: EngineSetup) -> Beams | None:
    if not setup.beam_width:
        return None
    params = BeamSearchParams(beam_width=setup.beam_width, max_tokens=None, ignore_eos=True)
    return plan_beams(params, vocab_size=setup.vocab_size, num_end_tokens=0)


@dataclass(slots=True)
class _OpenSession:
    session: Session
    place: int  # in the workload
    contexts: list[list[int]] = field(default_factory=list)  # prompt and output of each turn that has ended


class _OpenTurn:
    """A turn that is being computed."""

    __slots__ = ("context", "index", "keeps_output", "num_open", "result", "session")

    def __init__(
        self, session: _OpenSession, index: int, result: RequestResult, prompt: list[int], num_open: int
    ) -> None:
        self.session = session
        self.index = index
        self.result = result
        self.keeps_output = index + 1 < len(session.session.turns)
        self.context = list(prompt) if self.keeps_output else []
        self.num_open = num_open  # sequences that have not ended
