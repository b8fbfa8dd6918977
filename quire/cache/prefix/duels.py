"""Duels: whether the learnt order does better than plain recency. Bounded, and fair to whichever is in force.

Where the two would give up different leaves, both are watched: the one that is asked for first was the wrong one to
give up. So each order is judged by what it would have done, and recency rules until the learnt order has earned it.
"""

from collections import deque

from quire.cache.prefix.radix_node import Node

_MOST_OPEN = 1024
_FORGET = 1 - 1 / 128  # weight that outcomes keep when the next one comes
_TO_LEAD = 1.5  # more duels won than lost, of the latest ones


class Duel:
    """Two leaves, of which each order would give up one."""

    __slots__ = ("due", "is_open", "keys")

    def __init__(self, due: int) -> None:
        """due: blocks that were given up when nobody has won."""
        self.due = due
        self.is_open = True
        self.keys: list[int] = []  # of leaves that have gone


Side = tuple[Duel, bool]  # whether the learnt order would have given up this leaf


class Duels:
    """A leaf takes part in one open duel at most, `node.duel`. Time is counted in blocks given up."""

    def __init__(self, horizon: int) -> None:
        self.balance = 0.0  # duels that the learnt order won, less those that it lost; old ones count less
        self._horizon = horizon
        self._open: deque[Duel] = deque()
        self._gone: dict[int, Side] = {}

    @property
    def learnt_leads(self) -> bool:
        """Whether the learnt order has earned to decide."""
        return self.balance >= _TO_LEAD

    @property
    def any_gone(self) -> bool:
        """Whether anything could be asked for in vain."""
        return bool(self._gone)

    def begin(self, learnt: Node | None, oldest: Node | None, time: int) -> None:
        """The learnt order would give up one and recency the other; None: nobody would say when it is used."""
        while self._open and (not self._open[0].is_open or self._open[0].due <= time):
            self._close(self._open.popleft())
        if learnt is None or oldest is None or learnt is oldest or len(self._open) >= _MOST_OPEN:
            return
        if _is_free(learnt) and _is_free(oldest):
            duel = Duel(time + self._horizon)
            learnt.duel, oldest.duel = (duel, True), (duel, False)
            self._open.append(duel)

    def used(self, node: Node) -> None:
        """A leaf in a duel was used."""
        side, node.duel = node.duel, None
        self._lost(side)

    def left(self, leaf: Node, key: int) -> None:
        """A leaf in a duel is given up."""
        side, leaf.duel = leaf.duel, None
        if side[0].is_open:
            side[0].keys.append(key)
            self._gone[key] = side

    def wanted(self, key: int) -> None:
        """A prompt asks for a block that is not there."""
        side = self._gone.get(key)
        if side is not None:
            self._lost(side)

    def _lost(self, side: Side) -> None:
        duel, by_learnt = side
        if duel.is_open:
            self.balance = self.balance * _FORGET + (-1 if by_learnt else 1)
            self._close(duel)

    def _close(self, duel: Duel) -> None:
        duel.is_open = False
        for key in duel.keys:
            if key in self._gone and self._gone[key][0] is duel:
                del self._gone[key]


def _is_free(node: Node) -> bool:
    return node.duel is None or not node.duel[0].is_open
