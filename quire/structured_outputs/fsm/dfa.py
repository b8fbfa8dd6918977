"""A deterministic automaton over bytes as a table, without states from which no text ends."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Rows = Sequence[Sequence[int]]  # for each state the next one by class of bytes; -1: none

DEAD = -1


@dataclass(frozen=True, slots=True, eq=False)
class Dfa:
    """The automaton of one language. It begins in state 0; states are numbered as they are met from there.

    table: int32 (num_states + 1, num_classes), the next state or DEAD; the last row, all DEAD, is what DEAD finds.
    classes: uint8 (256,), the column of each byte. accepts: bool (num_states,), whether a text may end.
    """

    table: np.ndarray
    classes: np.ndarray
    accepts: np.ndarray

    @property
    def num_states(self) -> int:
        """Without the dead one."""
        return len(self.accepts)

    @property
    def by_byte(self) -> np.ndarray:
        """int32 (num_states, 256): the table without classes."""
        return np.asarray(self.table[:-1, self.classes])

    def walk(self, state: int, data: bytes) -> int:
        """The state behind these bytes, or DEAD."""
        item = self.table.item
        for column in data.translate(self.classes.tobytes()):
            state = item(state, column)
        return state

    def matches(self, data: bytes) -> bool:
        """Whether all of it is in the language."""
        state = self.walk(0, data)
        return state != DEAD and bool(self.accepts[state])


def assemble(rows: Rows, accepts: Sequence[bool], classes: np.ndarray) -> Dfa:
    """The automaton that begins in state 0 of these: what is not met is left out, classes that are alike are one.

    Every state must be able to reach an end. At least one class.
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
