"""Wishes: what requests asked for the KV that they left, and who it still counts for.

A mark lies where a sequence ended and counts for all before it, too: it moves up when a leaf is given up. Marks of a
session all name one wish, so that its latest request speaks for what the session left: at the places where its latest
sequences ended, so that the end of a request takes no longer the more there were before.

Where nothing else runs and the next sequence does not fit, pins yield, the weakest first: nobody waits for ever.
Whoever flushes ends them all.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from heapq import heapify, heappop, heappush
from math import inf

from quire.cache.eviction.keep import PLAIN, Keep, Mark, Wish, merged
from quire.cache.eviction.pins import Pins
from quire.cache.eviction.uses import Clock
from quire.cache.pool import BlockPool
from quire.cache.radix_node import Node
from quire.core.events import Event, PinsRefused, PinsYielded
from quire.core.terms import Retention

MOST_PLACES = 256  # where marks of one session lie

_NOTHING_ASKED = Retention()


class Wishes:
    """All wishes that count for some node."""

    def __init__(
        self, pools: Sequence[BlockPool], clock: Clock, key_bytes: int, relist: Callable[[Node], None]
    ) -> None:
        """key_bytes: of a block. relist: a node's standing changed, or blocks of it are idle that were not."""
        self.events: list[Event] = []
        self._clock = clock
        self._relist = relist
        self._nodes: dict[Wish, dict[int, Node]] = {}  # where marks of a wish lie, the latest last
        self._sessions: dict[tuple[str, str], Wish] = {}
        self._due: list[tuple[float, int, Wish]] = []
        self._pins = Pins(pools, key_bytes)
        self._num_wishes = 0

    def left(self, ends: Sequence[Node], keep: Keep) -> None:
        """A sequence is over. ends: the nodes where it ends; several where part of it is public, or a tail."""
        wish = self._wish_of(keep)
        asked_before = wish.asked
        if wish is not PLAIN:
            wish.asks(keep.retention, self._clock.now)
            wish.request_id = keep.request_id
        for node in ends:
            if node.parent is not None:
                self._merge(node, (*node.marks, Mark(wish, node.end)))
        places = self._nodes.get(wish)
        if places is None:  # nothing was asked, or nothing is left, or others asked for more
            if self._sessions.get(wish.session or ("", "")) is wish:
                del self._sessions[wish.session or ("", "")]
            return
        new = [node for node in ends if node.id in places]
        for node in new:
            places[node.id] = places.pop(node.id)  # the latest
        while len(places) > MOST_PLACES:
            self._unmark(next(iter(places.values())), wish)
        if wish.expires < inf:
            self._note_due(wish)
        self._asked(wish, asked_before, new, keep)

    def _note_due(self, wish: Wish) -> None:
        heappush(self._due, (wish.expires, wish.number, wish))
        if len(self._due) > 2 * len(self._nodes) + 64:
            self._due = [(one.expires, one.number, one) for one in self._nodes if one.expires < inf]
            heapify(self._due)

    def _asked(self, wish: Wish, before: tuple[int, float, bool], new: Sequence[Node], keep: Keep) -> None:
        """A wish holds for new nodes. What it holds for already is looked at only where it changed."""
        priority, expires, pin = before
        places = list(self._nodes[wish].values())
        if wish.pin:
            self._hold(wish, new if pin else places, keep)
        elif pin:
            self._pins.let_all_go(wish)
        less = wish.priority < priority or wish.expires < expires or (pin and not wish.pin)
        for node in places if less else new:
            self._relist(node)

    def _hold(self, wish: Wish, nodes: Iterable[Node], keep: Keep) -> None:
        """Hold the blocks up to some nodes, as far as pins may go."""
        refused: set[tuple[int, int]] = set()
        held: set[tuple[int, int]] = set()
        for node in nodes:
            not_held, are_held = self._pins.hold(wish, node)
            refused |= not_held
            held |= are_held
        if refused:
            self.events.append(PinsRefused(self._clock.now, keep.request_id, len(refused), len(held)))

    def _wish_of(self, keep: Keep) -> Wish:
        """The wish of a request that has just ended: a new one, or that of its session, with what was asked before."""
        asked = keep.retention
        if asked == _NOTHING_ASKED:
            return PLAIN
        session = None if asked.session is None else (keep.tenant, asked.session)
        wish = None if session is None else self._sessions.get(session)
        if wish is None:
            self._num_wishes += 1
            wish = Wish(self._num_wishes, session, keep.tenant)
            if session is not None:
                self._sessions[session] = wish
        return wish

    # Where marks lie

    def _merge(self, node: Node, marks: tuple[Mark, ...]) -> None:
        """These marks lie at a node, as far as they count; the others hold nothing for it."""
        self._mark(node, merged(marks, self._clock.now))
        kept = {wish for wish, _ in node.marks}
        if any(wish not in kept for wish, _ in marks):
            self._relist(node)

    def _mark(self, node: Node, marks: tuple[Mark, ...]) -> None:
        before, node.marks = node.marks, marks
        for wish, _ in marks:
            if wish is not PLAIN:
                self._nodes.setdefault(wish, {})[node.id] = node
        kept = {wish for wish, _ in marks}
        for wish, _ in before:
            if wish not in kept and wish is not PLAIN:
                self._forget(wish, node)

    def _unmark(self, node: Node, wish: Wish) -> None:
        """A wish counts for a node no more."""
        self._mark(node, tuple(mark for mark in node.marks if mark.wish is not wish))
        self._relist(node)

    def _forget(self, wish: Wish, node: Node) -> None:
        self._pins.let_go(wish, node)
        nodes = self._nodes[wish]
        del nodes[node.id]
        if not nodes:
            del self._nodes[wish]
            if wish.session is not None:
                del self._sessions[wish.session]

    def _move(self, node: Node, other: Node) -> None:
        """Marks of a node lie at another now, as far as they count there, and what is held for them goes with them."""
        kept = {wish for wish, _ in other.marks}
        for wish, _ in node.marks:
            if wish in kept:
                self._pins.moved(wish, node, other)
        self._mark(node, ())

    def moved_up(self, leaf: Node, parent: Node) -> None:
        """A leaf leaves the tree: what was asked for it was asked for what comes before, too."""
        if leaf.marks:
            if parent.parent is not None:
                moved = (Mark(wish, min(reach, parent.end)) for wish, reach in leaf.marks)
                self._merge(parent, (*parent.marks, *moved))
            self._move(leaf, parent)

    def joined(self, upper: Node, node: Node) -> None:
        """The run of `upper` becomes the beginning of a node."""
        if upper.marks:
            self._merge(node, (*upper.marks, *node.marks))
            self._move(upper, node)

    # When they end

    def at(self, now: float) -> None:
        """It is so late now: wishes whose time is over count no more."""
        now = self._clock.now = max(now, self._clock.now)
        while self._due and self._due[0][0] <= now:
            wish = heappop(self._due)[2]
            if wish in self._nodes and wish.expires <= now:
                for node in list(self._nodes[wish].values()):
                    self._unmark(node, wish)

    # Pins

    def holds(self, leaf: Node) -> bool:
        """Whether a pin holds the block that a leaf ends with, in any group."""
        return self._pins.is_held(leaf, -1)

    def pinned(self, group: int) -> Counter[int]:
        """References that pins hold, per block."""
        return self._pins.references(group)

    def yield_one(self) -> bool:
        """The weakest pin ends, so that somebody can run; False where there is none."""
        wish = self._pins.weakest
        if wish is None:
            return False
        self.events.append(PinsYielded(self._clock.now, wish.request_id, self._pins.num_blocks(wish)))
        self._end_pin(wish)
        return True

    def end_pins(self) -> None:
        """All pins end."""
        for wish in self._pins.wishes:
            self._end_pin(wish)

    def void(self) -> None:
        """Blocks have left the index for which there was no eviction: pins of such blocks end."""
        self._pins.void()

    def _end_pin(self, wish: Wish) -> None:
        self._pins.let_all_go(wish)
        wish.pin = False
        for node in list(self._nodes.get(wish, {}).values()):
            self._relist(node)

    # Looking

    def faults(self, node: Node, windowed: Collection[int]) -> list[str]:
        """Complaints about the marks of a node, and what is held of it; empty when all is well."""
        unknown = [
            wish.number
            for wish, _ in node.marks
            if wish is not PLAIN and self._nodes.get(wish, {}).get(node.id) is not node
        ]
        wrong = [f"wishes {unknown} do not know it"] if unknown else []
        return [*wrong, *self._pins.faults(node, windowed)]
