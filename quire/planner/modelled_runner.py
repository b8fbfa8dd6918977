"""ModelledRunner: a runner without a model. It predicts how long a Step takes, and advances a virtual clock by that.

Tokens are a function of the request's seed and the position, or the recorded output of the request. So a simulation
with recorded outputs verifies the drafts of the real drafters.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from quire.config import CacheConfig
from quire.core.capabilities import Capabilities
from quire.core.runner import RowProcessors
from quire.core.step import Logprobs, SamplingMasks, Step, StepResult
from quire.cost.latency_profile import LatencyProfile

Outputs = Mapping[int, Sequence[int]]  # recorded output tokens, by the seed of a request
Fails = Callable[[Step], bool]
_MULTIPLIER = 2_654_435_761  # Knuth's multiplicative hash
_STRIDE = 40_503
_OF_SAMPLE = (
    1_000_003  # distance of the seeds of a request's sequences, above the seeds of requests with recorded outputs
)


class VirtualClock:
    """Seconds that pass only when the simulation says so."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """The current time in seconds."""
        return self.now

    def advance_to(self, when: float) -> None:
        """Advance the clock, never backwards."""
        self.now = max(self.now, when)


class ModelledRunner:
    """Implements Runner. Steps run one after the other; copies to and from the host run beside them."""

    capabilities = Capabilities()

    def __init__(
        self,
        profile: LatencyProfile,
        cache: CacheConfig,
        clock: VirtualClock,
        *,
        max_num_seqs: int,
        vocab_size: int,
        outputs: Outputs | None = None,
        fails: Fails | None = None,
    ) -> None:
        """outputs: tokens of requests that have recorded ones. fails: whether a step fails after its time."""
        self.busy_seconds = 0.0  # of all steps
        self._profile = profile
        self._clock = clock
        self._block_bytes = [pool.bytes_per_block for pool in cache.pools]
        self._vocab_size = vocab_size
        self._outputs: Outputs = {} if outputs is None else outputs  # may grow
        self._fails = fails
        self._seeds = np.zeros(max_num_seqs, np.int64)  # by row
        self._prompt_lens = np.zeros(max_num_seqs, np.int64)
        self._num_logprobs = np.full(max_num_seqs, -1, np.int64)
        self._in_flight: deque[tuple[Step, float, float]] = deque()  # step, its seconds, when it ends
        self._device_free_at = 0.0
        self._copies: dict[int, tuple[bool, float, float]] = {}  # move id -> to the host?, its seconds, when it ends
        self._link_free_at = [0.0, 0.0]  # to the host, and from it

    def launch(self, step: Step) -> None:
        """Predict the duration of the step and of its swaps."""
        opens = step.opens
        self._seeds[opens.rows] = opens.seeds.astype(np.int64) + opens.sample_indices * _OF_SAMPLE
        self._prompt_lens[opens.rows] = opens.prompt_lens
        self._num_logprobs[opens.rows] = opens.num_logprobs
        seconds = self._profile.step_seconds(step) + self._copy_seconds(step)
        begin = max(self._clock.now, self._device_free_at)
        self._device_free_at = begin + seconds
        self.busy_seconds += seconds
        for move in step.moves:
            if move.source != move.target:
                is_out = move.target == "host"
                copying = len(move.pairs) * self._block_bytes[move.group] * self._profile.seconds_per_byte
                start = max(begin, self._link_free_at[is_out])
                self._link_free_at[is_out] = start + copying
                self._copies[move.id] = is_out, copying, start + copying
        self._in_flight.append((step, seconds, self._device_free_at))

    def sample(self, step_id: int, masks: SamplingMasks, processors: Sequence[RowProcessors] = ()) -> None:
        """Do nothing: tokens depend on nothing that is known only now."""

    def collect(self) -> StepResult:
        """Advance the clock to the end of the oldest step. A step without chunks also waits for all copies."""
        step, seconds, ends = self._in_flight.popleft()
        self._clock.advance_to(ends)
        if not len(step.chunks) and self._copies:
            self._clock.advance_to(max(end for _, _, end in self._copies.values()))
        if self._fails is not None and self._fails(step):
            return StepResult.failed(step.id, "simulated failure")
        done = [move_id for move_id, (_, _, end) in self._copies.items() if end <= self._clock.now]
        copied = [0.0, 0.0]
        for move_id in done:
            is_out, copying, _ = self._copies.pop(move_id)
            copied[is_out] += copying
        counts, tokens, logprobs = self._tokens(step)
        swaps = copied[True], copied[False]
        return StepResult(step.id, seconds, counts, tokens, logprobs, done_moves=done, swap_seconds=swaps)

    def release_workspace(self) -> None:
        """See Runner. There is no memory to release."""

    def _copy_seconds(self, step: Step) -> float:
        """Seconds of the step's copies within the device: they read KV as attention does, and write as many bytes."""
        attention = self._profile.attention
        return sum(
            2 * attention[move.group].per_kv_token * move.num_tokens * len(move.pairs)
            if move.group < len(attention)
            else self._profile.state_copy_seconds(len(move.pairs))
            for move in step.moves
            if move.source == move.target
        )

    def _tokens(self, step: Step) -> tuple[np.ndarray, np.ndarray, Logprobs | None]:
        """(counts, tokens, candidates of beams) of the chunks that sample."""
        chunks = step.chunks
        samples, counts = chunks.samples, chunks.num_samples
        rows, drafts, stops = chunks.rows[samples], chunks.num_drafts[samples], chunks.stops[samples].astype(np.int64)
        seeds = self._seeds[rows]
        if drafts.any():
            sizes = drafts + 1
            seeds, ends = np.repeat(seeds, sizes), np.repeat(stops, sizes)
            within = np.arange(len(ends)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
            stops, rows = ends - np.repeat(drafts, sizes) + within, np.repeat(rows, sizes)
        tokens = token_at(seeds, stops, self._vocab_size)
        if self._outputs:
            for i, (seed, place) in enumerate(
                zip(seeds.tolist(), (stops - self._prompt_lens[rows]).tolist(), strict=True)
            ):
                recorded = self._outputs.get(seed)
                if recorded is not None and place < len(recorded):
                    tokens[i] = recorded[place]
        widest = int(self._num_logprobs[rows].max(initial=-1))
        return counts, tokens, None if widest < 0 else candidates_at(seeds, stops, widest, self._vocab_size)


_ZIPF = 2.0  # exponent: the most likely of many candidates has 1 / zeta(2), or 61 %


def candidates_at(seeds: np.ndarray, positions: np.ndarray, num_candidates: int, vocab_size: int) -> Logprobs:
    """Logprobs of `num_candidates` distinct tokens behind each position, most likely first, as a hash of both.

    Ranks follow Zipf's law on average: gaps between successive logprobs are exponential with mean _ZIPF / rank, as they
    are for the largest of many independent exponential values (Renyi, 1953). The first column is the most likely token.
    """
    ranks = np.arange(1, num_candidates + 1)
    hashes = token_at(seeds[:, None] + 7 * ranks, positions[:, None], 2**31 - 1)
    gaps = -np.log((hashes + 1.0) / 2**31) * (_ZIPF / ranks)
    values = -np.concatenate([np.zeros((len(seeds), 1)), np.cumsum(gaps[:, :-1], 1)], 1)
    values -= np.log(np.exp(values).sum(1, keepdims=True))
    ids = (token_at(seeds, positions, vocab_size)[:, None] + ranks * _STRIDE) % vocab_size
    columns = np.concatenate([ids[:, :1], ids], 1).astype(np.int32)
    return Logprobs(columns, np.concatenate([values[:, :1], values], 1).astype(np.float32), np.ones(len(ids), np.int32))


def token_at(seeds: np.ndarray, positions: np.ndarray, vocab_size: int) -> np.ndarray:
    """Tokens, int32: a hash of seed and position."""
    mixed = (seeds * _MULTIPLIER + positions * _STRIDE) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * _MULTIPLIER) & 0xFFFFFFFF
    tokens: np.ndarray = ((mixed ^ (mixed >> 13)) % vocab_size).astype(np.int32)
    return tokens
