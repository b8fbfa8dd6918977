"""Examples: leaves that the model of chances learns from, until it is known what became of them. Bounded."""

from collections import deque

from quire.cache.prefix.chance import Chance, Features
from quire.cache.prefix.radix_node import Node

_MOST_OPEN = 2048


class Example:
    """How a leaf looked at some time."""

    __slots__ = ("due", "features", "is_open", "key", "tenant")

    def __init__(self, features: Features, tenant: str, due: int) -> None:
        """due: blocks that were given up when it counts as not used again."""
        self.features = features
        self.tenant = tenant
        self.due = due
        self.key: int | None = None  # by which a prompt names it when its leaf has gone
        self.is_open = True


class Examples:
    """A leaf has one open example at most, `node.example`. Time is counted in blocks given up."""

    def __init__(self, chance: Chance, horizon: int) -> None:
        """horizon: blocks given up within which a leaf has to be used again."""
        self._chance = chance
        self._horizon = horizon
        self._spacing = max(1, horizon // _MOST_OPEN)
        self._open: deque[Example] = deque()  # the oldest first
        self._gone: dict[int, Example] = {}  # by key: their leaves have left the tree
        self._last = -self._spacing

    def __len__(self) -> int:
        return len(self._open)

    def take(self, leaf: Node, features: Features, tenant: str, time: int) -> None:
        """A leaf is looked at: it becomes an example, unless it is one or there are enough."""
        is_busy = len(self._open) > _MOST_OPEN // 2
        if leaf.example is not None or (is_busy and time < self._last + self._spacing):
            return
        self._last = time
        leaf.example = Example(features, tenant, time + self._horizon)
        self._open.append(leaf.example)
        if len(self._open) > 2 * _MOST_OPEN:  # many leaves of few blocks each
            self._close(self._open.popleft(), came_back=None)

    def used(self, node: Node) -> None:
        """A leaf was used again."""
        self._close(node.example, came_back=True)
        node.example = None

    def left(self, leaf: Node, key: int) -> None:
        """A leaf that is an example is given up."""
        example, leaf.example = leaf.example, None
        if example.is_open:
            example.key = key
            self._gone[key] = example

    def wanted(self, key: int) -> None:
        """A prompt asks for a block that is not there."""
        example = self._gone.get(key)
        if example is not None:
            self._close(example, came_back=True)

    @property
    def any_gone(self) -> bool:
        """Whether anything could be asked for in vain."""
        return bool(self._gone)

    def expire(self, time: int) -> None:
        """What was not used again until now was not used again."""
        while self._open and (not self._open[0].is_open or self._open[0].due <= time):
            self._close(self._open.popleft(), came_back=False)

    def _close(self, example: Example, *, came_back: bool | None) -> None:
        """came_back: None where nobody knows."""
        if not example.is_open:
            return
        example.is_open = False
        if example.key is not None and self._gone.get(example.key) is example:
            del self._gone[example.key]
        if came_back is not None:
            self._chance.learn(example.features, example.tenant, came_back=came_back)
