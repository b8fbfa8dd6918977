"""Goals for an H200, with lower bounds (floors) below which a result counts as an error."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Goal:
    """A goal for one figure of a row. at_most: smaller is better."""

    part: str
    what: str
    figure: str
    goal: float
    floor: float | None = None
    at_most: bool = False


GOALS = (
    Goal("attention", "decode, batch 32, context 4096", "share_of_copy", 0.90, 0.75),
    Goal("attention", "decode, batch 1, context 65536", "share_of_copy", 0.75, 0.60),
    Goal("attention", "decode, batch 32, context 4096", "fp8_speedup", 1.8, 1.6),
    Goal("step", "llama-8b decode, batch 1", "share_of_bound", 0.85, 0.75),
    Goal("step", "llama-8b decode, batch 64", "share_of_bound", 0.75, 0.65),
    Goal("step", "llama-8b prefill, 8192 tokens", "share_of_bound", 0.65, 0.50),
    Goal("step", "llama-8b decode, batch 1", "host_share", 0.05, at_most=True),
    Goal("step", "llama-8b decode, batch 64", "host_share", 0.05, at_most=True),
    Goal("serving", "qwen3-0.6b nano-vllm", "quire / transformers", 3.0),
    Goal("serving", "llama-8b nano-vllm", "quire / transformers", 3.0),
)


def judged(parts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each goal of the measured parts with its value and verdict. The value is None if it was not measured."""
    return [{**asdict(goal), **_judged(goal, parts[goal.part]["rows"])} for goal in GOALS if goal.part in parts]


def _judged(goal: Goal, rows: list[dict[str, Any]]) -> dict[str, Any]:
    value = next((row.get(goal.figure) for row in rows if row["what"] == goal.what), None)
    if value is None:
        return {"value": None, "verdict": "not measured"}
    sign = -1 if goal.at_most else 1
    if sign * value >= sign * goal.goal:
        return {"value": value, "verdict": "goal"}
    missed = goal.floor is None or sign * value < sign * goal.floor
    return {"value": value, "verdict": "missed" if missed else "floor"}
