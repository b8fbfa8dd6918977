"""Measurement of costs before the first request: steps and block copies.

The steps are built here and not by the scheduler, whose state and metrics do not change. They write to blocks that no
sequence owns yet. The first step of the scheduler resets the runner's rows. Measuring also warms up the kernels.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from typing import NamedTuple

from msgspec import UNSET, UnsetType

from quire.config import CacheConfig, SchedulerConfig
from quire.core.runner import Runner
from quire.core.step import (
    ChunkOutput,
    Chunks,
    Move,
    NewRows,
    SamplingMasks,
    StateChunks,
    Step,
    StepResult,
    TableUpdates,
)
from quire.cost.step_time import Calibration, CopySample, DecodeSample, PrefillSample

log = logging.getLogger(__name__)

_FIRST_CHUNK, _GROWTH = 8, 4  # tokens of the first chunk; factor from one chunk to the next
_LEAST_CHUNKS = 2  # lengths that are measured whatever the time: one cannot separate the cost of a step from its tokens
_MAX_CHUNKS = 8  # consecutive chunks that build up a context
_DECODE_BATCH_SIZES = (1, 4, 16)  # batch sizes of decode
_DECODE_PROMPT_TOKENS = 8  # per sequence of these
_MOST_RUNS = 5  # of one step, while its fastest two differ by more than
_AGREEMENT = 0.2  # this share of the fastest
_DISAGREEMENT_FACTOR = 4  # factor of the time limit for runs that disagree: another program is using the machine
_MAX_COPY_BYTES = 2**26  # the most bytes of a copy per KV group
_REPEATS = 2
_TIME_SHARES = (0.6, 0.8, 1.0)  # share of the time after which prefill, decode and copies must have ended


class Measured(NamedTuple):
    """Measured costs. spread: the most by which the fastest two runs of one step differ, as a share of the fastest.

    problem: the first error, or empty.
    """

    calibration: Calibration
    spread: float
    problem: str

    @property
    def is_reliable(self) -> bool:
        """Whether there was no error, and the runs of one step agreed."""
        return not self.problem and self.spread <= _AGREEMENT

    @property
    def quality(self) -> str:
        """The problem, or the spread in words."""
        if self.problem:
            return self.problem
        words = f"runs of one step differ by {100 * self.spread:.0f} % at most"
        if self.spread <= _AGREEMENT:
            return words
        return f"{words}: other programs may be using this machine; the first requests correct the costs"


def measure(
    runner: Runner,
    cache: CacheConfig,
    scheduler_config: SchedulerConfig,
    *,
    vocab_size: int,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> Measured:
    """Measure prefill, decode and copies for about `seconds`, longer while runs of the same step disagree.

    No step begins that is expected to end too late, except for the first and warm-up steps of a part.
    Errors of the runner are logged, end the part in which they occur, and are not raised.
    """
    trial = _CalibrationRun(runner, cache, scheduler_config, vocab_size, clock)
    found, problem = Calibration(), ""
    began = clock()
    parts = (("prompts", trial.measure_prefill), ("generating", trial.measure_decode), ("copies", trial.measure_copies))
    for (name, part), share in zip(parts, _TIME_SHARES, strict=True):
        trial.deadline = began + share * seconds
        trial.latest = began + _DISAGREEMENT_FACTOR * seconds
        try:
            part(found)
        except Exception as error:  # requests may still be served after any error of a kernel
            log.exception("the calibration of %s failed", name)
            problem = problem or f"{name} could not be measured ({type(error).__name__}: {error})"
    runner.release_workspace()
    return Measured(found, trial.spread, problem)


def decode_ratio(
    runner: Runner,
    cache: CacheConfig,
    scheduler_config: SchedulerConfig,
    known: Calibration,
    *,
    vocab_size: int,
    clock: Callable[[], float] = time.monotonic,
) -> float:
    """The time of a decode step of one sequence, divided by its time in an earlier calibration.

    It is infinite if one of the two has no such step. Errors of the runner are not raised: `measure` reports them.
    """
    trial, found = _CalibrationRun(runner, cache, scheduler_config, vocab_size, clock), Calibration()
    trial.latest = inf
    with suppress(Exception):
        trial.measure_decode(found)
    runner.release_workspace()
    now, before = ([step.seconds for step in some.decode if step.num_rows == 1] for some in (found, known))
    return now[0] / before[0] if now and before and before[0] > 0 else inf


class _CalibrationRun:
    """Builds steps and runs them one after the other. Step ids and sequence ids are negative."""

    def __init__(
        self,
        runner: Runner,
        cache: CacheConfig,
        scheduler_config: SchedulerConfig,
        vocab_size: int,
        clock: Callable[[], float],
    ) -> None:
        self.deadline = 0.0  # time by which steps must end, of `clock`
        self.latest = 0.0  # time by which runs that disagree must end
        self.spread = 0.0
        self._runner = runner
        self._cache = cache
        self._scheduler_config = scheduler_config
        self._vocab_size = vocab_size
        self._clock = clock
        self._next_id = -1
        self._num_moves = 0

    # What is measured

    def measure_prefill(self, found: Calibration) -> None:
        """Measure chunks of growing length without context, at least two, then chunks with more and more context."""
        length = self._scheduler_config.max_model_len - 1
        most = min(length, self._scheduler_config.max_num_batched_tokens)
        size, seconds = min(_FIRST_CHUNK, most), 0.0
        self._open_rows({0: length})
        longest = 0
        while longest < most:
            if len(found.prefill) >= _LEAST_CHUNKS and not self._has_time(2 * seconds * _GROWTH**1.5):
                break
            seconds = self._measure_chunk(size, 0, found)
            longest, size = size, min(size * _GROWTH, most)
        small = min(_FIRST_CHUNK * _GROWTH, longest)
        if longest > small and self._has_time(2 * seconds):
            self._measure_chunk(small, longest - small, found)
        for at in range(longest, min(length, longest * _MAX_CHUNKS) - longest + 1, longest):
            if not self._has_time(3 * seconds):
                return
            seconds = self._measure_chunk(longest, at, found)
            self._measure_chunk(small, at + longest - small, found)

    def measure_decode(self, found: Calibration) -> None:
        """Measure decode steps with the batch sizes of _DECODE_BATCH_SIZES; at least one step, whatever the time."""
        length = min(_DECODE_PROMPT_TOKENS + _MOST_RUNS, self._scheduler_config.max_model_len - 1)
        prompt = min(_DECODE_PROMPT_TOKENS, length - 1)
        seconds = min((sample.seconds for sample in found.prefill), default=0.0)
        for count in _DECODE_BATCH_SIZES if prompt else ():
            rows = range(
                min(
                    count,
                    self._scheduler_config.max_num_seqs,
                    self._scheduler_config.max_num_batched_tokens // _DECODE_PROMPT_TOKENS,
                )
            )
            is_late = found.decode and not self._has_time(4 * seconds)
            if len(rows) < count or is_late:
                return
            self._open_rows(dict.fromkeys(rows, length))
            self._run_step([(row, -1 - row, 0, prompt, 0, 1, ChunkOutput.SAMPLE) for row in rows])

            def decode(run: int, rows: range = rows) -> float:
                at = min(prompt + run, length - 1)
                return self._run_step([(row, -1 - row, at, at + 1, 0, 1, ChunkOutput.SAMPLE) for row in rows]).seconds

            seconds = self._measure(decode)
            found.decode.append(DecodeSample(len(rows), seconds))

    def measure_copies(self, found: Calibration) -> None:
        """Measure copies of blocks to the host pool and back, of two sizes."""
        most = [
            min(group.num_blocks, group.num_host_blocks, max(1, _MAX_COPY_BYTES // group.bytes_per_block))
            for group in self._cache.pools
        ]
        if not any(most):
            return
        seconds = 0.0
        for part in (8, 1):
            for repeat in range(1 + _REPEATS):
                if not self._has_time(seconds * (1 if repeat else 10)):
                    return
                began = self._clock()
                counts = [-(-count // part) for count in most]
                out, _ = self._run_copy("device", "host", counts)
                _, back = self._run_copy("host", "device", counts)
                seconds = self._clock() - began
                size = sum(n * group.bytes_per_block for n, group in zip(counts, self._cache.pools, strict=True))
                if repeat:  # the first copy touches new memory pages
                    found.copies.append(CopySample(size, out, back))

    # Steps

    def _measure(self, run: Callable[[int], float]) -> float:
        """The seconds of a step: of its fastest run. Other programs make a run slower, but none makes it faster.

        Runs are added until the fastest two agree. run(i): the seconds of run i. The first one warms the kernels up.
        """
        seconds = sorted((run(0), run(1)))
        while (
            len(seconds) < _MOST_RUNS
            and seconds[1] > (1 + _AGREEMENT) * seconds[0]
            and self._clock() + seconds[0] <= self.latest
        ):
            seconds = sorted((*seconds, run(len(seconds))))
        self.spread = max(self.spread, seconds[1] / seconds[0] - 1)
        return seconds[0]

    def _has_time(self, seconds: float) -> bool:
        return self._clock() + seconds <= self.deadline

    def _open_rows(self, lengths: dict[int, int]) -> None:
        """Open rows for sequences of these lengths. If the pool has too few blocks, block tables overlap."""
        rows = list(lengths)
        block_size = self._cache.block_size
        width = -(-(max(lengths.values()) + 1) // block_size)
        self._run_step(
            [],
            new_rows=NewRows.of(
                rows=rows,
                seq_ids=[-1 - row for row in rows],
                prompt_lens=list(lengths.values()),
            ),
            tokens=TableUpdates.of([(row, 0, self._tokens(row, length)) for row, length in lengths.items()]),
            blocks=[
                TableUpdates.of(
                    [(row, 0, [(row * width + i) % group.num_blocks for i in range(width)]) for row in rows]
                )
                for group in self._cache.groups
            ],
        )

    def _tokens(self, row: int, length: int) -> list[int]:
        """Varied token ids, so that a mixture-of-experts model uses all its experts."""
        return [(7919 * at + 104_729 * row + 1) % self._vocab_size for at in range(length)]

    def _measure_chunk(self, size: int, at: int, found: Calibration) -> float:
        """Compute positions [at, at + size) of row 0. Returns the seconds of the step."""
        chunk = [(0, -1, at, at + size, 0, 1, ChunkOutput.SAMPLE)]
        seconds = self._measure(lambda _run: self._run_step(chunk).seconds)
        found.prefill.append(PrefillSample(size, at, seconds))
        return seconds

    def _run_copy(self, source: str, target: str, counts: Sequence[int]) -> tuple[float, float]:
        moves = []
        for group, count in enumerate(counts):
            if count:
                self._num_moves += 1
                pairs = [(block, block) for block in range(count)]
                moves.append(Move(-self._num_moves, group, source, target, pairs, self._cache.block_size))
        return self._run_step([], moves=moves).swap_seconds

    def _states(self, chunks: Sequence[tuple[int, ...]]) -> StateChunks | UnsetType:
        """The state blocks of chunks: that of a row has the row's number. All tokens of a chunk are applied."""
        if self._cache.states is None:
            return UNSET
        return StateChunks.of([(row, start, stop) for row, _, start, stop, *_ in chunks], [])

    def _run_step(
        self,
        chunks: Sequence[tuple[int, ...]],
        *,
        new_rows: NewRows | None = None,
        tokens: TableUpdates | None = None,
        blocks: list[TableUpdates] | None = None,
        moves: Sequence[Move] = (),
    ) -> StepResult:
        """Run one step. Raises errors of the runner, and RuntimeError for a failed step."""
        step = Step(
            self._next_id,
            new_rows is not None,
            NewRows.of(rows=[]) if new_rows is None else new_rows,
            TableUpdates.of([]) if tokens is None else tokens,
            [TableUpdates.of([]) for _ in self._cache.groups] if blocks is None else blocks,
            list(moves),
            Chunks.of(chunks),
            states=self._states(chunks),
        )
        self._next_id -= 1
        self._runner.launch(step)
        self._runner.sample(step.id, SamplingMasks.empty())
        result = self._runner.collect()
        if result.error:
            raise RuntimeError(result.error)
        return result
