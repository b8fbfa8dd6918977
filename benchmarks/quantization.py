"""Accuracy of the embedded model with low-bit weights and KV: exact match, perplexity and KL divergence.

    python -m benchmarks.quantization [--chats 100] [--texts 300] [--only int8:auto,int4:int8] [--json FILE]
        [--plot FILE]

A case is a weight type and a KV type. The weight type may be the folder of a checkpoint that `quire quantize` has
written of the embedded model. Exact matches are those of all golden tasks together; the paired difference to
float32 counts answers that only one of the two has right. Perplexity and KL divergence are those of the tokens of right
answers, each after the true text before it.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import exp, sqrt
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from benchmarks.cpu import machine
from benchmarks.logits import TextModel, negative_logprobs
from benchmarks.result_file import write_result
from quire.config import EngineOptions
from quire.hub import embedded
from quire.startup.build import Prepared, prepare
from quire.tokenizer.tokenizer import Tokenizer
from quire.weights.schemes import AT_LOAD
from tools.demo_model.golden import CHATS, GOLDEN_TASKS, SEED
from tools.demo_model.questions import questions
from tools.demo_model.score import Run, ScoringRun

WEIGHTS = {"float32": ("float32", None), "bfloat16": ("bfloat16", None)} | {
    name: ("bfloat16", name) for name in AT_LOAD
}
CASES = [
    *("float32:auto", "bfloat16:auto", "bfloat16:fp8", "bfloat16:int8", "bfloat16:int4"),
    *("int8:auto", "int8:fp8", "int8:int8", "int8:int4", "fp8:auto", "fp8:fp8"),
    *("int4:auto", "int4:int8", "int4:int4", "mxfp4:auto", "nvfp4:auto"),
]


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one case. lost, won: answers that are right only with float32, or only with this case."""

    case: str
    kernels: str
    weight_bytes: int
    kv_bytes_per_token: int
    answers: int
    right: int
    lost: int
    won: int
    perplexity: float
    kl: float
    kl_error: float  # standard error over texts

    @property
    def difference(self) -> tuple[float, float]:
        """Difference of the exact-match rates to float32 and its standard error, in percent, paired."""
        changed, net = self.lost + self.won, self.won - self.lost
        return 100 * net / self.answers, 100 * sqrt(max(changed - net**2 / self.answers, 0)) / self.answers


def measure(
    case: str, chats: int, texts: int, exact: Run | None, logs: list[torch.Tensor] | None
) -> tuple[Row, Run, list[torch.Tensor]]:
    """Figures of a case, with its answers and log-probabilities. exact, logs: those of float32; None if this is it."""
    options = options_of(case)
    names = {"quantization": options.quantization, "kv_cache_dtype": options.kv_cache_dtype}
    chosen = {name: value for name, value in names.items() if value is not None}
    run = ScoringRun(
        model=Path(options.model or embedded.folder()),
        dtype=options.dtype,
        options=chosen,
        tasks=GOLDEN_TASKS,
        chats=chats,
        seed=SEED,
    ).run()
    prepared = prepare(options, report=_ignore_line, progress=_ignore)
    found, targets = log_probabilities(prepared, texts)
    nlls = torch.cat([negative_logprobs(*pair) for pair in zip(found, targets, strict=True)])
    divergences = [(p.exp() * (p - q)).sum(1) for p, q in zip(logs or found, found, strict=True)]
    kl = torch.cat(divergences).mean()
    deviations = torch.stack([(some - kl).sum() for some in divergences])  # by text, as its tokens are not independent
    before = [answer.text == answer.expected for answer in (exact or run).answers]
    now = [answer.text == answer.expected for answer in run.answers]
    row = Row(
        case=case,
        kernels=prepared.kernels.kernels.NAME,
        weight_bytes=prepared.files.description.weight_bytes(prepared.dtype, prepared.schemes),
        kv_bytes_per_token=sum(group.bytes_per_block for group in prepared.cache.groups) // prepared.cache.block_size,
        answers=len(now),
        right=sum(now),
        lost=sum(a and not b for a, b in zip(before, now, strict=True)),
        won=sum(b and not a for a, b in zip(before, now, strict=True)),
        perplexity=exp(nlls.mean().item()),
        kl=kl.item(),
        kl_error=deviations.norm().item() / len(nlls),
    )
    return row, run, found


def options_of(case: str) -> EngineOptions:
    """The options of "WEIGHTS:KV". Raises SystemExit for a case that is not in CASES and begins with no folder."""
    weights, _, kv = case.rpartition(":")
    fields: dict[str, Any] = {"kv_cache_dtype": kv}
    if case in CASES:
        fields["dtype"], fields["quantization"] = WEIGHTS[weights]
    elif Path(weights).is_dir():
        fields["model"] = weights
    else:
        raise SystemExit(f"no case {case!r}; there are {', '.join(CASES)}, and FOLDER:KV")
    return EngineOptions(memory="512MiB", speculation="off", **fields)


def log_probabilities(prepared: Prepared, texts: int) -> tuple[list[torch.Tensor], list[list[int]]]:
    """Log-probabilities (tokens, vocab_size) of the answers to `texts` questions, and the ids of these tokens."""
    model, tokenizer = TextModel(prepared), Tokenizer.from_folder(embedded.folder())
    found, targets = [], []
    for question in _sample(tokenizer, texts):
        targets.append(tokenizer.encode(question.expected, add_special_tokens=False))
        found.append(model.log_probabilities(question.prompt + targets[-1], len(question.prompt)))
    return found, targets


def _sample(tokenizer: Tokenizer, texts: int) -> list[Any]:
    """`texts` questions, spread over the golden tasks."""
    drawn = questions(GOLDEN_TASKS, max(1, 2 * texts // len(GOLDEN_TASKS)), SEED + 1, tokenizer)
    fitting = [question for question in drawn if question.num_tokens <= 2048 and question.expected]
    return fitting[:: max(1, len(fitting) // texts)][:texts]


def table(rows: Sequence[Row]) -> str:
    """The figures in Markdown."""
    lines = [
        "| weights:KV | kernels | weights, MB | KV, B/token | exact match, % | paired difference | perplexity | KL |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        rate = row.right / row.answers
        error = 100 * sqrt(rate * (1 - rate) / row.answers)
        net, net_error = row.difference
        lines.append(
            f"| {row.case} | {row.kernels} | {row.weight_bytes / 1e6:.2f} | {row.kv_bytes_per_token} | "
            f"{100 * rate:.2f} ± {error:.2f} | {net:+.2f} ± {net_error:.2f} | {row.perplexity:.4f} | "
            f"{row.kl:.5f} ± {row.kl_error:.5f} |"
        )
    return "\n".join(lines)


def draw(rows: Sequence[Row], path: Path) -> None:
    """A picture of size against exact match. Raises SystemExit without matplotlib."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  (an optional package)
    except ImportError as error:
        raise SystemExit("--plot needs matplotlib: pip install -e '.[plots]'") from error
    figure = Figure(figsize=(6.4, 3.6), layout="constrained", facecolor="white")
    axes = figure.subplots()
    for kv, marker in (("auto", "o"), ("fp8", "s"), ("int8", "^"), ("int4", "v")):
        some = [row for row in rows if row.case.endswith(f":{kv}")]
        if not some:
            continue
        rates = [row.right / row.answers for row in some]
        errors = [100 * sqrt(rate * (1 - rate) / row.answers) for rate, row in zip(rates, some, strict=True)]
        sizes = [row.weight_bytes / 1e6 for row in some]
        label = "KV as computed" if kv == "auto" else f"{kv} KV"
        axes.errorbar(sizes, [100 * rate for rate in rates], errors, fmt=marker, capsize=3, label=label)
        for size, rate, row in zip(sizes, rates, some, strict=True):
            if kv == "auto":
                offset = {"textcoords": "offset points", "xytext": (6, 6)}
                axes.annotate(row.case.partition(":")[0], (size, 100 * rate), fontsize=8, **offset)
    axes.set(xlabel="weights, MB", ylabel="exact match, %", title="Size against accuracy, embedded model")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def _ignore(done: int, total: int) -> None:
    """Ignore the progress."""


def _ignore_line(line: str) -> None:
    """Ignore the line."""


def main() -> None:
    """Measure the cases one after another, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quantization", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--chats", type=int, default=CHATS, help="per task, for exact match")
    parser.add_argument("--texts", type=int, default=300, help="right answers, for perplexity and KL")
    parser.add_argument("--only", type=lambda text: text.split(","), default=CASES, help="cases WEIGHTS:KV")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--plot", type=Path, help="draw size against accuracy to this file")
    args = parser.parse_args()
    rows: list[Row] = []
    exact, logs = None, None
    cases = [CASES[0], *(case for case in args.only if case != CASES[0])]
    for case in track(cases, "cases", console=Console(stderr=True), transient=True):
        row, run, found = measure(case, args.chats, args.texts, exact, logs)
        rows.append(row)
        if exact is None:
            exact, logs = run, found
    print(table(rows))
    if args.json is not None:
        kept = {
            "machine": machine.describe(),
            "chats": args.chats,
            "texts": args.texts,
            "rows": [asdict(row) for row in rows],
        }
        write_result(args.json, kept)
    if args.plot is not None:
        draw(rows, args.plot)


if __name__ == "__main__":
    main()
