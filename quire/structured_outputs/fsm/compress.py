"""Compression of an automaton: single-way paths become one edge, labelled with all their bytes.

The compressed finite state machine of SGLang (Zheng and others, 2024, section 4): where text has to come, all of it
is known at once.
"""

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from quire.structured_outputs.fsm.dfa import DEAD, Dfa


class Edge(NamedTuple):
    """One of the bytes `first`, and then all of `rest`, lead to the state `target`."""

    first: bytes
    rest: bytes
    target: int


class CompressedFsm:
    """An automaton and its single-way states: where a text may not end, and one byte alone may come."""

    def __init__(self, dfa: Dfa) -> None:
        self.dfa = dfa
        num_bytes = np.bincount(dfa.classes, minlength=dfa.table.shape[1])  # of each class
        live = dfa.table[:-1] != DEAD
        single = (live @ num_bytes == 1) & ~dfa.accepts
        column = live.argmax(axis=1)
        byte_of_column = np.zeros(dfa.table.shape[1], np.int64)
        byte_of_column[dfa.classes] = np.arange(256)
        states = np.arange(dfa.num_states)
        self._byte = np.where(single, byte_of_column[column], DEAD)
        self._next = np.where(single, dfa.table[states, column], states)

    def span(self, state: int) -> tuple[bytes, int]:
        """The bytes that have to come from this state on, and the state behind them."""
        data = bytearray()
        while (byte := self._byte.item(state)) != DEAD:
            data.append(byte)
            state = self._next.item(state)
        return bytes(data), state

    def edges(self, state: int) -> list[Edge]:
        """The ways out of a state."""
        ways: dict[tuple[bytes, int], list[int]] = defaultdict(list)
        for byte, target in enumerate(self.dfa.table[state, self.dfa.classes].tolist()):
            if target != DEAD:
                ways[self.span(target)].append(byte)
        return [Edge(bytes(first), rest, target) for (rest, target), first in ways.items()]

    def kept(self) -> list[int]:
        """The states that edges begin and end in: the first one, and those that are not single-way."""
        return [state for state in range(self.dfa.num_states) if state == 0 or self._byte.item(state) == DEAD]

    def matches(self, data: bytes) -> bool:
        """Whether all of it is in the language, told along the edges."""
        state = 0
        while data:
            for first, rest, target in self.edges(state):
                if data[0] in first and data.startswith(rest, 1):
                    data, state = data[1 + len(rest) :], target
                    break
            else:
                return False
        return bool(self.dfa.accepts[state])


def compress(dfa: Dfa) -> CompressedFsm:
    """The automaton with its single-way paths as edges."""
    return CompressedFsm(dfa)
