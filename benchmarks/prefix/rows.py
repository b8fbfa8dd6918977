"""Rows with a document's figure and ours, and tables of them. Imports no engine."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

Note = Callable[[str], None]  # called with the name of the current measurement


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `reported`: lowest and highest value of the document. `goal`: upper bound of our value."""

    id: str
    what: str
    kind: Literal["measured", "simulated"]
    ours: float
    unit: str
    reported: tuple[float, float] | None = None
    goal: float | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Our value over the reported one: over the nearer end if it is outside of the range, 1 inside."""
        if self.reported is None:
            return None
        low, high = self.reported
        nearest = min(max(self.ours, low), high)
        return self.ours / nearest if nearest else None

    @property
    def expected(self) -> str:
        """The reported value or the goal, as text."""
        if self.reported is None:
            return "" if self.goal is None else f"< {shown(self.goal)} {self.unit}"
        low, high = self.reported
        return f"{shown(low)} {self.unit}" if low == high else f"{shown(low)}-{shown(high)} {self.unit}"

    def as_dict(self) -> dict[str, Any]:
        """The row for JSON."""
        return {**asdict(self), "ratio": self.ratio}


@dataclass(slots=True)
class Section:
    """Results of one section. data: all of its figures, for JSON and plots."""

    rows: list[Row] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    seconds: float = 0.0  # duration of the section


def shown(value: float) -> str:
    """A rounded number: an integer from 1000 on, else three or four significant digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}" if abs(value) >= 100 else f"{value:.3g}"


def show(console: Console, sections: Sequence[Section]) -> None:
    """Print all rows in one table, then their notes and the sections' own tables."""
    table = Table(title="the prefix cache: reported and ours", title_justify="left")
    for name in ("row", "what", "how", "reported or goal", "ours", "ratio"):
        table.add_column(name, justify="right" if name in ("ours", "ratio") else "left")
    notes: dict[str, list[str]] = {}
    for row in (row for section in sections for row in section.rows):
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        if row.goal is not None:
            ratio = "ok" if row.ours < row.goal else "MISSED"
        table.add_row(row.id, row.what, row.kind, row.expected, f"{shown(row.ours)} {row.unit}", ratio)
        if row.note and row.note not in notes.setdefault(row.id, []):
            notes[row.id].append(row.note)
    console.print(table)
    for name, lines in notes.items():
        for line in lines:
            console.print(f"  {name}: {line}", highlight=False, markup=False)
    for extra in (extra for section in sections for extra in section.tables):
        console.print(extra)
