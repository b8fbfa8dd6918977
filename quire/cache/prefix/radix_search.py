"""Searching a radix tree: what there is of a prompt, and why there is no more. Changes nothing."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from quire.cache.block_table import ABSENT
from quire.cache.prefix.index import SYMBOL, Found, num_common, symbols
from quire.cache.prefix.public import PublicPrefixes
from quire.cache.prefix.radix_node import Node
from quire.cache.prefix.radix_tree import Forest, RootKey
from quire.config import CacheConfig
from quire.core.explanation import Miss, MissReason
from quire.core.request import Namespace

_MOST_ROOTS_SEARCHED = 16

Partial = tuple[tuple[int, ...], int]  # a block of each group, and how many of its tokens are wanted
Candidates = Iterator[tuple[bytes, tuple[int, ...]]]  # tokens that are written of a block, and the block of each group


class Place(NamedTuple):
    """The end of `depth` blocks on the path to a node, which may have more."""

    node: Node
    depth: int


class RadixSearch:
    """Reads the trees of a forest."""

    def __init__(self, config: CacheConfig, forest: Forest, public: PublicPrefixes, fresh: Mapping[int, int]) -> None:
        """fresh: see RadixTree."""
        self._forest = forest
        self._public = public
        self._fresh = fresh
        self._num_groups = len(config.groups)
        self._block_size = config.block_size
        self._size = config.block_size * SYMBOL  # of a block's key
        self._windows = [(g, group.window) for g, group in enumerate(config.groups) if group.window]

    def find(self, namespace: Namespace, tokens: Sequence[int]) -> Found:
        """See PrefixIndex."""
        data = symbols(tokens)
        num_public = self._public.num_blocks(data)
        blocks: tuple[list[int], ...] = tuple([] for _ in range(self._num_groups))
        places = self._walk(namespace, data, num_public, blocks)
        partial, count = self._best_partial(places, data)
        depth = len(blocks[0])
        if self._windows and not self._sees(blocks, depth * self._block_size + count):
            partial, count = (), 0
            while not self._sees(blocks, depth * self._block_size):
                depth -= 1
            for some in blocks:
                del some[depth:]
            places = [climb(place, min(depth, place.depth)) for place in places if place.node.root.end <= depth]
        return Found(blocks, depth * self._block_size + count, partial, num_public, places)

    def why(self, namespace: Namespace, tokens: Sequence[int], found: Found, reusable: int) -> Miss:
        """See PrefixIndex."""
        position = found.num_tokens
        token = tokens[position]
        if position >= reusable:
            return Miss(position, token, "last_token" if reusable == len(tokens) - 1 else "recomputed")
        depth = position // self._block_size
        data = symbols(tokens[: (depth + 1) * self._block_size])  # nothing behind that tells more
        rest = data[depth * self._size :]
        for root_key, end in self._root_keys(namespace, data, found.num_public):
            before = data[end * self._size : depth * self._size]
            cause = self._forest.why_lost(root_key, before, rest, position % self._block_size) if end <= depth else None
            if cause is not None:
                whom = cause.request_id if cause.tenant == namespace.tenant else None
                return Miss(position, token, "evicted", cause.now, whom)
        return Miss(position, token, self._why_never(namespace, data, found))

    def _why_never(self, namespace: Namespace, data: bytes, found: Found) -> MissReason:
        """Of tokens that were not evicted."""
        depth = found.num_tokens // self._block_size
        places: list[Place] = found.place or []  # type: ignore[assignment]  # what `find` put there
        if any(self._is_being_computed(place, data, found.num_tokens) for place in places if place.depth == depth):
            return "being_computed"
        others = (one for one in self._forest.namespaces(namespace.tenant) if one != namespace)
        for other in islice(others, _MOST_ROOTS_SEARCHED):
            blocks: tuple[list[int], ...] = tuple([] for _ in range(self._num_groups))
            places = self._walk(other, data, found.num_public, blocks)
            reached = len(blocks[0]) * self._block_size + self._best_partial(places, data)[1]
            if reached > found.num_tokens:
                return "other_salt" if other.salt != namespace.salt else "other_adapter"
        return "never_seen"

    def _is_being_computed(self, place: Place, data: bytes, position: int) -> bool:
        """Whether a running sequence has the token at `position` before it, or the step that is being planned has."""
        node, depth = place
        begin = depth * self._size
        wanted, at = data[begin : (position + 1) * SYMBOL], depth * self._block_size
        for candidates in self._candidates(node, depth, data[begin : begin + self._size]):
            if any(key.startswith(wanted) for key, _ in islice(candidates, 1)):
                return True
        return depth == node.end and any(symbols(t.tokens[at : position + 1]) == wanted for t in node.writers)

    def _root_keys(self, namespace: Namespace, data: bytes, num_public: int) -> Iterator[tuple[RootKey, int]]:
        """The roots that a prompt may be found under, and where they begin."""
        yield (namespace, data[: num_public * self._size]), num_public
        if num_public:
            yield self._public.root_key(namespace), 0

    def _walk(self, namespace: Namespace, data: bytes, num_public: int, blocks: tuple[list[int], ...]) -> list[Place]:
        """Collect whole blocks; where that ends in the public root, and where in the namespace's.

        Where it ends among public blocks, the namespace may still have a part of the next one.
        """
        places = []
        public = self._forest.roots.get(self._public.root_key(namespace)) if self._public.longest else None
        if public is not None:
            places.append(self.descend(public, data[: num_public * self._size], blocks))
        depth = len(blocks[0])
        own = self._forest.roots.get((namespace, data[: depth * self._size]))
        if own is not None:
            places.append(self.descend(own, data, blocks) if depth == num_public else Place(own, depth))
        return places

    def descend(self, node: Node, data: bytes, blocks: tuple[list[int], ...]) -> Place:
        """Collect whole blocks behind a node as far as `data` goes, which begins at the root; where that ends."""
        size, depth = self._size, node.end
        while (depth + 1) * size <= len(data):
            at = depth * size
            child = node.children.get(data[at : at + size])
            if child is None:
                break
            node, run = child, data[at : at + len(child.edge)]
            if run != child.edge:
                count = num_common(run, child.edge) * SYMBOL // size
                for ours, theirs in zip(blocks, child.blocks, strict=True):
                    ours += theirs[:count]
                depth += count
                break
            for ours, theirs in zip(blocks, child.blocks, strict=True):
                ours += theirs
            depth = child.end
        return Place(node, depth)

    def _best_partial(self, places: Sequence[Place], data: bytes) -> Partial:
        """The block that goes on longest as `data` does where a walk ended."""
        best: Partial = ((), 0)
        for node, depth in places:
            rest = data[depth * self._size : (depth + 1) * self._size]
            if depth < places[-1].depth or not rest:
                continue
            for candidates in self._candidates(node, depth, rest):
                for key, blocks in candidates:
                    common = num_common(key, rest)
                    if common <= best[1]:
                        break
                    count = 0 if ABSENT in blocks else min(common, self._fresh.get(blocks[0], common))
                    if count > best[1]:
                        best = (blocks, count)
                    if count == common:
                        break
        return best

    def _candidates(self, node: Node, depth: int, rest: bytes) -> Iterator[Candidates]:
        """Blocks behind `depth` that may begin as `rest` does; together, those that begin ever less so."""
        if depth < node.end:
            i = depth - node.start
            yield iter([(node.edge[i * self._size : (i + 1) * self._size], tuple(blocks[i] for blocks in node.blocks))])
            return
        for side in node.sides(rest):
            yield ((child.edge[: self._size], tuple(blocks[0] for blocks in child.blocks)) for child in side)
        first, at = rest[:SYMBOL], depth * self._block_size
        for table in node.writers:
            stop = min(table.launched, len(table.tokens), at + self._block_size)
            if at < stop and symbols(table.tokens[at : at + 1]) == first:
                yield iter([(symbols(table.tokens[at:stop]), tuple(blocks[depth] for blocks in table.blocks))])

    def _sees(self, blocks: tuple[list[int], ...], position: int) -> bool:
        """Whether the whole blocks that a query at `position` sees are there."""
        last = position // self._block_size
        return all(
            ABSENT not in blocks[group][max(0, position - window + 1) // self._block_size : last]
            for group, window in self._windows
        )


def climb(place: Place, depth: int) -> Place:
    """The end of `depth` blocks on the path to a place."""
    node = place.node
    while node.parent is not None and node.start >= depth:
        node = node.parent
    return Place(node, depth)
