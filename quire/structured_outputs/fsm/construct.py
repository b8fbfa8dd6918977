"""Construction of minimal automata."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from quire.errors import RequestError
from quire.structured_outputs.fsm.dfa import DEAD, Dfa, Rows, assemble
from quire.structured_outputs.fsm.nfa import ACCEPT, Nfa, word_graph
from quire.structured_outputs.fsm.nodes import MAX_DFA_STATES, MAX_EFFORT, MAX_ENTRIES, Node, too_complex
from quire.structured_outputs.fsm.regex import parse

States = frozenset[int]  # states of an Nfa that have an arc, and ACCEPT


class SubsetConstruction:
    """Subset construction. rows: next state by state and class, or DEAD. accepts: by state. classes: uint8 (256,)."""

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
        """(first class, last class + 1, targets): ranges of classes that lead from `states` to equal targets."""
        column = self._column
        arcs = [self._nfa.arcs[state] for state in states if state != ACCEPT]
        if len(arcs) == 1:
            first, last, target = arcs[0]
            self._count_effort(1)
            return [(column[first], column[last + 1], frozenset((target,)))]
        cuts = sorted({column[edge] for first, last, _ in arcs for edge in (first, last + 1)})
        self._count_effort(len(arcs) * len(cuts))
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
            self._count_effort(sum(map(len, closures)))
            known = self._unions[targets] = frozenset().union(*closures)
        return known

    def _closure(self, state: int) -> States:
        """The epsilon closure of a state: its states with an arc, and ACCEPT."""
        known = self._closures.get(state)
        if known is None:
            seen = {state}
            for one in (queue := [state]):
                for other in self._nfa.splits.get(one, ()):
                    if other not in seen:
                        seen.add(other)
                        queue.append(other)
            self._count_effort(len(queue))
            known = frozenset(one for one in queue if one == ACCEPT or one in self._nfa.arcs)
            self._closures[state] = known
        return known

    def _count_effort(self, effort: int) -> None:
        self._effort += effort
        if self._effort > MAX_EFFORT:
            raise too_complex("steps to determinize it", MAX_EFFORT, self._param)


def _classes(nfa: Nfa) -> tuple[np.ndarray, list[int]]:
    """The class of each byte, uint8 (256,), and the same as a list with the number of classes at index 256."""
    begins = np.zeros(257, np.int64)
    for first, last, _ in nfa.arcs.values():
        begins[first] = begins[last + 1] = 1
    begins[0] = begins[256] = 0
    column = begins.cumsum()
    classes = column[:256].astype(np.uint8)
    return classes, [*column[:256].tolist(), int(column[255]) + 1]


def minimize(rows: Rows, accepts: Sequence[bool], classes: np.ndarray) -> Dfa | None:
    """The minimal automaton of the language of these states; state 0 is the start. None if the language is empty."""
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
    """The coarsest partition in which states of a block have transitions to equal blocks. block_of: block by state."""

    def __init__(self, rows: Rows, accepts: Sequence[bool], before: Sequence[Sequence[int]], alive: set[int]) -> None:
        self._rows = rows
        self._before = before
        self._alive = alive
        self.block_of = [DEAD] * (len(rows) + 1)  # the last entry is for DEAD
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
        """Split the blocks with transitions to states in `changed`. Returns the states that have a new block."""
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
        """Split a block into `parts` and the states in none of them. The largest keeps the number of the block."""
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


def regex_to_dfa(pattern: str) -> Dfa:
    """The minimal automaton of a pattern. Raises RequestError."""
    return node_to_dfa(parse(pattern), "regex")


def node_to_dfa(node: Node, param: str) -> Dfa:
    """The minimal automaton of a tree. Raises RequestError about `param` if it is too large or no text matches."""
    states = determinize(node, param)
    found = minimize(states.rows, states.accepts, states.classes)
    assert found is not None, "a text matches"
    return found


def determinize(node: Node, param: str) -> SubsetConstruction:
    """The automaton before minimization. Raises RequestError for all trees that `node_to_dfa` refuses."""
    states = SubsetConstruction(Nfa(node, param), param)
    if not any(states.accepts):
        raise RequestError(f"no text matches the {param}", param)
    return states


def words_to_dfa(words: Iterable[str]) -> Dfa:
    """The minimal automaton of these texts. At least one must not be empty. Raises RequestError if it is too large."""
    graph = word_graph(word.encode() for word in words)
    used = sorted({byte for _, edges in graph for byte, _ in edges})
    num_classes = len(used) + 1  # the last class has the bytes that do not occur
    if len(graph) * num_classes > MAX_ENTRIES:
        raise too_complex("transitions", MAX_ENTRIES, "choice")
    classes = np.full(256, len(used), np.uint8)
    classes[used] = np.arange(len(used), dtype=np.uint8)
    last = len(graph) - 1  # the last node is the start
    arcs = np.array([(last - node, byte, last - to) for node, (_, edges) in enumerate(graph) for byte, to in edges])
    table = np.full((len(graph) + 1, num_classes), DEAD, np.int32)
    table[arcs[:, 0], classes[arcs[:, 1]]] = arcs[:, 2]
    return Dfa(table, classes, np.array([is_end for is_end, _ in reversed(graph)], bool))
