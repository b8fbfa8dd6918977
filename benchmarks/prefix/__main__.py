"""Savings and costs of sharing and reusing KV.

    python -m benchmarks.prefix [--only NAME ...] [--json FILE] [--plots FOLDER] [--quick]

Each row says whether it was measured (real tensors, this machine) or simulated (the real scheduler and KV cache over a
modelled runner), what the source document reports, and our figure. One thread. --quick runs everything at sizes whose
figures have no meaning.
"""

import argparse
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.prefix import plots
from benchmarks.prefix.cost import unique_prompts
from benchmarks.prefix.gain import gain
from benchmarks.prefix.memory import beam_search, parallel_sampling, shared_prefix, wide_beams
from benchmarks.prefix.micro import verbs
from benchmarks.prefix.reuse import granularity
from benchmarks.prefix.rows import Section, show
from benchmarks.result_file import write_result

SECTIONS: dict[str, Callable[..., Section]] = {
    "sampling": parallel_sampling,  # M10
    "beams": beam_search,  # M11
    "shared-prefix": shared_prefix,  # M12
    "wide-beams": wide_beams,  # M17
    "granularity": granularity,  # R5
    "unique": unique_prompts,  # R4
    "gain": gain,  # R1
    "micro": verbs,
}


def run(names: Sequence[str], *, quick: bool) -> dict[str, Section]:
    """Run these sections one after another, with a progress bar on stderr."""
    sections: dict[str, Section] = {}
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(names))
        for name in names:
            start = time.perf_counter()
            sections[name] = SECTIONS[name](lambda doing: progress.update(task, description=doing), quick=quick)
            sections[name].seconds = time.perf_counter() - start
            progress.advance(task)
    return sections


def as_json(sections: dict[str, Section], *, quick: bool) -> dict[str, Any]:
    """All figures with the facts of the run."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "quick": quick,
        "rows": [row.as_dict() for section in sections.values() for row in section.rows],
        "seconds": {name: section.seconds for name, section in sections.items()},
        "data": {name: section.data for name, section in sections.items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables and write the files."""
    parser = argparse.ArgumentParser(prog="benchmarks.prefix", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="NAME")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--plots", type=Path, help="draw prefix.png in this folder (needs matplotlib)")
    parser.add_argument("--quick", action="store_true", help="try everything; the figures mean little")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the model is too small for two
    console = Console() if sys.stdout.isatty() else Console(width=150)  # a file has no width; 80 columns are too few
    sections = run(args.only, quick=args.quick)
    if args.json:
        write_result(args.json, as_json(sections, quick=args.quick))
    show(console, list(sections.values()))
    if args.plots:
        path = plots.draw({name: section.data for name, section in sections.items()}, args.plots)
        nothing = "nothing drawn: that needs matplotlib (pip install -e '.[plots]') and a section that has a panel"
        console.print(f"drawn: {path}" if path else nothing, markup=False)


if __name__ == "__main__":
    main()
