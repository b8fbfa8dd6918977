"""Leaves by an order, and by what programs say of them: within a tenant, so that nobody can say anything for others.

The order says whose turn it is: the tenant of the leaf that comes first. Of that tenant's leaves those go first that
its finished branches left, then those that no program speaks of, then those that programs expect to go on from. Where
that is another leaf than the one whose turn it was, the two change places: a tenant gives up a leaf when it would have
without programs. But what finished branches left goes before all else.
"""

from quire.cache.prefix.eviction import Aside, Order, OrderedLeaves
from quire.cache.prefix.radix_node import Node
from quire.cache.prefix.uses import Clock
from quire.cache.retention import NO_STAGE, Stage, stage_at

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
