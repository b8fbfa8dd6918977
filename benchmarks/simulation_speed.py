"""How long the simulator takes for 100,000 requests with 256 running sequences.

    python -m benchmarks.simulation_speed [--requests 100000] [--json FILE]

ShareGPT-like requests arrive faster than an H100 with Llama-3.1-8B completes them, so that all rows are in use and
thousands of requests wait. One process. The goal is two minutes, or 2.5 us per token and 0.15 ms per step.
"""

import argparse
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from benchmarks.result_file import write_result
from quire.config import EngineOptions
from quire.planner.options import WorkloadOptions
from quire.planner.simulate import simulate

RATE = 60.0  # requests per second; about 53 are completed


def main() -> None:
    """Simulate, print, and write the file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation_speed", description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    options = EngineOptions(
        **{"model": "llama-3.1-8b", "device": "H100", "max_num_seqs": 256, "max_model_len": 4096},
        **{"max_queued_requests": 65_536, "max_queued_tokens": 100_000_000},
    )
    workload = WorkloadOptions(workload="sharegpt", num_requests=args.requests, rate=RATE)
    with Progress(BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=args.requests)
        _, figures = simulate(
            options, workload, report=print, advance=lambda done, _total: progress.update(task, completed=done)
        )
    if args.json:
        write_result(args.json, figures)


if __name__ == "__main__":
    main()
