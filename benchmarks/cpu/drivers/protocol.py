"""What the runner and a driver say to each other: one JSON object a line. Knows no engine, only the standard library.

The runner starts `python NAME_driver.py SETTINGS` and first sends queries to warm up with. The driver loads, answers
{"ready": seconds, ...}, and from then on answers each {"name": ..., "queries": [{"prompt": ids, "out": n}]} with
{"seconds": ..., "ttft": ..., "num_tokens": [of each query]}, and {"memory": true} with {"bytes": ..., "kind": ...}. A
query may have a "form", a JSON schema, and then has a "seed".
Between the two it waits blocked for its next line, and ends with the last one. What the engine prints goes to the
error stream.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

Queries = list[dict]  # of "prompt", token ids, and "out", how many tokens must come
Result = tuple[list[int], float | None]  # tokens that came for each query, seconds to the first of the first query


@dataclass
class Driven:
    """A loaded engine. `run` answers all queries at once, greedily, and does not stop at end tokens."""

    run: Callable[[Queries], Result]
    version: str
    threads: int
    notes: list[str] = field(default_factory=list)  # what else the report should say


def drive(load: Callable[[dict], Driven]) -> None:
    """Load with the settings of the command line, and answer the runner until it has no more to say."""
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
    """Where the engine does not say when the first token of a single query came, a run of its own finds out.

    It has one token of output and the prompt backwards: of the same length, and in nobody's prefix cache.
    """
    start = time.perf_counter()
    num_tokens, ttft = engine.run(queries)
    seconds = time.perf_counter() - start
    ttft_is = "of the run"
    if ttft is None and [query["out"] for query in queries] == [1]:
        ttft = seconds
    if ttft is None and len(queries) == 1:
        start = time.perf_counter()
        engine.run([{"prompt": queries[0]["prompt"][::-1], "out": 1}])
        ttft, ttft_is = time.perf_counter() - start, "of another run, with one token of output"
    return {"seconds": seconds, "ttft": ttft, "ttft_is": ttft_is, "num_tokens": num_tokens}


def memory() -> dict:
    """Resident bytes of this process and all below it. PSS counts a shared page once; RSS where PSS is not readable."""
    processes = [os.getpid()]
    for pid in processes:  # grows while it is read
        for task in Path(f"/proc/{pid}/task").iterdir():
            processes += map(int, (task / "children").read_text().split())
    try:
        return {"bytes": _total(processes, "smaps_rollup", "Pss:"), "kind": "PSS"}
    except OSError:
        return {"bytes": _total(processes, "status", "VmRSS:"), "kind": "RSS"}


def _total(processes: list[int], file: str, name: str) -> int:
    texts = [Path(f"/proc/{pid}/{file}").read_text() for pid in processes]
    return sum(1024 * int(line.split()[1]) for text in texts for line in text.splitlines() if line.startswith(name))
