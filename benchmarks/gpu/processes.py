"""Each part runs in a process of its own, which ends in time and writes its rows after every one.

So an error that a device does not recover from, or a kernel that never ends, costs what was still to be measured of
that part, and nothing else. This file imports nothing that may touch a device.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

GRACE = 20.0  # seconds that a part has to end by itself, before its process is ended
LOOK = 2.0  # seconds between two looks at its rows

Row = dict[str, Any]  # figures by name, and under "what" whose they are


@dataclass(frozen=True)
class Settings:
    """What all parts are told. peers: interpreters of other engines, by name."""

    device: str
    tiny: bool
    shapes: list[str]
    models: Path
    peers: dict[str, str]
    repeat: int


@dataclass(frozen=True)
class Task:
    """A part for a process. file: where its rows are written. limits: see `benchmarks.gpu.limits`."""

    name: str
    module: str
    settings: Settings
    limits: Row
    file: Path
    deadline: float  # of time.monotonic(), which all processes share


def run(name: str, module: str, settings: Settings, limits: Row, seconds: float, tell: Callable[[Row], None]) -> Row:
    """Measure a part in a new process, for so many seconds at most. tell(found) is called while it runs.

    What is found has "rows" and "skipped", see Part, and in the end "seconds", and how it "ended".
    """
    begin = time.monotonic()
    task = Task(name, module, settings, limits, settings.models / f"{name}-{os.getpid()}.json", begin + seconds)
    task.file.write_text(json.dumps({"rows": [], "skipped": []}))
    process = get_context("spawn").Process(target=_measure, args=(task,))
    process.start()
    while process.is_alive() and time.monotonic() < task.deadline + GRACE:
        process.join(LOOK)
        tell(json.loads(task.file.read_text()))
    ended = "by itself"
    if process.is_alive():
        process.kill()
        process.join()
        ended = f"it was ended after {seconds + GRACE:.0f} s"
    elif process.exitcode:
        ended = f"with status {process.exitcode}"
    found: Row = json.loads(task.file.read_text())
    task.file.unlink()
    found |= {"seconds": round(time.monotonic() - begin, 1), "ended": ended}
    tell(found)
    return found


def _measure(task: Task) -> None:
    """In the new process."""
    try:
        part = import_module("benchmarks.gpu.part").Part(task.name, task.file, task.deadline, task.limits)
        import_module(f"benchmarks.gpu.{task.module}").measure(part, task.settings)
    except Exception as error:
        found = json.loads(task.file.read_text())
        found["skipped"].append({"what": f"the rest of {task.name}", "why": f"{type(error).__name__}: {error}"})
        task.file.write_text(json.dumps(found))
        raise
