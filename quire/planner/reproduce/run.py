"""`quire reproduce`: runs the rows, and writes the document with reported beside ours."""

import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from types import MappingProxyType

import msgspec
from rich.console import Console

from quire.errors import ConfigError, nearest
from quire.planner.files import write_json, write_text
from quire.planner.reproduce import memory, recorded, reuse, throughput
from quire.planner.reproduce.finding import Context, Finding, Findings, Row
from quire.planner.reproduce.targets import TARGETS, Target
from quire.startup.hardware import cpu_description

ROWS: Mapping[str, Row] = MappingProxyType(
    {
        **{f"M{i}": getattr(memory, f"m{i}") for i in range(1, 21)},
        **{f"T{i}": getattr(throughput, f"t{i}") for i in (1, 2, 3, 4, 6, 7, 8, 9, 10, 11)},
        **{"T5": recorded.t5, "R1": recorded.r1, "R4": recorded.r4, "C1": recorded.c1, "S1": recorded.s1},
        **{"S2": recorded.s2, "Q1": recorded.q1, "O1": throughput.o1, "D1": throughput.d1, "P1": memory.p1},
        **{f"R{i}": getattr(reuse, f"r{i}") for i in (2, 3, 5, 6, 7)},
    }
)
_CLOSE = 0.1  # ratios within 10 % of the reported value come out
_CHART_FOLDER = "reproduction"  # beside the document


def reproduce(
    only: Sequence[str],
    *,
    quick: bool,
    results: Path | None,
    json_file: Path | None,
    document: Path | None,
    console: Console,
    advance: Callable[[int, int], None],
) -> dict[str, Findings]:
    """Run rows (all if `only` is empty), print them, and write the files. Charts go to a folder beside the document.

    quick: sizes whose figures have no meaning. results: folder with result files of benchmarks. json_file: rows that it
    has from an earlier run are kept, if they do not run now. Raises ConfigError for an unknown row, or a file that
    cannot be written.
    """
    for row in only:
        if row.upper() not in ROWS:
            raise ConfigError(f"there is no row {row!r:.20}{nearest(row.upper(), ROWS)}; known: {', '.join(ROWS)}")
    wanted = [target for target in TARGETS if not only or target.id in {row.upper() for row in only}]
    context, (found, runs) = Context(quick=quick, results=results), _earlier(json_file)
    began = perf_counter()
    kept = "" if json_file is None else f" --json {json_file}"
    written = "" if document is None else f" --document {document}"
    command, commit = f"quire reproduce{kept}{written}{' --quick' if quick else ''}", _commit(results)
    run = f"commit {commit}, {cpu_description()}"
    for number, target in enumerate(wanted):
        found[target.id], runs[target.id] = ROWS[target.id](context), run
        if json_file is not None:  # after each row: a run that is stopped goes on with the others
            write_json(json_file, _figures(found, runs, commit, command, quick=quick))
        advance(number + 1, len(wanted))
        for line in _lines(target, found[target.id]):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    seconds = perf_counter() - began
    console.print(f"{len(wanted)} rows in {seconds:.0f} s", highlight=False)
    if document is not None:
        write_text(document, markdown(found, runs, _write_charts(document, context.charts), command, quick=quick))
    return found


def _write_charts(document: Path, charts: Mapping[str, str]) -> list[str]:
    """Write charts to the folder beside the document. Returns the names of all that are there now."""
    folder = document.parent / _CHART_FOLDER
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}") from error
    for name, chart in charts.items():
        write_text(folder / name, chart)
    return sorted(path.name for path in folder.glob("*.svg"))


class _Recorded(msgspec.Struct):
    """A file of figures."""

    quick: bool
    commit: str
    machine: str
    rows: dict[str, Findings]
    runs: dict[str, str] = {}


def _earlier(json_file: Path | None) -> tuple[dict[str, Findings], dict[str, str]]:
    """The rows in a file of an earlier run, and commit and machine of each; none if there is no file."""
    if json_file is None or not json_file.is_file():
        return {}, {}
    try:
        read = msgspec.json.decode(json_file.read_bytes(), type=_Recorded)
        return read.rows, dict.fromkeys(read.rows, f"commit {read.commit}, {read.machine}") | read.runs
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{json_file} is not a file that `quire reproduce` wrote: {error}") from error


def verdict(finding: Finding) -> str:
    """Whether a figure comes out, in a word or two; that of arithmetic says nothing."""
    if finding.ours is None:
        return "pending"
    if finding.kind == "arithmetic":
        return "arithmetic"
    if finding.reported is None:
        return ""
    ratio = finding.ratio
    if ratio == 1:
        return "as reported"
    is_direction = finding.reported[1] is None
    return "close" if ratio is not None and abs(ratio - 1) <= _CLOSE and not is_direction else "differs"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _reported(finding: Finding) -> str:
    if finding.reported is None:
        return ""
    low, high = finding.reported
    if high is None:
        return f"above {_number(low)}"
    return _number(low) if low == high else f"{_number(low)} to {_number(high)}"


def _ours(finding: Finding) -> str:
    if finding.ours is None:
        return ""
    spread = "" if finding.spread is None else f" ± {_number(finding.spread)}"
    return f"{_number(finding.ours)}{spread}"


def _lines(target: Target, findings: Findings) -> list[str]:
    head = f"{target.id:<4} {target.experiment}"
    rows = []
    for one in findings:
        ratio = "" if one.ratio is None else f"{one.ratio:.2f}"
        cells = (one.what, _reported(one), _ours(one), one.unit, ratio, one.kind, verdict(one))
        rows.append(
            "     " + "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, _WIDTHS, strict=True)).rstrip()
        )
    return [head, *rows, *(f"     - {note}" for note in _notes(findings))]


def _notes(findings: Findings) -> list[str]:
    """The notes of a row, each once."""
    return list(dict.fromkeys(one.note for one in findings if one.note))


_WIDTHS = (52, 16, 16, 9, 6, 9, 11)


def _commit(checkout: Path | None) -> str:
    """The commit of the checkout that has the result files, with `-dirty` if files differ; "unknown" outside of one."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def _figures(
    found: Mapping[str, Findings], runs: Mapping[str, str], commit: str, command: str, *, quick: bool
) -> dict[str, object]:
    rows = {
        row: [
            {
                "what": one.what,
                "reported": one.reported,
                "ours": one.ours,
                "spread": one.spread,
                "unit": one.unit,
                "ratio": one.ratio,
                "kind": one.kind,
                "verdict": verdict(one),
                "note": one.note,
            }
            for one in findings
        ]
        for row, findings in ((target.id, found[target.id]) for target in TARGETS if target.id in found)
    }
    about = {"commit": commit, "date": datetime.now(UTC).date().isoformat(), "machine": cpu_description()}
    about |= {"command": command, "python": platform.python_version()}
    return {**about, "quick": quick, "runs": runs, "rows": rows}


_HEAD = """# Reproduction

What papers and articles report about serving engines, beside what quire's own code gives. `quire reproduce` wrote this
page: do not edit it.

- **measured**: real kernels and the embedded model or random weights, on a machine that the result file names.
- **simulated**: quire's scheduler and KV cache, or a baseline in the cache's place, over modelled steps: see
  [planning.md](planning.md).
- **computed**: from sizes, by the code of the memory plan and of the KV cache.
- **arithmetic**: the source's formula on the source's numbers. It says nothing about quire and has no verdict.
- The ratio is ours over the nearest reported value, and 1 within a reported range. A figure within 10 % is close.
  "above 1" is a direction, which a figure keeps or not.
- ± is half of the 95 % confidence interval over three seeds.

No constant is tuned to make a row match. The parameters of the workloads are in `quire/planner/lengths.py`.
"""


def markdown(
    found: Mapping[str, Findings], runs: Mapping[str, str], charts: Sequence[str], command: str, *, quick: bool
) -> str:
    """The document. runs: commit and machine of each row. charts: files in its folder. command: what runs all rows."""
    counts = {name: 0 for name in ("as reported", "close", "differs", "arithmetic", "pending")}
    for findings in found.values():
        for one in findings:
            if verdict(one):
                counts[verdict(one)] += 1
    parts = [_HEAD]
    parts.append(
        f"Command: `{command}`. Each row names the commit and the machine of its run. "
        f"Of the figures with a reported value, {counts['as reported']} are as reported, {counts['close']} close, and "
        f"{counts['differs']} differ; {counts['arithmetic']} are arithmetic, and {counts['pending']} pending.\n"
    )
    if quick:
        parts.append("**These figures have no meaning: `--quick` runs sizes for tests.**\n")
    for target in TARGETS:
        if target.id not in found:
            continue
        parts.append(f"## {target.id}: {target.experiment}\n\nReported: {target.reported} ({target.source}).\n")
        parts.append(f"Run: {runs[target.id]}.\n")
        parts.append("| figure | reported | ours | unit | ratio | kind | |\n|---|---|---|---|---|---|---|")
        for one in found[target.id]:
            ratio = "" if one.ratio is None else f"{one.ratio:.2f}"
            cells = (one.what, _reported(one), _ours(one), one.unit, ratio, one.kind, verdict(one))
            parts.append("| " + " | ".join(cells) + " |")
        notes = _notes(found[target.id])
        parts.append("\n" + "".join(f"- {note}\n" for note in notes) if notes else "")
        for name in charts:
            if name.startswith(f"{target.id.lower()}_"):
                parts.append(f"![{target.experiment}]({_CHART_FOLDER}/{name})\n")
    return "\n".join(parts).rstrip() + "\n"
