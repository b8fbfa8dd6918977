"""The smallest automaton of a language: states that no text tells apart become one (Moore's partition, refined).

A block that falls apart keeps its number for its largest part, so that a state changes blocks at most log2(n) times.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from quire.structured_outputs.fsm.dfa import DEAD, Dfa, Rows, assemble


def minimize(rows: Rows, accepts: Sequence[bool], classes: np.ndarray) -> Dfa | None:
    """The smallest automaton with the language of these states, of which 0 is the first. None: it has no text."""
    before = _predecessors(rows)
    alive = _reaching(before, [state for state, accepting in enumerate(accepts) if accepting])
    if 0 not in alive:
        return None
    rows = [[target if target in alive else DEAD for target in row] for row in rows] if len(alive) < len(rows) else rows
    block_of = _Partition(rows, accepts, before, alive).block_of
    order: dict[int, int] = {}
    for state in sorted(alive):
        order.setdefault(block_of[state], state)
    number = {block: i for i, block in enumerate(order)}
    number[DEAD] = DEAD
    merged = [[number[block_of[target]] for target in rows[state]] for state in order.values()]
    return assemble(merged, [accepts[state] for state in order.values()], classes)


def _predecessors(rows: Rows) -> list[list[int]]:
    before: list[list[int]] = [[] for _ in rows]
    for state, row in enumerate(rows):
        for target in set(row):
            if target != DEAD:
                before[target].append(state)
    return before


def _reaching(before: Sequence[Sequence[int]], ends: list[int]) -> set[int]:
    found = set(ends)
    for state in (queue := list(ends)):
        for other in before[state]:
            if other not in found:
                found.add(other)
                queue.append(other)
    return found


class _Partition:
    """block_of: by state, and DEAD for DEAD. Refined until states of one block lead to the same blocks."""

    def __init__(self, rows: Rows, accepts: Sequence[bool], before: Sequence[Sequence[int]], alive: set[int]) -> None:
        self._rows = rows
        self._before = before
        self._alive = alive
        self.block_of = [DEAD] * (len(rows) + 1)  # the last entry is that of DEAD
        self._members: list[set[int]] = []
        groups = defaultdict(list)
        for state in sorted(alive):
            groups[accepts[state], tuple(target == DEAD for target in rows[state])].append(state)
        changed: list[int] = []
        for group in groups.values():
            changed += self._new_block(group)
        while changed:
            changed = self._refine(changed)

    def _new_block(self, states: list[int]) -> list[int]:
        for state in states:
            self.block_of[state] = len(self._members)
        self._members.append(set(states))
        return states

    def _refine(self, changed: list[int]) -> list[int]:
        """What leads to states that changed may differ from its block now; the states that change blocks for it."""
        touched = {state for target in changed for state in self._before[target] if state in self._alive}
        block_of = self.block_of
        groups: dict[int, dict[tuple[int, ...], list[int]]] = defaultdict(lambda: defaultdict(list))
        for state in sorted(touched):
            groups[block_of[state]][tuple([block_of[target] for target in self._rows[state]])].append(state)
        moved: list[int] = []
        for block, parts in groups.items():
            moved += self._split(block, list(parts.values()))
        return moved

    def _split(self, block: int, parts: list[list[int]]) -> list[int]:
        """Parts of a block, and what is in none of them, become blocks; the largest stays."""
        rest = self._members[block]
        for part in parts:
            rest.difference_update(part)
        if rest:
            parts = [*parts, sorted(rest)]
        largest = max(parts, key=len)
        moved: list[int] = []
        for part in parts:
            if part is not largest:
                moved += self._new_block(part)
        self._members[block] = set(largest)
        return moved
