"""The part of the radix trees that viewers see: the most recently used nodes with all their ancestors."""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush, nlargest
from itertools import chain, takewhile
from operator import attrgetter

import numpy as np

from quire.cache.block_table import BlockTable
from quire.cache.prefix.index import PrefixIndex
from quire.cache.prefix.radix_index import RadixIndex
from quire.cache.prefix.radix_node import Node
from quire.cache.prefix.radix_tree import MOST_CHANGES, node_of
from quire.core.block_keys import BYTES_PER_TOKEN
from quire.monitor.update import NodeDetail, NodeRow, TreeChanges, Watcher

MOST_NODES = 2000  # shown, not counting nodes in use
_FEWEST_NODES = 1800  # shown after nodes were hidden because there were too many
MOST_TOKENS = 4096  # in the detail of a node
REUSABLE, IN_USE, PINNED = range(3)
_MOST_REMOVALS = 8192  # remembered for viewers that have not seen them
_TICK = attrgetter("tick")


def visible_roots(index: PrefixIndex, watcher: Watcher) -> list[Node]:
    """The roots of the trees that a watcher may see; none if the index has no trees."""
    if not isinstance(index, RadixIndex):
        return []
    return list(index.trees.roots.values()) if watcher.sees_all else list(index.trees.roots_of(watcher.tenant))


def visible_nodes(index: PrefixIndex, watcher: Watcher) -> Iterator[Node]:
    """The nodes that a watcher may see."""
    return chain.from_iterable(root.walk() for root in visible_roots(index, watcher))


def num_visible(index: PrefixIndex, watcher: Watcher) -> int:
    """Number of nodes that a watcher may see."""
    if watcher.sees_all and isinstance(index, RadixIndex):
        return index.trees.num_nodes
    return sum(1 for _ in visible_nodes(index, watcher))


def _path(node: Node) -> Iterator[Node]:
    """A node and its ancestors, the root last."""
    above: Node | None = node
    while above is not None:
        yield above
        above = above.parent


def recent_nodes(roots: Iterable[Node], most: int) -> list[Node]:
    """At most `most` nodes, each behind its parent: the most recently used ones and their ancestors."""
    shown: dict[Node, None] = {}
    heap = _entries(list(roots), most)
    heapify(heap)
    while heap and len(shown) < most:
        node = heappop(heap)[2]
        missing = [one for one in _path(node) if one not in shown]  # besides the node only its root can be missing
        shown.update(dict.fromkeys(reversed(missing)))
        for entry in _entries([node], most):
            heappush(heap, entry)
    return list(shown)


def _entries(parents: list[Node], most: int) -> list[tuple[int, int, Node]]:
    """Heap entries of the children of some nodes, at most `most`: those used last come first."""
    children: Iterable[Node] = chain.from_iterable(parent.children for parent in parents)
    if sum(len(parent.children) for parent in parents) > most:
        children = nlargest(most, children, key=_TICK)
    return [(-node.tick, node.id, node) for node in children]


class TreeView:
    """What all viewers with the same sight see of the trees of one index.

    A row has the version of the view in which it changed, so that a viewer gets the rows since the version that it has
    seen.
    """

    def __init__(self, index: RadixIndex, watcher: Watcher) -> None:
        self.version = 0
        self._index = index
        self._watcher = watcher
        self._changed: set[Node] = set(recent_nodes(visible_roots(index, watcher), MOST_NODES))
        self._nodes: dict[int, Node] = {}  # shown
        self._rows: dict[int, tuple[int, NodeRow]] = {}  # with the version of each, ascending
        self._users: dict[Node, int] = {}
        self._pinned: frozenset[int] = frozenset()
        self._anchors: frozenset[int] = frozenset()  # blocks with snapshots of recurrent states
        self._removed: deque[tuple[int, int, bool]] = deque()  # (version, node, whether evicted), ascending
        self._first_version = 0  # a viewer that has seen an earlier one cannot be brought up to date

    def note_changes(self, changed: Iterable[Node]) -> None:
        """Take nodes that have changed, come or gone since the last call."""
        tenant = self._watcher.tenant
        if self._watcher.sees_all:
            self._changed.update(changed)
        else:
            self._changed.update(node for node in changed if node.tenant == tenant)

    @property
    def num_noted(self) -> int:
        """Nodes that `refresh` has to look at. They stay in memory until then, even if they have left the trees."""
        return len(self._changed)

    def refresh(self, tables: Iterable[BlockTable], anchors: frozenset[int]) -> None:
        """Bring the rows up to date. tables: of the running sequences that the viewers may see.

        anchors: blocks of group 0 with snapshots of recurrent states.
        """
        self.version += 1
        changed, self._changed = self._changed, set()
        users = self._num_users(tables)
        changed.update(node for node, count in users.items() if self._users.get(node) != count)
        changed.update(node for node in self._users if node not in users)
        self._users = users
        self._mark_pins(changed)
        self._mark_snapshots(anchors, changed)
        dirty = set()
        for node in changed:
            if self._is_gone(node):
                self._remove(node, is_evicted=not node.children)  # a node that merged with a child still has it
            else:
                dirty.update(self._show(node))
        for number in dirty:
            node = self._nodes[number]
            row = self._row(node)
            if number not in self._rows or self._rows[number][1] != row:
                self._rows.pop(number, None)
                self._rows[number] = self.version, row
        if len(self._nodes) > MOST_NODES:
            self._hide()

    def knows(self, since: int) -> bool:
        """Whether all changes since a version are known."""
        return since >= self._first_version

    def changes(self, since: int, num_nodes: int) -> TreeChanges:
        """The changes since a version that it knows. num_nodes: that the viewers may see."""
        latest = takewhile(lambda item: item[0] > since, reversed(self._rows.values()))
        rows = [row for _, row in latest][::-1]
        gone = takewhile(lambda item: item[0] > since, reversed(self._removed))
        lost: tuple[list[int], list[int]] = ([], [])  # hidden, evicted
        for _, number, is_evicted in gone:
            if number not in self._nodes:
                lost[is_evicted].append(number)
        return TreeChanges(rows, lost[1], lost[0], num_nodes, len(self._nodes))

    def node(self, number: int) -> Node | None:
        """The shown node with this id; None if there is none."""
        return self._nodes.get(number)

    def all_rows(self, num_nodes: int) -> TreeChanges:
        """All rows. num_nodes: that the viewers may see."""
        return TreeChanges([row for _, row in self._rows.values()], [], [], num_nodes, len(self._nodes))

    def _num_users(self, tables: Iterable[BlockTable]) -> dict[Node, int]:
        """Running sequences by node whose blocks they use, a root included."""
        users: dict[Node, int] = {}
        for table in tables:
            for node in _path(node_of(table)):
                users[node] = users.get(node, 0) + 1
        if not self._watcher.sees_all:
            return {node: count for node, count in users.items() if node.tenant == self._watcher.tenant}
        return users

    def _mark_pins(self, changed: set[Node]) -> None:
        """Add all shown nodes to the changed ones if other blocks are pinned than before. Pins are rare."""
        pinned = frozenset(self._index.retention.pin_refs(0))
        if pinned != self._pinned:
            self._pinned = pinned
            changed.update(self._nodes.values())

    def _mark_snapshots(self, anchors: frozenset[int], changed: set[Node]) -> None:
        """Add the shown nodes to the changed ones whose snapshots came or left."""
        different, self._anchors = anchors ^ self._anchors, anchors
        if different:
            changed.update(node for node in self._nodes.values() if not different.isdisjoint(node.blocks[0]))

    def _is_gone(self, node: Node) -> bool:
        """Whether a node has left the trees."""
        if node.root_key is None:
            return node.is_removed
        return self._index.trees.roots.get(node.root_key) is not node  # type: ignore[call-overload]  # it is a RootKey

    def _show(self, node: Node) -> list[int]:
        """Show a node and its ancestors. Returns the ids of those that are new, and of the node itself."""
        new = [one for one in _path(node) if one.id not in self._nodes]
        self._nodes.update((one.id, one) for one in new)
        return [node.id, *(one.id for one in new)]

    def _remove(self, node: Node, *, is_evicted: bool) -> None:
        if self._nodes.get(node.id) is not node:
            return
        del self._nodes[node.id]
        self._rows.pop(node.id, None)
        self._removed.append((self.version, node.id, is_evicted))
        if len(self._removed) > _MOST_REMOVALS:
            self._first_version = self._removed.popleft()[0]

    def _hide(self) -> None:
        """Hide the least recently used nodes without shown children, until few enough are shown."""
        num_children = Counter(node.parent.id for node in self._nodes.values() if node.parent is not None)
        oldest = sorted(self._nodes.values(), key=lambda node: (node.parent is None, node.tick, -node.end))
        for node in oldest:
            if len(self._nodes) <= _FEWEST_NODES:
                return
            if not num_children[node.id] and node not in self._users:
                self._remove(node, is_evicted=False)
                if node.parent is not None:
                    num_children[node.parent.id] -= 1

    def _row(self, node: Node) -> NodeRow:
        count, parent, blocks = self._users.get(node, 0), node.parent, node.blocks[0]
        kind = IN_USE if count else REUSABLE
        if self._pinned and blocks and blocks[-1] in self._pinned:
            kind = PINNED
        return NodeRow(
            node.id,
            -1 if parent is None else parent.id,
            len(node.edge) // BYTES_PER_TOKEN,
            len(blocks),
            node.most_hits if node.parts else node.uses.hits,
            count,
            node.used_at,
            node.created_at,
            kind,
            node.tenant.lstrip("\0") if parent is None and self._watcher.sees_all else "",
            len(self._anchors.intersection(blocks)) if self._anchors else 0,
        )


class TreeViews:
    """The views of the trees of an index, one for each sight that viewers have. The trees report changes to them."""

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index
        self._views: dict[Watcher, TreeView] = {}
        self._changes = index.trees.report_changes(counts_uses=True) if isinstance(index, RadixIndex) else None

    def close(self) -> None:
        """Let the trees report no changes any more."""
        if isinstance(self.index, RadixIndex) and self._changes is not None:
            self.index.trees.end_report(self._changes)

    def keep(self, watchers: Iterable[Watcher]) -> None:
        """Forget the views that none of these watchers has."""
        wanted = {_sight(watcher) for watcher in watchers}
        self._views = {sight: view for sight, view in self._views.items() if sight in wanted}

    def view(self, watcher: Watcher, tables: Iterable[BlockTable], anchors: frozenset[int]) -> TreeView | None:
        """The view of a watcher, up to date; None if the index has no trees. tables, anchors: see TreeView.refresh."""
        if not isinstance(self.index, RadixIndex) or self._changes is None:
            return None
        changed = self._changes.take()
        if changed is None:  # too many: all begin anew
            self._views.clear()
        else:
            for view in self._views.values():
                view.note_changes(changed)
        self._views = {sight: view for sight, view in self._views.items() if view.num_noted <= MOST_CHANGES}
        sight = _sight(watcher)
        if sight not in self._views:
            self._views[sight] = TreeView(self.index, sight)
        self._views[sight].refresh(tables, anchors)
        return self._views[sight]

    def shown(self, watcher: Watcher, number: int) -> Node | None:
        """A node that the view of a watcher shows; None for another id."""
        view = self._views.get(_sight(watcher))
        return None if view is None else view.node(number)


def _sight(watcher: Watcher) -> Watcher:
    """The same for all watchers that see everything."""
    return Watcher("", sees_all=True) if watcher.sees_all else watcher


def node_detail(index: PrefixIndex, watcher: Watcher, number: int) -> NodeDetail | None:
    """The node with this id; None if there is none that the watcher may see."""
    return next((detail_of(node) for node in visible_nodes(index, watcher) if node.id == number), None)


def detail_of(node: Node) -> NodeDetail:
    """A node with its first MOST_TOKENS tokens."""
    tokens = np.frombuffer(node.edge[: MOST_TOKENS * BYTES_PER_TOKEN], np.int64).tolist()
    return NodeDetail(node.id, tokens, path_tokens(node), node.most_hits, node.created_at, node.used_at)


def path_tokens(node: Node) -> int:
    """Tokens from the root of a node to its end."""
    return sum(len(one.edge) for one in _path(node)) // BYTES_PER_TOKEN
