"""A runner without a model, for tests, benchmarks and simulation: the next token is a hash of all KV.

It keeps what a real one keeps (rows of tokens, block tables, the contents of blocks) and believes
only what Steps tell it. The KV of a position is a digest of all tokens up to it, and the token after
a position is a digest of all KV up to it, read through the block table: a lost copy, a stale block
or a wrong table entry anywhere changes what comes out, as it would with attention.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quire.config import CacheConfig
from quire.core.step import Chunk, ChunkOutput, Late, Step, StepResult

_MODULUS = 2**31 - 1
_NOTHING = -1


def key_after(key: int, token: int) -> int:
    """The KV of a token behind a prefix whose last KV is `key` (0 for an empty prefix)."""
    return (key * 48_271 + token * 7_919 + 12_345) % _MODULUS


def attend(keys: np.ndarray) -> int:
    """What a query sees of the KV before it: order matters, and so does every entry."""
    return int((keys * np.arange(1, len(keys) + 1)).sum() % _MODULUS)


def token_after(seen: int, vocab_size: int) -> int:
    """The token that follows what a query saw."""
    return seen * 40_692 % _MODULUS % vocab_size


def script(prompt: list[int], num_tokens: int, vocab_size: int) -> list[int]:
    """What a ScriptedRunner generates after `prompt`, computed without blocks or steps."""
    tokens, keys = list(prompt), [0]
    for token in prompt:
        keys.append(key_after(keys[-1], token))
    for _ in range(num_tokens):
        tokens.append(token_after(attend(np.array(keys[1:])), vocab_size))
        keys.append(key_after(keys[-1], tokens[-1]))
    return tokens[len(prompt) :]


@dataclass(slots=True)
class _InFlight:
    step_id: int
    chunks: list[Chunk]
    seconds: float
    tokens: list[int]


class ScriptedRunner:
    """Does what Steps say, on digests instead of tensors.

    seconds_of: duration of a step, given its number of tokens. fails: whether `launch` of a step is
    to raise after half of its work is done.
    """

    def __init__(
        self,
        cache: CacheConfig,
        *,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int = 1000,
        seconds_of: Callable[[int], float] = lambda num_tokens: 1e-3 + 1e-5 * num_tokens,
        fails: Callable[[Step], bool] = lambda step: False,
    ) -> None:
        self._block_size = cache.block_size
        self._kv = np.full((cache.groups[0].num_blocks, cache.block_size), _NOTHING, np.int64)
        self._tokens = np.full((max_num_seqs, max_model_len + 1), _NOTHING, np.int32)
        width = -(-(max_model_len + 1) // cache.block_size)
        self._tables = np.full((max_num_seqs, width), _NOTHING, np.int32)
        self._vocab_size = vocab_size
        self._seconds_of = seconds_of
        self._fails = fails
        self._launched: _InFlight | None = None
        self._sampled: deque[_InFlight] = deque()

    def launch(self, step: Step) -> None:
        """Apply the delta and compute the KV of every chunk."""
        if step.reset:
            self._tokens[:] = _NOTHING
            self._tables[:] = _NOTHING
            self._launched = None
            self._sampled.clear()
        for row in step.opens.rows.tolist():
            self._tokens[row] = _NOTHING
            self._tables[row] = _NOTHING
        step.tokens.apply(self._tokens)
        step.blocks[0].apply(self._tables)
        for move in step.moves:
            for source, target in move.pairs:
                self._kv[target, : move.num_tokens] = self._kv[source, : move.num_tokens]
        chunks = list(step.chunks)
        failing = self._fails(step)
        for chunk in chunks[: len(chunks) // 2] if failing else chunks:
            self._compute(chunk)
        if failing:
            raise RuntimeError(f"scripted failure of step {step.id}")
        self._launched = _InFlight(step.id, chunks, self._seconds_of(step.num_tokens), [])

    def sample(self, step_id: int, late: Late) -> None:
        """Write the next token of every chunk that samples."""
        del late
        launched = self._launched
        if launched is None or launched.step_id != step_id:
            raise ValueError(f"step {step_id} was not launched last")
        self._launched = None
        for chunk in launched.chunks:
            if chunk.output is ChunkOutput.SAMPLE:
                token = token_after(attend(self._keys(chunk.row, chunk.stop)), self._vocab_size)
                self._tokens[chunk.row, chunk.stop] = token
                launched.tokens.append(token)
        self._sampled.append(launched)

    def collect(self) -> StepResult:
        """The result of the oldest sampled step."""
        done = self._sampled.popleft()
        counts = np.array([chunk.output is ChunkOutput.SAMPLE for chunk in done.chunks], np.int32)
        return StepResult(done.step_id, done.seconds, counts, np.array(done.tokens, np.int32))

    def _compute(self, chunk: Chunk) -> None:
        before = self._keys(chunk.row, chunk.start)
        key = int(before[-1]) if chunk.start else 0
        for position in range(chunk.start, chunk.stop):
            token = int(self._tokens[chunk.row, position])
            block = self._tables[chunk.row, position // self._block_size]
            if token == _NOTHING or block == _NOTHING:
                raise ValueError(f"{chunk}: position {position} has token {token} and block {block}")
            key = key_after(key, token)
            self._kv[block, position % self._block_size] = key

    def _keys(self, row: int, stop: int) -> np.ndarray:
        """The KV of positions [0, stop) of a row, through its block table."""
        positions = np.arange(stop)
        keys: np.ndarray = self._kv[self._tables[row, positions // self._block_size], positions % self._block_size]
        if (keys == _NOTHING).any():
            raise ValueError(f"row {row} reads KV before {stop} that was never written")
        return keys
