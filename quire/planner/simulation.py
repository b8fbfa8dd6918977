"""Simulation: the real router, engines, schedulers and KV caches with modelled runners, in virtual time.

Nothing of the control plane is written a second time here. A simulation can write journals, which `quire replay`
verifies like those of a server.
"""

import gc
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf
from random import Random
from typing import BinaryIO

from msgspec.structs import replace

from quire.core.block_keys import BlockKeys
from quire.core.request import Beams, Namespace, Request
from quire.core.step import Step
from quire.errors import DeadlineUnreachable, QueueFull, RequestError
from quire.fleet.fleet import COSTS_SECONDS
from quire.fleet.request_keys import RequestKeys
from quire.fleet.routing import Router, RouterConfig, mean_costs
from quire.fleet.tenant_service import CallLater, TenantService
from quire.params import BeamSearchParams, SamplingParams
from quire.planner.results import RequestResult, SimulationResult, Window
from quire.planner.simulated_engine import EngineSetup, NewCache, SimulatedEngine, paged_cache
from quire.planner.workloads import NO_PARENT, Failures, Session, Turn, Workload, num_requests, tokens_of
from quire.scheduler.beam_search import plan_beams

_EVERY = 256  # finished requests between reports of progress


class _Rank(IntEnum):
    """The order of events at one time."""

    DELIVERY = 0  # of the outputs of a step
    ACTION = 1  # of a client
    STEP = 2


class Simulation:
    """Engines in virtual time, in one order of events. `run` can be called once.

    A step of an engine, from one time to another, delivers its outputs at its end. Requests that arrive in between are
    placed when they arrive, and added to the engine at the end of its step.
    """

    def __init__(
        self,
        setup: EngineSetup,
        *,
        new_cache: NewCache = paged_cache,
        journals: Sequence[BinaryIO] = (),
        failures: Failures | None = None,
        on_step: Callable[[SimulatedEngine], None] | None = None,
        window: Window | None = None,
        stops_early: Callable[[RequestResult], bool] | None = None,
        new_router: Callable[[RouterConfig], Router] = Router,
    ) -> None:
        """new_cache: makes a KV cache, such as that of a baseline. journals: one for each replica, or none.

        on_step: called with each step planned. window: the part of the time that the result is about. stops_early:
        called when a request has its first token and when it ends or is rejected; the simulation stops if it returns
        True.
        """
        self.results: dict[str, RequestResult] = {}
        self._lengths: dict[str, tuple[int, int]] = {}
        self._failures = failures or Failures()
        self._rng = Random(self._failures.seed)
        self._outputs: dict[int, tuple[int, ...]] = {}
        self._window = window or Window()
        self.engines = [
            SimulatedEngine(
                setup,
                new_cache(setup.cache, self._lengths.__getitem__),
                journal=journals[i] if journals else None,
                outputs=self._outputs,
                fails=self._fails if self._failures.failed_steps else None,
                window=self._window,
                on_step=on_step,
            )
            for i in range(setup.num_replicas)
        ]
        self._now = 0.0  # time of the event that happens now
        self._routes = _Routes(setup, self.engines, new_router, self._later) if setup.num_replicas > 1 else None
        self._setup = setup
        self._beams = _beams_of(setup)
        self._events: list[tuple[float, _Rank, int, Callable[[], None]]] = []
        self._order = count()
        self._open: dict[str, _OpenTurn] = {}
        self._numbers = count()
        self._num_done = 0
        self._stops_early = stops_early
        self._stops = self._is_stopped = False  # after the outputs that are delivered now, and at once
        self._blocked: list[SimulatedEngine] = []  # whose requests wait for something to happen

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
        reported, events = 0, self._events
        while events and events[0][0] < until and not self._is_stopped:
            when, _, _, action = heappop(events)
            self._now = when
            action()
            if self._blocked:
                self._unblock(when)
            if self._num_done >= reported + _EVERY:
                reported = self._num_done
                advance(min(reported, total), total)
        if self._blocked and not events:
            raise AssertionError("nothing can run, and requests wait")
        if not self._is_stopped:  # steps that go on at `until`
            for engine in self.engines:
                self._record(engine)
        advance(total, total)

    # Events

    def _at(self, when: float, rank: _Rank, action: Callable[[], None]) -> None:
        heappush(self._events, (when, rank, next(self._order), action))

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self._at(self._now + seconds, _Rank.ACTION, action)

    def _send_at(self, when: float, session: "_OpenSession", index: int) -> None:
        self._at(when, _Rank.ACTION, lambda: self._send(when, session, index))

    def _tell(self, engine: SimulatedEngine, when: float, action: Callable[[], None]) -> None:
        """Do something between two steps of an engine, at `when` or at the end of the step that runs then."""
        engine.inbox.append(action)
        if not engine.has_turn:
            engine.begin(when)
            self._plan_step(engine)

    def _plan_step(self, engine: SimulatedEngine) -> None:
        engine.has_turn = True
        self._at(engine.clock.now, _Rank.STEP, partial(self._step, engine))

    def _unblock(self, when: float) -> None:
        """Plan steps of the blocked engines for which time has passed, or that an event has given work."""
        blocked, self._blocked = self._blocked, []
        for engine in blocked:
            if engine.inbox or engine.clock.now < when:
                engine.clock.advance_to(when)
                self._plan_step(engine)
            else:
                self._blocked.append(engine)

    def _step(self, engine: SimulatedEngine) -> None:
        """The turn of an engine: its inbox, and a step."""
        while engine.inbox:
            engine.inbox.popleft()()
        events, now = self._events, engine.clock.now
        if events and events[0] < (now, _Rank.STEP):  # a client does something at once
            self._plan_step(engine)
        elif not engine.engine.has_work:
            engine.has_turn = False
            self._is_stopped = self._stops
        elif engine.step():
            self._at(engine.clock.now, _Rank.DELIVERY, partial(self._deliver, engine))
        else:
            self._blocked.append(engine)

    def _deliver(self, engine: SimulatedEngine) -> None:
        self._record(engine)
        self._plan_step(engine)

    def _send(self, when: float, session: "_OpenSession", index: int) -> None:
        """Send a turn of a session. It arrives at `when`, while a step may be running."""
        turn, number = session.session.turns[index], next(self._numbers)
        prompt = list(session.contexts[turn.parent]) if turn.parent != NO_PARENT else []
        for part in turn.new:
            prompt += tokens_of(part, self._setup.vocab_size)
        tenant = session.session.tenant
        num_sequences = self._setup.num_sequences(turn)
        request_id = str(number)
        request = Request(
            request_id,
            prompt,
            self._params(turn, number, num_sequences),
            namespace=Namespace(tenant),
            beams=self._beams,
            scheduling_params=turn.scheduling_params,
        )
        result = RequestResult(
            tenant,
            when,
            len(prompt),
            num_sequences=num_sequences,
            session=session.place,
            turn=index,
        )
        self._place(request, number, _OpenTurn(session, index, result, prompt, num_sequences), when)

    def _place(
        self, request: Request, number: int, opened: "_OpenTurn", when: float, refused: tuple[int, ...] = ()
    ) -> None:
        """Have an engine add a request that none of `refused` takes."""
        if self._routes is not None:
            opened.result.replica = self._routes.place(request, when, refused)
        engine = self.engines[opened.result.replica]
        self._tell(engine, when, lambda: self._add(engine, request, number, opened, refused))

    def _add(
        self,
        engine: SimulatedEngine,
        request: Request,
        number: int,
        opened: "_OpenTurn",
        refused: tuple[int, ...],
    ) -> None:
        """Add a request to an engine. If it has no room or time for it, the others are tried, as in a server."""
        turn, result = opened.session.session.turns[opened.index], opened.result
        self.results[request.id] = result
        self._lengths[request.id] = result.num_prompt, turn.num_output
        try:
            engine.engine.add(request)
        except RequestError as error:
            now, refused = engine.clock.now, (*refused, result.replica)
            self._forget(request.id, engine)
            if isinstance(error, QueueFull | DeadlineUnreachable) and len(refused) < len(self.engines):
                self._place(replace(request, waited=now - result.arrived), number, opened, now, refused)
            else:
                result.reason = "rejected"
                self._judge(result)
            return
        if turn.output:
            self._outputs[number] = turn.output
        self._open[request.id] = opened
        patience = turn.patience
        if self._failures.aborted and self._rng.random() < self._failures.aborted:
            patience = min(patience, self._rng.random() * self._failures.abort_seconds)
        if patience < inf:
            until = result.arrived + patience
            abort = partial(self._abort, engine, request.id)
            self._at(until, _Rank.ACTION, lambda: self._tell(engine, until, abort))

    def _params(self, turn: Turn, number: int, num_sequences: int) -> SamplingParams:
        return SamplingParams(
            n=num_sequences,
            temperature=1.0 if num_sequences > 1 and not self._setup.beam_width else 0.0,
            max_tokens=turn.num_output,
            seed=number,
            ignore_eos=True,
        )

    def _abort(self, engine: SimulatedEngine, request_id: str) -> None:
        if self._open.pop(request_id, None) is not None:
            engine.engine.abort(request_id)
            self._forget(request_id, engine)
            result = self.results[request_id]
            result.ended, result.reason = engine.clock.now, "abort"

    def _forget(self, request_id: str, engine: SimulatedEngine) -> None:
        """A request is no longer on its engine."""
        if self._routes is not None:
            self._routes.remove(request_id, self.results[request_id].replica, engine.clock.now)

    def _record(self, engine: SimulatedEngine) -> None:
        """Record new tokens."""
        now, open_turns = engine.clock.now, self._open
        for output in engine.take_outputs():
            turn = open_turns.get(output.request_id)
            if turn is None:
                continue
            result, tokens = turn.result, output.token_ids
            if tokens:
                if not result.num_output:
                    result.first_token = now
                    result.num_cached = output.num_cached_tokens
                    self._judge(result)
                    if self._routes is not None:
                        self._routes.router.record_first_token(output.request_id, now)
                result.num_output += len(tokens)
                if turn.keeps_output and not output.index:
                    turn.context += tokens
            if output.end is not None:
                turn.num_open -= 1
                if not turn.num_open:
                    del self._open[output.request_id]
                    result.ended, result.reason = now, str(output.finish_reason)
                    self._num_done += 1
                    self._judge(result)
                    self._forget(output.request_id, engine)
                    self._continue(turn, now)
        if self._routes is not None:
            self._routes.update(self.engines.index(engine))
        self._is_stopped = self._stops

    def _judge(self, result: RequestResult) -> None:
        if self._stops_early is not None and self._stops_early(result):
            self._stops = True

    def _continue(self, turn: "_OpenTurn", now: float) -> None:
        """Plan the turn after one that has ended."""
        session, after = turn.session, turn.index + 1
        session.contexts.append(turn.context)
        if after < len(session.session.turns):
            pause = session.session.turns[after].pause
            self._send_at(now + pause, session, after)

    def _finished(self) -> SimulationResult:
        total, window = SimulationResult(stopped_early=self._is_stopped), self._window
        for engine in self.engines:
            total.add(engine.totals())
        total.num_replicas = len(self.engines)
        requests = list(self.results.values())
        total.requests = [one for one in requests if window.start <= one.arrived < window.stop]
        if window.stop < inf:
            total.seconds = window.overlap(0.0, max(engine.clock.now for engine in self.engines))
            total.open_requests = window.mean_open(requests)
        else:
            total.seconds = max((one.ended for one in requests if one.ended < inf), default=0.0) - window.start
        return total

    def _fails(self, step: Step) -> bool:
        return bool(len(step.chunks)) and self._rng.random() < self._failures.failed_steps


def _beams_of(setup: EngineSetup) -> Beams | None:
    if not setup.beam_width:
        return None
    params = BeamSearchParams(beam_width=setup.beam_width, max_tokens=None, ignore_eos=True)
    return plan_beams(params, vocab_size=setup.vocab_size, num_end_tokens=0)


class _Routes:
    """What a front end does with its router, and with the service that each engine gives to tenants."""

    def __init__(
        self,
        setup: EngineSetup,
        engines: Sequence[SimulatedEngine],
        new_router: Callable[[RouterConfig], Router],
        call_later: CallLater,
    ) -> None:
        size, limits = setup.cache.block_size, setup.scheduler
        self.router = new_router(
            RouterConfig(
                routing=setup.routing,
                num_replicas=len(engines),
                block_size=size,
                num_blocks=engines[0].scheduler.cache.pools.num_blocks,
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                has_states=setup.cache.states is not None,
            )
        )
        self._engines = engines
        keys = BlockKeys(size)
        self._request_keys = RequestKeys.of_cache(setup.cache, keys)
        self._service = TenantService(call_later)
        for engine in engines:
            engine.engine.report_keys(keys)
            engine.scheduler.report_service()
            self._service.register(engine)
        self._num_free = [engine.num_free for engine in engines]  # at the ends of their last steps
        self._costs = [engine.engine.cost_figures() for engine in engines]  # then, too
        self._costs_at = 0.0

    def place(self, request: Request, now: float, refused: Collection[int]) -> int:
        """The replica of a request, which is none of `refused`."""
        if now >= self._costs_at:
            self._costs_at = now + COSTS_SECONDS
            self.router.set_costs(mean_costs(self._costs))
        allowed = [replica for replica in range(len(self._engines)) if replica not in refused]
        free = [self._num_free[replica] for replica in allowed]
        return self.router.place(self._request_keys.routed(request), allowed, free, now).replica

    def remove(self, request_id: str, replica: int, now: float) -> None:
        """A request has ended."""
        self.router.remove(request_id, replica, now)

    def update(self, replica: int) -> None:
        """An engine has reported what a step has changed."""
        engine = self._engines[replica]
        changes = engine.engine.take_key_changes()
        assert changes is not None, "the engine reports keys"
        self.router.update_keys(replica, changes)
        for request_id, number in engine.engine.num_counted.items():
            self.router.record_progress(request_id, number)
        self._service.add(engine, engine.engine.take_service())
        self._num_free[replica] = engine.num_free
        self._costs[replica] = engine.engine.cost_figures()


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
