"""Wishes: what requests asked for the KV that they left, and who it still counts for.

A mark lies where a sequence ended and counts for all before it, too: it moves up when a leaf is given up. Marks of a
session all name one wish, so that its latest request speaks for what the session left: at the places where its latest
sequences ended, so that the end of a request takes no longer the more there were before. A branch of a program is such
a session, too; what is asked for it is what the program says (docs/programs.md).

Where nothing else runs and the next sequence does not fit, pins yield, the weakest first: nobody waits for ever.
Whoever flushes ends them all.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from heapq import heapify, heappop, heappush
from math import inf

from quire.cache.block_pool import BlockPool
from quire.cache.prefix.eviction import Aside, Order, OrderedLeaves
from quire.cache.prefix.pins import Pins
from quire.cache.prefix.radix_node import Clock, Node
from quire.cache.retention import NO_STAGE, PLAIN, Asked, Keep, Key, Mark, Stage, Wish, merged, stage_at
from quire.core.events import Event, PinsRefused, PinsYielded
from quire.core.scheduling_params import Retention

MOST_PLACES = 256  # where marks of one session lie

_OF_SESSION = 2  # parts of the key of a session; that of a branch has one more
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
        self._sessions: dict[Key, Wish] = {}
        self._branches: dict[Key, dict[Key, None]] = {}  # keys of sessions by tenant and program
        self._due: list[tuple[float, int, Wish]] = []
        self._pins = Pins(pools, key_bytes)
        self._num_wishes = 0

    def left(self, ends: Sequence[Node], keep: Keep) -> None:
        """A sequence is over. ends: the nodes where it ends; several where part of it is public, or a tail."""
        if keep.program is not None:
            self._left(ends, keep, self._wish_of_program(keep))
        if keep.program is None or keep.retention != _NOTHING_ASKED:
            self._left(ends, keep, self._wish_of(keep))

    def _left(self, ends: Sequence[Node], keep: Keep, wish: Wish) -> None:
        asked_before = wish.asked
        self._ask(wish, keep)
        for node in ends:
            if node.parent is not None:
                self._merge(node, (*node.marks, Mark(wish, node.end)))
        places = self._nodes.get(wish)
        if places is None:  # nothing was asked, or nothing is left, or others asked for more
            if wish.session is not None and self._sessions.get(wish.session) is wish:
                self._end_session(wish.session)
            return
        new = [node for node in ends if node.id in places]
        for node in new:
            places[node.id] = places.pop(node.id)  # the latest
        while len(places) > MOST_PLACES:
            self._unmark(next(iter(places.values())), wish)
        if wish.expires < inf:
            self._note_due(wish)
        self._asked(wish, asked_before, new, keep)

    def _ask(self, wish: Wish, keep: Keep) -> None:
        """What the request asks that has just ended."""
        if wish is PLAIN:
            return
        wish.request_id = keep.request_id
        if wish.session is None or len(wish.session) == _OF_SESSION:
            wish.asks(keep.retention, self._clock.now)
        elif keep.program is not None and keep.program.expects_more:
            wish.expects_more(keep, self._clock.now)
        else:
            wish.is_finished()

    def end_program(self, tenant: str, program: str, branch: str | None) -> None:
        """Nobody goes on from what a branch left; None: from what any of its branches left. Unknown ones do nothing."""
        keys = list(self._branches.get((tenant, program), ())) if branch is None else [(tenant, program, branch)]
        for key in keys:
            wish = self._sessions.get(key)
            if wish is not None:
                wish.is_finished()
                for node in list(self._nodes.get(wish, {}).values()):
                    self._relist(node)

    def _note_due(self, wish: Wish) -> None:
        heappush(self._due, (wish.expires, wish.number, wish))
        if len(self._due) > 2 * len(self._nodes) + 64:
            self._due = [(one.expires, one.number, one) for one in self._nodes if one.expires < inf]
            heapify(self._due)

    def _asked(self, wish: Wish, before: Asked, new: Sequence[Node], keep: Keep) -> None:
        """A wish holds for new nodes. What it holds for already is looked at only where it changed."""
        places = list(self._nodes[wish].values())
        if wish.pin:
            self._hold(wish, new if before.pin else places, keep)
        elif before.pin:
            self._pins.let_all_go(wish)
        for node in places if wish.asked.is_less_than(before) else new:
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
        if asked.session is None:
            return self._new_wish(None, keep)
        return self._of_session((keep.tenant, asked.session), keep)

    def _wish_of_program(self, keep: Keep) -> Wish:
        """The wish of the branch that a request was a part of."""
        assert keep.program is not None, "it is a program's"
        key = keep.tenant, keep.program.id, keep.program.branch
        self._branches.setdefault(key[:_OF_SESSION], {})[key] = None
        return self._of_session(key, keep)

    def _of_session(self, key: Key, keep: Keep) -> Wish:
        wish = self._sessions.get(key)
        if wish is None:
            wish = self._sessions[key] = self._new_wish(key, keep)
        return wish

    def _new_wish(self, key: Key | None, keep: Keep) -> Wish:
        self._num_wishes += 1
        return Wish(self._num_wishes, key, keep.tenant)

    def _end_session(self, key: Key) -> None:
        """Nothing is left that it counts for."""
        del self._sessions[key]
        if len(key) > _OF_SESSION:
            branches = self._branches[key[:_OF_SESSION]]
            del branches[key]
            if not branches:
                del self._branches[key[:_OF_SESSION]]

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
                self._end_session(wish.session)

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


Standing = tuple[int, ...]


class _Staged:
    """An order within the stages of programs. See Order."""

    def __init__(self, order: Order, clock: Clock) -> None:
        self._order = order
        self._clock = clock

    def used(self, node: Node) -> None:
        """See Order."""
        self._order.used(node)

    def given_up(self, leaf: Node) -> None:
        """See Order."""
        self._order.given_up(leaf)

    def stage(self, leaf: Node) -> Stage:
        """What programs say of its end."""
        return stage_at(leaf.marks, leaf.end, self._clock.now) if leaf.marks else NO_STAGE

    def standing(self, leaf: Node) -> Standing:
        """See Order."""
        return *self.stage(leaf), *self._order.standing(leaf)

    def reason(self, leaf: Node) -> dict[str, float]:
        """See Order. program: 1 where one expected to go on from there, -1 where it did not any more."""
        stage, _ = self.stage(leaf)
        reason = self._order.reason(leaf)
        return {**reason, "program": stage} if stage else reason


class _Turns(_Staged):
    """Whose turn it is: programs say nothing, but that what finished branches left goes before the rest. See Order."""

    def __init__(self, order: Order, clock: Clock) -> None:
        super().__init__(order, clock)
        self._places: dict[
            int, tuple[int, Standing]
        ] = {}  # of some leaves: another's standing, and when they were used

    def standing(self, leaf: Node) -> Standing:
        """See Order."""
        return *min(self.stage(leaf), NO_STAGE), *self._place(leaf)

    def _place(self, leaf: Node) -> Standing:
        tick, place = self._places.get(leaf.id, (-1, ()))
        return place if tick == leaf.tick else self._order.standing(leaf)

    def change(self, one: Node, other: Node) -> None:
        """Two leaves change places, each until it is used again."""
        place = self._place(one)
        self._places[one.id] = one.tick, self._place(other)
        self._places[other.id] = other.tick, place

    def forget(self, leaf: Node) -> bool:
        """Its place is its own again. Whether it had another's."""
        return self._places.pop(leaf.id, None) is not None


class LeavesByTenant:
    """See Leaves."""

    asks_for_misses = False

    def __init__(self, order: Order, clock: Clock) -> None:
        self._staged = _Staged(order, clock)
        self._turns = _Turns(order, clock)
        self._all = OrderedLeaves(self._turns)
        self._of: dict[str, OrderedLeaves] = {}  # the same, by tenant
        self._aside = Aside()

    def __contains__(self, node: Node) -> bool:
        return node in self._all or node in self._aside

    def __len__(self) -> int:
        return len(self._all)

    def add(self, node: Node) -> None:
        """See Leaves."""
        self._aside.discard(node)
        self._all.add(node)
        own = self._of.get(node.tenant)
        if own is None:
            own = self._of[node.tenant] = OrderedLeaves(self._staged)
        own.add(node)

    def renew(self, node: Node) -> None:
        """See Leaves."""
        if node in self._all:
            self._all.renew(node)
            self._of[node.tenant].renew(node)

    def discard(self, node: Node) -> None:
        """See Leaves."""
        self._aside.discard(node)
        self._turns.forget(node)
        self._take_out(node)

    def _take_out(self, node: Node) -> None:
        if node in self._all:
            self._all.discard(node)
            own = self._of[node.tenant]
            own.discard(node)
            if not len(own):
                del self._of[node.tenant]

    def set_aside(self, node: Node) -> None:
        """See Leaves."""
        if node not in self._all:
            self._aside.put(node)

    def begin(self) -> None:
        """See Leaves."""
        for node in self._aside.some():
            self.add(node)

    def pop(self) -> Node | None:
        """See Leaves."""
        node = self.first()
        if node is None:
            return self._aside.pop()
        self.instead(node)
        self._take_out(node)
        return node

    def first(self) -> Node | None:
        """The one that `pop` would take out, of those that were not set aside."""
        first = self._all.first()
        return None if first is None else self._of[first.tenant].first()

    def instead(self, node: Node) -> None:
        """What `first` said is to be given up, maybe in place of the one whose turn it is."""
        spared = self._all.first()
        if spared is not None and spared is not node:
            self._turns.change(spared, node)

    def is_finished(self, node: Node) -> bool:
        """Whether a finished branch left its end, and nobody else is known to want it."""
        return self._staged.stage(node) < NO_STAGE

    def used(self, node: Node, *, hit: bool) -> None:
        """See Leaves."""
        self._all.used(node, hit=hit)
        if self._turns.forget(node):
            self.renew(node)

    def given_up(self, leaf: Node, num_blocks: int) -> None:
        """See Leaves."""
        self._all.given_up(leaf, num_blocks)

    def num_at_once(self, leaf: Node) -> int:
        """See Leaves."""
        return leaf.num_alike

    def missed(self, root_key: object, data: bytes, first: int, at: int) -> None:
        """See Leaves."""

    def reason(self, leaf: Node) -> dict[str, float]:
        """See Leaves."""
        return self._staged.reason(leaf)
