"""Draw the automaton of a regex as SVG, byte by byte and compressed.

The column of a state is its longest path from the start. Arrows to the next column are drawn directly. Arrows that skip
a column run above all states, arrows that go back run below.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import NamedTuple

from quire.errors import RequestError
from quire.structured_outputs.fsm.construct import regex_to_dfa
from quire.structured_outputs.fsm.dfa import DEAD, CompressedFsm, Dfa, compress

RADIUS = 10.0
CHARACTER = 7.3  # width of one in a label
HEIGHT = 13.0  # of a label
_GAP = 15.0  # of a column beyond labels and states
_ROW = 58.0
_LANE = 26.0
_FAN = 34.0  # between arrows from one state to another


class Arrow(NamedTuple):
    """A labelled transition from one state to another."""

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
        """Whether the boxes share more than an edge."""
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom


@dataclass(frozen=True, slots=True)
class Placed:
    """A layout. points: centre of each state. curves: SVG path of each arrow. labels: box of each label."""

    points: dict[int, tuple[float, float]]
    curves: list[str]
    labels: list[Box]
    bounds: Box


def place(states: Sequence[int], arrows: Sequence[Arrow]) -> Placed:
    """The layout of states and arrows. The first state is the start; all states must be reachable from it."""
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
    """By state: length of the longest path from the first state, without arrows that close a cycle."""
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
    """Centre of each state. A column is as wide as its labels; its states are ordered by the height of sources."""
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
    """By arrow: how far its middle is moved down, so that arrows between the same states do not overlap."""
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
    """Horizontal lanes above and below all states. Arrows that would overlap get different lanes."""

    def __init__(self, top: float, bottom: float) -> None:
        self._edges = {True: top, False: bottom}
        self._used: dict[bool, list[list[tuple[float, float]]]] = {True: [], False: []}

    def around(self, start: Spot, end: Spot, *, above: bool) -> tuple[str, list[Spot]]:
        """The curve from one point to another along a free lane, and the places for its label."""
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
        """The box of all lanes."""
        xs = [x for x, _ in points.values()]
        tops, bottoms = (_LANE * len(self._used[above]) for above in (True, False))
        return Box(min(xs), self._edges[True] - tops, max(xs), self._edges[False] + bottoms)


def _free(spots: Iterable[Spot], width: float, taken: Sequence[Box]) -> Box:
    """The first box at, above or below one of the places that overlaps no taken box; else the first one."""
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


MAX_STATES = 200  # of an automaton that is drawn
_MARGIN = 24.0
_HEADING = 26.0
_CHARACTER = 8.0  # at most so wide in a heading
_NAMES = {0x20: "\N{OPEN BOX}", 0x09: "\\t", 0x0A: "\\n", 0x0D: "\\r"}
_STYLE = """<style>
text{font-family:sans-serif;font-size:13px;fill:#333}
.l{font-family:monospace;font-size:12px;text-anchor:middle;paint-order:stroke;stroke:#fff;stroke-width:3px}
.n{font-size:9px;text-anchor:middle;fill:#555}
circle{fill:#fff;stroke:#333;stroke-width:1.2}
path{fill:none;stroke:#2a6fbb;stroke-width:1.3}
</style>
<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<path d="M0 0L8 4L0 8z" style="fill:#2a6fbb;stroke:none"/></marker></defs>"""


def draw(before: Dfa, after: CompressedFsm, title: str = "") -> str:
    """The picture as SVG: byte by byte above, compressed below. Raises RequestError above MAX_STATES states."""
    if before.num_states > MAX_STATES:
        raise RequestError(f"{before.num_states} states are too many for a picture: at most {MAX_STATES}", "regex")
    kept = after.states()
    panels = [
        (f"Byte by byte: {before.num_states} states", list(range(before.num_states)), byte_arrows(before)),
        (f"Compressed: {len(kept)} states, what has to come is one edge", kept, edge_arrows(after)),
    ]
    body: list[str] = []
    y, width = _MARGIN, _CHARACTER * max(len(title), *(len(heading) for heading, _, _ in panels)) + 2 * _MARGIN
    if title:
        body.append(f'<text x="{_MARGIN}" y="{y + 6:.1f}" style="font-family:monospace">{escape(title)}</text>')
        y += _HEADING
    for heading, states, arrows in panels:
        placed = place(states, arrows)
        body.append(f'<text x="{_MARGIN}" y="{y + 6:.1f}">{escape(heading)}</text>')
        left, top, right, bottom = placed.bounds
        y += _HEADING
        body.append(f'<g transform="translate({_MARGIN + 20 - left:.1f} {y - top:.1f})">')
        body += _panel(placed, states, arrows, before)
        body.append("</g>")
        y += bottom - top + _HEADING
        width = max(width, right - left + 2 * _MARGIN + 20)
    size = f'width="{width:.0f}" height="{y:.0f}" viewBox="0 0 {width:.0f} {y:.0f}"'
    background = '<rect width="100%" height="100%" fill="#fff"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', _STYLE, background, *body, "</svg>", ""])


def byte_arrows(dfa: Dfa) -> list[Arrow]:
    """One arrow for each pair of connected states, labelled with all bytes between them."""
    arrows = []
    for state, row in enumerate(dfa.by_byte.tolist()):
        ways: dict[int, list[int]] = {}
        for byte, target in enumerate(row):
            if target != DEAD:
                ways.setdefault(target, []).append(byte)
        arrows += [Arrow(state, target, one_of(bytes(data))) for target, data in ways.items()]
    return arrows


def edge_arrows(fsm: CompressedFsm) -> list[Arrow]:
    """One arrow for each compressed edge."""
    return [
        Arrow(state, edge.target, one_of(edge.first) + "".join(map(_name, edge.rest)))
        for state in fsm.states()
        for edge in fsm.edges(state)
    ]


def one_of(data: bytes) -> str:
    """The label of a sorted set of bytes."""
    runs: list[list[int]] = []
    for byte in data:
        if runs and byte == runs[-1][-1] + 1:
            runs[-1].append(byte)
        else:
            runs.append([byte])
    names = [_name(run[0]) + ("-" if len(run) > 2 else "") + (_name(run[-1]) if len(run) > 1 else "") for run in runs]
    if len(data) == 1:
        return names[0]
    shown = "".join(names) if len(names) <= 4 else "".join(names[:3]) + "\N{HORIZONTAL ELLIPSIS}"
    return f"[{shown}]"


def _name(byte: int) -> str:
    return _NAMES.get(byte, chr(byte) if 0x20 < byte < 0x7F else f"\\x{byte:02x}")


def _panel(placed: Placed, states: list[int], arrows: list[Arrow], dfa: Dfa) -> list[str]:
    x, y = placed.points[states[0]]
    parts = [f'<path d="M{x - RADIUS - 22:.1f} {y:.1f}H{x - RADIUS - 1:.1f}" marker-end="url(#a)"/>']
    parts += [f'<path d="{curve}" marker-end="url(#a)"/>' for curve in placed.curves]
    for state in states:
        x, y = placed.points[state]
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS:g}"/>')
        if dfa.accepts[state]:
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS - 3:g}"/>')
        parts.append(f'<text class="n" x="{x:.1f}" y="{y + 3:.1f}">{state}</text>')
    parts += [_label(box, arrow.label) for box, arrow in zip(placed.labels, arrows, strict=True)]
    return parts


def _label(box: Box, text: str) -> str:
    x, y = (box.left + box.right) / 2, box.bottom - 3
    return f'<text class="l" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def main(arguments: list[str]) -> int:
    """Write the picture to a file or to the standard output. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.draw_automaton", description=__doc__)
    parser.add_argument("pattern")
    parser.add_argument("--out", type=Path, help="where to write the SVG; the standard output if not given")
    asked = parser.parse_args(arguments)
    try:
        dfa = regex_to_dfa(asked.pattern)
        picture = draw(dfa, compress(dfa), asked.pattern)
    except RequestError as error:
        parser.error(str(error))
    if asked.out is None:
        sys.stdout.write(picture)
    else:
        asked.out.write_text(picture, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
