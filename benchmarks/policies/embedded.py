"""The embedded model in a server process. Requests arrive through a pipe; their times are recorded."""

import gc
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Literal, NamedTuple

from benchmarks.policies.fair import Load, arrivals
from quire.config import EngineOptions, Policy
from quire.core.request import Namespace
from quire.engine.engine import Engine
from quire.params import SamplingParams
from quire.startup.build import build
from quire.supervisor.engine_loop import GCPolicy

MAX_NUM_SEQS = 16
STEP_TOKENS = 256

Collector = Literal["quire", "python"]  # who triggers full garbage collections: quire's Garbage or Python


class Asked(NamedTuple):
    """A request, as sent through the pipe."""

    id: str
    tenant: str
    prompt: list[int]
    num_output: int


class Play(NamedTuple):
    """What to serve: all requests until None arrives, then the rest of the watched tenant's requests."""

    policy: Policy
    collector: Collector
    watched: str
    patience: float  # most seconds for the rest, after None


class Times(NamedTuple):
    """Times in seconds of the monotonic clock, which all processes of the machine share."""

    taken: float
    admitted: float
    first_token: float


@dataclass
class Played:
    """Times of the watched tenant's requests; durations of steps and of garbage collections in seconds."""

    times: dict[str, Times] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)
    collections: list[float] = field(default_factory=list)  # full ones
    num_waiting: int = 0  # at the end


def serve(connection: Connection, play: Play) -> None:
    """Send the vocabulary size, serve the requests, then send a Played."""
    engine = _engine(play.policy)
    garbage = GCPolicy() if play.collector == "quire" else None
    collections = _note_collections()
    connection.send(engine.vocab_size)
    played = _Turns(engine, connection, play, garbage).played()
    played.collections = collections
    connection.send(played)


def measure(connection: Connection, load: Load) -> None:
    """Send how many requests of this load per second the machine completes with a full queue."""
    engine = _engine("fcfs")
    requests = arrivals({"all": load}, 8 * MAX_NUM_SEQS / load.rate, 99)
    for one in requests:
        prompt = [token % engine.vocab_size for token in one.request.prompt]
        engine.add_request(one.request.id, prompt, one.request.params)
    begin = time.monotonic()
    while engine.has_work:
        engine.step()
    connection.send(len(requests) / (time.monotonic() - begin))


def _engine(policy: Policy) -> Engine:
    """An engine with one compute thread, so that the sending process has a core of its own."""
    options = EngineOptions(
        memory="1GiB",
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=STEP_TOKENS,
        policy=policy,
        threads=1,
    )
    return build(options, report=_ignore, progress=_ignore).engine


def _ignore(*_: object) -> None:
    """Ignore reports and progress."""


def _note_collections() -> list[float]:
    """A list that receives the seconds of every full collection from now on."""
    found: list[float] = []
    begun = 0.0

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal begun
        if phase == "start":
            begun = time.monotonic()
        elif info["generation"] == 2:
            found.append(time.monotonic() - begun)

    gc.callbacks.append(note)
    return found


class _Turns:
    """Runs an engine from its first request to the last watched one."""

    def __init__(self, engine: Engine, connection: Connection, play: Play, garbage: GCPolicy | None) -> None:
        self._engine = engine
        self._connection = connection
        self._play = play
        self._garbage = garbage
        self._taken: dict[str, float] = {}  # watched requests without a first token
        self._ends: float | None = None
        self._played = Played()

    def played(self) -> Played:
        """Serve the requests and return their times."""
        while self._ends is None or (self._taken and time.monotonic() < self._ends):
            idle = not self._engine.has_work and not self._connection.poll(0.5)
            if self._garbage is not None:
                self._garbage.collect_if_due(idle=idle)
            self._take()
            self._step()
        self._played.num_waiting = self._engine.stats().num_waiting
        return self._played

    def _take(self) -> None:
        while self._ends is None and self._connection.poll():
            asked = self._connection.recv()
            if asked is None:
                self._ends = time.monotonic() + self._play.patience
                return
            params = SamplingParams(max_tokens=asked.num_output, seed=0, ignore_eos=True, temperature=0.0)
            self._engine.add_request(asked.id, asked.prompt, params, namespace=Namespace(asked.tenant))
            if asked.tenant == self._play.watched:
                self._taken[asked.id] = time.monotonic()

    def _step(self) -> None:
        begin = time.monotonic()
        outputs = self._engine.step()
        now = time.monotonic()
        if outputs:
            self._played.steps.append(now - begin)
        for output in outputs:
            if output.token_ids and (taken := self._taken.pop(output.request_id, None)) is not None:
                explanation = self._engine.explain(output.request_id)
                assert explanation is not None, "it has just been served"
                assert explanation.admitted is not None, "it has a token"
                self._played.times[output.request_id] = Times(taken, explanation.admitted, now)
