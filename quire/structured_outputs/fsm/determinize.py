"""Sets of states become states: the subset construction, over classes of bytes that no arc tells apart."""

from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from quire.structured_outputs.fsm.dfa import DEAD
from quire.structured_outputs.fsm.limits import MAX_DFA_STATES, MAX_EFFORT, too_complex
from quire.structured_outputs.fsm.nfa import ACCEPT, Nfa

States = frozenset[int]  # of an Nfa: those with arcs, and ACCEPT


class Determinized:
    """rows: for each state the next one by class, -1 where there is none. accepts: by state. classes: uint8 (256,)."""

    def __init__(self, nfa: Nfa, param: str) -> None:
        self._nfa = nfa
        self._param = param
        self._effort = 0
        self._closures: dict[int, States] = {}
        self._unions: dict[frozenset[int], States] = {}
        self.classes, self._column = _classes(nfa)
        self.rows: list[list[int]] = []
        self.accepts: list[bool] = []
        self._run()

    def _run(self) -> None:
        num_classes = int(self.classes[-1]) + 1
        start = self._closure(self._nfa.start)
        numbers = {start: 0}
        for states in (queue := [start]):
            row = [DEAD] * num_classes
            for first, stop, targets in self._spans(states):
                found = self._union(targets)
                if not found:
                    continue
                number = numbers.get(found)
                if number is None:
                    number = numbers[found] = len(queue)
                    queue.append(found)
                    if number >= MAX_DFA_STATES:
                        raise too_complex("states", MAX_DFA_STATES, self._param)
                row[first:stop] = [number] * (stop - first)
            self.rows.append(row)
            self.accepts.append(ACCEPT in states)

    def _spans(self, states: States) -> Iterable[tuple[int, int, frozenset[int]]]:
        """(first class, one behind the last, targets): where the arcs of these states lead to the same."""
        column = self._column
        arcs = [self._nfa.arcs[state] for state in states if state != ACCEPT]
        if len(arcs) == 1:
            first, last, target = arcs[0]
            self._work(1)
            return [(column[first], column[last + 1], frozenset((target,)))]
        cuts = sorted({column[edge] for first, last, _ in arcs for edge in (first, last + 1)})
        self._work(len(arcs) * len(cuts))
        spans = [(column[first], column[last + 1], target) for first, last, target in arcs]
        found = (
            (cut, end, frozenset(target for first, stop, target in spans if first <= cut < stop))
            for cut, end in pairwise(cuts)
        )
        return [span for span in found if span[2]]

    def _union(self, targets: frozenset[int]) -> States:
        known = self._unions.get(targets)
        if known is None:
            closures = [self._closure(target) for target in targets]
            self._work(sum(map(len, closures)))
            known = self._unions[targets] = frozenset().union(*closures)
        return known

    def _closure(self, state: int) -> States:
        """The states with arcs that this one may be taken for."""
        known = self._closures.get(state)
        if known is None:
            seen = {state}
            for one in (queue := [state]):
                for other in self._nfa.splits.get(one, ()):
                    if other not in seen:
                        seen.add(other)
                        queue.append(other)
            self._work(len(queue))
            known = frozenset(one for one in queue if one == ACCEPT or one in self._nfa.arcs)
            self._closures[state] = known
        return known

    def _work(self, effort: int) -> None:
        self._effort += effort
        if self._effort > MAX_EFFORT:
            raise too_complex("steps to put states together", MAX_EFFORT, self._param)


def _classes(nfa: Nfa) -> tuple[np.ndarray, list[int]]:
    """The class of each byte, and of each byte and 256 the class that begins there or holds it."""
    begins = np.zeros(257, np.int64)
    for first, last, _ in nfa.arcs.values():
        begins[first] = begins[last + 1] = 1
    begins[0] = begins[256] = 0
    column = begins.cumsum()
    classes = column[:256].astype(np.uint8)
    return classes, [*column[:256].tolist(), int(column[255]) + 1]
