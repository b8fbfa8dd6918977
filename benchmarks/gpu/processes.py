"""Runs each part in a process of its own, with a time limit. The process writes its rows after every measurement.

After an error that a device does not recover from, or a kernel that never ends, only the rest of that part is lost.
This module imports nothing that initialises a device.
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

GRACE = 20.0  # seconds after its deadline in which a part must exit before it is killed
LOOK = 2.0  # seconds between two reads of its file

Row = dict[str, Any]  # figures by name; "what" is the name of the row


@dataclass(frozen=True)
class Settings:
    """Settings of all parts. peers: interpreters of other engines, by name."""

    device: str
    tiny: bool
    shapes: list[str]
    models: Path
    peers: dict[str, str]
    repeat: int


@dataclass(frozen=True)
class Task:
    """A part that a process runs. file: where its rows are written. limits: see `benchmarks.gpu.limits`."""

    name: str
    module: str
    settings: Settings
    limits: Row
    file: Path
    deadline: float  # of time.monotonic(), which is equal in all processes


def run(name: str, module: str, settings: Settings, limits: Row, seconds: float, tell: Callable[[Row], None]) -> Row:
    """Measure a part in a new process for at most `seconds`. Calls tell(found) repeatedly meanwhile.

    The result has "rows" and "skipped" as in Part; at the end also "seconds", and in "ended" how the process ended.
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
    """Body of the new process."""
    try:
        part = import_module("benchmarks.gpu.part").Part(task.name, task.file, task.deadline, task.limits)
        import_module(f"benchmarks.gpu.{task.module}").measure(part, task.settings)
    except Exception as error:
        found = json.loads(task.file.read_text())
        found["skipped"].append({"what": f"the rest of {task.name}", "why": f"{type(error).__name__}: {error}"})
        task.file.write_text(json.dumps(found))
        raise
