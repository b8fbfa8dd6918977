"""Retention of KV in the radix tree: the marks at nodes, when they apply, and the eviction order that they change.

A mark is at the node where a sequence ended and applies to all blocks before it too. It moves up when a leaf is
evicted. All marks of a session share one Wish, so that the retention of its latest request applies to the whole
session. The number of marks per session is limited, so that the end of a request does not get slower as a session
grows. A branch of a program is such a session too; its hints are its retention (docs/programs.md).

If nothing runs and the next sequence does not fit, pins end, the weakest first, so that no request waits forever. A
flush ends all pins.
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

MOST_PLACES = 256  # nodes with marks of one session

_OF_SESSION = 2  # length of the key of a session; that of a branch is longer by one
_NOTHING_ASKED = Retention()


class Wishes:
    """All retention that applies to some node, and the pins."""

    def __init__(
        self, pools: Sequence[BlockPool], clock: Clock, key_bytes: int, relist: Callable[[Node], None]
    ) -> None:
        """key_bytes: of a block. relist(node): its eviction key may have fallen, or it has idle blocks again."""
        self.events: list[Event] = []
        self._clock = clock
        self._relist = relist
        self._nodes: dict[Wish, dict[int, Node]] = {}  # nodes with marks of a wish, the latest last
        self._sessions: dict[Key, Wish] = {}
        self._branches: dict[Key, dict[Key, None]] = {}  # keys of sessions by tenant and program
        self._due: list[tuple[float, int, Wish]] = []
        self._pins = Pins(pools, key_bytes)
        self._num_wishes = 0

    def left(self, ends: Sequence[Node], keep: Keep) -> None:
        """Apply the retention of a sequence that ended.

        ends: the nodes where it ends; several if a part of it is public, or a tail.
        """
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
        if places is None:  # no retention, no blocks left, or stronger marks of others at the node
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
        """Set the wish from the request that has just ended."""
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
        """End a branch of a program (None: all): no request will continue from its KV. Ignores unknown ones."""
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
        """Apply a changed wish: to its new nodes, and to its other nodes only as far as its retention changed."""
        places = list(self._nodes[wish].values())
        if wish.pin:
            self._hold(wish, new if before.pin else places, keep)
        elif before.pin:
            self._pins.let_all_go(wish)
        for node in places if wish.asked.is_less_than(before) else new:
            self._relist(node)

    def _hold(self, wish: Wish, nodes: Iterable[Node], keep: Keep) -> None:
        """Pin the paths to some nodes, within the limits. Adds an event if blocks were not pinned."""
        refused: set[tuple[int, int]] = set()
        held: set[tuple[int, int]] = set()
        for node in nodes:
            not_held, are_held = self._pins.hold(wish, node)
            refused |= not_held
            held |= are_held
        if refused:
            self.events.append(PinsRefused(self._clock.now, keep.request_id, len(refused), len(held)))

    def _wish_of(self, keep: Keep) -> Wish:
        """The wish of a request that has just ended: PLAIN without retention, that of its session, or a new one."""
        asked = keep.retention
        if asked == _NOTHING_ASKED:
            return PLAIN
        if asked.session is None:
            return self._new_wish(None, keep)
        return self._of_session((keep.tenant, asked.session), keep)

    def _wish_of_program(self, keep: Keep) -> Wish:
        """The wish of the program branch that a request belongs to."""
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
        """Delete a session without marks."""
        del self._sessions[key]
        if len(key) > _OF_SESSION:
            branches = self._branches[key[:_OF_SESSION]]
            del branches[key]
            if not branches:
                del self._branches[key[:_OF_SESSION]]

    # Marks

    def _merge(self, node: Node, marks: tuple[Mark, ...]) -> None:
        """Set the marks of a node to `marks`, without expired and excess ones."""
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
        """Remove the mark of a wish from a node."""
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
        """Remove all marks of a node. Pins of wishes that are also at `other` move there."""
        kept = {wish for wish, _ in other.marks}
        for wish, _ in node.marks:
            if wish in kept:
                self._pins.moved(wish, node, other)
        self._mark(node, ())

    def moved_up(self, leaf: Node, parent: Node) -> None:
        """A leaf is about to leave the tree: its marks, which apply to the blocks before it too, move to its parent."""
        if leaf.marks:
            if parent.parent is not None:
                moved = (Mark(wish, min(reach, parent.end)) for wish, reach in leaf.marks)
                self._merge(parent, (*parent.marks, *moved))
            self._move(leaf, parent)

    def joined(self, upper: Node, node: Node) -> None:
        """The run of `upper` has become the first section of `node`: its marks move there."""
        if upper.marks:
            self._merge(node, (*upper.marks, *node.marks))
            self._move(upper, node)

    # Expiry

    def at(self, now: float) -> None:
        """Advance the clock and remove the marks of expired wishes."""
        now = self._clock.now = max(now, self._clock.now)
        while self._due and self._due[0][0] <= now:
            wish = heappop(self._due)[2]
            if wish in self._nodes and wish.expires <= now:
                for node in list(self._nodes[wish].values()):
                    self._unmark(node, wish)

    # Pins

    def holds(self, leaf: Node) -> bool:
        """Whether the last block of a leaf is pinned, in any group."""
        return self._pins.is_held(leaf, -1)

    def pinned(self, group: int) -> Counter[int]:
        """References of pins, per block."""
        return self._pins.references(group)

    def yield_one(self) -> bool:
        """End the weakest pin, so that a sequence can run. Returns False if there is none."""
        wish = self._pins.weakest
        if wish is None:
            return False
        self.events.append(PinsYielded(self._clock.now, wish.request_id, self._pins.num_blocks(wish)))
        self._end_pin(wish)
        return True

    def end_pins(self) -> None:
        """End all pins."""
        for wish in self._pins.wishes:
            self._end_pin(wish)

    def void(self) -> None:
        """End the pins of blocks that have left the index without an eviction."""
        self._pins.void()

    def _end_pin(self, wish: Wish) -> None:
        self._pins.let_all_go(wish)
        wish.pin = False
        for node in list(self._nodes.get(wish, {}).values()):
            self._relist(node)

    # Checks

    def faults(self, node: Node, windowed: Collection[int]) -> list[str]:
        """Errors of the marks and pins of a node; empty if there are none."""
        unknown = [
            wish.number
            for wish, _ in node.marks
            if wish is not PLAIN and self._nodes.get(wish, {}).get(node.id) is not node
        ]
        wrong = [f"wishes {unknown} do not know it"] if unknown else []
        return [*wrong, *self._pins.faults(node, windowed)]


Standing = tuple[int, ...]


class _Staged:
    """An eviction policy with program hints as the first part of the key. See Order."""

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
        """The program hint for the last block of a leaf."""
        return stage_at(leaf.marks, leaf.end, self._clock.now) if leaf.marks else NO_STAGE

    def standing(self, leaf: Node) -> Standing:
        """See Order."""
        return *self.stage(leaf), *self._order.standing(leaf)

    def reason(self, leaf: Node) -> dict[str, float]:
        """See Order. program: 1 if a program expects to continue from it, -1 if a program has finished with it."""
        stage, _ = self.stage(leaf)
        reason = self._order.reason(leaf)
        return {**reason, "program": stage} if stage else reason


class _Turns(_Staged):
    """The order that selects the tenant: without hints, except that finished branches come first. See Order."""

    def __init__(self, order: Order, clock: Clock) -> None:
        super().__init__(order, clock)
        # Leaves that have the eviction key of another leaf: their tick at that time, and the key.
        self._places: dict[int, tuple[int, Standing]] = {}

    def standing(self, leaf: Node) -> Standing:
        """See Order."""
        return *min(self.stage(leaf), NO_STAGE), *self._place(leaf)

    def _place(self, leaf: Node) -> Standing:
        tick, place = self._places.get(leaf.id, (-1, ()))
        return place if tick == leaf.tick else self._order.standing(leaf)

    def change(self, one: Node, other: Node) -> None:
        """Swap the eviction keys of two leaves, each until it is used again."""
        place = self._place(one)
        self._places[one.id] = one.tick, self._place(other)
        self._places[other.id] = other.tick, place

    def forget(self, leaf: Node) -> bool:
        """Give a leaf its own eviction key back. Returns whether it had another one."""
        return self._places.pop(leaf.id, None) is not None


class LeavesByTenant:
    """Leaves in the order of an eviction policy with program hints. See Leaves.

    The first leaf in the policy's order selects the tenant. Hints then select which of its leaves is evicted, so they
    cannot protect KV at the expense of other tenants.
    """

    asks_for_misses = False

    def __init__(self, order: Order, clock: Clock) -> None:
        self._staged = _Staged(order, clock)
        self._turns = _Turns(order, clock)
        self._all = OrderedLeaves(self._turns)
        self._of: dict[str, OrderedLeaves] = {}  # the same leaves, by tenant
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
        """The leaf that `pop` would return, of those that are not set aside."""
        first = self._all.first()
        return None if first is None else self._of[first.tenant].first()

    def instead(self, node: Node) -> None:
        """Record that `node`, which `first` returned, is evicted: it swaps its key with the policy's first leaf."""
        spared = self._all.first()
        if spared is not None and spared is not node:
            self._turns.change(spared, node)

    def is_finished(self, node: Node) -> bool:
        """Whether the last block of a leaf belongs to a finished branch, and no other retention protects it."""
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
