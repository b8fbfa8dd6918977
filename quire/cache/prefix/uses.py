"""What is remembered of the uses of a node: the little that the orders of eviction go by. Knows no tokens."""

from typing import NamedTuple

_MOST_PARTS = 4


class Clock:
    """Both are told: nothing here reads a clock."""

    __slots__ = ("now", "tick")

    def __init__(self) -> None:
        self.now = 0.0  # seconds of the engine's clock
        self.tick = 0  # uses of the cache


class Uses:
    """Of a part of a path that one sequence computed, and of the place where it ends."""

    __slots__ = ("gap", "hits", "left", "level", "num_begun", "num_came_back", "turns")

    def __init__(self, turns: int = 0, gap: int = 0) -> None:
        self.turns = turns  # how often the path was continued, one part behind the other
        self.gap = gap  # ticks between its last use and the one before; 0: there was none
        self.hits = 0  # sequences that began with it
        self.level = 0  # see LeastFrequent
        self.left = False  # whether a sequence ended here: what comes next is another part
        self.num_begun = 0  # parts that were computed behind it
        self.num_came_back = 0  # uses of these

    @property
    def is_place(self) -> bool:
        """Whether somebody ended here or began with it: what is computed next is another part."""
        return self.left or self.hits > 0

    def followed(self) -> "Uses":
        """Of a part that begins where this one ends."""
        self.num_begun += 1
        return Uses(self.turns + self.left, self.gap)

    def divided(self) -> "Uses":
        """Of the beginning of this part, as another path leaves it there: whoever used the end used that, too."""
        uses = Uses(self.turns, self.gap)
        uses.hits, uses.level = self.hits, self.level
        uses.num_begun, uses.num_came_back = 1, self.hits
        return uses


class Part(NamedTuple):
    """Uses of an earlier part of a node's run, which ends `reach` blocks from the beginning."""

    reach: int
    uses: Uses


def parts_before(parts: tuple[Part, ...], uses: Uses, end: int) -> tuple[tuple[Part, ...], Uses]:
    """Of a run that ends at `end` from now on: its earlier parts, and the uses of the last one."""
    for i, part in enumerate(parts):
        if end <= part.reach:
            return parts[:i], part.uses
    return parts, uses


def joined(upper: tuple[Part, ...], reach: int, uses: Uses, lower: tuple[Part, ...]) -> tuple[Part, ...]:
    """Parts of two runs that become one, the upper of which ends at `reach`. The last ones matter first."""
    return (*upper, Part(reach, uses), *lower)[-_MOST_PARTS:]
