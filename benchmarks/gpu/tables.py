"""Tables of the figures, with a column for each figure that any row of a part has."""

from typing import Any

from benchmarks.cpu.tables import Grid

OMITTED = ("kernels_ms", "notes", "clocks")  # too long for a column; the JSON has them


def grids(results: dict[str, Any]) -> list[Grid]:
    """Tables of all results."""
    found = [_goals(results["goals"])] if results.get("goals") else []
    for name, part in results["parts"].items():
        columns = list(
            dict.fromkeys(key for row in part["rows"] for key in row if key not in OMITTED and key != "what")
        )
        rows = [[row["what"], *(_short(row.get(column)) for column in columns)] for row in part["rows"]]
        title = f"{name}: {part.get('seconds', 0):.0f} s, ended {part.get('ended', 'not yet')}"
        if rows:
            found.append(Grid(title, ["", *(column.replace("_", " ") for column in columns)], rows))
        if part["skipped"]:
            reasons = [[each["what"], each["why"].splitlines()[-1] if each["why"] else ""] for each in part["skipped"]]
            found.append(Grid(f"{name}: skipped", ["", "why"], reasons))
    return found


def _goals(goals: list[dict[str, Any]]) -> Grid:
    header = ["", "measured", "goal", "floor", "verdict"]
    rows = [
        [
            f"{goal['what']}: {goal['figure'].replace('_', ' ')}",
            _short(goal["value"]),
            f"{'at most ' if goal['at_most'] else ''}{_short(goal['goal'])}",
            _short(goal["floor"]),
            goal["verdict"],
        ]
        for goal in goals
    ]
    return Grid("goals on an H200", header, rows)


def _short(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)
