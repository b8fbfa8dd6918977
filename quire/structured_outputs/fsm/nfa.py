"""Construction of byte-level NFAs from trees (Thompson, 1968).

States are built from the end, so that equal states are merged.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from quire.structured_outputs.fsm.nodes import (
    MAX_NFA_STATES,
    MAX_PARTS,
    Chain,
    Chars,
    Choice,
    Node,
    Repeat,
    SeparatedList,
    Words,
    too_complex,
)

Span = tuple[int, int]  # bytes, both ends included

_LENGTHS = ((0x7F, 1), (0x7FF, 2), (0xFFFF, 3), (0x10FFFF, 4))  # the last code point of each number of bytes


def byte_ranges(low: int, high: int) -> Iterator[tuple[Span, ...]]:
    """Sequences of byte ranges that match the UTF-8 of the code points low to high, which include no surrogates."""
    start = 0
    for last, length in _LENGTHS:
        if max(low, start) <= min(high, last):
            yield from _of_length(max(low, start), min(high, last), length - 1)
        start = last + 1


def _of_length(low: int, high: int, num_more: int) -> Iterator[tuple[Span, ...]]:
    """As `byte_ranges`, for code points of 1 + num_more bytes. It splits them until each byte has one range."""
    for i in range(1, num_more + 1):
        rest = (1 << 6 * i) - 1
        if low >> 6 * i != high >> 6 * i:
            if low & rest:
                yield from _of_length(low, low | rest, num_more)
                yield from _of_length((low | rest) + 1, high, num_more)
                return
            if high & rest != rest:
                yield from _of_length(low, (high & ~rest) - 1, num_more)
                yield from _of_length(high & ~rest, high, num_more)
                return
    yield tuple(zip(chr(low).encode(), chr(high).encode(), strict=True))


Edges = tuple[tuple[int, int], ...]  # (byte, node), sorted


@dataclass(slots=True)
class _PathNode:
    """A node on the path of the latest word, which can get more edges."""

    is_end: bool = False
    edges: list[tuple[int, int]] = field(default_factory=list)


def word_graph(words: Iterable[bytes]) -> list[tuple[bool, Edges]]:
    """Minimal acyclic automaton of words: nodes as (whether a word ends, edges to earlier nodes), root last."""
    nodes: dict[tuple[bool, Edges], int] = {}
    path = [_PathNode()]  # of the latest word: the root and a node for each byte
    last = b""

    def close(length: int) -> None:
        """Merge the nodes after `length` bytes with equal nodes. Later words share at most `length` bytes."""
        while len(path) > length + 1:
            done = path.pop()
            node = nodes.setdefault((done.is_end, tuple(done.edges)), len(nodes))
            path[-1].edges.append((last[len(path) - 1], node))

    for word in sorted(set(words)):
        shared = next(
            (i for i, (a, b) in enumerate(zip(last, word, strict=False)) if a != b), min(len(last), len(word))
        )
        close(shared)
        path += (_PathNode() for _ in range(len(word) - shared))
        path[-1].is_end = True
        last = word
    close(0)
    root = path[0]
    return [*nodes, (root.is_end, tuple(root.edges))]


ACCEPT = 0  # the state in which a text may end
NOWHERE = 1  # the state from which ACCEPT cannot be reached

Arc = tuple[int, int, int]  # first byte, last byte, target


class Nfa:
    """States are numbers. A state has one arc, or epsilon transitions (`splits`). param: the field that errors name.

    Raises RequestError for more than `max_states` states.
    """

    def __init__(self, node: Node, param: str, *, max_states: int = MAX_NFA_STATES) -> None:
        self.arcs: dict[int, Arc] = {}
        self.splits: dict[int, tuple[int, ...]] = {ACCEPT: (), NOWHERE: ()}
        self._param = param
        self._max_states = max_states
        self._num_states = 2
        self._num_parts = 0
        self._known_arcs: dict[Arc, int] = {}
        self._known_splits: dict[tuple[int, ...], int] = {(): NOWHERE}
        self._graphs: dict[tuple[str, ...], list[tuple[bool, Edges]]] = {}
        self._built: dict[tuple[Node, int], int] = {}
        self.start = self._build(node, ACCEPT)

    def _build(self, node: Node, then: int) -> int:
        """The start state of the node's language, followed by the state `then`. Raises RequestError."""
        known = self._built.get((node, then))
        if known is not None:
            return known
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise too_complex("parts", MAX_PARTS, self._param)
        match node:
            case Chars(ranges):
                state = self._chars(ranges, then)
            case Words(words):
                state = self._words(words, then)
            case Chain(parts):
                state = then
                for part in reversed(parts):
                    state = self._build(part, state)
            case Choice(options):
                state = self._split(*(self._build(option, then) for option in options))
            case Repeat():
                state = self._repeat(node, then)
            case SeparatedList(item, separator):
                state, behind = self._new(), self._new()
                self.splits[state] = (self._build(item, behind),)
                self.splits[behind] = (self._build(separator, state), then)
            case _:
                raise AssertionError(f"a parsed pattern has no {node}")
        return self._built.setdefault((node, then), state)

    def _chars(self, ranges: tuple[tuple[int, int], ...], then: int) -> int:
        states = []
        for low, high in ranges:
            for spans in byte_ranges(low, high):
                state = then
                for first, last in reversed(spans):
                    state = self._arc(first, last, state)
                states.append(state)
        return self._split(*states)

    def _words(self, words: tuple[str, ...], then: int) -> int:
        if len(words) == 1:
            for byte in reversed(words[0].encode()):
                then = self._arc(byte, byte, then)
            return then
        if words not in self._graphs:
            self._graphs[words] = word_graph(word.encode() for word in words)
        states: list[int] = []
        for is_end, edges in self._graphs[words]:
            arcs = [self._arc(byte, byte, states[node]) for byte, node in edges]
            states.append(self._split(*arcs, *((then,) if is_end else ())))
        return states[-1]

    def _repeat(self, node: Repeat, then: int) -> int:
        state = then
        if node.most is None:
            state = self._new()
            again = self._build(node.inner, state)
            self.splits[state] = (again, then)
        for _ in range(0 if node.most is None else node.most - node.least):
            before = self._split(self._build(node.inner, state), then)
            if before == state:
                break  # the inner node matches the empty text only
            state = before
        for _ in range(node.least):
            before = self._build(node.inner, state)
            if before == state:
                break
            state = before
        return state

    def _arc(self, first: int, last: int, target: int) -> int:
        if target == NOWHERE:
            return NOWHERE
        arc = (first, last, target)
        state = self._known_arcs.get(arc)
        if state is None:
            state = self._known_arcs[arc] = self._new()
            self.arcs[state] = arc
        return state

    def _split(self, *states: int) -> int:
        different = tuple(dict.fromkeys(state for state in states if state != NOWHERE))
        if len(different) == 1:
            return different[0]
        state = self._known_splits.get(different)
        if state is None:
            state = self._known_splits[different] = self._new()
            self.splits[state] = different
        return state

    def _new(self) -> int:
        self._num_states += 1
        if self._num_states > self._max_states:
            raise too_complex("states before determinization", self._max_states, self._param)
        return self._num_states - 1
