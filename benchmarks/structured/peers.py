"""JSON records beside another engine: equal schema, prompts and weights, in processes that take turns."""

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cpu.engines import Engine, start
from benchmarks.structured.jump import RECORD

MAX_TOKENS = 200
PROMPT = 64


def measure(
    folder: Path, peer: str, python: str, batches: tuple[int, ...] = (1, 32), repeats: int = 5
) -> dict[str, Any]:
    """Records per second of each engine, and their ratio. peer: name of a driver; python: its interpreter."""
    with start(Engine(peer, python, folder)) as other, start(Engine("quire", sys.executable, folder)) as ours:
        rows = []
        for batch in batches:
            seconds: dict[str, list[float]] = {"quire": [], peer: []}
            tokens = {}
            for repeat in range(repeats + 1):
                queries = _queries(batch, repeat)
                for name, running in (("quire", ours), (peer, other)):
                    took, counts = running.answer(queries)
                    seconds[name].append(took)
                    tokens[name] = sum(counts) / batch
            ratios = [b / a for a, b in zip(seconds["quire"][1:], seconds[peer][1:], strict=True)]
            rows.append(
                {
                    "batch": batch,
                    **{f"{name}: seconds": median(one[1:]) for name, one in seconds.items()},
                    **{f"{name}: tokens each": count for name, count in tokens.items()},
                    "ratio": median(ratios),
                    "ratios": ratios,
                }
            )
        return {"peer": other.facts, "rows": rows}


def _queries(batch: int, repeat: int) -> list[dict[str, Any]]:
    """Queries without common prefixes."""
    schema = json.loads(RECORD.text)
    return [
        {
            "prompt": [1000 + (7919 * (batch * repeat + i) + 31 * j) % 20000 for j in range(PROMPT)],
            "out": MAX_TOKENS,
            "form": schema,
            "seed": i,
        }
        for i in range(batch)
    ]
