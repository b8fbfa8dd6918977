"""The prefix index as a radix tree (RadixAttention: Zheng et al., 2024, section 3), exact to the token.

Edges are runs of whole blocks. A match that ends inside a block is served by copying that block: children are
sorted, so the block with the longest beginning in common is a neighbour of the place where the match ends, or it
is still being filled by a running sequence, and then its table is among the `writers` of the node. What a
sequence leaves behind in a block that is not full becomes a tail. With blocks of one token this is the textbook
tree.

Each namespace has a root. The leading blocks of a prompt that hold a public prefix belong to a root that all
tenants read; what follows them belongs to a root for (namespace, those blocks).

In a group with a window a match ends where the blocks that its next query sees are there.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from quire.cache.block_pool import BlockPool
from quire.cache.block_table import ABSENT, BlockTable
from quire.cache.prefix.choose import leaves_in_order
from quire.cache.prefix.eviction_by_cost import Seconds, seconds_by_default
from quire.cache.prefix.index import SYMBOL, Added, Cause, Found, Reason, num_common, symbols
from quire.cache.prefix.public import PublicPrefixes
from quire.cache.prefix.radix_node import Node
from quire.cache.prefix.radix_search import Place, RadixSearch, climb
from quire.cache.prefix.radix_tree import Forest, place_of
from quire.cache.prefix.retention_marks import Wishes
from quire.cache.prefix.uses import Clock
from quire.config import CacheConfig
from quire.core.explanation import Miss
from quire.core.request import Namespace


class RadixTree:
    """See PrefixIndex."""

    def __init__(
        self,
        config: CacheConfig,
        pools: Sequence[BlockPool],
        fresh: Mapping[int, int],
        seconds: Seconds = seconds_by_default,
    ) -> None:
        """fresh: blocks of group 0 that the step that is being planned writes -> leading tokens that were there.

        seconds: to compute so many tokens behind so many others, for eviction by cost.
        """
        self._num_groups = len(pools)
        self._pools = pools
        self._block_size = config.block_size
        self._size = config.block_size * SYMBOL  # of a block's key
        self._public = PublicPrefixes(config.public_prefixes, self._size)
        clock = Clock()
        windowed = [g for g, group in enumerate(config.groups) if group.window]
        self.forest = Forest(pools, windowed, self._size, clock, leaves_in_order(config, clock, seconds))
        self._search = RadixSearch(config, self.forest, self._public, fresh)

    @property
    def num_evicted(self) -> int:
        """See PrefixIndex."""
        return self.forest.num_evicted

    def take_reason(self) -> Reason:
        """See PrefixIndex."""
        return self.forest.take_reason()

    @property
    def wishes(self) -> Wishes:
        """See PrefixIndex."""
        return self.forest.wishes

    def find(self, namespace: Namespace, tokens: Sequence[int]) -> Found:
        """See PrefixIndex."""
        return self._search.find(namespace, tokens)

    def why(self, namespace: Namespace, tokens: Sequence[int], found: Found, reusable: int) -> Miss:
        """See PrefixIndex."""
        return self._search.why(namespace, tokens, found, reusable)

    # What tables begin with, add and leave behind

    def enter(self, table: BlockTable, found: Found) -> None:
        """See PrefixIndex."""
        self.forest.clock.tick += 1
        depth = len(found.blocks[0]) if found.blocks else 0
        table.num_public = self._num_public(table)
        end = None
        for node, at in found.place or ():  # type: ignore[attr-defined]  # the places that `find` put there
            if at == depth and node.public == (depth < table.num_public):
                end = node = self.forest.end_at(node, at)
            self.forest.touch(node, hit=True)
        self.forest.write(table, end or self._root(table, depth))
        if self.forest.leaves.asks_for_misses:
            self._note_missing(table, depth)

    def _note_missing(self, table: BlockTable, depth: int) -> None:
        """A table would have begun with more blocks than `depth`, had they been there."""
        data, num_public = symbols(table.tokens), table.num_public
        if depth < num_public:
            self.forest.leaves.missed(self._public.root_key(table.namespace), data[: num_public * self._size], 0, depth)
        own = (table.namespace, data[: num_public * self._size])
        self.forest.leaves.missed(own, data, num_public, max(depth, num_public))

    def follow(self, parent: BlockTable, child: BlockTable) -> None:
        """See PrefixIndex."""
        depth = child.num_indexed
        child.num_public = min(parent.num_public, self._num_public(child))
        place = climb(Place(place_of(parent), parent.num_indexed), depth)
        if place.node.root.end > depth:  # it ends in the public root
            place = self._descend_public(parent, depth)
        at_root = depth == child.num_public
        self.forest.write(child, self._root(child, depth) if at_root else self.forest.end_at(*place))

    def add(self, table: BlockTable, num_blocks: int, num_written: int) -> Added:
        """See PrefixIndex."""
        added = Added()
        at, node = table.num_indexed, place_of(table)
        if num_blocks == at + 1 and not node.public:
            key = symbols(table.tokens[at * self._block_size : num_blocks * self._block_size])
            if self.forest.extend(node, key, [blocks[at] for blocks in table.blocks]):
                table.num_indexed = num_blocks
                added.entered.append(at)
                return added
        node = self._advance(table, num_blocks, added, num_written)
        if node is not table.place:
            self.forest.unwrite(table, keep=node)
            self.forest.write(table, node)
        table.num_indexed = node.end
        return added

    def leave(self, table: BlockTable, num_tokens: int) -> list[int]:
        """See PrefixIndex."""
        self.forest.clock.tick += 1
        added = Added()
        num_blocks, rest = divmod(num_tokens, self._block_size)
        node = self._advance(table, num_blocks, added, None)
        self.forest.unwrite(table, keep=node)
        ends = [node]
        if rest and node.end == num_blocks and (tail := self._add_tail(node, table, num_tokens, added)) is not None:
            ends.append(tail)
        self.forest.touch(ends[-1], hit=False)
        if table.keep.retention.pin and table.num_public and not node.public:
            ends.append(self._descend_public(table, table.num_public).node)
        self.forest.left(ends, table.keep, table.keep.num_prompt // self._block_size)
        self.forest.tidy(node)
        table.place = None
        return added.entered

    def evict(self, group: int, count: int, cause: Cause) -> int:
        """See PrefixIndex."""
        return self.forest.evict(group, count, cause)

    def void(self, blocks: Collection[int], tables: Iterable[BlockTable]) -> None:
        """See PrefixIndex."""
        self.forest.void(blocks)
        for table in tables:
            if table.num_public and not place_of(table).public:
                place = self._descend_public(table, table.num_public)
                if place.depth < table.num_public:
                    self.forest.unwrite(table)
                    self.forest.write(table, self.forest.end_at(*place))

    def owners(self, group: int) -> Counter[int]:
        """See PrefixIndex."""
        return self.forest.owners(group)

    def knows(self, table: BlockTable) -> bool:
        """See PrefixIndex."""
        node = table.place
        return isinstance(node, Node) and not node.is_gone and table in node.writers

    def check(self) -> list[str]:
        """See PrefixIndex."""
        return self.forest.check()

    def _advance(self, table: BlockTable, num_blocks: int, added: Added, num_written: int | None) -> Node:
        """Take in a table's blocks up to `num_blocks`; the node where they end, or where it has to wait.

        num_written: leading positions whose blocks may be exchanged; None: all, and they are about to be given up.
        """
        num_there = num_blocks * self._block_size if num_written is None else num_written
        node = place_of(table)
        first = depth = table.num_indexed
        data = symbols(table.tokens[first * self._block_size : num_blocks * self._block_size])
        while depth < num_blocks:
            stop = min(num_blocks, table.num_public) if node.public else num_blocks
            rest = data[(depth - first) * self._size : (stop - first) * self._size]
            child = node.child(rest[: self._size])
            if child is None:
                self._withdraw_tail(table, depth)
                new = [blocks[depth:stop] for blocks in table.blocks]
                node = self.forest.append(node, rest, new, table, num_there - depth * self._block_size)
                added.entered += range(depth, stop)
                depth = stop
            else:
                count = num_common(child.edge, rest) * SYMBOL // self._size
                if num_written is not None:
                    count = self._exchange(table, depth, child, count, num_written // self._block_size, added)
                if not count:
                    break
                depth += count
                crosses = child.public and depth == table.num_public
                node = child if crosses else self.forest.end_at(child, depth)
            if node.public and depth == table.num_public:
                self.forest.tidy(node)
                node = self._root(table, depth)
        return node

    def _exchange(
        self, table: BlockTable, depth: int, child: Node, count: int, num_exchangeable: int, added: Added
    ) -> int:
        """Let a table take blocks of a node in place of its own; how many of `count` it could."""
        for i in range(count):
            index = depth + i
            own, theirs = ([blocks[j] for blocks in some] for some, j in ((table.blocks, index), (child.blocks, i)))
            if own == theirs:
                continue
            if index >= num_exchangeable:
                return i
            if added.changed_from is None:
                added.changed_from = index
            for group, (mine, other) in enumerate(zip(own, theirs, strict=True)):
                if mine in (other, ABSENT):
                    continue
                if other == ABSENT:
                    self.forest.fill(child, i, group, mine)
                    added.entered.append(index)
                else:
                    self._pools[group].hold(other)
                    table.blocks[group][index] = other
                    added.let_go.append((group, mine))
        return count

    def _add_tail(self, node: Node, table: BlockTable, num_tokens: int, added: Added) -> Node | None:
        """The block that a table did not fill, unless one that begins the same way is there."""
        depth = node.end
        key = symbols(table.tokens[depth * self._block_size : num_tokens])
        blocks = [[blocks[depth]] for blocks in table.blocks]
        if [ABSENT] in blocks or any(child.edge.startswith(key) for child in node.neighbours(key)):
            return None
        self._withdraw_tail(table, depth)
        added.entered.append(depth)
        return self.forest.append(node, key, blocks, None, self._block_size)

    def _withdraw_tail(self, table: BlockTable, depth: int) -> None:
        """Take back a block that another table left as a tail, where one of the two went on as a public prefix does.

        It stands in the public root then and belongs under the namespace's, or the other way round.
        """
        new = [(pool, blocks[depth]) for pool, blocks in zip(self._pools, table.blocks, strict=True)]
        if not any(b != ABSENT and pool.refs(b) > pool.users(b) for pool, b in new):
            return
        node: Node | None = None
        if depth == table.num_public:
            node = self._descend_public(table, depth).node
        elif depth < table.num_public:
            before = symbols(table.tokens[: depth * self._block_size])
            node = self.forest.roots.get((table.namespace, before))
        if node is not None:
            key = symbols(table.tokens[depth * self._block_size :][: self._block_size])
            self.forest.drop_tail(node, key, self._size)
            self.forest.tidy(node)

    def _num_public(self, table: BlockTable) -> int:
        return self._public.num_blocks(symbols(table.tokens[: self._public.longest]))

    def _root(self, table: BlockTable, depth: int) -> Node:
        """The root that blocks from `depth` on belong under, which begins there: the public or the namespace's."""
        if depth < table.num_public:
            return self.forest.root(self._public.root_key(table.namespace), 0, public=True)
        before = symbols(table.tokens[: table.num_public * self._block_size])
        return self.forest.root((table.namespace, before), table.num_public, public=False)

    def _descend_public(self, table: BlockTable, num_blocks: int) -> Place:
        """Where leading blocks of a table end in the public root, or as many of them as are there."""
        data = symbols(table.tokens[: num_blocks * self._block_size])
        root = self.forest.root(self._public.root_key(table.namespace), 0, public=True)
        return self._search.descend(root, data, tuple([] for _ in range(self._num_groups)))
