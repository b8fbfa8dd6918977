"""Wishes: what requests asked for the KV that they left, who it still counts for, and the blocks that pins hold.

A mark lies where a sequence ended and counts for all before it, too: it moves up when a leaf is given up. Marks of a
session all name one wish, so that its latest request speaks for all that the session left.

A pin is an owner of blocks as any other, by reference count, up to a share of each pool: what it holds is not idle,
so that nobody plans with it. Where nothing else runs and the next sequence does not fit, pins yield, the weakest
first: nobody waits for ever. Whoever flushes ends them all.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from math import inf

from quire.cache.eviction.keep import PLAIN, Keep, Mark, Wish, merged
from quire.cache.eviction.uses import Clock
from quire.cache.pool import BlockPool
from quire.cache.radix_node import Node
from quire.cache.table import ABSENT
from quire.core.events import Event, PinsRefused, PinsYielded
from quire.core.terms import Retention

MOST_PINNED = 0.5  # share of each pool's blocks

_NOTHING_ASKED = Retention()


class Wishes:
    """All wishes that count for some node."""

    def __init__(
        self, pools: Sequence[BlockPool], clock: Clock, key_bytes: int, relist: Callable[[Node], None]
    ) -> None:
        """key_bytes: of a block. relist: a node's standing changed, or blocks of it are idle that were not."""
        self.events: list[Event] = []
        self._pools = pools
        self._clock = clock
        self._size = key_bytes
        self._relist = relist
        self._nodes: dict[Wish, dict[int, Node]] = {}  # where marks of a wish lie
        self._sessions: dict[tuple[str, str], Wish] = {}
        self._due: list[tuple[float, int, Wish]] = []
        self._held: dict[Wish, list[list[int]]] = {}  # blocks of each group that a pin holds
        self._pinned: list[Counter[int]] = [Counter() for _ in pools]  # how many pins hold a block
        self._num_wishes = 0

    def left(self, ends: Sequence[Node], keep: Keep) -> None:
        """A sequence is over. ends: the nodes where it ends; several where part of it is public, or a tail."""
        wish = self._wish_of(keep)
        for node in ends:
            if node.parent is not None:
                self._merge(node, (*node.marks, Mark(wish, node.end)))
        if wish not in self._nodes:  # nothing was asked, or nothing is left, or others asked for more
            if self._sessions.get(wish.session or ("", "")) is wish:
                del self._sessions[wish.session or ("", "")]
            return
        if wish.expires < inf:
            heappush(self._due, (wish.expires, wish.number, wish))
        self._hold(wish, keep)
        for node in list(self._nodes.get(wish, {}).values()):
            self._relist(node)
        if len(self._due) > 2 * len(self._nodes) + 64:
            self._due = [(one.expires, one.number, one) for one in self._nodes if one.expires < inf]
            heapify(self._due)

    def _wish_of(self, keep: Keep) -> Wish:
        """The wish of a request that has just ended."""
        asked = keep.retention
        if asked == _NOTHING_ASKED:
            return PLAIN
        session = None if asked.session is None else (keep.tenant, asked.session)
        wish = None if session is None else self._sessions.get(session)
        if wish is None:
            self._num_wishes += 1
            wish = Wish(self._num_wishes, session)
            if session is not None:
                self._sessions[session] = wish
        wish.priority, wish.pin = asked.priority, asked.pin
        wish.expires = inf if asked.ttl is None else self._clock.now + asked.ttl
        return wish

    # Where marks lie

    def _merge(self, node: Node, marks: tuple[Mark, ...]) -> None:
        """These marks lie at a node, as far as they count. A pin that has to give way to stronger ones ends."""
        self._mark(node, merged(marks, self._clock.now))
        kept = {wish for wish, _ in node.marks}
        dropped = [wish for wish, _ in marks if wish not in kept]
        if dropped:
            self._relist(node)
        for wish in dropped:
            if wish in self._held:
                self._end_pin(wish)

    def _mark(self, node: Node, marks: tuple[Mark, ...]) -> None:
        before, node.marks = node.marks, marks
        for wish, _ in marks:
            if wish is not PLAIN:
                self._nodes.setdefault(wish, {})[node.id] = node
        kept = {wish for wish, _ in marks}
        for wish, _ in before:
            if wish not in kept and wish is not PLAIN:
                self._forget(wish, node)

    def _forget(self, wish: Wish, node: Node) -> None:
        nodes = self._nodes[wish]
        del nodes[node.id]
        if nodes:
            return
        del self._nodes[wish]
        if wish.session is not None:
            del self._sessions[wish.session]
        self._let_go(wish)

    def moved_up(self, leaf: Node, parent: Node) -> None:
        """A leaf leaves the tree: what was asked for it was asked for what comes before, too."""
        if leaf.marks:
            if parent.parent is not None:
                moved = (Mark(wish, min(reach, parent.end)) for wish, reach in leaf.marks)
                self._merge(parent, (*parent.marks, *moved))
            self._mark(leaf, ())

    def joined(self, upper: Node, node: Node) -> None:
        """The run of `upper` becomes the beginning of a node."""
        if upper.marks:
            self._merge(node, (*upper.marks, *node.marks))
            self._mark(upper, ())

    # When they end

    def at(self, now: float) -> None:
        """It is so late now: wishes whose time is over count no more."""
        now = self._clock.now = max(now, self._clock.now)
        while self._due and self._due[0][0] <= now:
            wish = heappop(self._due)[2]
            if wish in self._nodes and wish.expires <= now:
                self._let_go(wish)
                for node in list(self._nodes[wish].values()):
                    self._mark(node, tuple(mark for mark in node.marks if mark.wish is not wish))
                    self._relist(node)

    # Pins

    def holds(self, leaf: Node) -> bool:
        """Whether a pin holds the block that a leaf ends with, in any group."""
        return any(blocks[-1] in pinned for blocks, pinned in zip(leaf.blocks, self._pinned, strict=True))

    def pinned(self, group: int) -> Counter[int]:
        """References that pins hold, per block."""
        return self._pinned[group]

    def yield_one(self) -> bool:
        """The weakest pin ends, so that somebody can run; False where there is none."""
        if not self._held:
            return False
        wish = min(self._held, key=lambda one: one.strength)
        num_blocks = sum(map(len, self._held[wish]))
        self._end_pin(wish)
        self.events.append(PinsYielded(self._clock.now, "", num_blocks))
        return True

    def end_pins(self) -> None:
        """All pins end."""
        for wish in list(self._held):
            self._end_pin(wish)

    def void(self) -> None:
        """Blocks have left the index for which there was no eviction: pins of such blocks end."""
        for wish, held in list(self._held.items()):
            if any(not pool.is_indexed(block) for pool, some in zip(self._pools, held, strict=True) for block in some):
                self._end_pin(wish)

    def _end_pin(self, wish: Wish) -> None:
        self._let_go(wish)
        wish.pin = False
        for node in list(self._nodes.get(wish, {}).values()):
            self._relist(node)

    def _hold(self, wish: Wish, keep: Keep) -> None:
        """Hold the blocks of all that a wish counts for, as far as pins may go, and no others."""
        before = self._held.pop(wish, None)
        if wish.pin and wish in self._nodes:
            self._held[wish] = self._take(wish, keep)
        if before is not None:
            self._drop(before)

    def _take(self, wish: Wish, keep: Keep) -> list[list[int]]:
        most = [int(pool.num_blocks * MOST_PINNED) for pool in self._pools]
        held: list[list[int]] = []
        num_refused = 0
        for group, (pool, pinned) in enumerate(zip(self._pools, self._pinned, strict=True)):
            taken: list[int] = []
            for block in dict.fromkeys(
                block for node in self._nodes[wish].values() for block in self._path(node, group)
            ):
                if block not in pinned and len(pinned) >= most[group]:
                    num_refused += 1
                    continue
                pool.hold(block)
                pinned[block] += 1
                taken.append(block)
            held.append(taken)
        if num_refused:
            self.events.append(PinsRefused(self._clock.now, keep.request_id, num_refused, sum(map(len, held))))
        return held

    def _path(self, node: Node, group: int) -> list[int]:
        """Whole blocks up to the end of a node."""
        is_tail = len(node.edge) < self._size
        whole = node.parent if is_tail else node
        return [] if whole is None else [block for block in whole.path_blocks(group) if block != ABSENT]

    def _let_go(self, wish: Wish) -> None:
        held = self._held.pop(wish, None)
        if held is not None:
            self._drop(held)

    def _drop(self, held: list[list[int]]) -> None:
        for pool, pinned, blocks in zip(self._pools, self._pinned, held, strict=True):
            for block in blocks:
                pool.drop(block)
                pinned[block] -= 1
                if not pinned[block]:
                    del pinned[block]

    # Looking

    def faults(self, node: Node) -> list[str]:
        """Complaints about the marks of a node; empty when all is well."""
        unknown = [
            wish.number
            for wish, _ in node.marks
            if wish is not PLAIN and self._nodes.get(wish, {}).get(node.id) is not node
        ]
        return [f"wishes {unknown} do not know it"] if unknown else []
