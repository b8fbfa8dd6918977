"""The nodes of the radix tree."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice
from sys import maxsize
from typing import Any, Generic, NamedTuple, TypeVar

from quire.cache.block_table import IndexHandle
from quire.cache.retention import Mark

V = TypeVar("V")

MOST_IN_A_RUN = 512


class SortedChildren(Generic[V]):
    """A sorted map from bytes. A lookup is two bisections. A change moves at most MOST_IN_A_RUN entries."""

    __slots__ = ("_firsts", "_keys", "_values")

    def __init__(self) -> None:
        self._firsts: list[bytes] = [b""]  # the first key of each run
        self._keys: list[list[bytes]] = [[]]
        self._values: list[list[V]] = [[]]

    def __len__(self) -> int:
        return sum(map(len, self._keys))

    def __bool__(self) -> bool:
        return bool(self._keys[0])

    def __iter__(self) -> Iterator[V]:
        for values in self._values:
            yield from values

    def __reversed__(self) -> Iterator[V]:
        for values in reversed(self._values):
            yield from reversed(values)

    @property
    def keys(self) -> list[bytes]:
        """All keys, sorted."""
        return [key for run in self._keys for key in run]

    @property
    def only(self) -> V | None:
        """The value if there is exactly one, else None."""
        return self._values[0][0] if len(self._keys) == 1 and len(self._keys[0]) == 1 else None

    def get(self, key: bytes) -> V | None:
        """The value of a key, or None."""
        run = max(0, bisect_right(self._firsts, key) - 1) if len(self._firsts) > 1 else 0
        keys = self._keys[run]
        i = bisect_left(keys, key)
        return self._values[run][i] if i < len(keys) and keys[i] == key else None

    def before(self, key: bytes) -> Iterator[V]:
        """Values of the keys before `key`, nearest first."""
        run, i = self._place(key)
        yield from map(self._values[run].__getitem__, range(i - 1, -1, -1))
        for values in reversed(self._values[:run]):
            yield from reversed(values)

    def from_key(self, key: bytes) -> Iterator[V]:
        """Values of the keys from `key` on, sorted by key."""
        run, i = self._place(key)
        yield from map(self._values[run].__getitem__, range(i, len(self._values[run])))
        for values in self._values[run + 1 :]:
            yield from values

    def add(self, key: bytes, value: V) -> None:
        """Insert a new key."""
        run, i = self._place(key)
        keys, values = self._keys[run], self._values[run]
        keys.insert(i, key)
        values.insert(i, value)
        self._firsts[run] = keys[0]
        if len(keys) > MOST_IN_A_RUN:
            half = len(keys) // 2
            self._firsts.insert(run + 1, keys[half])
            self._keys.insert(run + 1, keys[half:])
            self._values.insert(run + 1, values[half:])
            del keys[half:], values[half:]

    def replace(self, key: bytes, value: V) -> None:
        """Replace the value of a key that exists."""
        run, i = self._place(key)
        self._values[run][i] = value

    def remove(self, key: bytes) -> None:
        """Remove a key that exists."""
        run, i = self._place(key)
        del self._keys[run][i], self._values[run][i]
        if self._keys[run]:
            self._firsts[run] = self._keys[run][0]
        elif len(self._keys) > 1:
            del self._firsts[run], self._keys[run], self._values[run]

    def _place(self, key: bytes) -> tuple[int, int]:
        """The run of a key, and its index there."""
        run = max(0, bisect_right(self._firsts, key) - 1) if len(self._firsts) > 1 else 0
        return run, bisect_left(self._keys[run], key)


_MOST_PARTS = 4
_MAX_CONTINUATIONS = 64  # then the counts are halved, so that the latest ones count more and no chance is near 0


class Clock:
    """The current time and tick, set by the owners. Nothing here reads a clock."""

    __slots__ = ("now", "tick")

    def __init__(self) -> None:
        self.now = 0.0  # seconds of the engine's clock
        self.tick = 0  # number of uses of the cache


class UseStats:
    """Use statistics of a part: the section of a path that one sequence computed."""

    __slots__ = ("chance", "has_ended_here", "hits", "num_continuation_hits", "num_continuations")

    def __init__(self, chance: float = 1.0) -> None:
        self.chance = chance  # of a hit, when it was computed; see `continued`
        self.hits = 0  # sequences that began with it
        self.has_ended_here = False  # whether a sequence ended here
        self.num_continuations = 0  # parts that were computed behind it
        self.num_continuation_hits = 0  # hits of these parts

    @property
    def ends_part(self) -> bool:
        """Whether a sequence ended here or began with it: blocks behind it are another part."""
        return self.has_ended_here or self.hits > 0

    def continued(self) -> "UseStats":
        """Statistics of a new part behind this one. Its chance is the hits per part of the earlier ones, at most 1."""
        chance = min(1.0, (self.num_continuation_hits + 1) / (self.num_continuations + 1))
        self.num_continuations += 1
        if self.num_continuations > _MAX_CONTINUATIONS:
            self.num_continuations //= 2
            self.num_continuation_hits //= 2
        return UseStats(chance)

    def split(self) -> "UseStats":
        """Statistics of the first section of this part after a split. Each hit of the part was one of the section."""
        uses = UseStats(self.chance)
        uses.hits = self.hits
        uses.num_continuations, uses.num_continuation_hits = 1, self.hits
        return uses


class Part(NamedTuple):
    """An earlier part of a node's run, which ends `reach` blocks behind position 0."""

    reach: int
    uses: UseStats


def truncate_parts(parts: tuple[Part, ...], uses: UseStats, end: int) -> tuple[tuple[Part, ...], UseStats]:
    """The earlier parts, and the statistics of the last part, of a run that now ends at `end`."""
    for i, part in enumerate(parts):
        if end <= part.reach:
            return parts[:i], part.uses
    return parts, uses


def merge_parts(upper: tuple[Part, ...], reach: int, uses: UseStats, lower: tuple[Part, ...]) -> tuple[Part, ...]:
    """Parts of two runs that become one; the upper run ends at `reach`. Only the last few are kept."""
    return (*upper, Part(reach, uses), *lower)[-_MOST_PARTS:]


class Node(IndexHandle):
    """A run of blocks without a branch.

    `edge` is the key of its tokens. It has a whole number of blocks, except for a tail: a leaf of one partly filled
    block. Children are sorted by their first block, so that the one with the longest common prefix with a key is next
    to the place of that key.
    """

    __slots__ = (
        "blocks",
        "children",
        "created_at",
        "default_reach",
        "edge",
        "end",
        "id",
        "level",
        "marks",
        "parent",
        "parts",
        "public",
        "root_key",
        "tenant",
        "tick",
        "used_at",
        "uses",
        "writers",
    )

    def __init__(
        self, number: int, edge: bytes, blocks: Sequence[list[int]], parent: "Node | None", end: int, now: float = 0.0
    ) -> None:
        """number: of all nodes, in order of creation. blocks: per group. end: blocks from position 0 to its end."""
        self.id = number
        self.edge = edge
        self.blocks = tuple(blocks)
        self.parent = parent
        self.end = end
        self.root_key: object = None  # None for other nodes
        self.tenant: str = "" if parent is None else parent.tenant
        self.public: bool = parent is not None and parent.public
        self.children: SortedChildren[Node] = _NO_CHILDREN  # by the key of their first block
        self.writers: dict[Any, None] = {}  # tables whose indexed blocks end here, in order of arrival
        self.tick = 0  # of its last use
        self.created_at = self.used_at = now  # seconds of the engine's clock: the creation and the last use of its run
        self.level = 0.0  # ageing level of the eviction policy at its last use; see LFUPolicy
        self.uses = UseStats()  # of its last part
        self.parts: tuple[Part, ...] = ()  # earlier parts, if the run was continued or nodes were merged
        self.marks: tuple[Mark, ...] = ()  # retention; a mark applies to the blocks before the node too
        self.default_reach = 0  # a sequence without retention left so many blocks from position 0 on; 0: none did

    @property
    def start(self) -> int:
        """Number of blocks from position 0 to its first block."""
        return self.end - len(self.blocks[0])

    @property
    def most_hits(self) -> int:
        """Hits of the part of its run that has the most."""
        return max(self.uses.hits, max((part.uses.hits for part in self.parts), default=0))

    @property
    def is_removed(self) -> bool:
        """Whether it has left the tree."""
        return self.parent is None and self.root_key is None

    @property
    def is_free_leaf(self) -> bool:
        """Whether it is a leaf at which no table ends."""
        return self.parent is not None and not self.children and not self.writers

    @property
    def root(self) -> "Node":
        """The root of its tree."""
        node = self
        while node.parent is not None:
            node = node.parent
        return node

    @property
    def path(self) -> bytes:
        """The key of all tokens from the root to its end."""
        return self.path_end(len(self.edge), maxsize)

    def path_end(self, size: int, max_bytes: int) -> bytes:
        """The last `max_bytes` bytes, or fewer, of the key that ends `size` bytes behind the start of this node."""
        runs = [self.edge[max(0, size - max_bytes) : size]]
        node, missing = self.parent, max_bytes - len(runs[0])
        while missing > 0 and node is not None:
            runs.append(node.edge[-missing:])
            missing -= len(runs[-1])
            node = node.parent
        return b"".join(reversed(runs))

    def path_blocks(self, group: int) -> list[int]:
        """Blocks of a group from the root to its end."""
        runs = []
        node: Node | None = self
        while node is not None:
            runs.append(node.blocks[group])
            node = node.parent
        return [block for run in reversed(runs) for block in run]

    def child(self, key: bytes) -> "Node | None":
        """The child whose first block has this key."""
        return self.children.get(key)

    def sides(self, key: bytes) -> "tuple[Iterator[Node], Iterator[Node]]":
        """Children before and from `key` on; on each side the longest common prefix comes first."""
        return self.children.before(key), self.children.from_key(key)

    def neighbours(self, key: bytes) -> "list[Node]":
        """The children next to the place of `key`; one of them has the longest common prefix with it."""
        if not self.children:
            return []
        return [*islice(self.children.before(key), 1), *islice(self.children.from_key(key), 1)]

    def attach(self, child: "Node", key: bytes) -> None:
        """Add a child whose first block has this key."""
        if self.children is _NO_CHILDREN:
            self.children = SortedChildren()
        self.children.add(key, child)
        child.parent = self

    def detach(self, child: "Node") -> None:
        """Remove a child."""
        self.children.remove(child.first_key)
        child.parent = None

    def replace(self, child: "Node", other: "Node") -> None:
        """Replace a child by a node with the same first block."""
        self.children.replace(child.first_key, other)
        other.parent = self

    def begin_part(self) -> None:
        """Start a new part: another sequence continues the run."""
        self.parts = merge_parts(self.parts, self.end, self.uses, ())
        self.uses = self.uses.continued()

    def split_uses(self, upper: "Node") -> None:
        """Divide the use statistics with `upper`, the upper half of this node after a split."""
        upper.parts, uses = truncate_parts(self.parts, self.uses, upper.end)
        upper.uses = uses if uses is not self.uses and self.parts[len(upper.parts)].reach == upper.end else uses.split()
        self.parts = tuple(part for part in self.parts if part.reach > upper.end)

    def merge_uses(self, upper: "Node") -> None:
        """Add the use statistics of `upper`, whose run becomes the first section of this node."""
        self.parts = merge_parts(upper.parts, upper.end, upper.uses, self.parts)

    def shorten(self, end: int) -> None:
        """Set an earlier end, and drop the statistics and the reach of marks behind it."""
        self.end = end
        self.parts, self.uses = truncate_parts(self.parts, self.uses, end)
        self.default_reach = min(self.default_reach, end)
        if any(reach > end for _, reach in self.marks):
            self.marks = tuple(Mark(hint, min(reach, end)) for hint, reach in self.marks)

    @property
    def num_uniform_blocks(self) -> int:
        """Blocks at its end with the same use statistics and retention: at least 1."""
        first = max(self.start, self.parts[-1].reach if self.parts else 0)
        if self.marks:
            reaches = (self.default_reach, *(reach for _, reach in self.marks))
            first = max([first, *(reach for reach in reaches if reach < self.end)])
        return self.end - first

    @property
    def previous_uses(self) -> UseStats:
        """Use statistics of the part that its last part continues. Not for roots."""
        assert self.parent is not None, "a root has no parent"
        return self.parts[-1].uses if self.parts else self.parent.uses

    @property
    def first_key(self) -> bytes:
        """The key of its first block."""
        return self.edge[: len(self.edge) // len(self.blocks[0])]

    def walk(self) -> "Iterator[Node]":
        """This node and all nodes below it, parents first."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += reversed(node.children)


_NO_CHILDREN: SortedChildren[Node] = SortedChildren()  # of all nodes that never had any


class LRUNodes:
    """Nodes in the order of their last use. A use costs nothing: an entry is corrected when it reaches the top."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []
        self._members: set[int] = set()

    def __len__(self) -> int:
        return len(self._members)

    def add(self, node: Node) -> None:
        """Add a node. Does nothing if it is there."""
        if node.id not in self._members:
            self._members.add(node.id)
            heappush(self._heap, (node.tick, node.id, node))

    def discard(self, node: Node) -> None:
        """Remove a node that has left the tree."""
        self._members.discard(node.id)
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in self._members]
            heapify(self._heap)

    def pop(self) -> Node | None:
        """Remove and return the least recently used node; None if there is none."""
        while self._heap:
            tick, number, node = heappop(self._heap)
            if number not in self._members:
                continue
            if node.tick > tick:
                heappush(self._heap, (node.tick, number, node))
                continue
            self._members.remove(number)
            return node
        return None
