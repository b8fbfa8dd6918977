"""The nodes of the radix tree and the order in which they are given up. Knows keys and blocks, no tables."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice
from sys import maxsize
from typing import Any, Generic, NamedTuple, TypeVar

from quire.cache.retention import Mark

V = TypeVar("V")

MOST_IN_A_RUN = 512


class Children(Generic[V]):
    """A sorted map from bytes. A lookup is two bisections; a change moves at most MOST_IN_A_RUN entries."""

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
        """All of them, in order."""
        return [key for run in self._keys for key in run]

    @property
    def only(self) -> V | None:
        """The only value there is; None where there are none or more."""
        return self._values[0][0] if len(self._keys) == 1 and len(self._keys[0]) == 1 else None

    def get(self, key: bytes) -> V | None:
        """The value of a key."""
        run = max(0, bisect_right(self._firsts, key) - 1) if len(self._firsts) > 1 else 0
        keys = self._keys[run]
        i = bisect_left(keys, key)
        return self._values[run][i] if i < len(keys) and keys[i] == key else None

    def before(self, key: bytes) -> Iterator[V]:
        """Values whose keys come before `key`, nearest first."""
        run, i = self._place(key)
        yield from reversed(self._values[run][:i])
        for values in reversed(self._values[:run]):
            yield from reversed(values)

    def since(self, key: bytes) -> Iterator[V]:
        """Values whose keys are `key` or come behind it, in order."""
        run, i = self._place(key)
        yield from self._values[run][i:]
        for values in self._values[run + 1 :]:
            yield from values

    def add(self, key: bytes, value: V) -> None:
        """A new key."""
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

    def put(self, key: bytes, value: V) -> None:
        """Another value for a key that there is."""
        run, i = self._place(key)
        self._values[run][i] = value

    def remove(self, key: bytes) -> None:
        """A key that there is goes."""
        run, i = self._place(key)
        del self._keys[run][i], self._values[run][i]
        if self._keys[run]:
            self._firsts[run] = self._keys[run][0]
        elif len(self._keys) > 1:
            del self._firsts[run], self._keys[run], self._values[run]

    def _place(self, key: bytes) -> tuple[int, int]:
        """The run of a key, and its place there."""
        run = max(0, bisect_right(self._firsts, key) - 1) if len(self._firsts) > 1 else 0
        return run, bisect_left(self._keys[run], key)


_MOST_PARTS = 4


class Clock:
    """Both are told: nothing here reads a clock."""

    __slots__ = ("now", "tick")

    def __init__(self) -> None:
        self.now = 0.0  # seconds of the engine's clock
        self.tick = 0  # uses of the cache


class Uses:
    """Of a part of a path that one sequence computed, and of the place where it ends."""

    __slots__ = ("gap", "hits", "left", "level", "num_begun", "num_came_back", "turns")

    def __init__(self, turns: int = 0, gap: int = 0) -> None:
        self.turns = turns  # how often the path was continued, one part behind the other
        self.gap = gap  # ticks between its last use and the one before; 0: there was none
        self.hits = 0  # sequences that began with it
        self.level = 0  # see LeastFrequent
        self.left = False  # whether a sequence ended here: what comes next is another part
        self.num_begun = 0  # parts that were computed behind it
        self.num_came_back = 0  # uses of these

    @property
    def is_place(self) -> bool:
        """Whether somebody ended here or began with it: what is computed next is another part."""
        return self.left or self.hits > 0

    def followed(self) -> "Uses":
        """Of a part that begins where this one ends."""
        self.num_begun += 1
        return Uses(self.turns + self.left, self.gap)

    def divided(self) -> "Uses":
        """Of the beginning of this part, as another path leaves it there: whoever used the end used that, too."""
        uses = Uses(self.turns, self.gap)
        uses.hits, uses.level = self.hits, self.level
        uses.num_begun, uses.num_came_back = 1, self.hits
        return uses


class Part(NamedTuple):
    """Uses of an earlier part of a node's run, which ends `reach` blocks from the beginning."""

    reach: int
    uses: Uses


def parts_before(parts: tuple[Part, ...], uses: Uses, end: int) -> tuple[tuple[Part, ...], Uses]:
    """Of a run that ends at `end` from now on: its earlier parts, and the uses of the last one."""
    for i, part in enumerate(parts):
        if end <= part.reach:
            return parts[:i], part.uses
    return parts, uses


def joined(upper: tuple[Part, ...], reach: int, uses: Uses, lower: tuple[Part, ...]) -> tuple[Part, ...]:
    """Parts of two runs that become one, the upper of which ends at `reach`. The last ones matter first."""
    return (*upper, Part(reach, uses), *lower)[-_MOST_PARTS:]


class Node:
    """A run of blocks that follow each other, between two places where sequences part.

    `edge` is the tokens of its blocks, a whole number of blocks; only a tail, a leaf of a single block, may be
    shorter. Children are sorted by their first block, so that the one with the longest beginning in common with
    a key is a neighbour of the key's place.
    """

    __slots__ = (
        "blocks",
        "children",
        "duel",
        "edge",
        "end",
        "example",
        "id",
        "marks",
        "parent",
        "parts",
        "prompt_end",
        "public",
        "root_key",
        "tenant",
        "tick",
        "uses",
        "writers",
    )

    def __init__(self, number: int, edge: bytes, blocks: Sequence[list[int]], parent: "Node | None", end: int) -> None:
        """number: of all nodes, in order of creation. blocks: per group. end: blocks from the beginning to its end."""
        self.id = number
        self.edge = edge
        self.blocks = tuple(blocks)
        self.parent = parent
        self.end = end
        self.root_key: object = None  # of roots
        self.tenant: str = "" if parent is None else parent.tenant
        self.public: bool = parent is not None and parent.public
        self.children: Children[Node] = Children()  # by their first block
        self.writers: dict[Any, None] = {}  # tables whose indexed blocks end here, in order of arrival
        self.tick = 0  # when it was last used
        self.uses = Uses()  # of its last part
        self.parts: tuple[Part, ...] = ()  # before that, where the run was continued, or nodes were merged
        self.marks: tuple[Mark, ...] = ()  # what was asked for it; a mark counts for all before it, too
        self.prompt_end = 0  # blocks of the prompt of the latest sequence that ended here
        self.example: Any = None  # see Examples
        self.duel: Any = None  # see Duels

    @property
    def start(self) -> int:
        """Blocks before its first one. Of a tail: those before it."""
        return self.end - len(self.blocks[0])

    @property
    def is_gone(self) -> bool:
        """Whether it has left the tree."""
        return self.parent is None and self.root_key is None

    @property
    def is_free(self) -> bool:
        """Whether it is a leaf at which no table ends."""
        return self.parent is not None and not self.children and not self.writers

    @property
    def root(self) -> "Node":
        """The root above it, or itself."""
        node = self
        while node.parent is not None:
            node = node.parent
        return node

    @property
    def path(self) -> bytes:
        """Tokens from the root to its end."""
        return self.path_end(len(self.edge), maxsize)

    def path_end(self, size: int, most: int) -> bytes:
        """The last `most` bytes, or all there are, of the tokens up to `size` bytes behind its begin."""
        runs = [self.edge[max(0, size - most) : size]]
        node, missing = self.parent, most - len(runs[0])
        while missing > 0 and node is not None:
            runs.append(node.edge[-missing:])
            missing -= len(runs[-1])
            node = node.parent
        return b"".join(reversed(runs))

    def path_blocks(self, group: int) -> list[int]:
        """Blocks from the root to its end."""
        runs = []
        node: Node | None = self
        while node is not None:
            runs.append(node.blocks[group])
            node = node.parent
        return [block for run in reversed(runs) for block in run]

    def child(self, key: bytes) -> "Node | None":
        """The child whose first block is `key`."""
        return self.children.get(key)

    def sides(self, key: bytes) -> "tuple[Iterator[Node], Iterator[Node]]":
        """Children to both sides of the place of `key`: on each, those with more in common with it come first."""
        return self.children.before(key), self.children.since(key)

    def neighbours(self, key: bytes) -> "list[Node]":
        """Children beside the place of `key`: one of them has the longest beginning in common with it."""
        if not self.children:
            return []
        return [*islice(self.children.before(key), 1), *islice(self.children.since(key), 1)]

    def attach(self, child: "Node", key: bytes) -> None:
        """A new child, whose first block is `key`."""
        self.children.add(key, child)
        child.parent = self

    def detach(self, child: "Node") -> None:
        """A child leaves the tree."""
        self.children.remove(child.first_key)
        child.parent = None

    def replace(self, child: "Node", other: "Node") -> None:
        """Another node takes the place of a child; it begins with the same block."""
        self.children.put(child.first_key, other)
        other.parent = self

    def begin_part(self) -> None:
        """Another sequence goes on behind the end of one."""
        self.parts = joined(self.parts, self.end, self.uses, ())
        self.uses = self.uses.followed()

    def divide_uses(self, upper: "Node") -> None:
        """What is known of the uses up to the end of `upper`, which has just been split off, is known of it now."""
        upper.parts, uses = parts_before(self.parts, self.uses, upper.end)
        upper.uses = (
            uses if uses is not self.uses and self.parts[len(upper.parts)].reach == upper.end else uses.divided()
        )
        self.parts = tuple(part for part in self.parts if part.reach > upper.end)
        upper.prompt_end = self.prompt_end

    def join_uses(self, upper: "Node") -> None:
        """The run of `upper` becomes the beginning of this one."""
        self.parts = joined(upper.parts, upper.end, upper.uses, self.parts)

    def shorten(self, end: int) -> None:
        """It ends earlier: what was known of the rest counts no more."""
        self.end = end
        self.parts, self.uses = parts_before(self.parts, self.uses, end)
        if any(reach > end for _, reach in self.marks):
            self.marks = tuple(Mark(wish, min(reach, end)) for wish, reach in self.marks)

    @property
    def num_alike(self) -> int:
        """Blocks at its end that came there together and for which the same was asked: at least 1."""
        first = max([self.start, *(reach for reach, _ in self.parts), *(r for _, r in self.marks if r < self.end)])
        return self.end - first

    @property
    def before(self) -> Uses:
        """The uses of what its last part goes on from. It is not a root."""
        assert self.parent is not None, "nothing comes before a root"
        return self.parts[-1].uses if self.parts else self.parent.uses

    @property
    def first_key(self) -> bytes:
        """Tokens of its first block."""
        return self.edge[: len(self.edge) // len(self.blocks[0])]

    def walk(self) -> "Iterator[Node]":
        """It and all below it, parents first."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += reversed(node.children)


class LeastRecent:
    """Nodes in the order of their last use. A use costs nothing: entries are put right when they come up."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []
        self._members: set[int] = set()

    def __len__(self) -> int:
        return len(self._members)

    def add(self, node: Node) -> None:
        """It may be given up; one that is there already stays."""
        if node.id not in self._members:
            self._members.add(node.id)
            heappush(self._heap, (node.tick, node.id, node))

    def discard(self, node: Node) -> None:
        """It has left the tree."""
        self._members.discard(node.id)
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in self._members]
            heapify(self._heap)

    def pop(self) -> Node | None:
        """Take out the least recently used."""
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
