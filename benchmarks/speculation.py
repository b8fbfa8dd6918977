"""Speculative decoding beside decoding without drafts, with the same engine and in turns.

    python -m benchmarks.speculation [--only controlled,earned,repeated,together,records] [--shape 0.5b] [--rounds 9]
        [--models FOLDER] [--json FILE] [--picture FILE]

controlled: a model with random weights, and predictions that are the engine's own earlier output with a share of tokens
changed, for batches of 1, 8 and 32. Random weights repeat themselves, so other drafters would look too good.
earned: the embedded model on its own tasks. Chats of the same task come first, whose answers are drafts. `tokens per
step` is without the governor, with 8 drafts, and counts the step that computes the prompt: it yields a token, too.
`speed-up` is with the governor: seconds without drafts by seconds with them.
repeated: a request again, with the same answer. together: 32 requests at a time, of random prompts at temperature 1
(W2), and of chats. records: JSON records of a schema, token by token, with forced tokens, and with drafts between them.
Every output is compared with the one without drafts.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.cpu import machine
from benchmarks.cpu.checkpoints import checkpoint
from benchmarks.result_file import write_result
from benchmarks.structured import jump
from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.core.request import Namespace, Request
from tools.demo_model.questions import questions

BATCHES = (1, 8, 32)
ACCEPTANCES = (0.0, 0.5, 0.7, 0.9, 1.0)
_PROMPT_TOKENS = 64
_OUTPUT_TOKENS = 64
_WARM_UPS = 5
TASKS = ("copy", "needle", "talk", "tool", "recall", "extract", "facts")
_MOST_TOKENS = 256
_CONSOLE = Console(stderr=True)


class Run(NamedTuple):
    """One batch of requests, run to its end."""

    seconds: float
    num_steps: int  # of the model, that yield output tokens
    num_drafts: int
    num_accepted: int
    tokens: list[list[int]]
    cpu_seconds: float  # of all threads

    @property
    def num_tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(map(len, self.tokens))


class Bench:
    """An engine that runs batches with and without drafts."""

    def __init__(self, model: str | None, **options: object) -> None:
        self.llm = LLM(model, **{"calibration": 0.3, "seed": 1, "speculation": "auto", **options})
        self.engine = self.llm.llm_engine
        self._number = 0

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        predictions: Sequence[Sequence[int]] = (),
        *,
        speculation: bool,
        governed: bool = True,
        tenant: str = "",
        constraints: Sequence[StructuredOutputsParams] = (),
        **params: object,
    ) -> Run:
        """Run one request per prompt, all at once. predictions: token ids. Lists are empty or have one per prompt."""
        engine = self.engine
        speculator = engine.scheduler.speculator
        assert speculator is not None, "the engine drafts"
        speculator.governs = governed
        ids = []
        for i, prompt in enumerate(prompts):
            self._number += 1
            ids.append(f"{self._number}")
            if constraints:
                params["structured_outputs"] = constraints[i]
            asked = SamplingParams(speculation=speculation, **params)  # type: ignore[arg-type]  # checked by name
            predicted = predictions[i] if predictions else ()
            namespace = Namespace(tenant)
            engine.add(Request(ids[-1], list(prompt), asked, namespace=namespace, prediction=predicted))
        tokens: dict[str, list[int]] = {one: [] for one in ids}
        before, num_steps = engine.stats(), 0
        began, cpu_began = time.perf_counter(), time.process_time()
        while engine.has_work:
            outputs = engine.step()
            num_steps += any(output.token_ids for output in outputs)
            for output in outputs:
                tokens[output.request_id] += output.token_ids
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
        after = engine.stats()
        drafts = after.num_draft_tokens - before.num_draft_tokens
        accepted = after.num_accepted_drafts - before.num_accepted_drafts
        return Run(seconds, num_steps, drafts, accepted, list(tokens.values()), cpu_seconds)


def changed(tokens: Sequence[int], share: float, vocab_size: int, draw: random.Random) -> list[int]:
    """The tokens with a share of others between them: a draft is right with a chance of 1 - share."""
    return [draw.randrange(vocab_size) if draw.random() < share else token for token in tokens]


def controlled(folder: Path, shape: str, rounds: int) -> list[dict[str, Any]]:
    """The ratio of seconds without to seconds with drafts, for each acceptance and batch."""
    draw = random.Random(3)
    options = {"dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": 32, "speculation": "prediction"}
    bench = Bench(str(checkpoint(shape, folder)), **options)
    vocab_size, cells = bench.engine.vocab_size, []
    params = {"temperature": 0.0, "max_tokens": _OUTPUT_TOKENS, "ignore_eos": True}
    for batch in BATCHES:
        prompts = [[draw.randrange(vocab_size) for _ in range(_PROMPT_TOKENS)] for _ in range(batch)]
        known = bench.run(prompts, speculation=False, **params).tokens
        for acceptance in ACCEPTANCES:
            ratios, drafts, accepted, same = [], 0, 0, True
            predicted = [changed(one, 1 - acceptance, vocab_size, draw) for one in known]
            asked = {**params, "tenant": f"{batch} {acceptance}"}  # chances of drafts are learned by tenant
            bench.run(prompts, predicted, speculation=True, **asked)  # captures its steps
            label = f"batch {batch}, acceptance {acceptance}"
            for turn in track(range(rounds), label, console=_CONSOLE, transient=True):
                kinds = (False, True) if turn % 2 else (True, False)
                runs = {kind: bench.run(prompts, predicted, speculation=kind, **asked) for kind in kinds}
                ratios.append(runs[False].seconds / runs[True].seconds)
                drafts, accepted = drafts + runs[True].num_drafts, accepted + runs[True].num_accepted
                same &= runs[True].tokens == runs[False].tokens
            cells.append(
                {
                    "batch": batch,
                    "acceptance": acceptance,
                    "ratio": round(median(ratios), 3),
                    "least": round(min(ratios), 3),
                    "most": round(max(ratios), 3),
                    "drafts per run": round(drafts / rounds),
                    "accepted per run": round(accepted / rounds),
                    "same tokens": same,
                }
            )
            _CONSOLE.print(cells[-1])
    bench.llm.close()
    return cells


def earned(rounds: int, num_chats: int, num_before: int) -> list[dict[str, Any]]:
    """Tokens per step and speed-up for each task, after `num_before` chats of it."""
    rows = []
    params: dict[str, object] = {"temperature": 0.0, "max_tokens": _MOST_TOKENS}
    for task in TASKS:
        bench = Bench(None)
        tokenizer = bench.llm.get_tokenizer()
        for question in questions([task], num_before, 1, tokenizer):
            bench.run([question.prompt], speculation=True, governed=False, **params)
        asked = questions([task], num_chats, 2, tokenizer)
        speculator = bench.engine.scheduler.speculator
        assert speculator is not None, "the engine drafts"
        speculator.keeps_answers = False
        plain = [bench.run([one.prompt], speculation=False, **params) for one in asked]
        free = [bench.run([one.prompt], speculation=True, governed=False, **params) for one in asked]
        for one in asked:  # learns chances and costs
            bench.run([one.prompt], speculation=True, **params)
        ratios, steps = [], []
        for turn in track(range(rounds), task, console=_CONSOLE, transient=True):
            kinds = (False, True) if turn % 2 else (True, False)
            runs = {kind: [bench.run([one.prompt], speculation=kind, **params) for one in asked] for kind in kinds}
            ratios.append(sum(run.seconds for run in runs[False]) / sum(run.seconds for run in runs[True]))
            steps.append(tokens_per_step(runs[True]))
        rows.append(
            {
                "task": task,
                "requests": len(asked),
                "tokens": sum(run.num_tokens for run in plain),
                "tokens per step": round(tokens_per_step(free), 2),
                "governed tokens per step": round(median(steps), 2),
                "speed-up": round(median(ratios), 2),
                "least": round(min(ratios), 2),
                "most": round(max(ratios), 2),
                "same tokens": [run.tokens for run in free] == [run.tokens for run in plain],
            }
        )
        _CONSOLE.print(rows[-1])
        bench.llm.close()
    return rows


def tokens_per_step(runs: Sequence[Run]) -> float:
    """Output tokens by the steps that yielded them; the first step of a request computes its prompt, too."""
    return sum(run.num_tokens for run in runs) / sum(run.num_steps for run in runs)


def repeated(num_chats: int) -> dict[str, Any]:
    """Steps of requests, and of the same requests again."""
    bench, params = Bench(None), {"temperature": 0.8, "seed": 5, "max_tokens": _MOST_TOKENS}
    asked = questions(TASKS, num_chats, 3, bench.llm.get_tokenizer())
    first = [bench.run([one.prompt], speculation=False, **params) for one in asked]
    again = [bench.run([one.prompt], speculation=True, governed=False, **params) for one in asked]
    bench.llm.close()
    return {
        "requests": len(asked),
        "steps": sum(run.num_steps for run in first),
        "steps again": sum(run.num_steps for run in again),
        "same tokens": [run.tokens for run in first] == [run.tokens for run in again],
    }


def together(folder: Path, shape: str, rounds: int) -> list[dict[str, Any]]:
    """The ratio of seconds without to seconds with drafts, with all drafters and 32 requests at a time.

    Each run has 256 chats: 32 of the embedded model take 50 ms, which vary by a tenth.
    """
    draw, rows = random.Random(5), []
    options = {"dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": 32}
    shaped = Bench(str(checkpoint(shape, folder)), **options)
    prompts = [[draw.randrange(shaped.engine.vocab_size) for _ in range(128)] for _ in range(32)]
    sampled = {"temperature": 1.0, "seed": 5, "max_tokens": 64, "ignore_eos": True}
    rows.append(_compared("W2, temperature 1", shaped, prompts, sampled, rounds))
    embedded = Bench(None, max_num_seqs=32)
    asked = questions(TASKS, 40, 4, embedded.llm.get_tokenizer())
    chats = [one.prompt for one in asked[:: len(asked) // 256][:256]]
    answers = {"temperature": 1.0, "seed": 5, "max_tokens": 128}
    rows.append(_compared("256 chats, 32 at a time", embedded, chats, answers, rounds))
    return rows


def _compared(
    load: str, bench: Bench, prompts: Sequence[Sequence[int]], params: dict[str, object], rounds: int
) -> dict[str, Any]:
    """A row of `together`. Answers are not kept, or they would be repeated."""
    speculator = bench.engine.scheduler.speculator
    assert speculator is not None, "the engine drafts"
    speculator.keeps_answers = False
    for _ in range(_WARM_UPS):  # which capture steps
        bench.run(prompts, speculation=True, **params)
    ratios, drafts, accepted, same = [], 0, 0, True
    for turn in track(range(rounds), load, console=_CONSOLE, transient=True):
        kinds = (False, True) if turn % 2 else (True, False)
        runs = {kind: bench.run(prompts, speculation=kind, **params) for kind in kinds}
        ratios.append(runs[False].seconds / runs[True].seconds)
        drafts, accepted = drafts + runs[True].num_drafts, accepted + runs[True].num_accepted
        same &= runs[True].tokens == runs[False].tokens
    bench.llm.close()
    found = {"load": load, "ratio": round(median(ratios), 3), "least": round(min(ratios), 3)}
    found |= {"most": round(max(ratios), 3), "drafts": drafts, "accepted": accepted, "same tokens": same}
    _CONSOLE.print(found)
    return found


def records(rounds: int, count: int = 64) -> list[dict[str, Any]]:
    """Steps and seconds of JSON records by the embedded model, 16 at once; those with drafts after other records."""
    bench = Bench(None, max_num_seqs=16)
    tokenizer = bench.llm.get_tokenizer()

    def asked(seed: int) -> tuple[list[list[int]], list[dict[str, Any]]]:
        found = jump.questions(count, seed)
        texts = [tokenizer.apply_chat_template(messages, None, add_generation_prompt=True) for messages, _ in found]
        return [tokenizer.encode(text, add_special_tokens=False) for text in texts], [record for _, record in found]

    def run(prompts: list[list[int]], answers: list[dict[str, Any]], way: str) -> Run:
        constraints = [jump.form(record, fast_forward=way != "token by token") for record in answers]
        params: dict[str, object] = {"temperature": 0.0, "max_tokens": 96}
        return bench.run(prompts, speculation=way == "with drafts", constraints=constraints, **params)

    speculator = bench.engine.scheduler.speculator
    assert speculator is not None, "the engine drafts"
    run(*asked(1), "with drafts")  # its answers are drafts of others
    speculator.keeps_answers = False
    ways, prompts_and_answers = ("token by token", "fast-forward", "with drafts"), asked(2)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(_WARM_UPS):  # which capture steps
        runs = {way: run(*prompts_and_answers, way) for way in ways}
    for turn in track(range(rounds), "records", console=_CONSOLE, transient=True):
        for way in ways if turn % 2 else reversed(ways):
            runs[way] = run(*prompts_and_answers, way)
            seconds[way].append(runs[way].seconds)
    bench.llm.close()
    return [
        {
            "way": way,
            "steps": runs[way].num_steps,
            "seconds": round(median(seconds[way]), 3),
            "least": round(min(seconds[way]), 3),
            "most": round(max(seconds[way]), 3),
            "same tokens as fast-forward": runs[way].tokens == runs["fast-forward"].tokens,
        }
        for way in ways
    ]


def draw_map(cells: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Draw the ratios of `controlled`: one line per batch."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (an optional package)

    figure = Figure(figsize=(6, 3.6))
    axes = figure.subplots()
    for batch in BATCHES:
        some = [cell for cell in cells if cell["batch"] == batch]
        axes.plot([cell["acceptance"] for cell in some], [cell["ratio"] for cell in some], "o-", label=f"batch {batch}")
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("share of drafts that are right")
    axes.set_ylabel("speed, without drafts = 1")
    axes.set_title(title, fontsize=10)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print rows as a table."""
    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)


def main() -> None:
    """Run the parts, print tables, write the JSON file and the picture."""
    parser = argparse.ArgumentParser(prog="benchmarks.speculation", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="controlled,earned,repeated,together,records", help="parts to run")
    parser.add_argument("--shape", default="0.5b", help="model of `controlled`")
    parser.add_argument("--rounds", type=int, default=9, help="pairs of runs for each ratio")
    parser.add_argument("--chats", type=int, default=10, help="chats per task of `earned`")
    parser.add_argument("--before", type=int, default=30, help="chats per task before these")
    parser.add_argument("--models", type=Path, help="folder for model files; kept")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--picture", type=Path, help="write the picture of `controlled` to this file")
    args = parser.parse_args()
    parts = args.only.split(",")
    found: dict[str, Any] = {"machine": machine.describe()}
    with tempfile.TemporaryDirectory() as temporary:
        if "controlled" in parts:
            cells = found["controlled"] = controlled(args.models or Path(temporary), args.shape, args.rounds)
            show("controlled acceptance: seconds without drafts by seconds with them", cells)
            if args.picture:
                draw_map(cells, args.picture, f"{args.shape} shape, bfloat16, {machine.describe()['cpu']}")
    if "earned" in parts:
        rows = found["earned"] = earned(args.rounds, args.chats, args.before)
        show(f"embedded model, after {args.before} chats per task", rows)
    if "repeated" in parts:
        found["repeated"] = repeated(args.chats)
        show("requests again", [found["repeated"]])
    if "together" in parts:
        with tempfile.TemporaryDirectory() as temporary:
            rows = found["together"] = together(args.models or Path(temporary), args.shape, args.rounds)
        show("32 requests at a time: seconds without drafts by seconds with them", rows)
    if "records" in parts:
        rows = found["records"] = records(args.rounds)
        show("64 JSON records by the embedded model, 16 at once", rows)
    if args.json is not None:
        write_result(args.json, found)


if __name__ == "__main__":
    main()
