"""Charts as SVG text: lines, and stacked bars. A report with them needs no script and no other file."""

from collections.abc import Mapping, Sequence
from html import escape
from math import ceil, floor, isfinite, log10

_WIDTH, _HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 150, 30, 44
_COLORS = ("#1f6feb", "#d1570a", "#2a8a4a", "#8b3fb0", "#b3243f", "#57606a", "#0b7285", "#9a6700")
_TICKS = 5

Points = Sequence[tuple[float, float]]


def line_chart(title: str, x_label: str, y_label: str, lines: Mapping[str, Points], *, log_y: bool = False) -> str:
    """An SVG with one line for each name. Points that are not finite are left out. log_y: a logarithmic axis."""
    shown = {
        name: [(x, y) for x, y in points if isfinite(y) and (y > 0 or not log_y)] for name, points in lines.items()
    }
    xs = [x for points in shown.values() for x, _ in points] or [0.0, 1.0]
    ys = [log10(y) if log_y else y for points in shown.values() for _, y in points] or [0.0, 1.0]
    x_axis, y_axis = _Axis(min(0.0, *xs), max(xs)), _Axis(min(ys) if log_y else min(0.0, *ys), max(ys))
    parts = [_frame(title, x_label, y_label)]
    for value in x_axis.ticks:
        parts.append(_text(_x(x_axis, value), _HEIGHT - _BOTTOM + 16, f"{value:g}", "middle"))
    for value in y_axis.ticks:
        at = _y(y_axis, value)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#d8dee4"/>')
        parts.append(_text(_LEFT - 6, at + 4, f"{10**value if log_y else value:.3g}", "end"))
    for number, (name, points) in enumerate(shown.items()):
        color = _COLORS[number % len(_COLORS)]
        places = [(_x(x_axis, x), _y(y_axis, log10(y) if log_y else y)) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in places]
        parts.append(_legend(number, name, color))
    return _svg(parts)


def stacked_bars(title: str, y_label: str, bars: Mapping[str, Mapping[str, float]]) -> str:
    """An SVG with one bar for each name, divided into its parts from the bottom. Bars share the names of parts."""
    names = list(dict.fromkeys(part for bar in bars.values() for part in bar))
    y_axis = _Axis(0.0, max((sum(bar.values()) for bar in bars.values()), default=1.0))
    parts = [_frame(title, "", y_label)]
    for value in y_axis.ticks:
        parts.append(_text(_LEFT - 6, _y(y_axis, value) + 4, f"{value:.3g}", "end"))
    step = (_WIDTH - _RIGHT - _LEFT) / max(1, len(bars))
    for place, (name, bar) in enumerate(bars.items()):
        below = 0.0
        for number, part in enumerate(names):
            size = bar.get(part, 0.0)
            top, bottom = _y(y_axis, below + size), _y(y_axis, below)
            parts.append(
                f'<rect x="{_LEFT + (place + 0.15) * step:.1f}" y="{top:.1f}" width="{0.7 * step:.1f}" '
                f'height="{bottom - top:.1f}" fill="{_COLORS[number % len(_COLORS)]}"/>'
            )
            below += size
        parts.append(_text(_LEFT + (place + 0.5) * step, _HEIGHT - _BOTTOM + 16, name, "middle"))
    parts += [_legend(number, name, _COLORS[number % len(_COLORS)]) for number, name in enumerate(names)]
    return _svg(parts)


class _Axis:
    """Round bounds around the values of an axis, with ticks."""

    def __init__(self, low: float, high: float) -> None:
        span = (high - low) or abs(high) or 1.0
        rough = span / _TICKS
        unit = float(10 ** floor(log10(rough)))
        self._step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999)
        self.low, self.high = floor(low / self._step) * self._step, ceil(high / self._step) * self._step
        if self.high == self.low:
            self.high += self._step

    @property
    def ticks(self) -> list[float]:
        """The marked values."""
        return [self.low + i * self._step for i in range(round((self.high - self.low) / self._step) + 1)]

    def share(self, value: float) -> float:
        """The place of a value between the bounds, 0 to 1."""
        return (value - self.low) / (self.high - self.low)


def _x(axis: _Axis, value: float) -> float:
    return _LEFT + axis.share(value) * (_WIDTH - _RIGHT - _LEFT)


def _y(axis: _Axis, value: float) -> float:
    return _HEIGHT - _BOTTOM - axis.share(value) * (_HEIGHT - _BOTTOM - _TOP)


def _frame(title: str, x_label: str, y_label: str) -> str:
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    box = f'width="{_WIDTH - _RIGHT - _LEFT}" height="{_HEIGHT - _BOTTOM - _TOP}"'
    return (
        f'<rect x="{_LEFT}" y="{_TOP}" {box} fill="none" stroke="#8c959f"/>'
        f'<text x="{_LEFT}" y="18" font-weight="600">{escape(title)}</text>'
        f"{_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, x_label, 'middle')}"
        f'<text transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>'
    )


def _legend(number: int, name: str, color: str) -> str:
    top = _TOP + 6 + 18 * number
    box = f'<rect x="{_WIDTH - _RIGHT + 10}" y="{top}" width="11" height="11" fill="{color}"/>'
    return box + _text(_WIDTH - _RIGHT + 26, top + 10, name, "start")


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
    )
    style = 'font-family="sans-serif" font-size="12"'
    return f'{head} {style}><rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
