"""The part of the radix trees that a viewer sees: the most recently used nodes with all their ancestors."""

from collections.abc import Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush, nlargest
from itertools import chain
from operator import attrgetter

import numpy as np

from quire.cache.block_table import BlockTable
from quire.cache.prefix.index import BYTES_PER_TOKEN, PrefixIndex
from quire.cache.prefix.radix_index import RadixIndex
from quire.cache.prefix.radix_node import Node
from quire.cache.prefix.radix_tree import node_of
from quire.monitor.update import NodeDetail, NodeRow, TreeChanges, Watcher

MOST_NODES = 2000  # shown
MOST_TOKENS = 4096  # in the detail of a node
REUSABLE, IN_USE, PINNED = range(3)
_TICK = attrgetter("tick")


def visible_roots(index: PrefixIndex, watcher: Watcher) -> list[Node]:
    """The roots of the trees that a viewer may see; none if the index has no trees."""
    if not isinstance(index, RadixIndex):
        return []
    return list(index.trees.roots.values()) if watcher.sees_all else list(index.trees.roots_of(watcher.tenant))


def num_visible(index: PrefixIndex, watcher: Watcher) -> int:
    """Number of nodes that a viewer may see."""
    if watcher.sees_all and isinstance(index, RadixIndex):
        return index.trees.num_nodes
    return sum(1 for root in visible_roots(index, watcher) for _ in root.walk())


def num_users(roots: Iterable[Node], tables: Iterable[BlockTable]) -> dict[Node, int]:
    """Running sequences by node whose blocks they use, a root included. tables: of the running sequences."""
    visible, users = {root.id for root in roots}, dict[Node, int]()
    for table in tables:
        path = list(_path(node_of(table)))
        if path[-1].id in visible:
            for node in path:
                users[node] = users.get(node, 0) + 1
    return users


def _path(node: Node) -> Iterator[Node]:
    """A node and its ancestors, the root last."""
    above: Node | None = node
    while above is not None:
        yield above
        above = above.parent


def shown_nodes(roots: Iterable[Node], users: Mapping[Node, int], most: int = MOST_NODES) -> list[Node]:
    """At most `most` nodes, each behind its parent: first those in use, then the most recently used ones."""
    shown: dict[Node, None] = {}

    def show(node: Node) -> None:
        missing = [one for one in _path(node) if one not in shown]
        if len(shown) + len(missing) <= most:
            shown.update(dict.fromkeys(reversed(missing)))

    for node in users:
        show(node)
    heap = _entries(list(roots), most)
    heapify(heap)
    while heap and len(shown) < most:
        node = heappop(heap)[2]
        show(node)
        for entry in _entries([node], most):
            heappush(heap, entry)
    return list(shown)


def _entries(parents: list[Node], most: int) -> list[tuple[int, int, Node]]:
    """Heap entries of the children of some nodes, at most `most`: those used last come first."""
    children: Iterable[Node] = chain.from_iterable(parent.children for parent in parents)
    if sum(len(parent.children) for parent in parents) > most:
        children = nlargest(most, children, key=_TICK)
    return [(-node.tick, node.id, node) for node in children]


def node_rows(
    nodes: Iterable[Node], users: Mapping[Node, int], pinned: Mapping[int, int], watcher: Watcher
) -> list[NodeRow]:
    """The rows of some nodes. pinned: pinned blocks of group 0."""
    rows = []
    for node in nodes:
        count, parent, blocks = users.get(node, 0), node.parent, node.blocks[0]
        kind = IN_USE if count else REUSABLE
        if pinned and blocks and blocks[-1] in pinned:
            kind = PINNED
        rows.append(
            NodeRow(
                node.id,
                -1 if parent is None else parent.id,
                len(node.edge) // BYTES_PER_TOKEN,
                len(blocks),
                node.most_hits,
                count,
                node.used_at,
                node.created_at,
                kind,
                node.tenant.lstrip("\0") if parent is None and watcher.sees_all else "",
            )
        )
    return rows


class TreeView:
    """What one viewer has seen of the trees."""

    def __init__(self) -> None:
        self._rows: dict[int, NodeRow] = {}
        self._nodes: dict[int, Node] = {}

    def update(self, rows: list[NodeRow], nodes: list[Node], num_nodes: int, *, full: bool) -> TreeChanges:
        """The changes to `rows`, which are those of `nodes`. num_nodes: of the trees that the viewer may see.

        A node that left the tree while a child of it stayed was not evicted: the two have become one.
        """
        before, self._rows = self._rows, {row.id: row for row in rows}
        left = [node for number, node in self._nodes.items() if number not in self._rows]
        self._nodes = {node.id: node for node in nodes}
        if full:
            return TreeChanges(rows, [], [], num_nodes, len(rows))
        changed = [row for row in rows if before.get(row.id) != row]
        evicted, hidden = [], []
        gone = {node.id for node in left if node.is_removed}
        merged = {row.parent for row in before.values() if row.parent in gone and row.id not in gone}
        for node in left:
            (evicted if node.id in gone and node.id not in merged else hidden).append(node.id)
        return TreeChanges(changed, evicted, hidden, num_nodes, len(rows))


def node_detail(index: PrefixIndex, watcher: Watcher, number: int) -> NodeDetail | None:
    """The node with this id; None if there is none that the viewer may see."""
    for root in visible_roots(index, watcher):
        for node in root.walk():
            if node.id == number:
                tokens = np.frombuffer(node.edge[: MOST_TOKENS * BYTES_PER_TOKEN], np.int64).tolist()
                block_tokens = _path_tokens(node)
                return NodeDetail(node.id, tokens, block_tokens, node.most_hits, node.created_at, node.used_at)
    return None


def _path_tokens(node: Node) -> int:
    return sum(len(one.edge) for one in _path(node)) // BYTES_PER_TOKEN
