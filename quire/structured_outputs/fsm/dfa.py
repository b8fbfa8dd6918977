"""Deterministic automata over bytes as transition tables."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

Rows = Sequence[Sequence[int]]  # next state by state and class of bytes; -1: none

DEAD = -1


@dataclass(frozen=True, slots=True, eq=False)
class Dfa:
    """The automaton of one language. The start is state 0. Every state can reach an accepting state.

    table: int32 (num_states + 1, num_classes), the next state or DEAD; the last row, all DEAD, is the row of DEAD.
    classes: uint8 (256,), the column of each byte. accepts: bool (num_states,), whether a text may end in the state.
    """

    table: np.ndarray
    classes: np.ndarray
    accepts: np.ndarray

    @property
    def num_states(self) -> int:
        """Number of states without DEAD."""
        return len(self.accepts)

    @property
    def by_byte(self) -> np.ndarray:
        """int32 (num_states, 256): the next state by byte, or DEAD."""
        return np.asarray(self.table[:-1, self.classes])

    def walk(self, state: int, data: bytes) -> int:
        """The state after these bytes, or DEAD."""
        item = self.table.item
        for column in data.translate(self.classes.tobytes()):
            state = item(state, column)
        return state

    def matches(self, data: bytes) -> bool:
        """Whether `data` is in the language."""
        state = self.walk(0, data)
        return state != DEAD and bool(self.accepts[state])


def assemble(rows: Rows, accepts: Sequence[bool], classes: np.ndarray) -> Dfa:
    """The automaton of these states from state 0, in breadth-first order. Equal classes are merged.

    Unreachable states are dropped. Every state must reach an accepting one. At least one class is needed.
    """
    order = {0: 0}
    for state in (queue := [0]):
        for target in rows[state]:
            if target != DEAD and target not in order:
                order[target] = len(order)
                queue.append(target)
    number = np.full(len(rows) + 1, DEAD, np.int32)
    number[queue] = np.arange(len(queue), dtype=np.int32)
    table = number[np.array([rows[state] for state in queue], np.int32)]
    columns, inverse = np.unique(table, axis=1, return_inverse=True)
    padded = np.concatenate([columns, np.full((1, columns.shape[1]), DEAD, np.int32)])
    merged = inverse.reshape(-1)[classes].astype(np.uint8)
    return Dfa(np.ascontiguousarray(padded), merged, np.array([accepts[state] for state in queue], bool))


class Edge(NamedTuple):
    """A transition to the state `target` by one of the bytes `first`, followed by all of `rest`."""

    first: bytes
    rest: bytes
    target: int


class CompressedFsm:
    """An automaton with compressed edges. A single-way state does not accept and has one transition by one byte."""

    def __init__(self, dfa: Dfa) -> None:
        self.dfa = dfa
        num_bytes = np.bincount(dfa.classes, minlength=dfa.table.shape[1])  # by class
        live = dfa.table[:-1] != DEAD
        single = (live @ num_bytes == 1) & ~dfa.accepts
        column = live.argmax(axis=1)
        byte_of_column = np.zeros(dfa.table.shape[1], np.int64)
        byte_of_column[dfa.classes] = np.arange(256)
        states = np.arange(dfa.num_states)
        self._byte = np.where(single, byte_of_column[column], DEAD)
        self._next = np.where(single, dfa.table[states, column], states)

    def forced_bytes(self, state: int) -> tuple[bytes, int]:
        """The forced bytes from this state on, and the state after them."""
        data = bytearray()
        while (byte := self._byte.item(state)) != DEAD:
            data.append(byte)
            state = self._next.item(state)
        return bytes(data), state

    def edges(self, state: int) -> list[Edge]:
        """The compressed edges of a state."""
        first_bytes: dict[tuple[bytes, int], list[int]] = defaultdict(list)
        for byte, target in enumerate(self.dfa.table[state, self.dfa.classes].tolist()):
            if target != DEAD:
                first_bytes[self.forced_bytes(target)].append(byte)
        return [Edge(bytes(first), rest, target) for (rest, target), first in first_bytes.items()]

    def states(self) -> list[int]:
        """The states that edges connect: the start and all that are not single-way."""
        return [state for state in range(self.dfa.num_states) if state == 0 or self._byte.item(state) == DEAD]

    def matches(self, data: bytes) -> bool:
        """Whether `data` is in the language, computed along the edges."""
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
