"""CPU time of quire's decoder beside `model_impl="transformers"`, for shapes of several model families.

Both engines have one thread, so that no thread waits in a loop and counts as CPU time. They take turns. The time of a
decode step is the difference of two runs, with 65 and with 1 output tokens for each query, divided by 64.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.cpu.engines import Answer, Engine
from benchmarks.cpu.turns import Figures, Turns, compared
from benchmarks.workloads import Workload, unrelated

FAMILIES = ("0.5b", "smollm3-0.5b", "glm4-moe-small", "gemma4-small")
_ONE, _MANY, _PROMPT = "decode step of 1 row, CPU s", "decode step of 16 rows, CPU s", "prompt of 1024 tokens, CPU s"
BOUNDS: Mapping[str, Mapping[str, float]] = {
    _ONE: {"goal": 3.0, "floor": 2.0},
    _MANY: {"goal": 2.3, "floor": 1.7},
    _PROMPT: {"goal": 1.3, "floor": 1.1},
}
_NUM_STEPS = 64
_RUNS = {  # queries, prompt tokens and output tokens of each
    "1 row": (1, 16, 1 + _NUM_STEPS),
    "1 row, first token": (1, 16, 1),
    "16 rows": (16, 16, 1 + _NUM_STEPS),
    "16 rows, first token": (16, 16, 1),
    "prompt": (1, 1024, 1),
}


def _make(name: str, seed: int) -> Workload:
    return unrelated(name, seed, *_RUNS[name])


def family_turns(model: Path, repeat: int) -> Turns:
    """Turns of both implementations of a model."""
    implementations = {"quire": "quire", "quire:transformers": "transformers"}
    engines = [
        Engine(
            name,
            sys.executable,
            model,
            max_num_seqs=16,
            max_model_len=2048,
            options={"threads": 1, "model_impl": implementation},
        )
        for name, implementation in implementations.items()
    ]
    return Turns(engines, list(_RUNS), repeat=repeat, make=_make, cold_starts=1)


def family_report(turns: Turns) -> dict[str, Any]:
    """Figures of both engines that have taken their turns, and their ratios; above 1 quire's decoder is faster."""
    by_engine = {
        name: [_figures({run: turns.answers[run][name][number] for run in _RUNS}) for number in range(turns.repeat)]
        for name in turns.facts
    }
    return {"engines": turns.facts, **compared(by_engine)}


def _figures(answers: Mapping[str, Answer]) -> Figures:
    """CPU seconds of one round, whose answers are by run."""
    seconds = {run: answer.cpu_seconds for run, answer in answers.items()}
    return {
        _ONE: (seconds["1 row"] - seconds["1 row, first token"]) / _NUM_STEPS,
        _MANY: (seconds["16 rows"] - seconds["16 rows, first token"]) / _NUM_STEPS,
        _PROMPT: seconds["prompt"],
    }
