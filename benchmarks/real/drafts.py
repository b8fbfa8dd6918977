"""Speculative decoding on eight tasks: accepted drafts, and the time of decoding without drafts over that with them.

One stream, with the governor, at temperature 0 and 0.8. Answers of earlier requests are no drafts. Each task is a
tenant of its own: chances of drafts are learned by tenant, from one run before.
"""

from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.real.model import model_file
from benchmarks.real.tasks import tasks
from benchmarks.speculation import Bench, Run, tokens_per_step

_TEMPERATURES = (0.0, 0.8)
_CONSOLE = Console(stderr=True)


def drafts(rounds: int = 3, most_tokens: int = 96) -> list[dict[str, Any]]:
    """A row for each task and temperature."""
    bench = Bench(str(model_file()), memory="2GiB", max_model_len=2048, max_num_seqs=8)
    speculator = bench.engine.scheduler.speculator
    assert speculator is not None, "the engine drafts"
    speculator.keeps_answers = False
    rows = []
    for task, prompts in tasks(bench.llm.get_tokenizer()).items():
        for temperature in _TEMPERATURES:
            params: dict[str, object] = {"temperature": temperature, "seed": 7, "max_tokens": most_tokens}
            runs: dict[bool, list[Run]] = {False: [], True: []}
            for turn in track(range(rounds + 1), task, console=_CONSOLE, transient=True):
                for kind in (False, True) if turn % 2 else (True, False):
                    for prompt in prompts:
                        runs[kind].append(bench.run([prompt], speculation=kind, tenant=task, **params))
            rows.append({"task": f"{task}, {temperature:g}", **_figures(runs, len(prompts))})
            _CONSOLE.print(rows[-1])
    bench.llm.close()
    return rows


def _figures(runs: dict[bool, list[Run]], num_prompts: int) -> dict[str, Any]:
    """Figures of all rounds except the first, which learns. Ratios above 1: drafts save time."""
    before = [run.tokens for run in runs[False]]
    rounds = {
        kind: [some[i : i + num_prompts] for i in range(num_prompts, len(some), num_prompts)]
        for kind, some in runs.items()
    }
    found: dict[str, Any] = {
        "tokens": sum(run.num_tokens for run in rounds[True][0]),
        "tokens per step": round(median(tokens_per_step(some) for some in rounds[True]), 2),
    }
    num_drafts = sum(run.num_drafts for some in rounds[True] for run in some)
    accepted = sum(run.num_accepted for some in rounds[True] for run in some)
    found |= {"drafts": num_drafts, "accepted, %": round(100 * accepted / num_drafts, 1) if num_drafts else None}
    for what in ("seconds", "cpu_seconds"):
        ratios = [
            sum(getattr(run, what) for run in off) / sum(getattr(run, what) for run in on)
            for off, on in zip(rounds[False], rounds[True], strict=True)
        ]
        name = {"seconds": "time none/with", "cpu_seconds": "CPU none/with"}[what]
        found |= {name: round(median(ratios), 3), f"{name}, range": [round(min(ratios), 3), round(max(ratios), 3)]}
    return found | {"same tokens": [run.tokens for run in runs[True]] == before}
