"""Forced tokens of JSON records (jump-forward): steps and seconds with and without them.

A question is a sentence and the keys of a record, as in `benchmarks.structured.jump`. `right` counts records that equal
the true ones, which says how well this small model reads them.
"""

from statistics import median
from typing import Any

from benchmarks.real.model import model_file
from benchmarks.structured import jump


def forced(rounds: int = 3, count: int = 16) -> list[dict[str, Any]]:
    """A row for each way of writing `count` records, 16 at once. `steps, one by one`: of a quarter of them."""
    found = jump.measure("auto", count, rounds, model=str(model_file()), dtype="auto", memory="2GiB")
    rows = []
    for way, row in found["ways"].items():
        figures = {name: row[name] for name in ("tokens", "forced", "steps", "right", "valid")}
        seconds = [
            before / now for before, now in zip(found["ways"]["token by token"]["seconds"], row["seconds"], strict=True)
        ]
        figures["steps, one by one"] = found["steps_alone"][way]
        figures["seconds"] = round(median(row["seconds"]), 3)
        figures["time of token by token over this"] = round(median(seconds), 2)
        rows.append({"way": way, **figures})
    return rows
