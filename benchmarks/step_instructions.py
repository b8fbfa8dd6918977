"""Instructions of the engine for one token, beside another version of quire.

    python -m benchmarks.step_instructions --before CHECKOUT [--sequences 1 8] [--steps 64] [--json FILE]

Valgrind counts the instructions of decode steps of the embedded model, kernels included, in a process without a server.
The counts hardly depend on what else the machine does. --before is a checkout with its kernels built, also for avx2,
which is what Valgrind runs. Its code runs with this interpreter.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.commit import ROOT, commit_of
from benchmarks.cpu.machine import describe
from benchmarks.result_file import write_result

GOAL, FLOOR = 1.0, 1.005
_WARM_UP = 24  # steps until all prompts are computed and steps are captured
# what the process runs; it waits for a line before its steps, and behind them
_STEPS = """
import sys
from quire.config import EngineOptions
from quire.core.request import Request
from quire.kernels.cpu import _C
from quire.params import SamplingParams
from quire.startup.build import build

assert _C is not None, "the kernels are not built for avx2: QUIRE_BUILDS=avx2 python setup.py build_ext --inplace"
sequences, warm_up, steps = map(int, sys.argv[1:])
options = EngineOptions(memory="512MiB", threads=1, speculation="off", max_num_seqs=64, step_seconds=1e9)
engine = build(options, report=lambda line: None, progress=lambda done, total: None).engine
for i in range(sequences):
    params = SamplingParams(temperature=0, max_tokens=warm_up + steps + 8, ignore_eos=True)
    engine.add(Request(str(i), [20 + (7 * i + j) % 200 for j in range(24)], params))
for _ in range(warm_up):
    engine.step()
print("begin", flush=True)
sys.stdin.readline()
tokens = sum(len(output.token_ids) for _ in range(steps) for output in engine.step())
print(tokens, flush=True)
sys.stdin.readline()
"""


def instructions(checkout: Path, sequences: int, steps: int, folder: Path) -> float:
    """Instructions of a checkout for one token of `sequences` sequences that decode together."""
    counts = folder / f"{sequences}-{checkout.name}"
    command = [
        *("valgrind", "--quiet", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={counts}"),
        *(sys.executable, "-c", _STEPS, str(sequences), str(_WARM_UP), str(steps)),
    ]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONHASHSEED": "0"}
    with subprocess.Popen(
        command, cwd=checkout, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        if process.stdin is None or process.stdout is None or process.stdout.readline() != "begin\n":
            raise SystemExit(f"the engine of {checkout} has ended; run it there to see why")
        _control("--instr=on", process.pid)
        print(file=process.stdin, flush=True)
        tokens = int(process.stdout.readline())
        _control("--dump", process.pid)
        process.kill()
    parts = "".join(part.read_text() for part in folder.glob(f"{counts.name}.*"))
    return sum(int(n) for n in re.findall(r"^totals: (\d+)", parts, re.MULTILINE)) / tokens


def _control(option: str, pid: int) -> None:
    subprocess.run(["callgrind_control", option, str(pid)], check=True, capture_output=True)


def main() -> None:
    """Print the ratios, and write them to the file of --json."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--before", type=Path, required=True, metavar="CHECKOUT")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    before = commit_of(args.before)
    table = Table(title=f"Instructions for one token, this version by {before}; goal {GOAL}, floor {FLOOR}")
    for name in ("sequences", "before (thousands)", "now (thousands)", "ratio"):
        table.add_column(name)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for sequences in args.sequences:
            old, new = (
                instructions(checkout, sequences, args.steps, Path(folder))
                for checkout in (args.before.resolve(), ROOT)
            )
            table.add_row(str(sequences), f"{old / 1e3:.1f}", f"{new / 1e3:.1f}", f"{new / old:.4f}")
            found.append({"sequences": sequences, "before": old, "now": new, "ratio": new / old})
    Console().print(table)
    if args.json:
        report = {"machine": describe(), "before": before, "goal": GOAL, "floor": FLOOR, "steps": args.steps}
        write_result(args.json, {**report, "rows": found})


if __name__ == "__main__":
    main()
