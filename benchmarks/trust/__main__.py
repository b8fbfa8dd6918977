"""Robustness of a server under repeated engine kills and misbehaving clients, and what latencies reveal.

    python -m benchmarks.trust [--only chaos soak timing] [--streams 200] [--kills 20] [--seconds 60] [--trials 2000]
        [--json FILE]

chaos: streams while the engine is killed at random moments; each text is compared with a run without kills. soak:
clients that disconnect, read slowly, or send too much or invalid data, and kills. timing: whether a tenant's latencies
reveal which schema or prompt another tenant used. Exit code 1 after any failure.
"""

import argparse
import json
import sys
from pathlib import Path

from benchmarks.result_file import write_result
from benchmarks.trust.chaos import chaos
from benchmarks.trust.soak import soak
from benchmarks.trust.timing import timing


def main() -> None:
    """Run the parts and print their results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=("chaos", "soak", "timing"), default=("chaos", "soak", "timing"))
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60.0, help="of the soak")
    parser.add_argument("--trials", type=int, default=2000, help="of the timing")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    parts = {
        "chaos": lambda: chaos(args.streams, args.kills, args.seed),
        "soak": lambda: soak(args.seconds, args.seed),
        "timing": lambda: timing(args.trials, args.seed),
    }
    results = {}
    for part in args.only:
        came = parts[part]()
        results[part] = {**came._asdict(), "good": came.good}
        print(part, json.dumps(results[part], indent=2))
    if args.json:
        write_result(args.json, results)
    sys.exit(not all(one["good"] for one in results.values()))


if __name__ == "__main__":
    main()
