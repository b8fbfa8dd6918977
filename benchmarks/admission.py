"""CPU time of an admission to the KV cache, and the part of it that explains why the prefix match ended.

    python -m benchmarks.admission [--rounds 5] [--before CHECKOUT] [--json FILE]

Each admission is of a prompt whose first `shared` tokens are cached. In a full pool each evicts blocks of others.
--before adds another version of quire, whose processes take turns with those of this one.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.cpu.machine import describe
from benchmarks.result_file import write_result
from quire.cache.kv_cache import KVCache
from quire.config import CacheConfig
from quire.core.kv_groups import KVGroup, kv_kind
from quire.core.request import Namespace

BLOCK_SIZE, ADMISSIONS = 16, 300
# (prompt tokens, cached tokens, whether the pool is full, number of cache salts)
CASES = (
    *((length, shared, full, 1) for length, shared in ((128, 0), (512, 256), (4096, 4000)) for full in (False, True)),
    (512, 256, False, 8),
)


def main() -> None:
    """Print a row per case, and write the rows to the file of --json."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--before", type=Path, help="a checkout of another version of quire")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one-round", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one_round:
        _measure(*CASES[0])  # warm up
        print(json.dumps([_measure(*case) for case in CASES]))
        return
    here = Path(__file__).resolve().parents[1]
    checkouts = {"now": here, **({"before": args.before.resolve()} if args.before else {})}
    rounds: dict[str, list[list[dict[str, float]]]] = {name: [] for name in checkouts}
    for _ in range(args.rounds):
        for name, checkout in checkouts.items():
            rounds[name].append(_in_process(here, checkout))
    rows = []
    for i, case in enumerate(CASES):
        row: dict[str, Any] = dict(zip(("prompt", "cached", "full_pool", "salts"), case, strict=True))
        for name, found in rounds.items():
            for part in ("admit_us", "explain_us"):
                row[f"{name}_{part}"] = round(statistics.median(one[i][part] for one in found), 1)
        rows.append(row)
        print(row)
    if args.json:
        write_result(args.json, {"machine": describe(), "rows": rows})


def _in_process(here: Path, checkout: Path) -> list[dict[str, float]]:
    """One round with quire from `checkout`. This file is the same for both versions."""
    path = os.pathsep.join([str(checkout), str(here)])
    command = [sys.executable, str(here / "benchmarks" / "admission.py"), "--one-round"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, check=True)
    found: list[dict[str, float]] = json.loads(done.stdout)
    return found


def _measure(length: int, shared: int, full_pool: bool, num_salts: int) -> dict[str, float]:  # noqa: FBT001
    """Mean CPU microseconds of an admission, and of `explain_miss` within it."""
    rng, clock = random.Random(1), time.process_time_ns
    num_blocks = (20 if full_pool else ADMISSIONS + 20) * (length // BLOCK_SIZE + 2)
    cache = KVCache(CacheConfig(BLOCK_SIZE, (KVGroup((0,), kv_kind(1, 1), "float32", num_blocks, 128),), "radix"))
    head = [rng.randrange(50_000) for _ in range(shared)]
    explain, admitted, explained = cache.index.explain_miss, 0, 0

    def timed(*args: Any) -> Any:  # noqa: ANN401
        nonlocal explained
        start = clock()
        miss = explain(*args)
        explained += clock() - start
        return miss

    cache.index.explain_miss = timed  # type: ignore[method-assign]
    for i in range(ADMISSIONS):
        tokens = head + [rng.randrange(50_000) for _ in range(length - shared)]
        namespace = Namespace(salt=str(i % num_salts))
        start = clock()
        cache.admit(i, tokens, namespace, reusable=length - 1, limit=length, max_new_positions=length)
        admitted += clock() - start
        cache.release(i, length)
    return {"admit_us": admitted / ADMISSIONS / 1e3, "explain_us": explained / ADMISSIONS / 1e3}


if __name__ == "__main__":
    main()
