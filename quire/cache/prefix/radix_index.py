"""The prefix index as a radix tree (RadixAttention: Zheng et al., 2024, section 3). Matches are exact to the token.

Edges are runs of whole blocks. If a match ends within a block, that block is copied. Children are sorted, so the block
with the longest common prefix is next to the place where the match ends. Or a running sequence is still filling that
block; then its table is one of the node's `writers`. A partly filled block that a sequence leaves becomes a tail. With
blocks of one token this is the textbook tree.

Each namespace has a root. The leading blocks of a prompt that match a public prefix are under a root that all tenants
read. The blocks behind them are under a root for (namespace, those blocks).

An adapter may start behind position 0. Then the whole blocks before its start are where those of the model alone are:
under the public root and its namespace's. The blocks from the start on are under a root for (namespace, all these
blocks). So a path has up to three sections, each under a root of its own.

In a group with a window, a match ends where the blocks that its next query attends to are present.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from quire.cache.block_pool import BlockPool
from quire.cache.block_table import ABSENT, BlockTable
from quire.cache.prefix.eviction import (
    CostPolicy,
    EvictableLeaves,
    LFUPolicy,
    LRUPolicy,
    OrderedLeaves,
    PriorityPolicy,
    RecomputeSeconds,
    default_recompute_seconds,
)
from quire.cache.prefix.index import (
    EvictionCause,
    EvictionReason,
    InsertResult,
    PrefixMatch,
    PublicPrefixes,
    common_prefix_len,
)
from quire.cache.prefix.radix_node import Clock, Node
from quire.cache.prefix.radix_search import RadixSearch, TreePosition, climb, positions_of, root_key_of
from quire.cache.prefix.radix_tree import RadixTrees, RootKey, node_of
from quire.cache.prefix.retention_marks import LeavesByTenant, RetentionMarks
from quire.config import CacheConfig, Eviction
from quire.core.block_keys import BYTES_PER_TOKEN, token_key
from quire.core.explanation import Miss
from quire.core.request import Namespace

# An empty collection of leaves in the order of each policy. seconds: prediction for the policy "cost".
EVICTION: Mapping[Eviction, Callable[[Clock, RecomputeSeconds, int], EvictableLeaves]] = MappingProxyType(
    {
        "lru": lambda clock, _seconds, _block_size: LeavesByTenant(LRUPolicy(clock), clock),
        "lfu": lambda clock, _seconds, _block_size: LeavesByTenant(LFUPolicy(clock), clock),
        "priority": lambda clock, _seconds, _block_size: OrderedLeaves(PriorityPolicy(clock)),
        "cost": lambda clock, seconds, block_size: LeavesByTenant(CostPolicy(clock, seconds, block_size), clock),
    }
)


class RadixIndex:
    """See PrefixIndex."""

    def __init__(
        self,
        config: CacheConfig,
        pools: Sequence[BlockPool],
        planned_writes: Mapping[int, int],
        seconds: RecomputeSeconds = default_recompute_seconds,
    ) -> None:
        """planned_writes: blocks of group 0 that the planned step writes -> leading tokens that were written before.

        seconds: seconds to compute tokens behind others, for the policy "cost".
        """
        self._num_groups = len(pools)
        self._pools = pools
        self._block_size = config.block_size
        self._size = config.block_size * BYTES_PER_TOKEN  # bytes of a block's key
        self._public = PublicPrefixes(config.public_prefixes, self._size)
        clock = Clock()
        self.trees = RadixTrees(
            pools, config.dropping, self._size, clock, EVICTION[config.eviction](clock, seconds, config.block_size)
        )
        self._search = RadixSearch(config, self.trees, self._public, planned_writes)

    @property
    def num_evicted(self) -> int:
        """See PrefixIndex."""
        return self.trees.num_evicted

    def take_reason(self) -> EvictionReason:
        """See PrefixIndex."""
        return self.trees.take_reason()

    @property
    def retention(self) -> RetentionMarks:
        """See PrefixIndex."""
        return self.trees.retention

    def match_prefix(self, namespace: Namespace, tokens: Sequence[int]) -> PrefixMatch:
        """See PrefixIndex."""
        return self._search.match_prefix(namespace, tokens)

    def truncate(self, match: PrefixMatch, num_tokens: int) -> PrefixMatch | None:
        """See PrefixIndex."""
        return self._search.truncate(match, num_tokens)

    def explain_miss(self, namespace: Namespace, tokens: Sequence[int], found: PrefixMatch, reusable: int) -> Miss:
        """See PrefixIndex."""
        return self._search.explain_miss(namespace, tokens, found, reusable)

    # Insertion

    def register(self, table: BlockTable, found: PrefixMatch) -> None:
        """See PrefixIndex."""
        self.trees.clock.tick += 1
        depth = len(found.blocks[0]) if found.blocks else 0
        table.cursor.num_public = self._num_public(table)
        end, own = None, self._root_key(table, depth)
        for node, at in positions_of(found):
            if at == depth and root_key_of(node) == own:
                end = node = self.trees.split_at(node, at)
            self.trees.touch(node, hit=True)
        self.trees.register_table(table, end or self._root(table, depth))

    def register_fork(self, parent: BlockTable, child: BlockTable, num_indexed: int) -> None:
        """See PrefixIndex."""
        depth = num_indexed
        child.cursor.num_public = min(parent.cursor.num_public, self._num_public(child))
        if depth == self._begin(child, depth):
            self.trees.register_table(child, self._root(child, depth))
            return
        place = climb(TreePosition(node_of(parent), parent.cursor.num_indexed), depth)
        if place.node.root.end > depth:  # the child's blocks end under the root of an earlier section
            place = self._descend_section(child, depth)
        self.trees.register_table(child, self.trees.split_at(*place))

    def extend(self, table: BlockTable) -> bool:
        """See PrefixIndex."""
        at, node = table.cursor.num_indexed, node_of(table)
        if node.public or at < table.namespace.num_model_blocks(self._block_size):
            return False  # the table may leave the section
        key = token_key(table.tokens[at * self._block_size : (at + 1) * self._block_size])
        if not self.trees.extend(node, key, [blocks[at] for blocks in table.blocks]):
            return False
        table.cursor.num_indexed = at + 1
        return True

    def insert(self, table: BlockTable, num_blocks: int, num_written: int) -> InsertResult:
        """See PrefixIndex."""
        added = InsertResult()
        node = self._insert_blocks(table, num_blocks, added, num_written)
        if node is not table.cursor.handle:
            self.trees.unregister_table(table, keep=node)
            self.trees.register_table(table, node)
        table.cursor.num_indexed = node.end
        return added

    def unregister(self, table: BlockTable, num_tokens: int) -> list[int]:
        """See PrefixIndex."""
        self.trees.clock.tick += 1
        added = InsertResult()
        num_blocks, rest = divmod(num_tokens, self._block_size)
        node = self._insert_blocks(table, num_blocks, added, None)
        self.trees.unregister_table(table, keep=node)
        ends = [node]
        if rest and node.end == num_blocks and (tail := self._add_tail(node, table, num_tokens, added)) is not None:
            ends.append(tail)
        self.trees.touch(ends[-1], hit=False)
        if table.retention.params.pin and table.cursor.num_public and not node.public:
            ends.append(self._descend_section(table, table.cursor.num_public).node)
        leading = self._leading_end(table, node)
        ends += leading
        self.trees.apply_retention(ends, table.retention)
        for one in (*leading, node):
            self.trees.tidy(one)
        table.cursor.handle = None
        return added.entered

    def evict(self, group: int, count: int, cause: EvictionCause) -> int:
        """See PrefixIndex."""
        return self.trees.evict(group, count, cause)

    def invalidate(self, blocks: Collection[int], tables: Iterable[BlockTable]) -> None:
        """See PrefixIndex."""
        self.trees.invalidate(blocks)
        for table in tables:
            num_model = table.namespace.num_model_blocks(self._block_size)
            for end in sorted({table.cursor.num_public, num_model}):
                if 0 < end <= node_of(table).root.end:
                    place = self._descend_section(table, end)
                    if place.depth < end:
                        self.trees.unregister_table(table)
                        self.trees.register_table(table, self.trees.split_at(*place))

    def owners(self, group: int) -> Counter[int]:
        """See PrefixIndex."""
        return self.trees.owners(group)

    def is_registered(self, table: BlockTable) -> bool:
        """See PrefixIndex."""
        node = table.cursor.handle
        return isinstance(node, Node) and not node.is_removed and table in node.writers

    def check(self) -> list[str]:
        """See PrefixIndex."""
        return self.trees.check()

    def _insert_blocks(self, table: BlockTable, num_blocks: int, added: InsertResult, num_written: int | None) -> Node:
        """Insert a table's blocks up to `num_blocks`. Returns the node where they end, or where the insertion stops.

        num_written: leading positions whose blocks may be exchanged. None: insert all blocks and exchange none, because
        the table is about to be released.
        """
        num_there = num_blocks * self._block_size if num_written is None else num_written
        node = node_of(table)
        first = depth = table.cursor.num_indexed
        data = token_key(table.tokens[first * self._block_size : num_blocks * self._block_size])
        while depth < num_blocks:
            end = self._end(table, depth)
            stop = num_blocks if end is None else min(num_blocks, end)
            rest = data[(depth - first) * self._size : (stop - first) * self._size]
            child = node.child(rest[: self._size])
            if child is None:
                self._remove_misplaced_tail(table, depth)
                new = [blocks[depth:stop] for blocks in table.blocks]
                node = self.trees.append(node, rest, new, table, num_there - depth * self._block_size)
                added.entered += range(depth, stop)
                depth = stop
            else:
                count = common_prefix_len(child.edge, rest) * BYTES_PER_TOKEN // self._size
                if num_written is not None:
                    count = self._exchange(table, depth, child, count, num_written // self._block_size, added)
                if not count:
                    break
                depth += count
                node = child if depth == end else self.trees.split_at(child, depth)
            if depth == end:
                self.trees.tidy(node)
                node = self._root(table, depth)
        return node

    def _exchange(
        self, table: BlockTable, depth: int, child: Node, count: int, num_exchangeable: int, added: InsertResult
    ) -> int:
        """Replace blocks of a table by those of a node. Returns for how many of `count` blocks that was possible."""
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
                    self.trees.restore_block(child, i, group, mine)
                    added.entered.append(index)
                else:
                    self._pools[group].incr_ref(other)
                    table.blocks[group][index] = other
                    added.exchanged.append((group, mine))
        return count

    def _add_tail(self, node: Node, table: BlockTable, num_tokens: int, added: InsertResult) -> Node | None:
        """Insert the partly filled block of a table as a tail.

        Returns None, and inserts nothing, if a child begins with the same tokens or a block is absent.
        """
        depth = node.end
        key = token_key(table.tokens[depth * self._block_size : num_tokens])
        blocks = [[blocks[depth]] for blocks in table.blocks]
        if [ABSENT] in blocks or any(child.edge.startswith(key) for child in node.neighbours(key)):
            return None
        self._remove_misplaced_tail(table, depth)
        added.entered.append(depth)
        return self.trees.append(node, key, blocks, None, self._block_size)

    def _remove_misplaced_tail(self, table: BlockTable, depth: int) -> None:
        """Remove a tail that has the same block as this table but is under the other kind of root.

        This happens if the tail and the table disagree on whether the block belongs to a public prefix: the tail is
        under the public root and the block belongs under the namespace's root, or the other way round.
        """
        if not self._public.longest:
            return
        new = [(pool, blocks[depth]) for pool, blocks in zip(self._pools, table.blocks, strict=True)]
        if not any(b != ABSENT and pool.num_refs(b) > pool.num_refs_without_index(b) for pool, b in new):
            return
        node: Node | None = None
        if depth == table.cursor.num_public:
            root = self.trees.root(self._public.root_key(table.namespace), 0, public=True)
            node = self._descend(root, table, depth).node
        elif depth < table.cursor.num_public:
            before = token_key(table.tokens[: depth * self._block_size])
            node = self.trees.roots.get((table.namespace.of_block(depth, self._block_size), before))
        if node is not None:
            key = token_key(table.tokens[depth * self._block_size :][: self._block_size])
            self.trees.drop_tail(node, key, self._size)
            self.trees.tidy(node)

    def _num_public(self, table: BlockTable) -> int:
        return self._public.num_blocks(table.namespace, token_key(table.tokens[: self._public.longest]))

    def _begin(self, table: BlockTable, depth: int) -> int:
        """Index of the first block of the section of a table's block `depth`."""
        num_public, num_model = table.cursor.num_public, table.namespace.num_model_blocks(self._block_size)
        return 0 if depth < num_public else num_public if depth < num_model else max(num_public, num_model)

    def _end(self, table: BlockTable, depth: int) -> int | None:
        """Index behind the last block of the section of a table's block `depth`; None for the last section."""
        num_public, num_model = table.cursor.num_public, table.namespace.num_model_blocks(self._block_size)
        return num_public if depth < num_public else num_model if depth < num_model else None

    def _root_key(self, table: BlockTable, depth: int) -> RootKey:
        """The key of the root of the section of a table's block `depth`."""
        if depth < table.cursor.num_public:
            return self._public.root_key(table.namespace)
        before = token_key(table.tokens[: self._begin(table, depth) * self._block_size])
        return table.namespace.of_block(depth, self._block_size), before

    def _root(self, table: BlockTable, depth: int) -> Node:
        """The root of the section of a table's block `depth`."""
        is_public = depth < table.cursor.num_public
        return self.trees.root(self._root_key(table, depth), self._begin(table, depth), public=is_public)

    def _descend(self, root: Node, table: BlockTable, num_blocks: int) -> TreePosition:
        """The place where the leading blocks of a table, or those that are present, end under a root."""
        data = token_key(table.tokens[: num_blocks * self._block_size])
        return self._search.descend(root, data, tuple([] for _ in range(self._num_groups)))

    def _descend_section(self, table: BlockTable, num_blocks: int) -> TreePosition:
        """The same under the root of the last of these blocks."""
        return self._descend(self._root(table, num_blocks - 1), table, num_blocks)

    def _leading_end(self, table: BlockTable, node: Node) -> list[Node]:
        """The node where the blocks before the start of a table's adapter end, which are used now.

        Empty if `node`, where the table ends, is before that place, or if these blocks are all public. Without them,
        the blocks from the start on cannot be found, so that they must not be evicted earlier.
        """
        num_model = table.namespace.num_model_blocks(self._block_size)
        if num_model <= table.cursor.num_public or node.root.end < num_model:
            return []
        end = self.trees.split_at(*self._descend_section(table, num_model))
        self.trees.clock.tick += 1
        self.trees.touch(end, hit=False)
        return [end]
