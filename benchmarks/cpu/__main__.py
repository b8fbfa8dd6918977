"""Comparison of engines on this machine's CPU: the same checkpoints, prompts and lengths, greedy, in bfloat16.

    python -m benchmarks.cpu [--shapes 0.5b,1b] [--workloads W1,W2,W3,W4] [--repeat 3]
        [--only workloads http families arrivals] [--peer vllm=VENV/bin/python] [--peer openvino:int4=...]
        [--before CHECKOUT] [--alone] [--models FOLDER] [--quantization int8] [--requests 120] [--json FILE]
        [--table FILE]

Each engine runs in a process of its own with the given interpreter, and the engines take turns. --before adds another
version of quire: a checkout in which `python setup.py build_ext --inplace` has run. --alone loads one engine at a
time. --quantization rounds the weights of quire to int8 or int4 and gives OpenVINO and llama.cpp files in Q8_0 or Q4_0
with a head in Q8_0; vLLM and transformers keep bfloat16. With --quantization Q4_K_M, Q4_0 or Q8_0 quire, OpenVINO and
llama.cpp load the same GGUF file; --peer llama_cpp=... makes that in Q4_K_M. A peer PROGRAM:QUANTIZATION has a
quantization of its own, `none` for 16 bits; the program may be quire, too.

For one stream, the report has the bytes of weights and KV that decoding a token reads, and the rate at which decoding
reads them. `benchmarks.read_share` compares it with the rate at which the machine reads.

The part `http` sends 64 streams to `quire serve` and the same queries to an `LLM`. The part `arrivals` sends --requests
streams with Poisson arrivals to the servers of quire, of the version before, and of vLLM. The part `families` compares
the CPU time of quire's decoder with that of `model_impl="transformers"`, with one thread each; without --shapes it has
a shape of each of several model families. --shapes tiny runs every part at a size whose figures have no meaning.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.cpu.arrivals import SERVERS, arrivals, num_ticks
from benchmarks.cpu.checkpoints import SHAPES, checkpoint, weight_bytes
from benchmarks.cpu.decode_bytes import decode_bytes
from benchmarks.cpu.engines import BEFORE, DRIVERS, PEERS, QUANTIZATIONS, Engine, EngineError
from benchmarks.cpu.families import BOUNDS, FAMILIES, family_report, family_turns
from benchmarks.cpu.gguf_file import gguf_file
from benchmarks.cpu.machine import describe
from benchmarks.cpu.over_http import http_turns
from benchmarks.cpu.tables import grids, machine_line
from benchmarks.cpu.turns import Turns
from benchmarks.result_file import write_result
from benchmarks.workloads import WORKLOADS

PARTS = ("workloads", "http", "families", "arrivals")
_SHAPES = ("0.5b", "1b")


def peer(text: str) -> tuple[str, str]:
    """The (name, path) of NAME=PYTHON. The path is made absolute; links stay, because a venv's python is a link."""
    name, separator, python = text.partition("=")
    program, colon, quantization = name.partition(":")
    if program not in (*PEERS, *["quire"] * bool(colon)) or not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PYTHON with a name of {', '.join(PEERS)}")
    if colon and quantization not in (*QUANTIZATIONS, "none"):
        raise argparse.ArgumentTypeError(f"{quantization!r} is none of {', '.join(QUANTIZATIONS)}, none")
    if not Path(python).is_file():
        raise argparse.ArgumentTypeError(f"there is no interpreter {python!r}")
    return name, str(Path(python).absolute())


def checkout(text: str) -> Path:
    """The absolute path of a checkout of quire whose CPU kernels are built."""
    path = Path(text).absolute()
    if not list(path.glob("quire/kernels/cpu/_C*.so")):
        raise argparse.ArgumentTypeError(f"{text!r} has no built CPU kernels; run: python setup.py build_ext --inplace")
    return path


def names_of(known: Sequence[str], text: str) -> list[str]:
    """The known names in a comma-separated list."""
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is none of {', '.join(known)}")
    return names


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.cpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--shapes",
        type=lambda text: names_of([*SHAPES, "embedded"], text),
        help="0.5b,1b by default; of the part families those of benchmarks.cpu.families",
    )
    parser.add_argument("--workloads", type=lambda text: names_of(list(WORKLOADS), text), default="W1,W2,W3,W4")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--quantization", choices=QUANTIZATIONS, help="of the weights, or type of one GGUF file for all"
    )
    parser.add_argument("--requests", type=int, default=120, help="of one run of the part arrivals")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--peer", type=peer, action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--before", type=checkout, metavar="CHECKOUT", help="another version of quire, kernels built")
    parser.add_argument("--alone", action="store_true", help="load one engine at a time")
    parser.add_argument("--models", type=Path, help="keep the checkpoints in this folder")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--table", type=Path, help="write the tables here, in Markdown")
    args = parser.parse_args(arguments)
    programs, _, quantizations = zip(*(name.partition(":") for name in ("quire", *dict(args.peer))), strict=True)
    if "Q4_K_M" in (args.quantization, *quantizations) and "llama_cpp" not in programs:
        parser.error("Q4_K_M needs --peer llama_cpp=PYTHON, which makes the file")
    if args.repeat < 1:
        parser.error("--repeat must be at least 1")
    return args


def measure(args: argparse.Namespace, models: Path, results: dict[str, Any]) -> None:
    """Run all parts one after another and put their figures into `results`. Raises EngineError; finished parts stay."""
    shapes = args.shapes or _SHAPES
    if "workloads" in args.only:
        for shape in shapes:
            model = checkpoint(shape, models)
            turns = Turns(_engines(args, model), args.workloads, repeat=args.repeat)
            _take(turns, alone=args.alone)
            results.setdefault("shapes", {})[shape] = {"weight_bytes": weight_bytes(model), **turns.report()}
    if "http" in args.only:
        turns = http_turns(checkpoint(shapes[0], models), args.repeat)
        _take(turns, alone=args.alone)
        results["http"] = {"shape": shapes[0], **turns.report()}
    if "families" in args.only:
        for shape in args.shapes or FAMILIES:
            turns = family_turns(checkpoint(shape, models), args.repeat)
            _take(turns, alone=args.alone)
            part = results.setdefault("families", {"bounds": BOUNDS, "shapes": {}})
            part["shapes"][shape] = family_report(turns)
    if "arrivals" in args.only:
        engines = [one for one in _engines(args, checkpoint(shapes[0], models)) if one.name in SERVERS]
        with _progress(num_ticks(len(engines), args.repeat)) as tick:
            found = arrivals(engines, count=args.requests, repeat=args.repeat, tick=tick)
        results["arrivals"] = {"shape": shapes[0], **found}


def _engines(args: argparse.Namespace, model: Path) -> list[Engine]:
    """quire, the version before if there is one, and the peers."""
    pythons = {"quire": sys.executable, **dict(args.peer)}
    engines = []
    for name, python in pythons.items():
        own = name.partition(":")[2]
        quantization = None if own == "none" else own or args.quantization
        engines.append(Engine(name, python, model, quantization=quantization))
    if args.before:
        driver = DRIVERS / "quire_driver.py"
        before = Engine(BEFORE, sys.executable, model, driver=driver, checkout=args.before)
        engines.insert(1, replace(before, quantization=args.quantization))
    llama_cpp = next((engine.python for engine in engines if engine.program == "llama_cpp"), "")
    for engine in engines:
        if engine.gguf_type:
            gguf_file(model, engine.gguf_type, llama_cpp=llama_cpp)
    return [replace(engine, decode_bytes=decode_bytes(engine)) for engine in engines]


def _take(turns: Turns, *, alone: bool) -> None:
    with _progress(turns.num_turns) as tick:
        (turns.alone if alone else turns.side_by_side)(tick)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on stderr. The value is called with the name of each turn when it begins."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task, done = progress.add_task("loading", total=total), count()
        yield lambda doing: progress.update(task, description=doing, completed=next(done))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables and write the files."""
    args = parse(arguments)
    results: dict[str, Any] = {
        "machine": describe(),
        "settings": {
            "dtype": "bfloat16",
            "quantization": args.quantization,
            "repeat": args.repeat,
            "alone": args.alone,
        },
    }
    with tempfile.TemporaryDirectory() as temporary:
        try:
            measure(args, args.models or Path(temporary), results)
        except EngineError as error:
            results["error"] = str(error)
    found = grids(results)
    if args.json:
        write_result(args.json, results)
    if args.table:
        args.table.write_text(
            "\n".join([machine_line(results["machine"]) + "\n", *(grid.markdown() for grid in found)])
        )
    console = Console() if sys.stdout.isatty() else Console(width=150)  # a file has no width; 80 columns are too few
    console.print(machine_line(results["machine"]), markup=False, highlight=False, soft_wrap=True)
    for grid in found:
        grid.print(console)
    if "error" in results:
        sys.exit(results["error"])


if __name__ == "__main__":
    main()
