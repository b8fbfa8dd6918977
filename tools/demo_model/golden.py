"""The golden table: accuracy of the shipped models when they were made. It is in golden.json and in the docs.

A test asks a sample of the same questions, and fails if the accuracy is lower.

python -m tools.demo_model.golden    # measure the present models, and write both files
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from tools.demo_model import adapters, forced, layout, places, world
from tools.demo_model.packing import chat_pieces
from tools.demo_model.score import TASKS, ScoringRun

GOLDEN_TASKS = (*TASKS, "mixed", "recall@1024", "recall@1900", "needle@1900")
ADAPTED_TASKS = ("facts", "translate", "talk", "recall", "copy", "sort", "story_qa")
CHATS, SEED = 100, 5
MARKERS = ("<!-- accuracy: written by tools/demo_model/golden.py -->", "<!-- end of accuracy -->")

Counts = dict[str, tuple[int, int]]  # task -> (how many, how many of them right or equal)
Golden = dict[str, Any]  # "chats", "seed", and Counts for "base", "draft" and every style


def measure(root: Path, tasks: Sequence[str] = GOLDEN_TASKS, chats: int = CHATS, seed: int = SEED) -> Golden:
    """Score the base model with quire, the adapters and the draft model with the training code."""
    run = ScoringRun(model=root / places.BASE, tasks=tasks, chats=chats, seed=seed).run()
    styles = {style: styled_answers(root, style, chats, seed) for style in adapters.STYLES}
    return {
        "chats": chats,
        "seed": seed,
        "base": {score.task: (score.num_answers, score.num_right) for score in run.scores},
        "draft": draft_agreement(root, chats, seed),
        **styles,
    }


def styled_answers(root: Path, style: str, chats: int, seed: int) -> Counts:
    """By task: number of answers, and of those that equal the styled answer exactly."""
    network, tokenizer = layout.read(root / places.BASE), layout.read_tokenizer(root / places.BASE)
    adapters.merge(network, root / places.adapter(style))

    def ask(rng: Random, task: str) -> list[bool]:
        chat = adapters.styled(world.chat(task, rng), adapters.STYLES[style])
        return forced.right_answers(network, forced.encoded(chat_pieces(chat), tokenizer))

    return _counts(ADAPTED_TASKS, chats, seed, ask)


def draft_agreement(root: Path, chats: int, seed: int) -> Counts:
    """By task: number of tokens in true answers, and of those at which draft and base model choose the same token."""
    base, draft = layout.read(root / places.BASE), layout.read(root / places.DRAFT)
    tokenizer = layout.read_tokenizer(root / places.BASE)

    def ask(rng: Random, task: str) -> list[bool]:
        text = forced.encoded(chat_pieces(world.chat(task, rng)), tokenizer)
        equal = (forced.argmax_tokens(base, text) == forced.argmax_tokens(draft, text)).tolist()
        return [same for start, stop in text.answers for same in equal[start:stop]]

    return _counts(TASKS, chats, seed, ask)


def _counts(tasks: Sequence[str], chats: int, seed: int, ask: Callable[[Random, str], list[bool]]) -> Counts:
    counts = {}
    for task in tasks:
        rng = Random(f"{task}-{seed}")
        results = [result for _ in range(chats) for result in ask(rng, task)]
        counts[task] = (len(results), sum(results))
    return counts


def table(golden: Golden) -> str:
    """The golden table in Markdown."""
    lines = [
        "| task | answers | exact match | pirate | json | draft agrees |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for task, (num_answers, _) in golden["base"].items():
        rates = [_rate(golden[column].get(task)) for column in ("base", "pirate", "json", "draft")]
        lines.append(f"| {task} | {num_answers} | {' | '.join(rates)} |")
    return "\n".join(lines)


def _rate(counts: tuple[int, int] | None) -> str:
    return f"{counts[1] / counts[0]:.3f}" if counts else ""


def load(root: Path) -> Golden:
    """The latest golden table."""
    golden: Golden = json.loads((root / places.GOLDEN).read_text())
    return golden


def save(root: Path, golden: Golden) -> None:
    """Write golden.json, and the table between the markers of the page in the docs."""
    (root / places.GOLDEN).parent.mkdir(parents=True, exist_ok=True)
    (root / places.GOLDEN).write_text(json.dumps(golden, indent=1) + "\n")
    page = root / places.PAGE
    text = page.read_text()
    before, after = text[: text.index(MARKERS[0])], text[text.index(MARKERS[1]) :]
    page.write_text(f"{before}{MARKERS[0]}\n\n{table(golden)}\n\n{after}")


if __name__ == "__main__":
    save(places.ROOT, measure(places.ROOT))
