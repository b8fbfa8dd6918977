"""Prefix matches of waiting prompts, updated incrementally. They order the waiting queue; admission matches anew.

Matches are in whole blocks. In the radix tree a match continues from its last node. A node whose `edge` is the same
object has not changed. The nodes above a node of the tree have not changed either, because only leaves are evicted. A
match that begins with a public prefix spans two trees, which change independently, so it starts at the root.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.cache.kv_cache import KVCache
from quire.cache.prefix.index import SYMBOL, PrefixIndex, PublicPrefixes, num_common, symbols
from quire.cache.prefix.radix_index import RadixTree
from quire.cache.prefix.radix_node import Node
from quire.cache.prefix.radix_tree import Forest
from quire.core.request import Namespace

_PIECE = 32  # blocks per comparison


@dataclass(slots=True)
class Match:
    """The last known prefix match of a prompt."""

    num_blocks: int = 0
    num_public: int = 0  # leading blocks that belong to a public prefix
    node: Node | None = None  # where the match ends; None: no match, or the index is no tree
    edge: bytes = b""  # the node's `edge` at that time


class Matching:
    """Prefix matches against the index of a cache. They are incremental for a radix tree without window groups."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._block_size = cache.block_size
        self._size = cache.block_size * SYMBOL
        self._public = PublicPrefixes(cache.config.public_prefixes, self._size)

    @property
    def index(self) -> PrefixIndex:
        """The current index. Matches of an earlier one are invalid: the cache replaces an inconsistent index."""
        return self._cache.index

    @property
    def follows_tree(self) -> bool:
        """Whether matches have nodes."""
        return isinstance(self.index, RadixTree) and not self._cache.windowed

    def renew(self, match: Match, namespace: Namespace, tokens: Sequence[int], most: int) -> int:
        """Update the match of the leading `most` tokens. Returns about how many blocks were compared."""
        index = self._cache.index
        if not isinstance(index, RadixTree) or self._cache.windowed:
            match.num_blocks = index.find(namespace, tokens[:most]).num_tokens // self._block_size if most > 0 else 0
            return most // self._block_size + 1
        most = max(most, 0) // self._block_size
        node, depth = match.node, match.num_blocks
        if node is None or node.is_gone or node.parent is None or match.num_public:
            node, depth = self._begin(match, index.forest, namespace, tokens, most)
        elif node.edge is match.edge:
            if depth < node.end:
                return 1
        else:
            node, depth = node.parent, node.start
            while depth > match.num_blocks and node.parent is not None:  # it was split behind the end of the match
                node, depth = node.parent, node.start
        begin = depth
        if node is not None:
            node, depth = self._go_on(match, index.forest, namespace, node, depth, tokens, most)
            match.edge = node.edge
        match.node, match.num_blocks = node, depth
        return depth - begin + 1

    def next_key(self, match: Match, namespace: Namespace, tokens: Sequence[int], most: int) -> tuple[object, ...]:
        """A key that is equal for prompts that match up to the same place and have the same next block."""
        begin = match.num_blocks * self._block_size
        where = namespace if match.node is None else match.node.id
        return where, match.num_blocks, symbols(tokens[begin : min(begin + self._block_size, most)])

    def path(self, match: Match) -> tuple[int, ...]:
        """Ids of the nodes from a root to the end of the match: the namespace's root, or the public one."""
        ids = []
        node = match.node
        while node is not None:
            ids.append(node.id)
            node = node.parent
        return tuple(reversed(ids))

    def _begin(
        self, match: Match, forest: Forest, namespace: Namespace, tokens: Sequence[int], most: int
    ) -> tuple[Node | None, int]:
        """The root under which a prompt is matched (None if there is none), and depth 0. Sets `match.num_public`."""
        if self._public.longest:
            match.num_public = min(self._public.num_blocks(symbols(tokens[: self._public.longest])), most)
        if match.num_public:
            return forest.roots.get(self._public.root_key(namespace)), 0
        return forest.roots.get((namespace, b"")), 0

    def _go_on(
        self,
        match: Match,
        forest: Forest,
        namespace: Namespace,
        node: Node,
        depth: int,
        tokens: Sequence[int],
        most: int,
    ) -> tuple[Node, int]:
        """(node, depth in blocks) where the match ends, continued from `depth` blocks at `node`."""
        if node.public:
            node, depth = self._descend(node, depth, tokens, match.num_public)
            if depth < match.num_public:
                return node, depth
            own = forest.roots.get((namespace, symbols(tokens[: depth * self._block_size])))
            if own is None:
                return node, depth
            node = own
        return self._descend(node, depth, tokens, most)

    def _descend(self, node: Node, depth: int, tokens: Sequence[int], most: int) -> tuple[Node, int]:
        size = self._block_size
        while depth < most:
            child = node.children.get(symbols(tokens[depth * size : (depth + 1) * size]))
            if child is None:
                break
            node, end = child, min(child.end, most)
            while depth < end:
                piece = min(_PIECE, end - depth)
                run = symbols(tokens[depth * size : (depth + piece) * size])
                begin = (depth - child.start) * self._size
                if (there := child.edge[begin : begin + len(run)]) != run:
                    return node, depth + num_common(run, there) * SYMBOL // self._size
                depth += piece
        return node, depth
