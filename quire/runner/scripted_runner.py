"""A runner without a model, for tests, benchmarks and simulation: the next token is a hash of all KV.

Its state is that of a real runner (rows of tokens, block tables, contents of blocks), and comes from Steps only. A
recurrent state is a digest of all tokens up to its position, and the next token depends on it, too. The
KV of a position is a hash of all tokens up to it. The token after a position is a hash of all KV up to it (in a window
group: of the KV in the window), read through the block tables. So a lost copy, a stale block or a wrong table entry
changes the output, as it would with attention.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from quire.config import CacheConfig
from quire.core.capabilities import Capabilities
from quire.core.runner import RowProcessors
from quire.core.step import Chunk, ChunkOutput, Logprobs, Move, SamplingMasks, StateChunks, Step, StepResult

_MODULUS = 2**31 - 1
_UNSET = -1


def key_after(key: int, token: int, adapter: int = 0) -> int:
    """The KV of a token after a prefix whose last KV is `key` (0 for an empty prefix). adapter: of `adapter_key`."""
    return (key * 48_271 + token * 7_919 + 12_345 + adapter) % _MODULUS


def adapter_key(digest: str) -> int:
    """What an adapter adds to the KV of a token; 0 without one."""
    return int.from_bytes(sha256(digest.encode()).digest()[:7]) % _MODULUS if digest else 0


def attend(keys: np.ndarray) -> int:
    """Attention output of a query over `keys`: a hash that depends on every entry and on the order."""
    return int((keys * np.arange(1, len(keys) + 1)).sum() % _MODULUS)


def token_after(seen: int, vocab_size: int) -> int:
    """The next token for an attention output `seen`."""
    return seen * 40_692 % _MODULUS % vocab_size


def state_after(state: int, token: int, adapter: int = 0) -> int:
    """The recurrent state behind a token, from that before it (0 before the first). adapter: of `adapter_key`."""
    return (state * 69_621 + token * 16_807 + 54_321 + adapter) % _MODULUS


@dataclass(frozen=True, slots=True)
class _StateBlock:
    """A state block: the state behind position `settled`, and the inputs of the tokens from there on."""

    settled: int
    state: int
    inputs: tuple[tuple[int, int], ...]  # token, and what its adapter adds

    def after(self, count: int) -> int:
        """The state behind the first `count` inputs."""
        state = self.state
        for token, added in self.inputs[:count]:
            state = state_after(state, token, added)
        return state


def script(
    prompt: list[int],
    num_tokens: int,
    vocab_size: int,
    windows: Sequence[int] = (0,),
    *,
    adapter: str = "",
    adapter_start: int = 0,
    has_states: bool = False,
) -> list[int]:
    """The output of a ScriptedRunner after `prompt`, computed without blocks or steps. windows: of the KV groups.

    adapter: its digest. has_states: whether the cache has recurrent states.
    """
    tokens, keys, added, state = list(prompt), [0], adapter_key(adapter), 0
    for position, token in enumerate(prompt):
        here = added if position >= adapter_start else 0
        keys.append(key_after(keys[-1], token, here))
        state = state_after(state, token, here)
    for _ in range(num_tokens):
        every = np.array(keys[1:])
        seen = sum(attend(every[-window:]) for window in windows)
        tokens.append(token_after(seen + state if has_states else seen, vocab_size))
        keys.append(key_after(keys[-1], tokens[-1], added))
        state = state_after(state, tokens[-1], added)
    return tokens[len(prompt) :]


def logprobs_after(seen: int, vocab_size: int) -> np.ndarray:
    """Logprobs (vocab_size,) of the next token for an attention output `seen`; no two are equal."""
    order = (seen + np.arange(vocab_size) * 7_919) % _MODULUS * 40_692 % _MODULUS
    scores = -((order % 1009) / 200 + np.arange(vocab_size) * 1e-4)
    logprobs: np.ndarray = (scores - np.log(np.exp(scores).sum())).astype(np.float32)
    return logprobs


class _Swap:
    """A Move to or from the host. Its blocks are written when it is done."""

    def __init__(self, step_id: int, move: Move, source: np.ndarray, target: np.ndarray, num_collects: int) -> None:
        """source, target: all blocks of both tiers. num_collects: results before its end. ValueError: KV is unset."""
        self.step_id = step_id
        self._move = move
        self._source = source
        self._target = target
        self._keys = source[[block for block, _ in move.pairs], : move.num_tokens].copy()
        self._targets = [block for _, block in move.pairs]
        self.num_collects = num_collects
        self.is_done = False
        if (self._keys == _UNSET).any():
            raise ValueError(f"{move}: it reads KV that was never written")
        target[self._targets] = _UNSET

    @property
    def is_swap_in(self) -> bool:
        """Whether it copies from the host."""
        return self._move.source == "host"

    @property
    def num_blocks(self) -> int:
        """Blocks that it copies."""
        return len(self._targets)

    def end(self) -> None:
        """Write the target blocks. Raises ValueError if they, or host blocks that it reads, were changed meanwhile."""
        if self.is_done:
            return
        self.is_done = True
        sources = [block for block, _ in self._move.pairs]
        if self.is_swap_in and (self._source[sources, : self._move.num_tokens] != self._keys).any():
            raise ValueError(f"{self._move}: a block that it reads was overwritten")
        if (self._target[self._targets] != _UNSET).any():
            raise ValueError(f"{self._move}: a block that it writes was written by another owner")
        self._target[self._targets, : self._move.num_tokens] = self._keys


@dataclass(slots=True)
class _InFlight:
    step_id: int
    chunks: list[Chunk]
    seconds: float
    prompt_logprobs: list[tuple[int, int]]  # prompt token, position
    pooled: list[tuple[int, int]]  # number of tokens, their sum
    tokens: list[int]
    logprobs: list[tuple[int, np.ndarray, int]]  # token, logprobs of the vocabulary, number to report


class ScriptedRunner:
    """Executes Steps on hashes instead of tensors.

    The adapter of a row changes the KV of its positions from the adapter's start on.
    Logprobs of the next token are a function of the attention output. A prompt token's logprob is minus its position.
    The pooled state of a chunk is the number and the sum of its tokens.
    seconds_of: duration of a step, given its number of tokens. swap_seconds_of: the same of swaps in one direction,
    given their number of blocks. swap_delay_of: number of results that are returned before a swap is done. fails:
    whether `launch` of a step raises after half of its chunks.
    """

    capabilities = Capabilities(steps_in_flight=4, adapters=True)

    def __init__(
        self,
        cache: CacheConfig,
        *,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int = 1000,
        seconds_of: Callable[[int], float] = lambda num_tokens: 1e-3 + 1e-5 * num_tokens,
        swap_seconds_of: Callable[[int], float] = lambda num_blocks: 1e-5 * num_blocks,
        swap_delay_of: Callable[[Move], int] = lambda move: 0,
        fails: Callable[[Step], bool] = lambda step: False,
    ) -> None:
        self._block_size = cache.block_size
        self._kinds = [group.kind for group in cache.groups]
        self._kv = [np.full((group.num_blocks, cache.block_size), _UNSET, np.int64) for group in cache.groups]
        self._host = [np.full((group.num_host_blocks, cache.block_size), _UNSET, np.int64) for group in cache.groups]
        self._has_states = cache.states is not None
        counts = (0, 0) if cache.states is None else (cache.states.num_blocks, cache.states.num_host_blocks)
        self._states, self._host_states = (np.full((count, 1), _UNSET, np.int64) for count in counts)
        self._state_blocks: list[_StateBlock] = []  # that were written; `_states` has indices
        self._after: list[list[int]] = []  # per chunk, the states behind its positions
        self._tokens = np.full((max_num_seqs, max_model_len + 1), _UNSET, np.int32)
        self._num_logprobs = np.full(max_num_seqs, -1, np.int32)
        width = -(-(max_model_len + 1) // cache.block_size)
        self._tables = [np.full((max_num_seqs, width), _UNSET, np.int32) for _ in cache.groups]
        self._slots: dict[int, int] = {0: 0}  # what the adapter in a slot adds to KV
        self._adapters = np.zeros((max_num_seqs, 2), np.int32)  # per row: slot, first position
        self._vocab_size = vocab_size
        self.seconds_of = seconds_of
        self.swap_seconds_of = swap_seconds_of
        self._swap_delay_of = swap_delay_of
        self._swaps: dict[int, _Swap] = {}  # not in a result yet, by Move id
        self._fails = fails
        self._launched: _InFlight | None = None
        self.sampled: deque[_InFlight] = deque()

    def launch(self, step: Step) -> None:
        """Apply the delta, start the Moves, compute the KV of every chunk.

        Raises ValueError if it reads unset KV or an empty slot.
        """
        if step.reset:
            self._slots = {0: 0}
            self._tokens[:] = _UNSET
            for table in self._tables:
                table[:] = _UNSET
            self._launched = None
            self.sampled.clear()
            for swap in self._swaps.values():
                swap.end()
        self._slots.update((slot, adapter_key(digest)) for slot, digest in step.adapters)
        self._adapters[step.opens.rows] = np.stack([step.opens.adapters, step.opens.adapter_starts], 1)
        for row in step.opens.rows.tolist():
            self._tokens[row] = _UNSET
            for table in self._tables:
                table[row] = _UNSET
        self._num_logprobs[step.opens.rows] = step.opens.num_logprobs
        step.tokens.apply(self._tokens)
        for writes, table in zip(step.blocks, self._tables, strict=True):
            writes.apply(table)
        for move in step.moves:
            self._move(step.id, move)
        chunks = list(step.chunks)
        failing = self._fails(step)
        self._after = []
        for index, chunk in enumerate(chunks[: len(chunks) // 2] if failing else chunks):
            self._compute(chunk)
            if self._has_states and isinstance(step.states, StateChunks):
                self._recur(chunk, step.states, index)
        if failing:
            raise RuntimeError(f"scripted failure of step {step.id}")
        scored = [
            one for chunk in chunks if chunk.output is not ChunkOutput.POOL for one in self._prompt_logprobs(chunk)
        ]
        pooled = [self._pool(chunk) for chunk in chunks if chunk.output is ChunkOutput.POOL]
        seconds = self.seconds_of(step.num_tokens)
        self._launched = _InFlight(step.id, chunks, seconds, scored, pooled, [], [])

    def sample(self, step_id: int, masks: SamplingMasks, processors: Sequence[RowProcessors] = ()) -> None:
        """Write the next token of every chunk that samples."""
        del masks, processors
        launched = self._launched
        if launched is None or launched.step_id != step_id:
            raise ValueError(f"step {step_id} is not the last launched step")
        self._launched = None
        for index, chunk in enumerate(launched.chunks):
            if chunk.output is not ChunkOutput.SAMPLE:
                continue
            for stop in range(chunk.stop - chunk.num_drafts, chunk.stop + 1):
                seen = sum(attend(self._keys(chunk.row, stop, group)) for group in range(len(self._kv)))
                seen += self._after[index][stop - chunk.start - 1] if self._has_states else 0
                token = token_after(seen, self._vocab_size)
                launched.tokens.append(token)
                launched.logprobs.append((token, logprobs_after(seen, self._vocab_size), self._num_logprobs[chunk.row]))
            if not chunk.num_drafts:
                self._tokens[chunk.row, chunk.stop] = token
        self.sampled.append(launched)

    def collect(self) -> StepResult:
        """The result of the oldest sampled step, and of the swaps that are done."""
        done = self.sampled.popleft()
        begun = {i: one for i, one in self._swaps.items() if one.step_id <= done.step_id}
        ended = {i: one for i, one in begun.items() if one.is_done or one.num_collects <= 0 or not done.chunks}
        for move_id, swap in ended.items():
            swap.end()
            del self._swaps[move_id]
        for swap in begun.values():
            swap.num_collects -= 1
        num_out, num_in = (sum(s.num_blocks for s in ended.values() if s.is_swap_in is back) for back in (False, True))
        counts = np.array([_num_samples(chunk) for chunk in done.chunks], np.int32)
        tokens = np.array(done.tokens, np.int32)
        scored = None
        if done.prompt_logprobs:
            ids, positions = np.array(done.prompt_logprobs, np.int32).T
            scored = Logprobs(ids[:, None], -positions[:, None].astype(np.float32), np.ones_like(ids))
        pooled = np.array(done.pooled, np.float32) if done.pooled else None
        return StepResult(
            done.step_id,
            done.seconds,
            counts,
            tokens,
            _top_logprobs(done.logprobs),
            prompt_logprobs=scored,
            pooled=pooled,
            done_moves=list(ended),
            swap_seconds=(self.swap_seconds_of(num_out), self.swap_seconds_of(num_in)),
        )

    def release_workspace(self) -> None:
        """See Runner. There is no memory to release."""

    def _move(self, step_id: int, move: Move) -> None:
        """Execute a copy within the device, or start a swap."""
        is_state = move.group == len(self._kv)
        tiers = {
            "device": self._states if is_state else self._kv[move.group],
            "host": self._host_states if is_state else self._host[move.group],
        }
        num_tokens = 1 if is_state else move.num_tokens
        source, target = tiers[move.source], tiers[move.target]
        if move.source != move.target:
            self._swaps[move.id] = _Swap(step_id, move, source, target, self._swap_delay_of(move))
            return
        keys = source[[block for block, _ in move.pairs], :num_tokens].copy()
        target[[block for _, block in move.pairs], :num_tokens] = keys

    def _compute(self, chunk: Chunk) -> None:
        key = int(self._read(chunk.row, np.array([chunk.start - 1]), 0)[0]) if chunk.start else 0
        slot, adapter_start = self._adapters[chunk.row].tolist()
        if slot not in self._slots:
            raise ValueError(f"{chunk}: no adapter was put into slot {slot}")
        for position in range(chunk.start, chunk.stop):
            token = int(self._tokens[chunk.row, position])
            key = key_after(key, token, self._slots[slot] if position >= adapter_start else 0)
            for kv, table in zip(self._kv, self._tables, strict=True):
                block = table[chunk.row, position // self._block_size]
                if token == _UNSET or block == _UNSET:
                    raise ValueError(f"{chunk}: position {position} has token {token} and block {block}")
                kv[block, position % self._block_size] = key

    def _recur(self, chunk: Chunk, states: StateChunks, index: int) -> None:
        """Update the state block of a chunk and write its snapshots. Raises ValueError for a block of another state."""
        block, settled, settles = (int(column[index]) for column in (states.blocks, states.settled, states.settles))
        there = int(self._states[block, 0])
        before = _StateBlock(0, 0, ()) if not chunk.start else None if there < 0 else self._state_blocks[there]
        if before is None or before.settled != settled or len(before.inputs) < chunk.start - settled:
            raise ValueError(f"{chunk}: block {block} has {before}, not the state behind position {settled}")
        slot, adapter_start = self._adapters[chunk.row].tolist()
        own = [
            (int(self._tokens[chunk.row, at]), self._slots[slot] if at >= adapter_start else 0)
            for at in range(chunk.start, chunk.stop)
        ]
        every = _StateBlock(settled, before.state, (*before.inputs[: chunk.start - settled], *own))
        self._after.append([every.after(at + 1 - settled) for at in range(chunk.start, chunk.stop)])

        def write(target: int, position: int, stop: int) -> None:
            count = position - settled
            self._states[target] = len(self._state_blocks)
            self._state_blocks.append(_StateBlock(position, every.after(count), every.inputs[count : stop - settled]))

        for at in np.flatnonzero(states.snapshot_chunks == index).tolist():
            position = int(states.snapshot_positions[at])
            write(int(states.snapshot_blocks[at]), position, position)
        write(block, settles, chunk.stop)

    def _prompt_logprobs(self, chunk: Chunk) -> list[tuple[int, int]]:
        """(token, position) after each position with logits from which nothing is sampled."""
        positions = range(chunk.stop - chunk.num_logits + 1, chunk.stop - _num_samples(chunk) + 1)
        return [(int(self._tokens[chunk.row, position]), position) for position in positions]

    def _pool(self, chunk: Chunk) -> tuple[int, int]:
        tokens = self._tokens[chunk.row, chunk.stop - chunk.num_logits : chunk.stop]
        return len(tokens), int(tokens.sum())

    def _keys(self, row: int, stop: int, group: int) -> np.ndarray:
        """The KV of a group that a query at position `stop - 1` reads, through its block table."""
        return self._read(row, np.arange(self._kinds[group].first_attended(stop - 1), stop), group)

    def _read(self, row: int, positions: np.ndarray, group: int) -> np.ndarray:
        blocks = self._tables[group][row, positions // self._block_size]
        keys: np.ndarray = self._kv[group][blocks, positions % self._block_size]
        if (blocks == _UNSET).any() or (keys == _UNSET).any():
            raise ValueError(f"row {row} reads KV of positions {positions} that was never written")
        return keys


def _num_samples(chunk: Chunk) -> int:
    return chunk.num_drafts + 1 if chunk.output is ChunkOutput.SAMPLE else 0


def _top_logprobs(likely: list[tuple[int, np.ndarray, int]]) -> Logprobs | None:
    """Logprobs of the sampled tokens and of as many most likely ones as their rows requested; None if none did."""
    widest = max((number for _, _, number in likely), default=-1)
    if widest < 0:
        return None
    ids = np.full((len(likely), widest + 1), -1, np.int32)
    values = np.full((len(likely), widest + 1), -np.inf, np.float32)
    for i, (token, logprobs, number) in enumerate(likely):
        best = np.argsort(-logprobs, kind="stable")[: max(number, 0)]
        ids[i, 0], values[i, 0] = token, logprobs[token]
        ids[i, 1 : len(best) + 1], values[i, 1 : len(best) + 1] = best, logprobs[best]
    return Logprobs(ids, values, np.ones(len(likely), np.int32))
