"""All radix trees: splits, merges, eviction and consistency checks of nodes.

Invariants, which `check` verifies: children are sorted, and their first blocks differ. A node with a single child is
one at which a table ends, or the child is a tail. A leaf ends with a block. A table ends at a node and has the blocks
on the path to it.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from quire.cache.block_pool import BlockPool
from quire.cache.block_table import ABSENT, BlockTable
from quire.cache.prefix.eviction import EvictableLeaves
from quire.cache.prefix.index import NO_REASON, EvictionCause, EvictionReason
from quire.cache.prefix.radix_node import Clock, LRUNodes, Node, UseStats
from quire.cache.prefix.retention_marks import RetentionMarks
from quire.cache.retention import SequenceRetention
from quire.core.block_keys import BYTES_PER_TOKEN
from quire.core.request import Namespace


def node_errors(node: Node, size: int) -> Iterator[str]:
    """Errors of a node. size: bytes of a block's key."""
    keys = [child.edge[:size] for child in node.children]
    if keys != node.children.keys or keys != sorted(set(keys)):
        yield "its children are not sorted"
    if any(child.parent is not node for child in node.children):
        yield "a child has another parent"
    if len({len(blocks) for blocks in node.blocks}) != 1 or -(-len(node.edge) // size) != len(node.blocks[0]):
        yield "its numbers of tokens and blocks do not match"
    if node.parent is None:
        if not node.children and not node.writers:
            yield "a root without children and tables"
    else:
        yield from _inner_node_errors(node, size)
    for table in node.writers:
        if table.cursor.handle is not node or table.cursor.num_indexed != node.end:
            yield f"a table of {table.cursor.num_indexed} indexed blocks does not end at the node"
        for group, blocks in enumerate(table.blocks):
            pairs = zip(node.path_blocks(group), blocks[node.root.end : node.end], strict=False)
            if any(ours != theirs and ABSENT not in (ours, theirs) for ours, theirs in pairs):
                yield f"a table that ends at the node has other blocks of group {group}"


def _inner_node_errors(node: Node, size: int) -> Iterator[str]:
    assert node.parent is not None, "not a root"
    if node.start != node.parent.end:
        yield "it does not begin where its parent ends"
    if len(node.edge) % size and (node.children or node.writers or len(node.blocks[0]) > 1):
        yield "a node follows a partial block"
    if node.default_reach > node.end:
        yield "a sequence without retention is recorded behind its end"
    only = node.children.only
    if not node.writers and only is not None and len(only.edge) >= size:
        yield "it should be merged with its only child"
    if not node.children and not node.writers and all(blocks[-1] == ABSENT for blocks in node.blocks):
        yield "a leaf that ends without a block"


MOST_PLACES = 4096
MOST_CHANGES = 16_384  # kept for `take_changes`
MOST_AT_A_PLACE = 8


class EvictedBlock(NamedTuple):
    """The first block of an eviction."""

    key: bytes  # its tokens
    cause: EvictionCause


class EvictionLog:
    """The latest evictions, by the position of the first evicted block and the tokens before it."""

    def __init__(self) -> None:
        self._places: OrderedDict[tuple[object, int], list[EvictedBlock]] = OrderedDict()

    def add(self, place: object, before: bytes, key: bytes, cause: EvictionCause) -> None:
        """Record the eviction of the block `key`. place: its root and position. before: key of the tokens before it."""
        known = (place, hash(before))
        lost = self._places.setdefault(known, [])
        lost.append(EvictedBlock(key, cause))
        del lost[:-MOST_AT_A_PLACE]
        self._places.move_to_end(known)
        if len(self._places) > MOST_PLACES:
            self._places.popitem(last=False)

    def find(self, place: object, before: bytes, rest: bytes, num_found: int) -> EvictionCause | None:
        """The cause of the latest eviction of a block that matches more than `num_found` tokens of `rest`, or None."""
        if not self._places:
            return None
        lost = self._places.get((place, hash(before)), ())
        wanted = rest[: (num_found + 1) * BYTES_PER_TOKEN]
        for one in reversed(lost):
            if one.key.startswith(wanted):
                return one.cause
        return None


RootKey = tuple[Namespace, bytes]

_BLOCKS_REMEMBERED = 64  # before an evicted block, whose tokens identify it; of earlier ones only the number counts


class NodeChanges:
    """The nodes that have changed, come or gone since `take`. Pins and tables do not count.

    counts_uses: whether nodes that were used count, too.
    """

    def __init__(self, *, counts_uses: bool) -> None:
        self.counts_uses = counts_uses
        self._nodes: set[Node] = set()
        self._lost = False  # whether there were more than MOST_CHANGES

    def add(self, nodes: Iterable[Node]) -> None:
        """Add nodes."""
        self._nodes.update(nodes)
        if len(self._nodes) > MOST_CHANGES:
            self._nodes.clear()
            self._lost = True

    def take(self) -> set[Node] | None:
        """Return and forget the nodes.

        None if they were more than MOST_CHANGES. Then they are not kept: nodes that have left would fill the memory.
        """
        changed, self._nodes = self._nodes, set()
        lost, self._lost = self._lost, False
        return None if lost else changed


class RadixTrees:
    """The radix trees: one per root key."""

    def __init__(
        self, pools: Sequence[BlockPool], windowed: Sequence[int], key_bytes: int, clock: Clock, leaves: EvictableLeaves
    ) -> None:
        """windowed: groups with a window. key_bytes: bytes of a block's key. leaves: in the eviction order."""
        self.roots: dict[RootKey, Node] = {}
        self._by_tenant: dict[str, dict[RootKey, None]] = {}  # keys of roots, oldest first
        self._eviction_log = EvictionLog()
        self._logged_bytes = _BLOCKS_REMEMBERED * key_bytes
        self.num_evicted = 0
        self.first_reason: EvictionReason | None = None  # of the first eviction since `take_reason`
        self.clock = clock
        self.retention = RetentionMarks(pools, clock, key_bytes, self._relist)
        self._pools = pools
        self._size = key_bytes
        self.leaves = leaves
        self._window_nodes = {group: LRUNodes() for group in windowed}  # nodes with blocks of these groups
        self._last_number = 0  # of a node
        self.num_nodes = 0  # in all trees
        self._changes: tuple[NodeChanges, ...] = ()  # see `report_changes`

    def report_changes(self, *, counts_uses: bool) -> NodeChanges:
        """Start to collect changes for a reader."""
        changes = NodeChanges(counts_uses=counts_uses)
        self._changes += (changes,)
        return changes

    def end_report(self, changes: NodeChanges) -> None:
        """Collect no changes for a reader any more."""
        self._changes = tuple(one for one in self._changes if one is not changes)

    # Growth

    def root(self, key: RootKey, end: int, *, public: bool) -> Node:
        """The root of a tree, created if it does not exist. Its first blocks are behind `end` others."""
        root = self.roots.get(key)
        if root is None:
            root = self.roots[key] = Node(self._number(), b"", [[] for _ in self._pools], None, end, self.clock.now)
            self._by_tenant.setdefault(key[0].tenant, {})[key] = None
            root.root_key, root.public, root.tenant = key, public, key[0].tenant
            self._report(root)
        return root

    def append(
        self, node: Node, edge: bytes, blocks: Sequence[list[int]], writer: BlockTable | None, num_written: int
    ) -> Node:
        """Append new blocks behind a node, none of whose children begins with them. Returns the node where they end.

        The node itself grows if no table but `writer` ends there and it has no children. A tail with which the first
        block begins is dropped if it has at most `num_written` tokens, because these are in the new block already.
        """
        self.drop_tail(node, edge, num_written * BYTES_PER_TOKEN)
        for group, some in enumerate(blocks):
            for block in some:
                if block != ABSENT:
                    self._pools[group].enter_index(block)
        alone = not node.writers or (len(node.writers) == 1 and writer in node.writers)
        if alone and not node.children and node.parent is not None and len(edge) >= self._size:
            if node.uses.ends_part:
                node.begin_part()
            node.edge += edge
            for old, new in zip(node.blocks, blocks, strict=True):
                old += new
            node.end += len(blocks[0])
        else:
            end = node.end + len(blocks[0])
            parent, node = node, Node(self._number(), edge, blocks, node, end, self.clock.now)
            parent.attach(node, edge[: self._size])
            is_tail = len(edge) < self._size
            node.uses = UseStats(parent.uses.chance) if is_tail else parent.uses.continued()
        node.tick, node.used_at = self.clock.tick, self.clock.now
        self._report(node)
        self._list(node, in_use=writer is not None)
        return node

    def extend(self, node: Node, edge: bytes, blocks: Sequence[int]) -> bool:
        """Append one block to a leaf at which a single table ends: the fast path of `append`.

        Returns False, without a change, if `append` is needed.
        """
        if node.children or node.parent is None or len(node.writers) != 1:
            return False
        if self._window_nodes or self._pools[0].is_indexed(blocks[0]):
            return False
        if node.uses.ends_part:
            node.begin_part()
        node.edge += edge
        for pool, some, block in zip(self._pools, node.blocks, blocks, strict=True):
            pool.enter_index(block)
            some.append(block)
        node.end += 1
        node.tick, node.used_at = self.clock.tick, self.clock.now
        if self._changes:
            self._report(node)
        return True

    def split_at(self, node: Node, depth: int) -> Node:
        """The node that ends at `depth`, a position on the run of `node`, which is split there if needed.

        After a split the lower half is `node`.
        """
        if depth == node.end:
            return node
        count = depth - node.start
        size, parent = count * self._size, node.parent
        assert parent is not None, "a root has no run"
        upper = Node(self._number(), node.edge[:size], [blocks[:count] for blocks in node.blocks], parent, depth)
        upper.tick, upper.level = node.tick, node.level
        upper.created_at, upper.used_at = node.created_at, node.used_at
        node.split_uses(upper)
        parent.replace(node, upper)
        node.edge = node.edge[size:]
        for blocks in node.blocks:
            del blocks[:count]
        upper.attach(node, node.edge[: self._size])
        self._report(node, upper)
        self._list(upper)
        return upper

    def restore_block(self, node: Node, i: int, group: int, block: int) -> None:
        """Set block `i` of a node in a window group, which was ABSENT."""
        node.blocks[group][i] = block
        self._pools[group].enter_index(block)
        self._window_nodes[group].add(node)

    def touch(self, node: Node, *, hit: bool) -> None:
        """Mark a node and all above it as used. hit: a sequence begins with it."""
        above, tick, now = node, self.clock.tick, self.clock.now
        readers = [changes for changes in self._changes if changes.counts_uses]
        while above.parent is not None:
            if hit:
                above.uses.hits += 1
                above.previous_uses.num_continuation_hits += 1
            above.tick, above.used_at = tick, now
            self.leaves.on_use(above)
            for changes in readers:
                changes.add((above,))
            above = above.parent

    def apply_retention(self, ends: Sequence[Node], retention: SequenceRetention) -> None:
        """A sequence ended at the nodes `ends`: apply its retention."""
        for node in ends:
            if node.parent is not None:
                node.uses.has_ended_here = True
                self.leaves.update(node)  # a new part may have a lower eviction key than the one before
        self.retention.apply(ends, retention)

    # Tables

    def register_table(self, table: BlockTable, node: Node) -> None:
        """Register a table whose indexed blocks end at a node."""
        table.cursor.handle, table.cursor.num_indexed = node, node.end
        node.writers[table] = None

    def unregister_table(self, table: BlockTable, keep: Node | None = None) -> None:
        """Unregister a table, and tidy its node unless it is `keep`."""
        del (node := node_of(table)).writers[table]
        if node is not keep:
            self.tidy(node)

    # Removal

    def tidy(self, node: Node) -> None:
        """Restore the invariants at a node: merge it with an only child, remove it, or list it as a leaf."""
        if node.writers or node.is_removed:
            return
        if node.parent is None:
            if not node.children:
                self._forget_root(node.root_key)  # type: ignore[arg-type]  # of a root
        elif not node.children:
            end = self._num_blocks_to_last(node) if self._window_nodes else len(node.blocks[0])
            if not end:
                self._remove_leaf(node)
                return
            if end < len(node.blocks[0]):
                self._cut(node, end)
            self._relist(node)
        elif (only := node.children.only) is not None and len(only.edge) >= self._size:
            self._merge(node, only)

    def _num_blocks_to_last(self, node: Node) -> int:
        """Blocks of a node up to the last one that is present in some group."""
        end = len(node.blocks[0])
        while end and all(blocks[end - 1] == ABSENT for blocks in node.blocks):
            end -= 1
        return end

    def evict(self, group: int, count: int, cause: EvictionCause) -> int:
        """See PrefixIndex."""
        self.retention.advance_clock(cause.now)
        if group in self._window_nodes:
            return self._evict_window_blocks(group, count)
        self.leaves.requeue_deferred()
        freed, busy = 0, []
        while freed < count and (leaf := self.leaves.pop()) is not None:
            if leaf.children or leaf.is_removed:
                continue
            cut = self._num_idle_at_end(leaf, min(count - freed, leaf.num_uniform_blocks))
            if cut:
                self._evict_blocks(leaf, cut, cause)
                freed += cut
            elif not self.retention.is_pinned(leaf):  # a pinned leaf is listed again when the pin ends
                busy.append(leaf)
        for leaf in busy:
            self.leaves.defer(leaf)
        self.num_evicted += freed
        return freed

    def take_reason(self) -> EvictionReason:
        """See PrefixIndex."""
        reason, self.first_reason = self.first_reason, None
        return reason or NO_REASON

    def _evict_blocks(self, leaf: Node, cut: int, cause: EvictionCause) -> None:
        """Evict `cut` blocks at the end of a popped leaf."""
        self.first_reason = self.first_reason or EvictionReason(self.leaves.reason(leaf), leaf.tenant)
        self.leaves.on_evict(leaf)
        at = len(leaf.blocks[0]) - cut
        self._log_eviction(leaf, at, cause)
        if at:
            self._cut(leaf, at)
            self.leaves.add(leaf)
        else:
            self._remove_leaf(leaf)

    def invalidate(self, blocks: Collection[int]) -> None:
        """Remove blocks of group 0 that were never computed, and all behind them. Tables then end before them."""
        for root in list(self.roots.values()):
            for node in list(root.walk()):
                at = next((i for i, block in enumerate(node.blocks[0]) if block in blocks), None)
                if at is not None and not node.is_removed:
                    self._truncate(node, at)

    def _truncate(self, node: Node, at: int) -> None:
        below = list(node.walk())
        writers = [table for one in below for table in one.writers]
        survivor = node if at else node.parent
        assert survivor is not None, "a root has no run"
        for one in below:
            one.writers.clear()
        for one in reversed(below[1:]):
            self._detach(one)
        if at:
            self._cut(node, at)
        else:
            self._detach(node)
        for table in writers:
            self.register_table(table, survivor)
        self.retention.unpin_invalid()
        self.tidy(survivor)

    def _evict_window_blocks(self, group: int, count: int) -> int:
        """Evict idle blocks of a window group from any node, least recently used node first."""
        pool, freed, rest = self._pools[group], 0, []
        while freed < count and (node := self._window_nodes[group].pop()) is not None:
            blocks = node.blocks[group]
            for i, block in enumerate(blocks):
                if freed < count and block != ABSENT and pool.is_idle(block):
                    self.first_reason = self.first_reason or EvictionReason(
                        {"age": self.clock.tick - node.tick}, node.tenant
                    )
                    pool.leave_index(block)
                    blocks[i] = ABSENT
                    freed += 1
            if any(block != ABSENT for block in blocks):
                if freed < count:
                    node.tick = self.clock.tick  # the remaining blocks are in use now
                rest.append(node)
            self.tidy(node)
        for node in rest:
            if not node.is_removed:
                self._window_nodes[group].add(node)
        self.num_evicted += freed
        return freed

    def _num_idle_at_end(self, leaf: Node, wanted: int) -> int:
        """Blocks at the end of a leaf that are idle or absent in every group, at most `wanted`."""
        most = min(wanted, len(leaf.blocks[0]))
        for count in range(most):
            for pool, blocks in zip(self._pools, leaf.blocks, strict=True):
                block = blocks[-1 - count]
                if block != ABSENT and not pool.is_idle(block):
                    return count
        return most

    def eviction_cause(self, key: RootKey, before: bytes, rest: bytes, num_found: int) -> EvictionCause | None:
        """The cause of the eviction that left only `num_found` tokens of `rest` behind `before`; None without one."""
        return self._eviction_log.find((key, len(before)), before[-self._logged_bytes :], rest, num_found)

    def _log_eviction(self, leaf: Node, at: int, cause: EvictionCause) -> None:
        size = self._size
        root, before = leaf.root, leaf.path_end(at * size, self._logged_bytes)
        place = (root.root_key, (leaf.start - root.end + at) * size)
        self._eviction_log.add(place, before, leaf.edge[at * size : (at + 1) * size], cause)

    def _cut(self, node: Node, at: int) -> None:
        """Remove the blocks of a node from index `at` on."""
        node.shorten(node.start + at)
        for group, blocks in enumerate(node.blocks):
            for block in blocks[at:]:
                if block != ABSENT:
                    self._pools[group].leave_index(block)
            del blocks[at:]
        node.edge = node.edge[: at * self._size]
        self._report(node)
        self.leaves.update(node)

    def _remove_leaf(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None, "roots are not removed"
        self._detach(leaf)
        parent.tick, parent.level = max(parent.tick, leaf.tick), max(parent.level, leaf.level)
        self.tidy(parent)

    def _detach(self, leaf: Node) -> None:
        """Remove a leaf with its blocks from the tree. Its parent is not tidied."""
        assert leaf.parent is not None, "roots are not removed"
        self.num_nodes -= 1
        self.retention.move_to_parent(leaf, leaf.parent)
        leaf.parent.detach(leaf)
        self._report(leaf)
        for group, blocks in enumerate(leaf.blocks):
            for block in blocks:
                if block != ABSENT:
                    self._pools[group].leave_index(block)
        self._unlist(leaf)

    def drop_tail(self, node: Node, key: bytes, most: int) -> None:
        """Remove a tail of at most `most` bytes with which `key` begins."""
        for child in node.neighbours(key[: self._size]):
            if len(child.edge) <= min(most, self._size - 1) and key.startswith(child.edge):
                self._detach(child)
                return

    def _merge(self, node: Node, child: Node) -> None:
        """Merge a node into its only child, which keeps its end."""
        parent = node.parent
        assert parent is not None, "roots are not merged"
        self.num_nodes -= 1
        parent.replace(node, child)
        node.parent = None
        child.edge = node.edge + child.edge
        for upper, lower in zip(node.blocks, child.blocks, strict=True):
            lower[:0] = upper
        child.tick, child.level = max(child.tick, node.tick), max(child.level, node.level)
        child.created_at = min(child.created_at, node.created_at)
        child.used_at = max(child.used_at, node.used_at)
        child.merge_uses(node)
        self._report(node, child)
        self.retention.merge_nodes(node, child)
        self._unlist(node)
        self._list(child)

    def _relist(self, node: Node) -> None:
        """List a leaf whose eviction key may have fallen or which has idle blocks again."""
        if not node.children and not node.is_removed:
            self.leaves.update(node)
            self.leaves.add(node)

    def _list(self, node: Node, *, in_use: bool = False) -> None:
        """List a leaf for eviction, and any node with blocks of a window group for their eviction.

        in_use: a table is about to end there. `tidy` lists the leaf when no table does any more.
        """
        if not (node.children or node.writers or in_use):
            self.leaves.add(node)
        for group, nodes in self._window_nodes.items():
            if any(block != ABSENT for block in node.blocks[group]):
                nodes.add(node)

    def _unlist(self, node: Node) -> None:
        self.leaves.discard(node)
        for nodes in self._window_nodes.values():
            nodes.discard(node)

    def _number(self) -> int:
        self._last_number += 1
        self.num_nodes += 1
        return self._last_number

    def _report(self, *nodes: Node) -> None:
        for changes in self._changes:
            changes.add(nodes)

    def _forget_root(self, key: RootKey) -> None:
        self.num_nodes -= 1
        self._report(self.roots.pop(key))
        keys = self._by_tenant[key[0].tenant]
        del keys[key]
        if not keys:
            del self._by_tenant[key[0].tenant]

    # Checks

    def namespaces(self, tenant: str) -> Iterator[Namespace]:
        """Namespaces of a tenant that have a root, the latest first."""
        return (key[0] for key in reversed(self._by_tenant.get(tenant, {})))

    def roots_of(self, tenant: str) -> Iterator[Node]:
        """The roots of a tenant's namespaces, oldest first."""
        return (self.roots[key] for key in self._by_tenant.get(tenant, ()))

    def nodes(self) -> Iterator[Node]:
        """All nodes, roots first."""
        for root in self.roots.values():
            yield from root.walk()

    def owners(self, group: int) -> Counter[int]:
        """See PrefixIndex."""
        return Counter(block for node in self.nodes() for block in node.blocks[group] if block != ABSENT)

    def check(self) -> list[str]:
        """See PrefixIndex."""
        wrong = [f"node {node.id}: {wrong}" for node in self.nodes() for wrong in node_errors(node, self._size)]
        if (count := sum(1 for _ in self.nodes())) != self.num_nodes:
            wrong.append(f"{self.num_nodes} nodes are counted, and there are {count}")
        for node in self.nodes():
            wrong += [f"node {node.id}: {one}" for one in self.retention.node_errors(node, self._window_nodes)]
            if node.is_free_leaf and node not in self.leaves and not self.retention.is_pinned(node):
                wrong.append(f"node {node.id}: a leaf that would never be evicted")
        return wrong


def node_of(table: BlockTable) -> Node:
    """The node where a table's indexed blocks end."""
    node = table.cursor.handle
    assert isinstance(node, Node), "the table is registered"
    return node
