"""Programs with hints, beside the same requests without: prefix matches, prefill, and duration of programs.

    python -m benchmarks.programs [--only KIND ...] [--count N] [--seeds N] [--live N] [--json FILE]

Runs the real scheduler and KV cache in virtual time; a step takes 5 ms plus 50 us per token. Figures are means over
seeds. --live N also runs N programs of each kind in the language on the embedded model, all at once, with and without
the hints that the interpreter gives; those times depend on this machine.
"""

import argparse
import platform
from pathlib import Path

from benchmarks.programs.driver import Driver
from benchmarks.programs.language import FUNCTIONS, live
from benchmarks.programs.servers import Setup, Virtual
from benchmarks.programs.workloads import starts
from benchmarks.result_file import write_result

LOADS = {  # Programs per second. The cache is too small for all that run.
    "tree of thought": 10.0,
    "skeleton of thought": 10.0,
    "self-consistency": 6.0,
    "agent": 2.0,
    "mixed": 9.0,
    "tree of thought, light": 3.0,  # a load for which the cache is large enough
}
SETUPS = [Setup(policy, eviction) for policy in ("fcfs", "cache-aware") for eviction in ("lru", "cost")]
UNBOUNDED = Setup(num_blocks=2**15)
HINTS = ("plain", "order", "hints")
LIVE_MEMORY = "28MiB"  # the embedded model leaves about 500 blocks of it

Row = dict[str, float]


def measured(load: str, setup: Setup, hints: str, *, count: int, seeds: int) -> Row:
    """Figures of one kind, averaged over seeds."""
    kind = load.partition(",")[0]
    each = (starts(kind, count, LOADS[load], seed) for seed in range(seeds))
    rows = [Driver(Virtual(setup), hints).run(programs).row() for programs in each]
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=list(LOADS), nargs="+", default=list(LOADS))
    parser.add_argument("--count", type=int, default=160, help="programs of each run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--live", type=int, default=0, metavar="N", help="programs of each kind on the embedded model")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    figures: dict[str, dict[str, Row]] = {}
    for load in args.only if args.seeds else ():
        name = f"{load}, fcfs, a cache without bound"
        figures[name] = {"plain": measured(load, UNBOUNDED, "plain", count=args.count, seeds=args.seeds)}
        _print(name, figures[name])
        for setup in SETUPS:
            name = f"{load}, {setup.policy}, {setup.eviction}"
            figures[name] = {hints: measured(load, setup, hints, count=args.count, seeds=args.seeds) for hints in HINTS}
            _print(name, figures[name])
    for kind in args.only if args.live else ():
        if kind in FUNCTIONS:
            rows = {
                name: live(kind, hints=name == "hints", count=args.live, memory=LIVE_MEMORY)
                for name in ("plain", "hints")
            }
            figures[f"live: {kind}"] = rows
            _print(f"live: {kind}", rows)
    if args.json:
        about = {"python": platform.python_version(), "rates": LOADS}
        asked = {"count": args.count, "seeds": args.seeds, "live": args.live}
        write_result(args.json, {**about, **asked, "figures": figures})


def _print(name: str, rows: dict[str, Row]) -> None:
    for hints, row in rows.items():
        row_figures = "  ".join(f"{figure} {value:.4g}" for figure, value in row.items())
        print(f"{name + ', ' + hints:<52}{row_figures}", flush=True)


if __name__ == "__main__":
    main()
