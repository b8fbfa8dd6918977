"""Cost of constraints, and savings by fast-forward.

    python -m benchmarks.structured [--only masks jump throughput ablation] [--backends llguidance fsm xgrammar]
        [--models FOLDER] [--peer vllm=VENV/bin/python] [--json FILE] [--table FILE]
    python -m benchmarks.structured --only corpora --suite FOLDER [--suite FOLDER] [--limit 500] [--backends fsm]

masks: compile time and time per mask, by backend, constraint and vocabulary; also of the package xgrammar, if it is
installed. jump: JSON records by the embedded model
with fast-forward, token by token, and unconstrained (row C1). throughput: a batch of 32 with random weights in the
shape of Qwen2.5-0.5B, constrained and unconstrained. ablation: programs with each feature off in turn (row R7).
corpora: the schemas and instances of public suites, by the first backend of --backends.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cpu.checkpoints import checkpoint
from benchmarks.cpu.machine import describe
from benchmarks.result_file import write_result
from benchmarks.structured import ablation, corpora, jump, masks, peers, throughput
from quire.hub import embedded
from quire.structured_outputs.backends import BACKENDS
from quire.structured_outputs.grammar_compilation import vocabulary_of
from quire.structured_outputs.vocabulary import Vocabulary
from quire.tokenizer.tokenizer import Tokenizer

PARTS = ("masks", "jump", "throughput", "ablation")
SHAPE = "0.5b"
_COUNTED = ("tokens", "forced", "right", "valid")


def main() -> None:
    """Run the parts and print their results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=(*PARTS, "corpora"), default=PARTS)
    parser.add_argument("--backends", nargs="+", choices=(*BACKENDS, "xgrammar"), default=["llguidance", "fsm"])
    parser.add_argument("--questions", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--models", type=Path, help="where checkpoints are kept")
    parser.add_argument("--peer", metavar="NAME=PYTHON", help="records beside it, such as vllm=VENV/bin/python")
    parser.add_argument("--suite", type=Path, action="append", default=[], help="a checkout of a public suite")
    parser.add_argument("--limit", type=int, help="schemas of each suite, drawn at random")
    parser.add_argument("--processes", type=int, default=2, help="for the suites; at most 2")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    if "corpora" in args.only and not args.suite:
        parser.error("--only corpora needs --suite FOLDER")
    results: dict[str, Any] = {"machine": describe()}
    if set(args.only) & set(PARTS):
        _measure_parts(args, results)
    if "corpora" in args.only:
        results["corpora"] = corpora.measure(args.suite, args.backends[0], limit=args.limit, processes=args.processes)
    text = "\n\n".join(_tables(results))
    print(text)
    if args.json:
        write_result(args.json, results)
    if args.table:
        args.table.write_text(text + "\n")


def _measure_parts(args: argparse.Namespace, results: dict[str, Any]) -> None:
    """Add the results of the parts that need a model."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = checkpoint(SHAPE, args.models or Path(temporary))
        if "masks" in args.only:
            results["masks"] = masks.measure(
                args.backends, {"2k": _vocabulary(embedded.folder()), "32k": _vocabulary(folder)}
            )
        if "jump" in args.only:
            results["jump"] = jump.measure("auto", args.questions, args.repeats)
            results["jump_shape"] = jump.measure_shape(folder, "auto", repeats=args.repeats)
        if args.peer:
            name, _, python = args.peer.partition("=")
            results["peers"] = peers.measure(folder, name, python, repeats=args.repeats)
        if "throughput" in args.only:
            results["throughput"] = throughput.measure(
                folder, [one for one in args.backends if one in BACKENDS], repeats=args.repeats
            )
    if "ablation" in args.only:
        results["ablation"] = ablation.measure(repeats=args.repeats)
        results["speculation"] = ablation.measure_speculation()


def _vocabulary(folder: Path) -> Vocabulary:
    tokenizer = Tokenizer.from_folder(folder)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    ends = json.loads((folder / "generation_config.json").read_text()).get("eos_token_id", 2)
    return vocabulary_of(tokenizer, size, tuple(ends) if isinstance(ends, list) else (ends,))


def _tables(results: dict[str, Any]) -> list[str]:
    tables = []
    if "masks" in results:
        names = ("compile_ms", "first_mask_us", "mask_p50_us", "mask_p99_us", "advance_p50_us", "forced_share", "ended")
        rows = [
            (
                row["form"],
                row["backend"],
                row["vocabulary"],
                *(_found(row, name) for name in names),
            )
            for row in results["masks"]
        ]
        tables.append(_table(("form", "backend", "vocabulary", *names), rows))
    if "jump" in results:
        found = results["jump"]
        rows = [
            (way, row["steps"], found["steps_alone"][way], median(row["seconds"]), *(row[name] for name in _COUNTED))
            for way, row in found["ways"].items()
        ]
        columns = ("way", "model steps", "alone", "seconds", *_COUNTED)
        tables.append(_table(columns, rows) + f"\n\n{found['same_text']} of {found['questions']} texts are the same.")
        tables.append(_of_rows(results["jump_shape"]))
    if "throughput" in results:
        names = ("backend", "form", "batch", "plain_tokens_per_second", "constrained_tokens_per_second", "ratio")
        tables.append(_table(names, [tuple(row[name] for name in names) for row in results["throughput"]]))
    if "peers" in results:
        tables.append(_of_rows(results["peers"]["rows"]))
    if "corpora" in results:
        tables += corpora.tables(results["corpora"])
    tables += [_of_rows(results[name]) for name in ("ablation", "speculation") if name in results]
    return tables


def _found(row: dict[str, Any], name: str) -> object:
    return "refused" if "refused" in row else row.get(name, "")


def _of_rows(rows: Sequence[dict[str, Any]]) -> str:
    return _table(list(rows[0]), [tuple(row.values()) for row in rows])


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *([_cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
