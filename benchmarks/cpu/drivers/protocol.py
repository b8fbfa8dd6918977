"""Protocol between the benchmark and a driver: one JSON object per line. Imports the standard library only.

The benchmark starts `python NAME_driver.py SETTINGS` and first sends queries for the warm-up. The driver loads the
engine and answers {"ready": seconds, ...}. It then answers each {"name": ..., "queries": [{"prompt": ids, "out": n}]}
with {"seconds": ..., "cpu_seconds": ..., "ttft": ..., "num_tokens": [one per query], "steps": number}, and
{"memory": true} with {"bytes": ..., "kind": ...}. "cpu_seconds" are those of the driver's own process. A query may have
a "form", a JSON schema; it then also has a "seed". All may have an "adapter", a folder. The driver blocks while it
reads its next line, and exits at the end of its input. The engine's own output goes to stderr.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

Queries = list[dict]  # each with "prompt" (token ids) and "out" (exact number of output tokens)


@dataclass
class Driven:
    """A loaded engine. `run` answers all queries at once, and returns the number of output tokens of each.

    Without a "form", it is greedy and ignores end tokens.
    """

    run: Callable[[Queries], list[int]]
    version: str
    threads: int
    notes: list[str] = field(default_factory=list)  # further facts for the report
    steps: Callable[[], int] = lambda: 0  # model steps so far; 0 if the engine does not count them


def drive(load: Callable[[dict], Driven]) -> None:
    """Load the engine with the settings of the command line, and answer queries until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    settings = json.loads(sys.argv[1])
    engine = load(settings)
    warm = json.loads(sys.stdin.readline())["queries"]
    engine.run([{**warm[0], "out": 1}])
    ready = time.time() - settings["started"]
    engine.run(warm)
    facts = {"version": engine.version, "threads": engine.threads, "notes": engine.notes}
    print(json.dumps({"ready": ready, **facts}), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(memory() if "memory" in asked else _measured(engine, asked["queries"])), file=answers)


def _measured(engine: Driven, queries: Queries) -> dict:
    """Run the queries. The TTFT of a single query is the time of a second run, with one output token.

    The prompt of that run is reversed: equal in length, and without a prefix match. Not all engines report their TTFT.
    """
    steps, start, cpu_start = engine.steps(), time.perf_counter(), time.process_time()
    num_tokens = engine.run(queries)
    seconds, cpu_seconds, ttft = time.perf_counter() - start, time.process_time() - cpu_start, None
    steps = engine.steps() - steps
    if len(queries) == 1 and queries[0]["out"] > 1:
        start = time.perf_counter()
        engine.run([{"prompt": queries[0]["prompt"][::-1], "out": 1}])
        ttft = time.perf_counter() - start
    times = {"seconds": seconds, "cpu_seconds": cpu_seconds, "ttft": ttft}
    return {**times, "num_tokens": num_tokens, "steps": steps}


def memory() -> dict:
    """Resident bytes of this process and its descendants: PSS, which counts a shared page once, or else RSS."""
    processes = [os.getpid()]
    for pid in processes:  # the list grows during the loop
        for task in Path(f"/proc/{pid}/task").iterdir():
            processes += map(int, (task / "children").read_text().split())
    try:
        return {"bytes": _total(processes, "smaps_rollup", "Pss:"), "kind": "PSS"}
    except OSError:
        return {"bytes": _total(processes, "status", "VmRSS:"), "kind": "RSS"}


def _total(processes: list[int], file: str, name: str) -> int:
    texts = [Path(f"/proc/{pid}/{file}").read_text() for pid in processes]
    return sum(1024 * int(line.split()[1]) for text in texts for line in text.splitlines() if line.startswith(name))
