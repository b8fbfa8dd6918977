"""Benchmarks on this machine's GPU: kernels, steps and serving, beside the limits of the device and other engines.

    python -m benchmarks.gpu [--only limits attention gemm experts step serving] [--shapes qwen3-0.6b,llama-8b]
        [--peer vllm=VENV/bin/python] [--repeat 1] [--seconds S] [--device cuda] [--models FOLDER] [--json FILE]
        [--table FILE]

Each part runs in a process of its own and has a limit in seconds; what does not fit is skipped, with the reason. All
parts together take less than 10 minutes. The figures are written during each part and after it. `limits` is always
measured, because the other parts are compared with it. --device cpu --tiny runs everything that needs no GPU, with
kernels in Triton's interpreter; its figures have no meaning.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.gpu.goals import judged
from benchmarks.gpu.processes import Settings, run
from benchmarks.gpu.tables import grids
from benchmarks.result_file import header

SHAPES = ("qwen3-0.6b", "llama-8b", "0.5b", "1b", "tiny")  # of benchmarks.cpu.checkpoints, which imports torch

# The module of each part and its default limit in seconds. The sum, with process starts, is at most 600.
PARTS = {
    "limits": ("limits", 25.0),
    "attention": ("attention", 105.0),
    "gemm": ("products", 70.0),
    "experts": ("mixtures", 25.0),
    "step": ("step", 145.0),
    "serving": ("serving", 190.0),
}


def peer(text: str) -> tuple[str, str]:
    """The (name, path) of vllm=PYTHON. The path is made absolute; links stay, because a venv's python is a link."""
    name, separator, python = text.partition("=")
    if name != "vllm" or not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not vllm=PYTHON")
    if not Path(python).is_file():
        raise argparse.ArgumentTypeError(f"there is no interpreter {python!r}")
    return name, str(Path(python).absolute())


def shapes(text: str) -> list[str]:
    """The known shapes in a comma-separated list."""
    names = text.split(",")
    if unknown := [name for name in names if name not in SHAPES]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is none of {', '.join(SHAPES)}")
    return names


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    parser.add_argument("--shapes", type=shapes, help="default: qwen3-0.6b,llama-8b; with --tiny: tiny")
    parser.add_argument("--peer", type=peer, action="append", default=[], metavar="vllm=PYTHON")
    parser.add_argument("--repeat", type=int, default=1, help="rounds of serving")
    parser.add_argument("--seconds", type=float, help="that each part may take")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="to try everything")
    parser.add_argument("--models", type=Path, help="keep the checkpoints in this folder")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--table", type=Path, help="write the tables here, in Markdown")
    args = parser.parse_args(arguments)
    if args.device == "cpu" and not args.tiny:
        parser.error("on a CPU there is only --tiny")
    if args.repeat < 1:
        parser.error("--repeat must be at least 1")
    args.shapes = args.shapes or (["tiny"] if args.tiny else ["qwen3-0.6b", "llama-8b"])
    return args


def measure(args: argparse.Namespace, models: Path, results: dict[str, Any]) -> None:
    """Run all parts one after another. Their figures go into `results`, which is written after every change."""
    models.mkdir(parents=True, exist_ok=True)
    settings = Settings(args.device, args.tiny, args.shapes, models, dict(args.peer), args.repeat)
    limits: dict[str, Any] = {}
    for name, (module, usual) in PARTS.items():
        if name not in args.only and name != "limits":
            continue

        def tell(found: dict[str, Any], name: str = name) -> None:
            results["parts"][name] = found
            results["goals"] = judged(results["parts"])
            write(args.json, json.dumps(results, indent=1))

        print(f"{name}:", flush=True)
        found = run(name, module, settings, limits, args.seconds or usual, tell)
        if name == "limits" and found["rows"]:
            limits = found["rows"][0]


def write(file: Path | None, text: str) -> None:
    """Write a complete file and rename it, so that a reader never sees half of one."""
    if file is not None:
        unfinished = file.with_name(f"{file.name}.part")
        unfinished.write_text(text)
        unfinished.replace(file)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables and write the files."""
    args = parse(arguments)
    if args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # for the processes of the parts
    results: dict[str, Any] = {
        **header(),
        "settings": {"shapes": args.shapes, "device": args.device, "tiny": args.tiny, "repeat": args.repeat},
        "parts": {},
    }
    with tempfile.TemporaryDirectory() as temporary:
        measure(args, args.models or Path(temporary), results)
    found = grids(results)
    write(args.table, "\n".join(grid.markdown() for grid in found))
    console = Console() if sys.stdout.isatty() else Console(width=260)  # a file has no width; 80 columns are too few
    for grid in found:
        grid.print(console)


if __name__ == "__main__":
    main()
