"""Rows: what a document reports beside what came out here. Knows numbers and tables, no engine."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

Note = Callable[[str], None]  # told what is being done now


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `reported`: the lowest and the highest that the document gives. `goal`: ours is to stay below it."""

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
        """Ours to what is reported; to the nearer end of a range that ours lies outside of, and 1 inside."""
        if self.reported is None:
            return None
        low, high = self.reported
        nearest = min(max(self.ours, low), high)
        return self.ours / nearest if nearest else None

    @property
    def expected(self) -> str:
        """What the document reports, or the goal, for people."""
        if self.reported is None:
            return "" if self.goal is None else f"< {shown(self.goal)} {self.unit}"
        low, high = self.reported
        return f"{shown(low)} {self.unit}" if low == high else f"{shown(low)}-{shown(high)} {self.unit}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "ratio": self.ratio}


@dataclass(slots=True)
class Section:
    """What one part of the benchmark found. data: all of its figures, for JSON and plots."""

    rows: list[Row] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    seconds: float = 0.0  # that it took


def shown(value: float) -> str:
    """Four digits are enough."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}" if abs(value) >= 100 else f"{value:.3g}"


def show(console: Console, sections: Sequence[Section]) -> None:
    """All rows in one table, what is to be said about them below, then the sections' own tables."""
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
