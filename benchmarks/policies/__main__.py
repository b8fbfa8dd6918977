"""Benchmarks of queue policies: hit rate against the best order, fairness under a flood, scheduling time.

    python -m benchmarks.policies [--only order|fair|live|plan ...] [--json FILE] [--quick]

order and fair run in virtual time over the real scheduler and KV cache. live starts `quire serve` (about 12 minutes).
plan is the time of plan + commit alone. --quick runs everything at sizes whose figures have no meaning.
"""

import argparse
import platform
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.policies.fair import fair
from benchmarks.policies.live import live
from benchmarks.policies.order import order
from benchmarks.policies.plan import plan
from benchmarks.result_file import write_result

PARTS: dict[str, Callable[..., dict[str, object]]] = {"order": order, "fair": fair, "live": live, "plan": plan}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=list(PARTS), nargs="+", default=list(PARTS))
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    figures: dict[str, object] = {}
    for name in args.only:
        begin = time.perf_counter()
        rows = PARTS[name](quick=args.quick)
        print(f"{name} ({time.perf_counter() - begin:.0f} s)")
        for row, values in rows.items():
            row_figures = values if isinstance(values, dict) else {"": values}
            print(f"  {row:<50} " + "   ".join(f"{key} {value:.4g}" for key, value in row_figures.items()))
        figures[name] = rows
    if args.json:
        write_result(args.json, {"python": platform.python_version(), "quick": args.quick, **figures})


if __name__ == "__main__":
    main()
