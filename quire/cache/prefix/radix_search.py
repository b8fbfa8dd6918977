"""Searches in the radix trees: prefix matches, and why they ended."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from quire.cache.block_table import ABSENT, IndexHandle
from quire.cache.prefix.index import PrefixMatch, PublicPrefixes, common_prefix_len
from quire.cache.prefix.radix_node import Node
from quire.cache.prefix.radix_tree import RadixTrees, RootKey
from quire.config import CacheConfig
from quire.core.block_keys import BYTES_PER_TOKEN, token_key
from quire.core.explanation import Miss, MissReason
from quire.core.request import Namespace

_MOST_ROOTS_SEARCHED = 16

Partial = tuple[tuple[int, ...], int]  # (block per group, number of its tokens that match)
Candidates = Iterator[tuple[bytes, tuple[int, ...]]]  # (key of a block's tokens, block per group)


class TreePosition(NamedTuple):
    """The end of `depth` blocks on the path to a node. The node may have more blocks."""

    node: Node
    depth: int


@dataclass(frozen=True, slots=True)
class MatchedPositions(IndexHandle):
    """Where a prefix match ends: under the root of each section that it reaches."""

    positions: list[TreePosition]
    data: bytes  # key of the tokens that could have matched


class RadixSearch:
    """Searches the radix trees. Changes nothing."""

    def __init__(
        self, config: CacheConfig, trees: RadixTrees, public: PublicPrefixes, planned_writes: Mapping[int, int]
    ) -> None:
        """planned_writes: see RadixIndex."""
        self._trees = trees
        self._public = public
        self._planned_writes = planned_writes
        self._num_groups = len(config.groups)
        self._block_size = config.block_size
        self._size = config.block_size * BYTES_PER_TOKEN  # bytes of a block's key
        self._shares_partial_blocks = config.shares_partial_blocks
        self._dropping = config.dropping
        self._first_attended_block = config.first_attended_block

    def match_prefix(self, namespace: Namespace, tokens: Sequence[int]) -> PrefixMatch:
        """See PrefixIndex."""
        data = token_key(tokens)
        num_public = self._public.num_blocks(namespace, data)
        blocks: tuple[list[int], ...] = tuple([] for _ in range(self._num_groups))
        places = self._walk(namespace, data, num_public, blocks)
        partial, count = self._best_partial(namespace, places, data)
        depth = len(blocks[0])
        if self._dropping and not self._has_window_blocks(blocks, depth * self._block_size + count):
            partial, count = (), 0
            while not self._has_window_blocks(blocks, depth * self._block_size):
                depth -= 1
            for some in blocks:
                del some[depth:]
            places = climb_all(places, depth)
        return PrefixMatch(
            blocks, depth * self._block_size + count, partial, num_public, MatchedPositions(places, data)
        )

    def truncate(self, match: PrefixMatch, num_tokens: int) -> PrefixMatch | None:
        """See PrefixIndex."""
        depth, count = divmod(num_tokens, self._block_size)
        blocks = tuple(some[:depth] for some in match.blocks)
        partial: tuple[int, ...] = ()
        if count:
            partial = match.partial if depth == len(match.blocks[0]) else tuple(some[depth] for some in match.blocks)
            is_copied = self._shares_partial_blocks and ABSENT not in partial
            if not is_copied or self._planned_writes.get(partial[0], count) < count:
                return None
        if self._dropping and not self._has_window_blocks(blocks, num_tokens):
            return None
        handle = match.handle
        if isinstance(handle, MatchedPositions):
            handle = MatchedPositions(climb_all(handle.positions, depth), handle.data)
        return PrefixMatch(blocks, num_tokens, partial, match.num_public, handle)

    def explain_miss(self, namespace: Namespace, tokens: Sequence[int], found: PrefixMatch, reusable: int) -> Miss:
        """See PrefixIndex."""
        position = found.num_tokens
        token = tokens[position]
        if position >= reusable:
            return Miss(position, token, "last_token" if reusable == len(tokens) - 1 else "recomputed")
        depth = position // self._block_size
        data = self._key_of_blocks(tokens, found, depth + 1)  # later tokens do not change the reason
        rest = data[depth * self._size :]
        for root_key, end in self._root_keys(namespace, data, found.num_public):
            before = data[end * self._size : depth * self._size]
            cause = (
                self._trees.eviction_cause(root_key, before, rest, position % self._block_size)
                if end <= depth and _may_read(namespace, root_key[0], position)
                else None
            )
            if cause is not None:
                return Miss(position, token, "evicted", cause.now, cause.request_shown_to(namespace.tenant))
        return Miss(position, token, self._miss_reason(namespace, data, found))

    def _key_of_blocks(self, tokens: Sequence[int], found: PrefixMatch, num_blocks: int) -> bytes:
        """The key of the first `num_blocks` blocks of `tokens`, of which the last may be incomplete."""
        data = found.handle.data if isinstance(found.handle, MatchedPositions) else b""
        known, end = len(data) // BYTES_PER_TOKEN, num_blocks * self._block_size
        return data[: end * BYTES_PER_TOKEN] if known >= end else data + token_key(tokens[known:end])

    def _miss_reason(self, namespace: Namespace, data: bytes, found: PrefixMatch) -> MissReason:
        """The reason of a miss of tokens that were not evicted."""
        depth = found.num_tokens // self._block_size
        for place in positions_of(found):
            is_readable = place.depth == depth and _may_read(namespace, root_key_of(place.node)[0], found.num_tokens)
            if is_readable and self._is_being_computed(place, data, found.num_tokens):
                return "being_computed"
        others = (one for one in self._trees.namespaces(namespace.tenant) if one != namespace)
        for other in islice(others, _MOST_ROOTS_SEARCHED):
            blocks: tuple[list[int], ...] = tuple([] for _ in range(self._num_groups))
            places = self._walk(other, data, self._public.num_blocks(other, data), blocks)
            reached = len(blocks[0]) * self._block_size + self._best_partial(other, places, data)[1]
            if reached > found.num_tokens:
                return "other_salt" if other.salt != namespace.salt else "other_adapter"
        return "never_seen"

    def _is_being_computed(self, place: TreePosition, data: bytes, position: int) -> bool:
        """Whether a running sequence, or one of the planned step, has the prompt's tokens including `position`."""
        node, depth = place
        begin = depth * self._size
        wanted, at = data[begin : (position + 1) * BYTES_PER_TOKEN], depth * self._block_size
        if depth < node.end:
            return node.edge.startswith(wanted, (depth - node.start) * self._size)
        child = next(node.children.from_key(wanted), None)  # the first of those that begin with `wanted`, if any does
        if child is not None and child.edge.startswith(wanted):
            return True
        return any(token_key(table.tokens[at : position + 1]) == wanted for table in node.writers)

    def _root_keys(self, namespace: Namespace, data: bytes, num_public: int) -> Iterator[tuple[RootKey, int]]:
        """(root key, index of its first block) of the roots under which a prompt may be matched."""
        num_model = namespace.num_model_blocks(self._block_size)
        for end in sorted({num_public, num_model} if namespace.adapter_start else {num_public}, reverse=True):
            yield (namespace.of_block(end, self._block_size), data[: end * self._size]), end
        if num_public:
            yield self._public.root_key(namespace), 0

    def _walk(
        self, namespace: Namespace, data: bytes, num_public: int, blocks: tuple[list[int], ...]
    ) -> list[TreePosition]:
        """Collect the whole blocks that match. Returns where they end under the root of each section.

        If it ends among public blocks, the namespace's root may still have a part of the next block. The same holds
        for the root of the model alone at the start of an adapter.
        """
        places = []
        public = self._trees.roots.get(self._public.root_key(namespace)) if self._public.longest else None
        if public is not None:
            places.append(self.descend(public, data[: num_public * self._size], blocks))
        sections = [(namespace, num_public)]
        if namespace.adapter_start:
            sections = [(namespace.of_model, num_public), (namespace, namespace.num_model_blocks(self._block_size))]
        for i, (owner, begin) in enumerate(sections):
            depth, end = len(blocks[0]), sections[i + 1][1] if i + 1 < len(sections) else len(data)
            if i and depth < begin:
                break  # the section before is not complete
            own = self._trees.roots.get((owner, data[: depth * self._size]))
            if own is not None:
                is_whole = depth == begin
                found = self.descend(own, data[: end * self._size], blocks) if is_whole else TreePosition(own, depth)
                places.append(found)
        return places

    def descend(self, node: Node, data: bytes, blocks: tuple[list[int], ...]) -> TreePosition:
        """Append the whole blocks behind `node` that match to `blocks`. Returns where they end.

        data: the key of the prompt from the root on.
        """
        size, depth = self._size, node.end
        while (depth + 1) * size <= len(data):
            at = depth * size
            child = node.children.get(data[at : at + size])
            if child is None:
                break
            node, run = child, data[at : at + len(child.edge)]
            if run != child.edge:
                count = common_prefix_len(run, child.edge) * BYTES_PER_TOKEN // size
                for ours, theirs in zip(blocks, child.blocks, strict=True):
                    ours += theirs[:count]
                depth += count
                break
            for ours, theirs in zip(blocks, child.blocks, strict=True):
                ours += theirs
            depth = child.end
        return TreePosition(node, depth)

    def _best_partial(self, namespace: Namespace, places: Sequence[TreePosition], data: bytes) -> Partial:
        """The block with the longest common prefix with the prompt at the end of the match."""
        best: Partial = ((), 0)
        if not self._shares_partial_blocks:
            return best
        for node, depth in places:
            if depth < places[-1].depth:
                continue
            end = (depth + 1) * self._size
            if namespace.adapter_start and root_key_of(node)[0].adapter != namespace.adapter:
                end = min(end, namespace.adapter_start * BYTES_PER_TOKEN)
            rest = data[depth * self._size : end]
            if not rest:
                continue
            for candidates in self._candidates(node, depth, rest):
                for key, blocks in candidates:
                    common = common_prefix_len(key, rest)
                    if common <= best[1]:
                        break
                    count = 0 if ABSENT in blocks else min(common, self._planned_writes.get(blocks[0], common))
                    if count > best[1]:
                        best = (blocks, count)
                    if count == common:
                        break
        return best

    def _candidates(self, node: Node, depth: int, rest: bytes) -> Iterator[Candidates]:
        """Blocks behind `depth` that may have a common prefix with `rest`.

        Each iterator yields them in the order of decreasing common length.
        """
        if depth < node.end:
            i = depth - node.start
            yield iter([(node.edge[i * self._size : (i + 1) * self._size], tuple(blocks[i] for blocks in node.blocks))])
            return
        for side in node.sides(rest):
            yield ((child.edge[: self._size], tuple(blocks[0] for blocks in child.blocks)) for child in side)
        first, at = rest[:BYTES_PER_TOKEN], depth * self._block_size
        for table in node.writers:
            stop = min(table.num_launched, len(table.tokens), at + self._block_size)
            if at < stop and token_key(table.tokens[at : at + 1]) == first:
                yield iter([(token_key(table.tokens[at:stop]), tuple(blocks[depth] for blocks in table.blocks))])

    def _has_window_blocks(self, blocks: tuple[list[int], ...], position: int) -> bool:
        """Whether the whole blocks that a query at `position` attends to are present."""
        last = position // self._block_size
        return all(
            ABSENT not in blocks[group][self._first_attended_block(group, position) : last] for group in self._dropping
        )


def root_key_of(node: Node) -> RootKey:
    """The key of the root of a node."""
    return node.root.root_key  # type: ignore[return-value]  # of a root


def _may_read(namespace: Namespace, root: Namespace, position: int) -> bool:
    """Whether a request of `namespace` may read a position under a root of its path, which has the namespace `root`.

    Blocks of the model alone may continue behind the start of the adapter.
    """
    return root.adapter == namespace.adapter or position < namespace.adapter_start


def climb(position: TreePosition, depth: int) -> TreePosition:
    """The position at `depth` blocks on the path to `position`."""
    node = position.node
    while node.parent is not None and node.start >= depth:
        node = node.parent
    return TreePosition(node, depth)


def climb_all(positions: Sequence[TreePosition], depth: int) -> list[TreePosition]:
    """Those of some positions that are at most at `depth` blocks, or their ancestors there."""
    return [climb(one, min(depth, one.depth)) for one in positions if one.node.root.end <= depth]


def positions_of(match: PrefixMatch) -> list[TreePosition]:
    """Where a match ends; nowhere without one."""
    return match.handle.positions if isinstance(match.handle, MatchedPositions) else []
