"""Speculative decoding of quire beside that of vLLM and llama.cpp: the embedded model on its own tasks, one stream.

    python -m benchmarks.speculation_peers [--vllm PYTHON [--methods ngram,suffix]] [--llama-cpp PYTHON] [--rounds 5]
        [--chats 6] [--before 30] [--tasks copy,talk] [--json FILE]

PYTHON: an interpreter that has vLLM, or llama-cpp-python. vLLM's method suffix needs the package arctic-inference.
llama.cpp gets the drafts of llama-cpp-python's prompt lookup. Each engine runs with and without drafts, 8 at most. It
runs after other chats of the same task, and with other chats in each round. All write equally many tokens. Tokens per
step are output tokens by model steps, those of prompts included. Engines take turns; those that wait are stopped.
"""

import argparse
import random
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.cpu import machine
from benchmarks.cpu.engines import Engine, EngineError, Running, start
from benchmarks.result_file import write_result
from benchmarks.speculation import TASKS
from quire import LLM, SamplingParams
from quire.hub import embedded
from tools.demo_model.questions import questions

_MOST_TOKENS = 256
_DRAFTS = 8  # of one sequence in one step
_CONSOLE = Console(stderr=True)

Queries = list[dict[str, Any]]


class Round(NamedTuple):
    """One engine's run of the queries of a round."""

    num_tokens: int
    seconds: float
    num_steps: int


def engines(vllm: str | None, methods: Sequence[str], llama_cpp: str | None, folder: Path) -> list[Engine]:
    """quire, and the peers whose interpreter is given, each without drafts and with them.

    folder: for a copy of the model, beside which its GGUF file is written.
    """
    common: dict[str, Any] = {"model": embedded.folder(), "max_num_seqs": 8, "max_model_len": 2048}
    found = [
        Engine("quire:off", sys.executable, options={"speculation": "off"}, **common),
        Engine("quire:auto", sys.executable, options={"speculation": "auto"}, **common),
    ]
    if llama_cpp is not None:
        copied = common | {"model": Path(shutil.copytree(embedded.folder(), folder / "model"))}
        found.append(Engine("llama_cpp:off", llama_cpp, **copied))
        found.append(Engine("llama_cpp:lookup", llama_cpp, options={"lookup": _DRAFTS}, **copied))
    if vllm is None:
        return found
    found.append(Engine("vllm:off", vllm, options={"disable_log_stats": False}, **common))
    for method in methods:
        config: dict[str, object] = {"method": method, "num_speculative_tokens": _DRAFTS}
        if method == "ngram":
            config |= {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
        options = {"speculative_config": config, "disable_log_stats": False}
        found.append(Engine(f"vllm:{method}", vllm, options=options, **common))
    return found


def queries_of(tasks: Sequence[str], rounds: int, num_chats: int, num_before: int) -> dict[str, list[Queries]]:
    """For each task the queries that come before, and those of each round, with the lengths of quire's answers."""
    llm = LLM(speculation="off")
    params = SamplingParams(temperature=0, max_tokens=_MOST_TOKENS)
    found = {}
    for task in track(tasks, "lengths of answers", console=_CONSOLE, transient=True):
        parts = []
        for turn in range(rounds + 1):
            number = num_chats if turn else num_before
            prompts = [one.prompt for one in questions([task], number, 1 + turn, llm.get_tokenizer())]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            lengths = [len(output.outputs[0].token_ids) for output in outputs]
            parts.append([{"prompt": p, "out": n} for p, n in zip(prompts, lengths, strict=True)])
        found[task] = parts
    llm.close()
    return found


def run(running: Running, queries: Queries) -> tuple[float, int]:
    """Seconds and model steps of queries one after another."""
    answers = [running.answer_in_steps([query]) for query in queries]
    return sum(seconds for seconds, _ in answers), sum(steps for _, steps in answers)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each task. Raises EngineError."""
    asked, rows = queries_of(args.tasks.split(","), args.rounds, args.chats, args.before), []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        chosen = engines(args.vllm, args.methods.split(","), args.llama_cpp, folder)
        loaded = {one.name: stack.enter_context(start(one)) for one in chosen}
        for task, (before, *others) in asked.items():
            for running in loaded.values():
                run(running, before)
            measured: dict[str, list[Round]] = defaultdict(list)
            for turn, queries in enumerate(track(others, task, console=_CONSOLE, transient=True)):
                order = list(loaded)
                random.Random(turn).shuffle(order)
                for name in order:
                    measured[name].append(Round(sum(query["out"] for query in queries), *run(loaded[name], queries)))
            rows.append(_row(task, measured))
            _CONSOLE.print(rows[-1])
    return rows


def _row(task: str, measured: Mapping[str, Sequence[Round]]) -> dict[str, Any]:
    """Tokens per step, speed-up by drafts, and tokens per second of each engine."""
    row: dict[str, Any] = {"task": task, "tokens": sum(one.num_tokens for one in next(iter(measured.values())))}
    for name, rounds in measured.items():
        if not name.endswith(":off"):
            row[f"{name}, tokens per step"] = round(row["tokens"] / sum(one.num_steps for one in rounds), 2)
            pairs = zip(measured[f"{name.partition(':')[0]}:off"], rounds, strict=True)
            row[f"{name}, speed-up"] = round(median(off.seconds / on.seconds for off, on in pairs), 2)
        row[f"{name}, tokens/s"] = round(median(one.num_tokens / one.seconds for one in rounds))
    return row


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table and write the JSON file."""
    parser = argparse.ArgumentParser(prog="benchmarks.speculation_peers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vLLM")
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="an interpreter that has llama-cpp-python")
    parser.add_argument("--methods", default="ngram,suffix", help="of vLLM")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chats", type=int, default=6, help="per task")
    parser.add_argument("--before", type=int, default=30, help="chats per task before these")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args(arguments)
    try:
        rows = measure(args)
    except EngineError as error:
        sys.exit(str(error))
    table = Table(*rows[0], title="speculative decoding of the embedded model, one stream")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    if args.json is not None:
        write_result(args.json, {"machine": machine.describe(), "tasks": rows})


if __name__ == "__main__":
    main()
