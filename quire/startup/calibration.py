"""Calibration: a few steps through the runner before the first request, to learn what they take.

The steps are made here, by hand: nothing of them reaches the scheduler, the memory it keeps or any figure but what is
returned. They write to blocks that nobody owns yet, and the scheduler's first step resets the runner's rows. Kernels
are warm when it is over.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import NamedTuple

from quire.cache.kv_cache import KVCache
from quire.config import CacheConfig, KVGroup, PrefixIndexKind, SchedulerConfig
from quire.core.request import NO_NAMESPACE
from quire.core.runner import Runner
from quire.core.step import ChunkOutput, Chunks, Late, Move, Opens, Step, StepResult, Writes
from quire.cost.step_time import Calibration, CopySample, DecodeSample, PrefillSample

log = logging.getLogger(__name__)

_FIRST_CHUNK, _GROWTH = 16, 4  # tokens of the first chunk; how much longer the next ones are
_MOST_CHUNKS = 8  # one behind the other, to make a context
_ROWS = (1, 4, 16)  # that generate at once
_PROMPT, _OUTPUT = 8, 4  # tokens of each of those
_COPIED = 2**26  # bytes of a copy at most
_REPEATS = 2
_SHARES = (0.6, 0.8, 1.0)  # of the time, that prompts, generating and copies have used when they end


class Measured(NamedTuple):
    """What was learnt, and what went wrong; nothing did where `problem` is empty."""

    calibration: Calibration
    problem: str


def measure(
    runner: Runner,
    cache: CacheConfig,
    limits: SchedulerConfig,
    *,
    vocab_size: int,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> Measured:
    """Run steps for about so many seconds: none begins, but for the first and those that warm up, that is not
    expected to be over by then.

    Raises nothing: a runner that fails ends the part that it failed in.
    """
    trial = _Trial(runner, cache, limits, vocab_size, clock)
    found, problem = Calibration(), ""
    began = clock()
    parts = (("prompts", trial.prompts), ("generating", trial.generating), ("copies", trial.copies))
    for (name, part), share in zip(parts, _SHARES, strict=True):
        trial.ends = began + share * seconds
        try:
            part(found)
        except Exception as error:  # whatever a kernel throws, requests may still be served
            log.exception("the calibration of %s failed", name)
            problem = problem or f"{name} could not be measured ({type(error).__name__}: {error})"
    runner.rest()
    return Measured(found, problem)


class _Trial:
    """Makes steps and runs them one after the other. Their ids and those of their sequences are below zero."""

    def __init__(
        self,
        runner: Runner,
        cache: CacheConfig,
        limits: SchedulerConfig,
        vocab_size: int,
        clock: Callable[[], float],
    ) -> None:
        self.ends = 0.0  # when no more steps begin
        self._runner = runner
        self._cache = cache
        self._limits = limits
        self._vocab_size = vocab_size
        self._clock = clock
        self._next_id = -1
        self._num_moves = 0

    # What is measured

    def prompts(self, found: Calibration) -> None:
        """Chunks that grow, each behind nothing and behind what there is, then as many as fit behind each other."""
        length = self._limits.max_model_len - 1
        most = min(length, self._limits.max_num_batched_tokens)
        size, seconds = min(_FIRST_CHUNK, most), 0.0
        self._open({0: length})
        longest = 0
        while longest < most and self._fits(seconds * _GROWTH**1.5):
            self._chunk(size, 0)  # to warm up
            seconds = self._chunk(size, 0, found)
            longest, size = size, min(size * _GROWTH, most)
        if not longest:
            return
        small = min(_FIRST_CHUNK * _GROWTH, longest)
        if longest > small and self._fits(seconds):
            self._chunk(small, longest - small, found)
        for at in range(longest, min(length, longest * _MOST_CHUNKS) - longest + 1, longest):
            if not self._fits(2 * seconds):
                return
            seconds = self._chunk(longest, at, found)
            self._chunk(small, at + longest - small, found)

    def generating(self, found: Calibration) -> None:
        """One token a step, of one sequence and of several."""
        length = min(_PROMPT + _OUTPUT + 1, self._limits.max_model_len - 1)
        prompt = min(_PROMPT, length - 1)
        seconds = min((sample.seconds for sample in found.prefill), default=0.0)
        for count in _ROWS if prompt else ():
            rows = range(min(count, self._limits.max_num_seqs, self._limits.max_num_batched_tokens // _PROMPT))
            if len(rows) < count or not self._fits(2 * seconds * (1 + _OUTPUT)):
                return
            self._open(dict.fromkeys(rows, length))
            self._run([(row, -1 - row, 0, prompt, 0, 1, ChunkOutput.SAMPLE) for row in rows])
            for at in range(prompt, length):
                chunks = [(row, -1 - row, at, at + 1, 0, 1, ChunkOutput.SAMPLE) for row in rows]
                seconds = self._run(chunks).seconds
                if at > prompt:  # the first of them warms up
                    found.decode.append(DecodeSample(len(rows), seconds))

    def copies(self, found: Calibration) -> None:
        """Blocks to the host pool and back, few and many."""
        most = [
            min(group.num_blocks, group.num_host_blocks, max(1, _COPIED // group.bytes_per_block))
            for group in self._cache.groups
        ]
        if not any(most):
            return
        seconds = 0.0
        for part in (8, 1):
            for repeat in range(1 + _REPEATS):
                if not self._fits(seconds * (1 if repeat else 10)):
                    return
                began = self._clock()
                counts = [-(-count // part) for count in most]
                out, _ = self._copy("device", "host", counts)
                _, back = self._copy("host", "device", counts)
                seconds = self._clock() - began
                size = sum(n * group.bytes_per_block for n, group in zip(counts, self._cache.groups, strict=True))
                if repeat:  # the first one waits for memory that nobody has touched
                    found.copies.append(CopySample(size, out, back))

    # Steps

    def _fits(self, seconds: float) -> bool:
        return self._clock() + seconds <= self.ends

    def _open(self, lengths: dict[int, int]) -> None:
        """Rows for sequences of so many tokens. Where there are too few blocks for all, some hold two of them."""
        rows = list(lengths)
        block_size = self._cache.block_size
        width = -(-(max(lengths.values()) + 1) // block_size)
        self._run(
            [],
            opens=Opens.of(
                rows=rows,
                seq_ids=[-1 - row for row in rows],
                prompt_lens=list(lengths.values()),
            ),
            tokens=Writes.of([(row, 0, self._tokens(row, length)) for row, length in lengths.items()]),
            blocks=[
                Writes.of([(row, 0, [(row * width + i) % group.num_blocks for i in range(width)]) for row in rows])
                for group in self._cache.groups
            ],
        )

    def _tokens(self, row: int, length: int) -> list[int]:
        """Of all kinds: experts, where a model has them, should be asked in turn."""
        return [(7919 * at + 104_729 * row + 1) % self._vocab_size for at in range(length)]

    def _chunk(self, size: int, at: int, found: Calibration | None = None) -> float:
        """Compute tokens [at, at + size) of row 0; the seconds that took."""
        seconds = self._run([(0, -1, at, at + size, 0, 1, ChunkOutput.SAMPLE)]).seconds
        if found is not None:
            found.prefill.append(PrefillSample(size, at, seconds))
        return seconds

    def _copy(self, source: str, target: str, counts: Sequence[int]) -> tuple[float, float]:
        moves = []
        for group, count in enumerate(counts):
            if count:
                self._num_moves += 1
                pairs = [(block, block) for block in range(count)]
                moves.append(Move(-self._num_moves, group, source, target, pairs, self._cache.block_size))
        return self._run([], moves=moves).swap_seconds

    def _run(
        self,
        chunks: Sequence[tuple[int, ...]],
        *,
        opens: Opens | None = None,
        tokens: Writes | None = None,
        blocks: list[Writes] | None = None,
        moves: Sequence[Move] = (),
    ) -> StepResult:
        """Raises what the runner raises, and RuntimeError for a step that failed."""
        step = Step(
            self._next_id,
            opens is not None,
            Opens.of(rows=[]) if opens is None else opens,
            Writes.of([]) if tokens is None else tokens,
            [Writes.of([]) for _ in self._cache.groups] if blocks is None else blocks,
            list(moves),
            Chunks.of(chunks),
        )
        self._next_id -= 1
        self._runner.launch(step)
        self._runner.sample(step.id, Late.nothing())
        result = self._runner.collect()
        if result.error:
            raise RuntimeError(result.error)
        return result


_PROMPTS = 32  # in the index, of which many begin alike
_SHARED = 8  # of them begin alike, in their first half
_LOOKUP_REPEATS = 3  # of which the quickest counts: what is slower was disturbed


def lookup_seconds(
    kind: PrefixIndexKind,
    block_sizes: Iterable[int],
    num_tokens: int,
    clock: Callable[[], float] = perf_counter,
) -> dict[int, float]:
    """Seconds to find a prompt of `num_tokens` in the index, by block size; nothing where there is no index."""
    if kind == "none" or num_tokens < 1:
        return {}
    return {size: _measure(kind, size, num_tokens, clock) for size in block_sizes}


def _measure(kind: PrefixIndexKind, block_size: int, num_tokens: int, clock: Callable[[], float]) -> float:
    cache = KVCache(_config(kind, block_size, _PROMPTS * (num_tokens // block_size + 1)))
    prompts = [_prompt(i, num_tokens) for i in range(_PROMPTS)]
    for i, prompt in enumerate(prompts):
        table = cache.open(i, prompt)
        cache.grow(table, num_tokens)
        cache.release(i, num_tokens)
    times = []
    for _ in range(_LOOKUP_REPEATS):
        began = clock()
        for prompt in prompts:
            cache.index.find(NO_NAMESPACE, prompt)
        times.append(clock() - began)
    return min(times) / _PROMPTS


def _config(kind: PrefixIndexKind, block_size: int, num_blocks: int) -> CacheConfig:
    group = KVGroup((0,), "full", 1, 1, "float32", num_blocks, 8 * block_size)
    return CacheConfig(block_size, (group,), kind)


def _prompt(number: int, length: int) -> list[int]:
    """One of `_SHARED` begins as others do, and goes on in its own way."""
    half = length // 2
    begins = [(7919 * at + number // _SHARED) % 50_021 for at in range(half)]
    return begins + [(104_729 * at + 31 * number) % 50_021 for at in range(half, length)]
