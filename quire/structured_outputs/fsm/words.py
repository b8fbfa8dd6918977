"""The smallest automaton of finitely many words: from sorted words in one pass (after Daciuk and others, 2000)."""

from collections.abc import Iterable
from dataclasses import dataclass, field

Edges = tuple[tuple[int, int], ...]  # (byte, node), sorted


@dataclass(slots=True)
class _Open:
    """A node of the word that was added last: more edges may come."""

    is_end: bool = False
    edges: list[tuple[int, int]] = field(default_factory=list)


def word_graph(words: Iterable[bytes]) -> list[tuple[bool, Edges]]:
    """Nodes as (whether a word ends here, edges). Edges lead to nodes that come before; the last node is the first."""
    nodes: dict[tuple[bool, Edges], int] = {}
    path = [_Open()]  # of the last word, one node for each byte and one more
    last = b""

    def close(length: int) -> None:
        """No word that shares more than `length` bytes comes any more: the nodes beyond are like others, or new."""
        while len(path) > length + 1:
            done = path.pop()
            node = nodes.setdefault((done.is_end, tuple(done.edges)), len(nodes))
            path[-1].edges.append((last[len(path) - 1], node))

    for word in sorted(set(words)):
        shared = next(
            (i for i, (a, b) in enumerate(zip(last, word, strict=False)) if a != b), min(len(last), len(word))
        )
        close(shared)
        path += (_Open() for _ in range(len(word) - shared))
        path[-1].is_end = True
        last = word
    close(0)
    root = path[0]
    return [*nodes, (root.is_end, tuple(root.edges))]
