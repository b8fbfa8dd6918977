"""What a request asks for the KV that it leaves behind, and how much of that counts at some place of the tree."""

from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from quire.core.scheduling_params import Program, Retention

ORDINARY = 50  # the priority of what nothing was asked for
_MOST_MARKS = 4  # of a node

# What a program says is a priority for the orders that heed one, and a stage for the others: what has less goes first.
EXPECTED, FINISHED = 75, 0  # priorities
Stage = tuple[int, int]
NO_STAGE: Stage = (0, 0)  # of what no program speaks of
GIVEN_UP: Stage = (-1, 0)  # what a finished branch left


class Keep(NamedTuple):
    """Comes to the memory with a table, and follows it."""

    retention: Retention = Retention()
    request_id: str = ""
    tenant: str = ""
    num_prompt: int = 0  # tokens of the prompt; what lies behind them was generated
    program: Program | None = None
    program_age: int = 0  # less began earlier


ANYHOW = Keep()  # nothing is asked


Key = tuple[str, ...]  # of a session: tenant and name; of a branch: tenant, program and branch


class Asked(NamedTuple):
    """What a wish asks at some time."""

    priority: int
    expires: float
    stage: Stage
    pin: bool

    def is_less_than(self, before: "Asked") -> bool:
        """In any way."""
        return (
            self.priority < before.priority
            or self.expires < before.expires
            or self.stage < before.stage
            or (before.pin and not self.pin)
        )


class Wish:
    """A retention since the end of the request that asked for it. That of a session changes with its latest request."""

    __slots__ = ("expires", "number", "pin", "priority", "request_id", "session", "stage", "tenant")

    def __init__(self, number: int, session: Key | None = None, tenant: str = "") -> None:
        """number: of all wishes, in order of creation."""
        self.number = number
        self.session = session
        self.tenant = tenant
        self.request_id = ""  # the latest that asked
        self.priority = ORDINARY
        self.expires = inf  # seconds of the engine's clock
        self.pin = False  # whether its blocks are held
        self.stage = NO_STAGE

    @property
    def asked(self) -> Asked:
        """What it asks now."""
        return Asked(self.priority, self.expires, self.stage, self.pin)

    def asks(self, retention: Retention, now: float) -> None:
        """A request has ended that asks this."""
        self.priority, self.pin = retention.priority, retention.pin
        self.expires = inf if retention.ttl is None else now + retention.ttl

    def expects_more(self, keep: Keep, now: float) -> None:
        """A request of a program has ended, and another is to go on from there. The oldest program's goes last."""
        assert keep.program is not None, "it is a program's"
        self.priority, self.stage, self.expires = EXPECTED, (1, -keep.program_age), now + keep.program.ttl

    def is_finished(self) -> None:
        """Nobody of the program goes on from there."""
        self.priority, self.stage, self.expires = FINISHED, GIVEN_UP, inf

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


def stage_at(marks: Iterable[Mark], depth: int, now: float) -> Stage:
    """What programs say of the block that ends there, the one that wants it most."""
    stage = None
    for wish, reach in marks:
        if reach >= depth and (stage is None or wish.stage > stage) and wish.expires > now:
            stage = wish.stage
    return NO_STAGE if stage is None else stage


def priority_at(marks: Iterable[Mark], depth: int, now: float) -> int:
    """The strongest wish that holds for the block that ends there."""
    return max((wish.priority for wish, reach in marks if reach >= depth and wish.expires > now), default=ORDINARY)
