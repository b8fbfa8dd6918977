"""Transitions of an automaton over the tokens of one vocabulary."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from quire.structured_outputs.forced_tokens import forced_tokens
from quire.structured_outputs.fsm.dfa import DEAD, Dfa, compress
from quire.structured_outputs.fsm.nfa import byte_ranges
from quire.structured_outputs.fsm.nodes import MAX_MASK_BYTES
from quire.structured_outputs.limits import MAX_FORCED, pack_bitmask
from quire.structured_outputs.vocabulary import Vocabulary

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """LRU cache of `max_size` values. Thread-safe."""

    def __init__(self, make: Callable[[K], V], max_size: int) -> None:
        self._make = make
        self._max_size = max_size
        self._values: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, key: K) -> V:
        """The value of a key. Threads that miss the same key at once all compute it."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = self._make(key)
        with self._lock:
            self._values[key] = value
            while len(self._values) > self._max_size:
                self._values.popitem(last=False)
        return value


_NOT_ASCII = [span for low, high in ((0x80, 0xD7FF), (0xE000, 0x10FFFF)) for span in byte_ranges(low, high)]
_MAX_LEAVING_CHARACTERS = 64  # if more of the 128 ASCII characters leave the state, most texts need a walk
_MIN_TEXTS_PER_WALK = 4  # at most one text in so many may need a walk


class PlainTokens:
    """Fast path for states inside of free text, where most texts lead back to the state."""

    def __init__(self, texts: list[bytes], data: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
        self._data, self._starts, self._lengths = data, starts, lengths
        bit = np.uint64(1) << (data & 63).astype(np.uint64)
        halves = [np.where(data >> 6 == half, bit, np.uint64(0)) for half in (0, 1)]
        self._ascii = [np.bitwise_or.reduceat(half, starts) if len(starts) else half for half in halves]
        self._is_ascii = np.array([text.isascii() for text in texts], bool)
        self._is_text = self._is_ascii | np.array([_is_text(text) for text in texts], bool)

    def next_states(self, dfa: Dfa, state: int) -> np.ndarray | None:
        """int32 (num_texts,): the state after each text, or DEAD. None if too many texts need a walk."""
        leaves = (dfa.table[state, dfa.classes[:128]] != state).astype(np.uint8)
        if leaves.sum() > _MAX_LEAVING_CHARACTERS:
            return None
        leaving = np.packbits(leaves, bitorder="little").view("<u8").astype(np.uint64)
        stays = ((self._ascii[0] & leaving[0]) | (self._ascii[1] & leaving[1])) == 0
        stays &= self._is_text if _loops_on_non_ascii(dfa, state) else self._is_ascii
        rest = np.flatnonzero(~stays)
        if len(rest) * _MIN_TEXTS_PER_WALK > len(stays):
            return None
        found = np.where(stays, np.int32(state), np.int32(DEAD))
        self._walk(dfa, state, rest, found)
        return found

    def _walk(self, dfa: Dfa, state: int, left: np.ndarray, found: np.ndarray) -> None:
        """Set `found` for the texts in `left`, by a walk over their bytes."""
        table, num_columns = dfa.table.reshape(-1), dfa.table.shape[1]
        states = np.full(len(left), state)
        depth = 0
        while len(left):
            states = table[states * num_columns + dfa.classes[self._data[self._starts[left] + depth]]]
            depth += 1
            is_done = self._lengths[left] == depth
            found[left[is_done]] = states[is_done]
            goes_on = ~is_done & (states != DEAD)
            left, states = left[goes_on], states[goes_on]


def _loops_on_non_ascii(dfa: Dfa, state: int) -> bool:
    """Whether every non-ASCII character leads from the state back to it."""
    for spans in _NOT_ASCII:
        states = {state}
        for first, last in spans:
            columns = sorted(set(dfa.classes[first : last + 1].tolist()))
            states = {target for one in states for target in dfa.table[one, columns].tolist()}
        if states != {state}:
            return False
    return True


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


_FEW = 4  # if less than one in so many nodes of a level can be reached, only these are walked


class _Level(NamedTuple):
    """The nodes of one depth in the order of their bytes. Children of a node are adjacent."""

    parents: np.ndarray  # int64, numpy's type of indices: index in the level above
    last: np.ndarray  # uint8: the byte that leads to the node
    first_child: np.ndarray  # int32: index in the level below
    num_children: np.ndarray  # int32


class TokenTrie:
    """Trie of the text tokens of one vocabulary. All automata of the vocabulary share it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        kept_out = vocabulary.special_ids.union(vocabulary.end_ids)
        texts = [(text, token) for token, text in enumerate(vocabulary.tokens) if text and token not in kept_out]
        texts.sort()
        self._tokens = np.array([token for _, token in texts], np.int64)
        lengths = np.array([len(text) for text, _ in texts], np.int64)
        starts = np.cumsum(lengths) - lengths
        data = np.frombuffer(b"".join(text for text, _ in texts), np.uint8)
        self._levels, self._offsets, nodes = _levels(data, starts, lengths)
        self._plain = PlainTokens([text for text, _ in texts], data, starts, lengths)
        self.size = vocabulary.size
        self.num_nodes = self._offsets[-1]
        self._node_of = np.full(self.size, self.num_nodes, np.int64)  # of ids without text: never reached
        self._node_of[self._tokens] = nodes
        self.single = frozenset(text[0] for text, _ in texts if len(text) == 1)  # bytes with a token of their own

    def next_states(self, dfa: Dfa, state: int) -> np.ndarray:
        """int32 (size,): the state after each token; DEAD if the token is not allowed or no text."""
        plain = self._plain.next_states(dfa, state)
        if plain is not None:
            ends = np.full(self.size, DEAD, np.int32)
            ends[self._tokens] = plain
            return ends
        return self._walk(dfa, state).take(self._node_of)

    def _walk(self, dfa: Dfa, state: int) -> np.ndarray:
        """int32 (num_nodes + 1,): the state after each node of the trie, or DEAD."""
        found = np.full(self.num_nodes + 1, DEAD, np.int32)
        num_columns = dfa.table.shape[1]
        table = dfa.table.reshape(-1)
        above, alive = np.array([state], np.int32), np.zeros(1, np.int64)  # states of a level, indices of live nodes
        counts, first = np.array([len(self._levels[0].last)]), np.zeros(1, np.int64)
        for level, offset in zip(self._levels, self._offsets, strict=False):
            here = found[offset : offset + len(level.last)]
            if counts[alive].sum() * _FEW >= len(here):
                here[:] = table.take(above.take(level.parents) * num_columns + dfa.classes.take(level.last))
                alive = np.flatnonzero(here != DEAD)
            else:
                parents, places = _children(alive, counts, first)
                states = table[above[parents] * num_columns + dfa.classes[level.last[places]]]
                here[places] = states
                alive = places[states != DEAD]
            if not len(alive):
                break
            above, counts, first = here, level.num_children, level.first_child
        return found


def _children(alive: np.ndarray, counts: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(index of the parent, index in the level below) of all children of the nodes in `alive`."""
    nums = counts[alive]
    which = np.repeat(np.arange(len(alive)), nums)
    begins = np.cumsum(nums) - nums
    return alive[which], np.arange(len(which)) + (first[alive] - begins)[which]


def _levels(data: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> tuple[list[_Level], list[int], np.ndarray]:
    """Levels of sorted texts, index of the first node of each (and number of all nodes), node of each text."""
    nodes = np.zeros(len(starts), np.int64)
    rows: list[tuple[np.ndarray, np.ndarray]] = []
    offsets = [0]
    left = np.arange(len(starts))  # texts that are longer than `depth`
    parents = np.zeros(len(starts), np.int32)  # their nodes in the level above
    depth = 0
    while len(left):
        last = data[starts[left] + depth]
        is_new = np.ones(len(left), bool)
        is_new[1:] = (parents[1:] != parents[:-1]) | (last[1:] != last[:-1])
        own = np.cumsum(is_new, dtype=np.int32) - 1
        rows.append((parents[is_new], last[is_new]))
        nodes[left] = own + offsets[-1]
        offsets.append(offsets[-1] + int(is_new.sum()))
        depth += 1
        goes_on = lengths[left] > depth
        left, parents = left[goes_on], own[goes_on]
    levels = []
    for i, (above, last) in enumerate(rows):
        below = rows[i + 1][0] if i + 1 < len(rows) else np.zeros(0, np.int32)
        counts = np.bincount(below, minlength=len(last)).astype(np.int32)
        levels.append(_Level(above.astype(np.int64), last, np.cumsum(counts, dtype=np.int32) - counts, counts))
    return levels, offsets, nodes


_MAX_SPAN = 4096  # bytes that are tokenized at once
_MAX_SPANS = 1024  # in the cache of forced tokens
_MAX_WALKS = 20_000_000  # states times nodes of the trie, up to which dead ends are searched


class TokenFsm:
    """An automaton over tokens. mask, forced_tokens: those of a state, from bounded caches."""

    def __init__(self, dfa: Dfa, trie: TokenTrie, vocabulary: Vocabulary) -> None:
        self._dfa = dfa
        self._trie = trie
        self._vocabulary = vocabulary
        self._compressed = compress(dfa)
        self._ends = frozenset(token for token in vocabulary.end_ids if token < vocabulary.size)
        self._can_write_all = _used_bytes(dfa) <= trie.single
        self._live = None if self._can_write_all else _live(dfa, trie)
        self.end_mask = pack_bitmask(self._with_ends(np.zeros(vocabulary.size, bool)))
        self.mask = LruCache(self._mask, max(1, MAX_MASK_BYTES // (4 * vocabulary.num_words)))
        self.forced_tokens = LruCache(self._forced_tokens, _MAX_SPANS)

    def is_end(self, token: int) -> bool:
        """Whether the token ends a sequence."""
        return token in self._ends

    def accepts(self, state: int) -> bool:
        """Whether the text may end in this state."""
        return bool(self._dfa.accepts[state])

    def is_terminated(self, state: int) -> bool:
        """Whether only the end of the text is possible."""
        return self.accepts(state) and bool((self._dfa.table[state] == DEAD).all())

    def is_stuck(self, state: int) -> bool:
        """Whether neither a token nor the end is possible. Needs a byte that the vocabulary cannot write."""
        return not self._can_write_all and not self.mask(state).any()

    def next_state(self, state: int, token: int) -> int:
        """The state after a token; DEAD if the token is not allowed or no text."""
        if not 0 <= token < self._vocabulary.size or token in self._vocabulary.special_ids:
            return DEAD
        text = self._vocabulary.tokens[token]
        return self._dfa.walk(state, text) if text else DEAD

    def _mask(self, state: int) -> np.ndarray:
        """uint32 (num_words,): the allowed tokens, with the end tokens if the text may end."""
        ends = self._trie.next_states(self._dfa, state)
        allowed = ends != DEAD if self._live is None else self._live[ends]
        return pack_bitmask(self._with_ends(allowed) if self.accepts(state) else allowed)

    def _with_ends(self, allowed: np.ndarray) -> np.ndarray:
        allowed[list(self._ends)] = True
        return allowed

    def _forced_tokens(self, state: int) -> tuple[int, ...]:
        """The forced tokens of a state, at most MAX_FORCED."""
        data, behind = self._compressed.forced_bytes(state)
        if not data:
            return ()
        closed = len(data) <= _MAX_SPAN and self.is_terminated(behind)
        return tuple(forced_tokens(data[:_MAX_SPAN], self._vocabulary, closed=closed)[:MAX_FORCED])


def _used_bytes(dfa: Dfa) -> set[int]:
    """The bytes that occur in texts of the language."""
    used = (dfa.table != DEAD).any(axis=0)[dfa.classes]
    return set(np.flatnonzero(used).tolist())


def _live(dfa: Dfa, trie: TokenTrie) -> np.ndarray | None:
    """bool (num_states + 1,): whether tokens lead from a state to an accepting state; the last, of DEAD, is False.

    None above _MAX_WALKS: then a text may reach a state in which no token is allowed.
    """
    if dfa.num_states * trie.num_nodes > _MAX_WALKS:
        return None
    before: list[set[int]] = [set() for _ in range(dfa.num_states)]
    for state in range(dfa.num_states):
        for target in set(trie.next_states(dfa, state).tolist()) - {DEAD}:
            before[target].add(state)
    live = np.append(dfa.accepts, False)
    for state in (queue := np.flatnonzero(live).tolist()):
        for other in sorted(before[state]):
            if not live[other]:
                live[other] = True
                queue.append(other)
    return live
