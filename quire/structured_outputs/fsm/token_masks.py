"""An automaton over the tokens of one vocabulary: which may come in a state, where they lead, which have to come."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from quire.structured_outputs.forced_tokens import forced_tokens
from quire.structured_outputs.fsm.dfa import DEAD, Dfa, compress
from quire.structured_outputs.fsm.nfa import byte_ranges
from quire.structured_outputs.fsm.nodes import MAX_MASK_BYTES
from quire.structured_outputs.limits import MAX_FORCED, packed
from quire.structured_outputs.vocabulary import Vocabulary

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """The values of the keys that were asked for last, at most `most` of them."""

    def __init__(self, make: Callable[[K], V], most: int) -> None:
        self._make = make
        self._most = most
        self._values: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, key: K) -> V:
        """The value of a key; computed, by several threads at worst, where it is not known."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = self._make(key)
        with self._lock:
            self._values[key] = value
            while len(self._values) > self._most:
                self._values.popitem(last=False)
        return value


_NOT_ASCII = [span for low, high in ((0x80, 0xD7FF), (0xE000, 0x10FFFF)) for span in byte_ranges(low, high)]
_MANY = 64  # of 128 characters lead elsewhere: a state without much text
_WORTH = 4  # one token in so many may need a walk


class PlainTokens:
    """Which ASCII bytes each of the texts has, and whether it is whole characters."""

    def __init__(self, texts: list[bytes], data: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
        self._data, self._starts, self._lengths = data, starts, lengths
        bit = np.uint64(1) << (data & 63).astype(np.uint64)
        halves = [np.where(data >> 6 == half, bit, np.uint64(0)) for half in (0, 1)]
        self._ascii = [np.bitwise_or.reduceat(half, starts) if len(starts) else half for half in halves]
        self._is_ascii = np.array([text.isascii() for text in texts], bool)
        self._is_text = self._is_ascii | np.array([_is_text(text) for text in texts], bool)

    def ends(self, dfa: Dfa, state: int) -> np.ndarray | None:
        """int32 (num_texts,): where each text leads from this state. None where too many of them need a walk."""
        leaves = (dfa.table[state, dfa.classes[:128]] != state).astype(np.uint8)
        if leaves.sum() > _MANY:
            return None
        leaving = np.packbits(leaves, bitorder="little").view("<u8").astype(np.uint64)
        stays = ((self._ascii[0] & leaving[0]) | (self._ascii[1] & leaving[1])) == 0
        stays &= self._is_text if _returns(dfa, state) else self._is_ascii
        rest = np.flatnonzero(~stays)
        if len(rest) * _WORTH > len(stays):
            return None
        found = np.where(stays, np.int32(state), np.int32(DEAD))
        self._walk(dfa, state, rest, found)
        return found

    def _walk(self, dfa: Dfa, state: int, left: np.ndarray, found: np.ndarray) -> None:
        """Sets where each of the texts in `left` leads."""
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


def _returns(dfa: Dfa, state: int) -> bool:
    """Whether every character beyond ASCII leads from the state back to it."""
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


_FEW = 4  # where less than one in so many nodes of a level can be reached, only those are walked


class _Level(NamedTuple):
    """Nodes that are equally deep, in the order of their bytes: children of one node side by side."""

    parents: np.ndarray  # int64, as numpy wants its indices: places in the level above
    last: np.ndarray  # uint8: the byte that leads here
    first_child: np.ndarray  # int32: a place in the level below
    num_children: np.ndarray  # int32


class TokenTrie:
    """The tokens of one vocabulary that are text. Made once for each vocabulary, used by many automata."""

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
        self._node_of = np.full(self.size, self.num_nodes, np.int64)  # the last node, of no text, is never reached
        self._node_of[self._tokens] = nodes
        self.single = frozenset(text[0] for text, _ in texts if len(text) == 1)  # bytes that are tokens

    def ends(self, dfa: Dfa, state: int) -> np.ndarray:
        """int32 (size,): where each token leads from this state; DEAD where it does not fit, or is no text."""
        plain = self._plain.ends(dfa, state)
        if plain is not None:
            ends = np.full(self.size, DEAD, np.int32)
            ends[self._tokens] = plain
            return ends
        return self._walk(dfa, state).take(self._node_of)

    def _walk(self, dfa: Dfa, state: int) -> np.ndarray:
        """int32 (num_nodes + 1,): where each node of the trie leads."""
        found = np.full(self.num_nodes + 1, DEAD, np.int32)
        num_columns = dfa.table.shape[1]
        table = dfa.table.reshape(-1)
        above, alive = np.array([state], np.int32), np.zeros(1, np.int64)  # states of a level, places that are not DEAD
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
    """(place of the parent, place of the child in the level below) of all children of the places in `alive`."""
    nums = counts[alive]
    which = np.repeat(np.arange(len(alive)), nums)
    begins = np.cumsum(nums) - nums
    return alive[which], np.arange(len(which)) + (first[alive] - begins)[which]


def _levels(data: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> tuple[list[_Level], list[int], np.ndarray]:
    """The levels of sorted texts, where each begins among all nodes (and their number), and the node of each text."""
    nodes = np.zeros(len(starts), np.int64)
    rows: list[tuple[np.ndarray, np.ndarray]] = []
    offsets = [0]
    left = np.arange(len(starts))  # texts that are longer than the levels so far
    parents = np.zeros(len(starts), np.int32)  # their nodes there
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


_MAX_SPAN = 4096  # bytes that are tokenised at once
_MAX_SPANS = 1024  # that are remembered
_MAX_WALKS = 20_000_000  # states times nodes of the trie, up to which dead ends are looked for


class TokenFsm:
    """What a state allows, as tokens. All answers depend on the state alone, and are remembered within bounds."""

    def __init__(self, dfa: Dfa, trie: TokenTrie, vocabulary: Vocabulary) -> None:
        self._dfa = dfa
        self._trie = trie
        self._vocabulary = vocabulary
        self._compressed = compress(dfa)
        self._ends = frozenset(token for token in vocabulary.end_ids if token < vocabulary.size)
        self._can_write_all = _used_bytes(dfa) <= trie.single
        self._live = None if self._can_write_all else _live(dfa, trie)
        self.end_mask = packed(self._with_ends(np.zeros(vocabulary.size, bool)))
        self.mask = Recent(self._mask, max(1, MAX_MASK_BYTES // (4 * vocabulary.num_words)))
        self.forced = Recent(self._forced, _MAX_SPANS)

    def is_end(self, token: int) -> bool:
        """Whether the token ends a sequence."""
        return token in self._ends

    def accepts(self, state: int) -> bool:
        """Whether the text may end in this state."""
        return bool(self._dfa.accepts[state])

    def is_last(self, state: int) -> bool:
        """Whether nothing but the end may come."""
        return self.accepts(state) and bool((self._dfa.table[state] == DEAD).all())

    def is_stuck(self, state: int) -> bool:
        """Whether no token may come, and not the end: only where the vocabulary cannot write some byte."""
        return not self._can_write_all and not self.mask(state).any()

    def after(self, state: int, token: int) -> int:
        """The state behind the token, or DEAD."""
        if not 0 <= token < self._vocabulary.size or token in self._vocabulary.special_ids:
            return DEAD
        text = self._vocabulary.tokens[token]
        return self._dfa.walk(state, text) if text else DEAD

    def _mask(self, state: int) -> np.ndarray:
        """uint32 (num_words,): the tokens that may come, ends among them where the text may end."""
        ends = self._trie.ends(self._dfa, state)
        allowed = ends != DEAD if self._live is None else self._live[ends]
        return packed(self._with_ends(allowed) if self.accepts(state) else allowed)

    def _with_ends(self, allowed: np.ndarray) -> np.ndarray:
        allowed[list(self._ends)] = True
        return allowed

    def _forced(self, state: int) -> tuple[int, ...]:
        """The tokens that have to come, MAX_FORCED of them at most."""
        data, behind = self._compressed.span(state)
        if not data:
            return ()
        closed = len(data) <= _MAX_SPAN and self.is_last(behind)
        return tuple(forced_tokens(data[:_MAX_SPAN], self._vocabulary, closed=closed)[:MAX_FORCED])


def _used_bytes(dfa: Dfa) -> set[int]:
    """Bytes that some text of the language has."""
    used = (dfa.table != DEAD).any(axis=0)[dfa.classes]
    return set(np.flatnonzero(used).tolist())


def _live(dfa: Dfa, trie: TokenTrie) -> np.ndarray | None:
    """bool (num_states + 1,): whether tokens lead from a state to an end; the last, of DEAD, is False.

    None where that takes too long to find out: then a text may come to where no token goes on.
    """
    if dfa.num_states * trie.num_nodes > _MAX_WALKS:
        return None
    before: list[set[int]] = [set() for _ in range(dfa.num_states)]
    for state in range(dfa.num_states):
        for target in set(trie.ends(dfa, state).tolist()) - {DEAD}:
            before[target].add(state)
    live = np.append(dfa.accepts, False)
    for state in (queue := np.flatnonzero(live).tolist()):
        for other in sorted(before[state]):
            if not live[other]:
                live[other] = True
                queue.append(other)
    return live
