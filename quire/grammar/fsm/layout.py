"""Where states and arrows of a small automaton go: columns by the longest way from the start. Knows no SVG.

Arrows to the next column are drawn directly; those that pass a column run above, those that go back run below.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

RADIUS = 10.0
CHARACTER = 7.3  # width of one in a label
HEIGHT = 13.0  # of a label
_GAP = 15.0  # of a column beyond labels and states
_ROW = 58.0
_LANE = 26.0
_FAN = 34.0  # between arrows from one state to another


class Arrow(NamedTuple):
    """A way from one state to another, before it has a place."""

    source: int
    target: int
    label: str


class Box(NamedTuple):
    """A rectangle: left, top, right, bottom."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: "Box") -> bool:
        """Whether they share more than an edge."""
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom


@dataclass(frozen=True, slots=True)
class Placed:
    """A picture without ink. points: centre of each state. curves: SVG paths by arrow. labels: their boxes."""

    points: dict[int, tuple[float, float]]
    curves: list[str]
    labels: list[Box]
    bounds: Box


def place(states: Sequence[int], arrows: Sequence[Arrow]) -> Placed:
    """A place for everything. The first state is where texts begin; all can be reached from it."""
    columns = _columns(states, arrows)
    points = _points(states, arrows, columns)
    fans = _fans(arrows)
    beside = max([RADIUS, *(abs(fan) + HEIGHT for fan in fans if fan)])  # that arrows need above and below states
    top = min(y for _, y in points.values()) - beside
    bottom = max(y for _, y in points.values()) + beside
    taken = [_around(x, y) for x, y in points.values()]
    lanes = _Lanes(top, bottom)
    curves, labels = [], []
    for arrow, bend in zip(arrows, fans, strict=True):
        start, end = points[arrow.source], points[arrow.target]
        step = columns[arrow.target] - columns[arrow.source]
        if arrow.source == arrow.target:
            curve, spots = _loop(start)
        elif step == 1:
            curve, spots = _direct(start, end, bend)
        else:
            curve, spots = lanes.around(start, end, above=step > 1)
        label = _free(spots, len(arrow.label) * CHARACTER, taken)
        taken.append(label)
        curves.append(curve)
        labels.append(label)
    return Placed(points, curves, labels, _bounds([*taken, lanes.extent(points)]))


def _columns(states: Sequence[int], arrows: Sequence[Arrow]) -> dict[int, int]:
    """The longest way from the first state to each, arrows that close a circle left out."""
    following = defaultdict(list)
    for arrow in arrows:
        following[arrow.source].append(arrow.target)
    order: list[int] = []
    open_now: set[int] = set()
    done: set[int] = set()
    forward = defaultdict(list)
    stack = [(states[0], iter(following[states[0]]))]
    open_now.add(states[0])
    while stack:
        state, targets = stack[-1]
        target = next(targets, None)
        if target is None:
            stack.pop()
            open_now.discard(state)
            done.add(state)
            order.append(state)
        elif target not in open_now:
            forward[state].append(target)
            if target not in done:
                open_now.add(target)
                stack.append((target, iter(following[target])))
    columns = dict.fromkeys(states, 0)
    for state in reversed(order):
        for target in forward[state]:
            columns[target] = max(columns[target], columns[state] + 1)
    return columns


def _points(states: Sequence[int], arrows: Sequence[Arrow], columns: dict[int, int]) -> dict[int, tuple[float, float]]:
    """Columns as wide as their labels need; in a column, states beside those that lead to them."""
    widths: dict[int, float] = defaultdict(float)
    for arrow in arrows:
        if columns[arrow.target] == columns[arrow.source] + 1:
            column = columns[arrow.source]
            widths[column] = max(widths[column], len(arrow.label) * CHARACTER)
    before = defaultdict(list)
    for arrow in arrows:
        before[arrow.target].append(arrow.source)
    points: dict[int, tuple[float, float]] = {}
    x = 0.0
    for column in range(max(columns.values()) + 1):
        here = [state for state in states if columns[state] == column]
        heights = {
            state: [points[other][1] for other in before[state] if columns[other] < column] or [0.0] for state in here
        }
        here.sort(key=lambda state: sum(heights[state]) / len(heights[state]))
        for i, state in enumerate(here):
            points[state] = (x, (i - (len(here) - 1) / 2) * _ROW)
        x += 2 * RADIUS + _GAP + widths[column]
    return points


def _fans(arrows: Sequence[Arrow]) -> list[float]:
    """How far the middle of each arrow is moved down, so that those between the same states differ."""
    between = defaultdict(list)
    for i, arrow in enumerate(arrows):
        between[arrow.source, arrow.target].append(i)
    bends = [0.0] * len(arrows)
    for same in between.values():
        for place_in, i in enumerate(same):
            bends[i] = (place_in - (len(same) - 1) / 2) * _FAN
    return bends


Spot = tuple[float, float]  # the middle of a label's lower edge


def _direct(start: Spot, end: Spot, bend: float) -> tuple[str, list[Spot]]:
    (x0, y0), (x1, y1) = start, end
    x0, x1 = x0 + RADIUS, x1 - RADIUS - 1
    third = (x1 - x0) / 3
    ys = (y0, y0 + bend * 4 / 3, y1 + bend * 4 / 3, y1)
    curve = f"M{x0:.1f} {ys[0]:.1f}C{x0 + third:.1f} {ys[1]:.1f} {x1 - third:.1f} {ys[2]:.1f} {x1:.1f} {ys[3]:.1f}"
    below = HEIGHT + 5 if bend > 0 or (bend == 0 and y0 + y1 > 0) else -3.0
    spots = []
    for t in (0.5, 0.4, 0.6, 0.3, 0.7):
        s = 1 - t
        y = s**3 * ys[0] + 3 * s * s * t * ys[1] + 3 * s * t * t * ys[2] + t**3 * ys[3]
        spots.append((x0 + t * (x1 - x0), y + below))
    return curve, spots


def _loop(start: Spot) -> tuple[str, list[Spot]]:
    x, y = start
    up = y - RADIUS - 20
    curve = (
        f"M{x - 5:.1f} {y - RADIUS + 1:.1f}C{x - 14:.1f} {up:.1f} {x + 14:.1f} {up:.1f} {x + 5:.1f} {y - RADIUS:.1f}"
    )
    return curve, [(x, up + 3)]


class _Lanes:
    """Horizontal ways above and below all states; arrows that overlap have different ones."""

    def __init__(self, top: float, bottom: float) -> None:
        self._edges = {True: top, False: bottom}
        self._used: dict[bool, list[list[tuple[float, float]]]] = {True: [], False: []}

    def around(self, start: Spot, end: Spot, *, above: bool) -> tuple[str, list[Spot]]:
        """The way from one point to another along a lane of its own."""
        (x0, y0), (x1, y1) = start, end
        reach = (min(x0, x1) - RADIUS, max(x0, x1) + RADIUS)
        lanes = self._used[above]
        number = next(
            (i for i, lane in enumerate(lanes) if all(reach[1] < a or b < reach[0] for a, b in lane)), len(lanes)
        )
        if number == len(lanes):
            lanes.append([])
        lanes[number].append(reach)
        sign = -1 if above else 1
        y = self._edges[above] + sign * _LANE * (number + 1)
        turn = 12 if x1 > x0 else -12
        out = f"M{x0:.1f} {y0 + sign * RADIUS:.1f}C{x0:.1f} {y:.1f} {x0:.1f} {y:.1f} {x0 + turn:.1f} {y:.1f}"
        back = f"L{x1 - turn:.1f} {y:.1f}C{x1:.1f} {y:.1f} {x1:.1f} {y:.1f} {x1:.1f} {y1 + sign * (RADIUS + 1):.1f}"
        return out + back, [((x0 + x1) / 2, y - 3)]

    def extent(self, points: dict[int, tuple[float, float]]) -> Box:
        """All lanes."""
        xs = [x for x, _ in points.values()]
        tops, bottoms = (_LANE * len(self._used[above]) for above in (True, False))
        return Box(min(xs), self._edges[True] - tops, max(xs), self._edges[False] + bottoms)


def _free(spots: Iterable[Spot], width: float, taken: Sequence[Box]) -> Box:
    """The first of these places, or above one of them, where a label covers nothing."""
    candidates = [
        Box(x - width / 2, y - HEIGHT - lift, x + width / 2, y - lift)
        for lift in (0.0, -18.0, *(14.0 * i for i in range(1, 12)))
        for x, y in spots
    ]
    return next((box for box in candidates if not any(box.overlaps(other) for other in taken)), candidates[0])


def _around(x: float, y: float) -> Box:
    return Box(x - RADIUS, y - RADIUS, x + RADIUS, y + RADIUS)


def _bounds(boxes: Sequence[Box]) -> Box:
    lefts, tops, rights, bottoms = zip(*boxes, strict=True)
    return Box(min(lefts), min(tops), max(rights), max(bottoms))
