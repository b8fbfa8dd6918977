"""What a request asks for the KV that it leaves behind, and how much of that counts at some place of the tree."""

from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from quire.core.terms import Retention

ORDINARY = 50  # the priority of what nothing was asked for
_MOST_MARKS = 4  # of a node


class Keep(NamedTuple):
    """Comes to the memory with a table, and follows it."""

    retention: Retention = Retention()
    request_id: str = ""
    tenant: str = ""
    num_prompt: int = 0  # tokens of the prompt; what lies behind them was generated


ANYHOW = Keep()  # nothing is asked


class Wish:
    """A retention since the end of the request that asked for it. That of a session changes with its latest request."""

    __slots__ = ("expires", "number", "pin", "priority", "request_id", "session", "tenant")

    def __init__(self, number: int, session: tuple[str, str] | None = None, tenant: str = "") -> None:
        """number: of all wishes, in order of creation. session: tenant and name."""
        self.number = number
        self.session = session
        self.tenant = tenant
        self.request_id = ""  # the latest that asked
        self.priority = ORDINARY
        self.expires = inf  # seconds of the engine's clock
        self.pin = False  # whether its blocks are held

    @property
    def asked(self) -> tuple[int, float, bool]:
        """What it asks now."""
        return self.priority, self.expires, self.pin

    def asks(self, retention: Retention, now: float) -> None:
        """A request has ended that asks this."""
        self.priority, self.pin = retention.priority, retention.pin
        self.expires = inf if retention.ttl is None else now + retention.ttl

    @property
    def strength(self) -> tuple[float, int, float, int]:
        """Which of two counts for more: pins first, those that last longest; then priorities."""
        return self.expires if self.pin else 0.0, self.priority, self.expires, self.number


PLAIN = Wish(0)  # of all requests that ask for nothing; never changed


class Mark(NamedTuple):
    """A wish holds for the blocks of a path up to the first `reach` ones."""

    wish: Wish
    reach: int


def merged(marks: Iterable[Mark], now: float) -> tuple[Mark, ...]:
    """Marks of one node: each wish once, without those that have expired; where they are too many, the strongest."""
    reaches: dict[Wish, int] = {}
    for wish, reach in marks:
        if wish.expires > now:
            reaches[wish] = max(reach, reaches.get(wish, 0))
    if len(reaches) <= _MOST_MARKS:
        return tuple(Mark(*item) for item in reaches.items())
    strongest = sorted(reaches, key=lambda wish: wish.strength, reverse=True)[:_MOST_MARKS]
    return tuple(Mark(wish, reaches[wish]) for wish in strongest)


def priority_at(marks: Iterable[Mark], depth: int, now: float) -> int:
    """The strongest wish that holds for the block that ends there."""
    return max((wish.priority for wish, reach in marks if reach >= depth and wish.expires > now), default=ORDINARY)
