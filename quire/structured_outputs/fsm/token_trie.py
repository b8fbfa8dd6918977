"""A vocabulary as a trie of bytes in arrays, through which all tokens walk an automaton at once."""

from typing import NamedTuple

import numpy as np

from quire.structured_outputs.fsm.dfa import DEAD, Dfa
from quire.structured_outputs.fsm.plain_tokens import PlainTokens
from quire.structured_outputs.vocabulary import Vocabulary

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
