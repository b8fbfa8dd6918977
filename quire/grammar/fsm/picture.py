"""An automaton before and after compression, as SVG."""

from html import escape

from quire.errors import RequestError
from quire.grammar.fsm.compress import CompressedFsm
from quire.grammar.fsm.dfa import DEAD, Dfa
from quire.grammar.fsm.layout import RADIUS, Arrow, Box, Placed, place

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
    """The picture: byte by byte above, compressed below. Raises RequestError for more than MAX_STATES states."""
    if before.num_states > MAX_STATES:
        raise RequestError(f"{before.num_states} states are too many for a picture: at most {MAX_STATES}", "regex")
    kept = after.kept()
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
    """One for each two states, with all bytes that lead from one to the other."""
    arrows = []
    for state, row in enumerate(dfa.by_byte.tolist()):
        ways: dict[int, list[int]] = {}
        for byte, target in enumerate(row):
            if target != DEAD:
                ways.setdefault(target, []).append(byte)
        arrows += [Arrow(state, target, one_of(bytes(data))) for target, data in ways.items()]
    return arrows


def edge_arrows(fsm: CompressedFsm) -> list[Arrow]:
    """One for each edge."""
    return [
        Arrow(state, edge.target, one_of(edge.first) + "".join(map(_name, edge.rest)))
        for state in fsm.kept()
        for edge in fsm.edges(state)
    ]


def one_of(data: bytes) -> str:
    """A set of bytes, sorted, as a label."""
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
