"""Engines whose scheduler and KV cache are accessible, over the scripted runner or over the embedded model."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from benchmarks.prefix.sessions import Session
from benchmarks.workloads import Query
from quire.cache.kv_cache import KVCache
from quire.config import CacheConfig, EngineOptions, PrefixIndexKind, SchedulerConfig
from quire.core.kv_groups import KVGroup, kv_kind
from quire.core.request import Beams, Request
from quire.core.runner import Runner
from quire.core.states import StateGroup
from quire.core.step import Step
from quire.engine.engine import Engine
from quire.params import SamplingParams
from quire.runner.model_runner import TorchRunner
from quire.runner.scripted_runner import ScriptedRunner
from quire.scheduler.scheduler import Scheduler
from quire.startup.build import prepare
from quire.tokenizer.tokenizer import Tokenizer

INDEXES: tuple[PrefixIndexKind, ...] = ("none", "hash", "radix")
BLOCK_SIZE = 16
VERBS = (
    "new_table",
    "admit",
    "fork",
    "branch",
    "grow",
    "cache_blocks",
    "trim",
    "release",
)  # methods of KVCache for a sequence


class WatchedScheduler(Scheduler):
    """A scheduler that records per step the blocks of all tables without sharing and with sharing."""

    def __init__(self, config: SchedulerConfig, cache: KVCache) -> None:
        super().__init__(config, cache)
        self.held: list[tuple[int, int]] = []
        self.watching = False

    def plan(self, now: float) -> Step | None:
        """See Scheduler."""
        step = super().plan(now)
        if step is not None and self.watching:
            self.held.append(num_held(self.cache))
        return step


@dataclass(slots=True)
class Rig:
    """An engine with its KV cache and scheduler."""

    engine: Engine
    cache: KVCache
    scheduler: WatchedScheduler


def num_held(cache: KVCache) -> tuple[int, int]:
    """Blocks of all block tables of one group: the sum of their lengths, and the distinct blocks."""
    tables = [table.blocks[0] for table in cache.tables.values()]
    return sum(map(len, tables)), len({block for blocks in tables for block in blocks})


def cache_config(
    prefix_index: PrefixIndexKind, num_blocks: int, bytes_per_block: int = 1, states: StateGroup | None = None
) -> CacheConfig:
    """One KV group with blocks of 16 tokens."""
    group = KVGroup((0,), kv_kind(1, 64), "bfloat16", num_blocks, bytes_per_block)
    return CacheConfig(BLOCK_SIZE, (group,), prefix_index, states=states)


def scripted(
    prefix_index: PrefixIndexKind,
    *,
    num_blocks: int = 20_000,
    max_num_seqs: int = 96,
    max_model_len: int = 2048,
    max_num_batched_tokens: int = 16384,
    states: StateGroup | None = None,
) -> Rig:
    """An engine over the scripted runner. With this token budget prompts are not chunked."""
    config = cache_config(prefix_index, num_blocks, states=states)
    limits = SchedulerConfig(max_num_seqs, max_num_batched_tokens, max_model_len, 1e9, 0.01, 1)
    runner = ScriptedRunner(config, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
    return _rig(limits, config, runner, vocab_size=1000, clock=lambda: 0.0)


class Embedded:
    """The embedded model, loaded once. Each engine over it has a KV pool of its own; all are of equal size."""

    def __init__(self) -> None:
        options = EngineOptions(memory="1GiB", max_num_seqs=64, step_seconds=1e9, speculation="off")
        self._prepared = prepare(options, report=_ignore, progress=_ignore)
        files, kernels = self._prepared.files, self._prepared.kernels.kernels
        self._model = files.load(self._prepared.dtype, self._prepared.device, kernels, self._prepared.schemes, _ignore)
        self.tokenizer: Tokenizer = files.tokenizer
        self.vocab_size: int = files.description.vocab_size

    def rig(self, prefix_index: PrefixIndexKind) -> Rig:
        """An engine with this prefix index."""
        limits, config = self._prepared.scheduler_config, replace(self._prepared.cache, prefix_index=prefix_index)
        runner = TorchRunner(
            self._model,
            self._prepared.kernels.kernels,
            cache=config,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            deterministic_kernels=self._prepared.kernels.deterministic,
        )
        return _rig(limits, config, runner, vocab_size=self.vocab_size, clock=time.monotonic)


def _rig(
    limits: SchedulerConfig, config: CacheConfig, runner: Runner, *, vocab_size: int, clock: Callable[[], float]
) -> Rig:
    scheduler = WatchedScheduler(limits, KVCache(config))
    return Rig(Engine(scheduler, runner, vocab_size=vocab_size, clock=clock), scheduler.cache, scheduler)


def _ignore(*_: object) -> None:
    """Ignore reports and progress."""


def greedy(max_tokens: int, n: int = 1) -> SamplingParams:
    """Parameters for exactly `max_tokens` greedy tokens."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, n=n, ignore_eos=True)


def ask(engine: Engine, queries: Sequence[Query], *, n: int = 1, beams: Beams | None = None) -> list[int]:
    """Run queries that arrive at once. Returns the cached tokens of each. beams: beam search instead of sampling."""
    for i, query in enumerate(queries):
        # Samples with one seed differ from each other by their index; greedy sequences would be equal.
        params = SamplingParams(max_tokens=query.num_output_tokens, n=n, seed=i, ignore_eos=True)
        plain = n == 1 or beams is not None
        engine.add(Request(str(i), query.prompt, greedy(query.num_output_tokens, n) if plain else params, beams=beams))
    cached = [0] * len(queries)
    while engine.has_work:
        for output in engine.step():
            check_reason(output.finish_reason)
            cached[int(output.request_id)] = max(cached[int(output.request_id)], output.num_cached_tokens)
    return cached


def check_reason(reason: str | None) -> None:
    """Raises RuntimeError if a request ended for another reason than its length, so that the work is as planned."""
    if reason not in (None, "length"):
        raise RuntimeError(f"a benchmark's request ended with {reason!r}; its figures would mean nothing")


@dataclass(slots=True)
class _Turn:
    session: Session
    outputs: list[list[int]]
    num_open: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_open = len(self.outputs)


def play(engine: Engine, sessions: Sequence[Session]) -> None:
    """Run sessions concurrently, with greedy requests. The next queries of a session may depend on outputs."""
    numbers, asked = count(), {}

    def ask_next(session: Session, outputs: list[list[int]] | None) -> None:
        try:
            queries = next(session) if outputs is None else session.send(outputs)
        except StopIteration:
            return
        turn = _Turn(session, [[] for _ in queries])
        for i, query in enumerate(queries):
            name = str(next(numbers))
            asked[name] = (turn, i)
            engine.add(Request(name, query.prompt, greedy(query.num_output_tokens)))

    for session in sessions:
        ask_next(session, None)
    while engine.has_work:
        for output in engine.step():
            turn, i = asked[output.request_id]
            turn.outputs[i] += output.token_ids
            check_reason(output.finish_reason)
            turn.num_open -= output.finish_reason is not None
            if not turn.num_open:
                ask_next(turn.session, turn.outputs)


class VerbClock:
    """Sums the seconds spent in some methods of an object."""

    def __init__(self, whose: object, verbs: Sequence[str]) -> None:
        self.seconds = 0.0
        self._inside = False  # these methods call each other
        for name in verbs:
            setattr(whose, name, self._timed(getattr(whose, name)))

    def _timed(self, verb: Callable[..., object]) -> Callable[..., object]:
        def timed(*args: object, **options: object) -> object:
            if self._inside:
                return verb(*args, **options)
            self._inside = True
            start = time.perf_counter()
            try:
                return verb(*args, **options)
            finally:
                self.seconds += time.perf_counter() - start
                self._inside = False

        return timed
