"""Tables of the figures, for a terminal or as Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Grid:
    """A table of strings with a title."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def print(self, console: Console) -> None:
        """Print the table on a terminal."""
        table = Table(title=self.title, title_justify="left")
        for number, name in enumerate(self.header):
            table.add_column(name, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)

    def markdown(self) -> str:
        """A heading and a pipe table."""
        lines = [self.header, ["---", *("---:" for _ in self.header[1:])], *self.rows]
        return f"### {self.title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def machine_line(machine: dict[str, Any]) -> str:
    """One line about the machine."""
    speeds = (
        f"reads {machine['read_gb_per_second']:.0f} GB/s, bf16 products {machine['bf16_matmul_gflops']:.0f} GFLOP/s"
    )
    return f"{machine['cpu']}; {speeds}, torch {machine['torch']} with {machine['threads']} threads"


def grids(results: dict[str, Any]) -> list[Grid]:
    """Tables of all results."""
    found = []
    for shape, part in results.get("shapes", {}).items():
        found += [_speeds(shape, part), _engines(shape, part)]
    if "http" in results:
        found.append(_speeds(f"through HTTP, {results['http']['shape']}", results["http"]))
    if "families" in results:
        found.append(_families(results["families"]))
    if "arrivals" in results:
        found += [_latencies(load, results["arrivals"]) for load in results["arrivals"]["runs"]]
    return found


def _families(part: dict[str, Any]) -> Grid:
    """One row per shape and figure, with the bounds of the ratio."""
    rows = []
    for shape, found in part["shapes"].items():
        ours, theirs = found["engines"]
        for what, bounds in part["bounds"].items():
            figures = [_span(found["figures"][name][what]) for name in (ours, theirs)]
            ratio = _span(found["ratios"][theirs][what])
            rows.append([f"{shape} {what}", *figures, ratio, f"{bounds['goal']:g}", f"{bounds['floor']:g}"])
    header = ["", ours, theirs, f"{ours} / {theirs}", "goal", "floor"]
    title = f"CPU time of one thread: median (least to most); of ratios above 1, {ours} is faster"
    return Grid(title, header, rows)


def _latencies(load: str, part: dict[str, Any]) -> Grid:
    """One row per figure: the median of each server over the rounds, and the first server divided by each other one."""
    runs, ratios = part["runs"][load], part["ratios"][load]
    first, *others = runs
    header = ["", *runs, *(f"{first} / {other}" for other in others)]
    rows = [
        [
            what,
            *(f"{median(one[what] for one in rounds):.3g}" for rounds in runs.values()),
            *(_span(ratios[other][what]) for other in others),
        ]
        for what in runs[first][0]
    ]
    title = f"Poisson arrivals at {load} ({part['requests per second at capacity']:.3g} requests/s), {part['shape']}"
    return Grid(f"{title}: medians of the rounds; of ratios in seconds below 1, {first} is faster", header, rows)


def _speeds(title: str, part: dict[str, Any]) -> Grid:
    """One row per figure and workload, with the first engine beside each other engine."""
    first, *others = part["engines"]
    header = ["", first, *(cell for other in others for cell in (other, f"{first} / {other}"))]
    rows = []
    for name, work in part["workloads"].items():
        for what in work["figures"][first]:
            row = [f"{name} {what}", _span(work["figures"][first][what])]
            for other in others:
                row += [_span(work["figures"][other][what]), _span(work["ratios"][other][what])]
            rows.append(row)
    return Grid(f"{title}: median (least to most); of ratios above 1, {first} is faster", header, rows)


def _engines(shape: str, part: dict[str, Any]) -> Grid:
    header = [
        "",
        "version",
        "threads",
        "start to first token s",
        f"resident MB (weights {part['weight_bytes'] / 1e6:.0f})",
        "decoding reads",
        "notes",
    ]
    rows = [
        [
            name,
            str(facts["version"]),
            str(facts["threads"]),
            f"{facts['cold_start_seconds']:.1f}",
            f"{facts['memory']['bytes'] / 1e6:.0f}",
            _read(**facts["decode_bytes"]),
            "; ".join([*facts.get("notes", []), *(f"preloaded {library}" for library in facts["preloaded"])]),
        ]
        for name, facts in part["engines"].items()
    ]
    return Grid(f"{shape}: the engines", header, rows)


def _read(weights: int, kv_per_token: int) -> str:
    return f"{weights / 1e6:.1f} MB, KV {kv_per_token / 1e3:.1f} kB a token"


def _span(figure: dict[str, Any]) -> str:
    middle, low, high = (_short(figure[name]) for name in ("median", "min", "max"))
    return middle if len(figure["values"]) == 1 else f"{middle} ({low} to {high})"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
