"""Prefix matches of waiting prompts, updated incrementally. They order the waiting queue; admission matches anew.

Matches are in whole blocks. In the radix tree a match continues from its last node. A node whose `edge` is the same
object has not changed. The nodes above a node of the tree have not changed either, because only leaves are evicted. A
match that begins with a public prefix spans two trees, which change independently, so it starts at the root.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.cache.manager import KVCacheManager
from quire.cache.prefix.index import BYTES_PER_TOKEN, PrefixIndex, PublicPrefixes, common_prefix_len, token_key
from quire.cache.prefix.radix_index import RadixIndex
from quire.cache.prefix.radix_node import Node
from quire.cache.prefix.radix_tree import RadixTrees
from quire.core.request import Namespace

_BLOCKS_PER_COMPARISON = 32  # blocks per comparison


@dataclass(slots=True)
class IncrementalMatch:
    """The last known prefix match of a prompt."""

    num_blocks: int = 0
    num_public: int = 0  # leading blocks that belong to a public prefix
    node: Node | None = None  # where the match ends; None: no match, or the index is no tree
    edge: bytes = b""  # the node's `edge` at that time


class IncrementalMatcher:
    """Prefix matches against the index of a cache. They are incremental for a radix tree without window groups."""

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache = cache
        self._block_size = cache.block_size
        self._size = cache.block_size * BYTES_PER_TOKEN
        self._public = PublicPrefixes(cache.config.public_prefixes, self._size)

    @property
    def index(self) -> PrefixIndex:
        """The current index. Matches of an earlier one are invalid: the cache replaces an inconsistent index."""
        return self._cache.index

    def update(self, match: IncrementalMatch, namespace: Namespace, tokens: Sequence[int], num_tokens: int) -> int:
        """Update the match of the leading `num_tokens` tokens. Returns about how many blocks were compared."""
        index = self._cache.index
        if not isinstance(index, RadixIndex) or self._cache.windowed:
            match.num_blocks = (
                index.match_prefix(namespace, tokens[:num_tokens]).num_tokens // self._block_size
                if num_tokens > 0
                else 0
            )
            return num_tokens // self._block_size + 1
        num_tokens = max(num_tokens, 0) // self._block_size
        node, depth = match.node, match.num_blocks
        if node is None or node.is_removed or node.parent is None or match.num_public:
            node, depth = self._find_root(match, index.trees, namespace, tokens, num_tokens)
        elif node.edge is match.edge:
            if depth < node.end:
                return 1
        else:
            node, depth = node.parent, node.start
            while depth > match.num_blocks and node.parent is not None:  # it was split behind the end of the match
                node, depth = node.parent, node.start
        begin = depth
        if node is not None:
            node, depth = self._continue_match(match, index.trees, namespace, node, depth, tokens, num_tokens)
            match.edge = node.edge
        match.node, match.num_blocks = node, depth
        return depth - begin + 1

    def next_block_key(
        self, match: IncrementalMatch, namespace: Namespace, tokens: Sequence[int], num_tokens: int
    ) -> tuple[object, ...]:
        """A key that is equal for prompts that match up to the same place and have the same next block."""
        begin = match.num_blocks * self._block_size
        where = namespace if match.node is None else match.node.id
        return where, match.num_blocks, token_key(tokens[begin : min(begin + self._block_size, num_tokens)])

    def _find_root(
        self, match: IncrementalMatch, trees: RadixTrees, namespace: Namespace, tokens: Sequence[int], most: int
    ) -> tuple[Node | None, int]:
        """The root under which a prompt is matched (None if there is none), and depth 0. Sets `match.num_public`."""
        if self._public.longest:
            match.num_public = min(self._public.num_blocks(token_key(tokens[: self._public.longest])), most)
        if match.num_public:
            return trees.roots.get(self._public.root_key(namespace)), 0
        return trees.roots.get((namespace, b"")), 0

    def _continue_match(
        self,
        match: IncrementalMatch,
        trees: RadixTrees,
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
            own = trees.roots.get((namespace, token_key(tokens[: depth * self._block_size])))
            if own is None:
                return node, depth
            node = own
        return self._descend(node, depth, tokens, most)

    def _descend(self, node: Node, depth: int, tokens: Sequence[int], most: int) -> tuple[Node, int]:
        size = self._block_size
        while depth < most:
            child = node.children.get(token_key(tokens[depth * size : (depth + 1) * size]))
            if child is None:
                break
            node, end = child, min(child.end, most)
            while depth < end:
                piece = min(_BLOCKS_PER_COMPARISON, end - depth)
                run = token_key(tokens[depth * size : (depth + piece) * size])
                begin = (depth - child.start) * self._size
                if (there := child.edge[begin : begin + len(run)]) != run:
                    return node, depth + common_prefix_len(run, there) * BYTES_PER_TOKEN // self._size
                depth += piece
        return node, depth
