"""Retention that applies to nodes of the radix tree."""

from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from quire.core.scheduling_params import Program, Retention

DEFAULT_PRIORITY = 50  # priority without retention
_MOST_MARKS = 4  # per node

# A program hint is a priority for eviction policies that use priorities, and a stage for the others. Lower is evicted
# first.
EXPECTED_PRIORITY, FINISHED_PRIORITY = 75, 0  # priorities
Stage = tuple[int, int]
NO_STAGE: Stage = (0, 0)  # without a program hint
FINISHED_STAGE: Stage = (-1, 0)  # of a finished branch


class SequenceRetention(NamedTuple):
    """The retention of a sequence's KV. Forks and branches of its table have the same."""

    params: Retention = Retention()
    request_id: str = ""
    tenant: str = ""
    program: Program | None = None
    program_age: int = 0  # lower for a program that began earlier


NO_RETENTION = SequenceRetention()  # no retention


BranchKey = tuple[str, str, str]  # (tenant, program, branch)


class HintState(NamedTuple):
    """The hint of a branch at some time."""

    priority: int
    expires: float
    stage: Stage

    def protects_less_than(self, before: "HintState") -> bool:
        """Whether it protects less than `before` in any respect."""
        return self.priority < before.priority or self.expires < before.expires or self.stage < before.stage


class RetentionHint:
    """Retention that applies since the end of a request. That of a branch changes with its latest request."""

    __slots__ = ("branch", "expires", "number", "pin", "priority", "request_id", "stage", "tenant")

    def __init__(self, number: int, branch: BranchKey | None = None, tenant: str = "", request_id: str = "") -> None:
        """number: of all hints, in order of creation. branch: of a program; None for the retention of a request."""
        self.number = number
        self.branch = branch
        self.tenant = tenant
        self.request_id = request_id
        self.priority = DEFAULT_PRIORITY
        self.expires = inf  # seconds of the engine's clock
        self.pin = False
        self.stage = NO_STAGE

    @property
    def state(self) -> HintState:
        """The hint now."""
        return HintState(self.priority, self.expires, self.stage)

    def set_retention(self, retention: Retention, now: float) -> None:
        """Set the retention of a request that has ended."""
        self.priority, self.pin = retention.priority, retention.pin
        self.expires = inf if retention.ttl is None else now + retention.ttl

    def set_expects_more(self, program_age: int, expires: float) -> None:
        """A request of a program has ended, and another will continue. The oldest program's KV is evicted last."""
        self.priority, self.stage, self.expires = EXPECTED_PRIORITY, (1, -program_age), expires

    def set_finished(self) -> None:
        """The branch has ended: no request will continue from its KV."""
        self.priority, self.stage, self.expires = FINISHED_PRIORITY, FINISHED_STAGE, inf

    @property
    def strength(self) -> tuple[float, int, float, int]:
        """Sort key. Pins are stronger than priorities, and a pin that expires later is stronger."""
        return self.expires if self.pin else 0.0, self.priority, self.expires, self.number


class Mark(NamedTuple):
    """A RetentionHint at a node. It applies to the first `reach` blocks of the path."""

    hint: RetentionHint
    reach: int


def merge_marks(marks: Iterable[Mark], now: float) -> tuple[Mark, ...]:
    """The marks of a node: each hint once, without expired ones, and only the strongest if there are too many."""
    reaches: dict[RetentionHint, int] = {}
    for hint, reach in marks:
        if hint.expires > now:
            reaches[hint] = max(reach, reaches.get(hint, 0))
    if len(reaches) <= _MOST_MARKS:
        return tuple(Mark(*item) for item in reaches.items())
    strongest = sorted(reaches, key=lambda hint: hint.strength, reverse=True)[:_MOST_MARKS]
    return tuple(Mark(hint, reaches[hint]) for hint in strongest)


def stage_at(marks: Iterable[Mark], default_reach: int, depth: int, now: float) -> Stage:
    """The highest stage that applies to the block at `depth`; NO_STAGE if none does.

    Sequences without retention count as a mark without a stage that reaches `default_reach`, see Node.
    """
    stage = NO_STAGE if default_reach >= depth else None
    for hint, reach in marks:
        if reach >= depth and (stage is None or hint.stage > stage) and hint.expires > now:
            stage = hint.stage
    return NO_STAGE if stage is None else stage


def priority_at(marks: Iterable[Mark], default_reach: int, depth: int, now: float) -> int:
    """The highest priority that applies to the block at `depth`; 50 if none does.

    Sequences without retention count as a mark of priority 50 that reaches `default_reach`, see Node.
    """
    found = [hint.priority for hint, reach in marks if reach >= depth and hint.expires > now]
    if default_reach >= depth or not found:
        found.append(DEFAULT_PRIORITY)
    return max(found)
