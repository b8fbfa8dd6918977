"""All checks that need a GPU: `make gpu-check`.

    python -m benchmarks.gpu.check [--run kernels models memory speed] [--dry-run] [--json FILE] [--logs FOLDER]
        [-- ARGUMENTS]

kernels: every kernel against the reference, compiled. models: whole models against the CPU and transformers, captured
steps, device block tables, blocks copied to the host and back. memory: some kernel tests under compute-sanitizer.
speed: `benchmarks.gpu` with the arguments behind `--`. Each run has a time limit, and all together take less than 20
minutes. Each run may be started alone. What is skipped is printed with the reason. --dry-run: on a machine without a
GPU, with the kernels in Triton's interpreter at small sizes; it shows only that every command runs.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.result_file import write_result

ROOT = Path(__file__).resolve().parents[2]
TESTS = Path("tests") / "kernels" / "triton"
MODELS = (
    TESTS / "test_triton_models.py",
    TESTS / "test_triton_low_bit_models.py",
    Path("tests") / "runner" / "test_device_inputs.py",
    Path("tests") / "kv_store" / "test_host_kv_store.py",
)
WATCHED = TESTS / "test_triton_kv_blocks.py"  # only the sanitizer sees accesses out of bounds; it is slow
SECONDS = {"kernels": 240, "models": 150, "memory": 180, "speed": 600}  # limit of each run
WORKERS = min(16, os.cpu_count() or 1)  # processes of tests: most of their time is compilation
SLOWER = 4  # upper bound of the interpreter's slowdown
NUM_SHOWN_LINES = 25  # printed lines of a failed command


@dataclass(frozen=True)
class Part:
    """One command of a run."""

    what: str
    command: tuple[str, ...]
    variables: Mapping[str, str]


@dataclass(frozen=True)
class Outcome:
    """Result of a command. result: "passed", "failed" or "skipped"."""

    run: str
    what: str
    result: str
    why: str
    seconds: float


def parts(run: str, *, dry: bool, extra: Sequence[str]) -> list[Part] | str:
    """The commands of a run, or the reason why there are none."""
    if run == "memory":
        return "it needs a GPU" if dry else _watched()
    if run == "speed":
        tiny = ("--device", "cpu", "--tiny") if dry else ()
        return [Part("benchmarks.gpu", (sys.executable, "-m", "benchmarks.gpu", *tiny, *extra), {})]
    files = MODELS if run == "models" else kernel_files()
    return [Part(f"{len(files)} files of tests", _pytest(*files, workers=WORKERS), {})]


def kernel_files() -> list[Path]:
    """All test files of Triton kernels except those of MODELS."""
    found = sorted((ROOT / TESTS).glob("test_triton_*.py"))
    return [file.relative_to(ROOT) for file in found if file.relative_to(ROOT) not in MODELS]


def _pytest(*files: Path, workers: int = 0) -> tuple[str, ...]:
    spread = ("-n", str(workers), "--dist", "worksteal") if workers > 1 else ()
    lenient = ("-W", "default")  # libraries of other versions may warn of other things
    return (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *lenient, *spread, *map(str, files))


def _watched() -> list[Part] | str:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        return "there is no compute-sanitizer: what kernels do outside of their memory is not seen"
    watch = (sanitizer, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "1")
    return [Part(WATCHED.name, (*watch, *_pytest(WATCHED)), {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})]


def make(run: str, found: Sequence[Part], seconds: float, logs: Path | None = None) -> list[Outcome]:
    """Run the commands in turn until `seconds` have passed. logs: a folder for what they print; None keeps none."""
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as temporary:
        return [_make(run, part, deadline, (logs or Path(temporary)) / f"{run}.log") for part in found]


def _make(run: str, part: Part, deadline: float, log: Path) -> Outcome:
    begin = time.monotonic()
    left = deadline - begin
    if left <= 0:
        return Outcome(run, part.what, "skipped", "no time left", 0.0)
    with log.open("w") as file:
        output = None if run == "speed" else file  # its tables go to the terminal
        try:
            status = subprocess.run(
                part.command,
                cwd=ROOT,
                env={**os.environ, **part.variables},
                stdout=output,
                stderr=output and subprocess.STDOUT,
                timeout=left,
                check=False,
            ).returncode
            ended = f"status {status}"
        except subprocess.TimeoutExpired:
            status, ended = None, f"it was ended after {left:.0f} s"
    took = round(time.monotonic() - begin, 1)
    lines = log.read_text().strip().splitlines()
    if status is None:
        lines.append(ended)
    if status != 0:
        return Outcome(run, part.what, "failed", "\n".join(lines[-NUM_SHOWN_LINES:]) or ended, took)
    return Outcome(run, part.what, "passed", lines[-1] if lines else "", took)


def has_gpu() -> bool:
    """Whether torch finds a GPU. Runs in another process, so that this one does not initialise the device."""
    command = [sys.executable, "-c", "import torch, sys; sys.exit(not torch.cuda.is_available())"]
    return subprocess.run(command, check=False).returncode == 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.check", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--run", nargs="+", choices=list(SECONDS), default=list(SECONDS), metavar="RUN")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU, in small")
    parser.add_argument("--json", type=Path, help="write what came of it here")
    parser.add_argument("--logs", type=Path, help="keep all that tests print in this folder")
    parser.add_argument("extra", nargs="*", help="arguments of benchmarks.gpu, behind --")
    args = parser.parse_args(arguments)
    if not args.dry_run and not has_gpu():
        parser.error("torch finds no GPU here; --dry-run tries everything without one")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks and print their results. Returns 1 if one failed."""
    args = parse(arguments)
    if args.logs:
        args.logs.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    for run in args.run:
        print(f"{run}:", flush=True)
        found = parts(run, dry=args.dry_run, extra=args.extra)
        new = (
            [Outcome(run, run, "skipped", found, 0.0)]
            if isinstance(found, str)
            else make(run, found, SECONDS[run] * (SLOWER if args.dry_run else 1), args.logs)
        )
        for outcome in new:
            print(f"  {outcome.result} {outcome.what}, {outcome.seconds:.0f} s: {outcome.why}", flush=True)
        outcomes += new
        if args.json:
            write_result(args.json, {"outcomes": [asdict(each) for each in outcomes]})
    counts = {result: sum(each.result == result for each in outcomes) for result in ("passed", "failed", "skipped")}
    print(", ".join(f"{number} {result}" for result, number in counts.items()))
    return int(counts["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
