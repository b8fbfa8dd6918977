"""Schemathesis on every route of a server: requests that its OpenAPI document allows, and others.

python -m tools.schema_fuzz [--examples 300] [--seed 1] [--url URL --key KEY]

Without a URL, starts `quire serve` with the embedded model and a key. No status of 500 or above is allowed except 503;
no answer may take longer than TIMEOUT; invalid requests must be rejected as documented. At the end only the prefix
index may hold blocks, and it must free all of them. Needs the extra `dev`.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
TIMEOUT = 30.0  # seconds per answer
# The first check fails for what a document cannot express: tokens beyond this vocabulary, prompts beyond this context,
# fields that exclude each other. The second fails for OPTIONS: a path with two methods names only the first one.
NOT_CHECKED = "positive_data_acceptance,allow_header_conformance"


def fuzz(
    url: str, key: str, *, examples: int, seed: int | None, hooks: str = "tools.schema_hooks"
) -> subprocess.CompletedProcess[str]:
    """Run all phases, positive and negative. examples: per route. seed: None gives the same cases each time."""
    chance = ["--generation-deterministic"] if seed is None else ["--seed", str(seed), "--generation-database", "none"]
    command = [
        *(str(BIN / "schemathesis"), "run", f"{url}/openapi.json", "--header", f"Authorization: Bearer {key}"),
        *("--mode", "all", "--phases", "examples,coverage,fuzzing,stateful", "--exclude-checks", NOT_CHECKED),
        *("--max-examples", str(examples), "--continue-on-failure", "--request-timeout", str(TIMEOUT), *chance),
        *("--exclude-path", "/monitor"),  # a stream without an end
        *("--output-sanitize", "false", "--no-color", "--warnings", "off"),
    ]
    env = {**os.environ, "SCHEMATHESIS_HOOKS": hooks, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:  # for its files
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, env=env)


def ask(url: str, key: str, method: str = "GET") -> dict[str, object]:
    """The JSON answer of a route."""
    request = urllib.request.Request(url, method=method, headers={"authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
        return json.load(answer)


def left(url: str, key: str) -> dict[str, object]:
    """Counts of requests and blocks still held when the server is idle; empty if there are none. key: an admin's.

    Pins hold blocks until the cache is flushed.
    """
    held: dict[str, object] = {}
    end = time.monotonic() + TIMEOUT
    while time.monotonic() < end:
        health = ask(f"{url}/health", key)
        held = {name: health[name] for name in ("requests_running", "requests_waiting")}
        if not any(held.values()):
            ask(f"{url}/flush_cache", key, "POST")
            cache = ask(f"{url}/get_server_info", key)["cache"]
            held |= {name: cache[name] for name in ("kv_blocks_cached", "kv_blocks_used")}  # type: ignore[index]
            if not any(held.values()):
                return {}
        time.sleep(0.1)
    return {name: number for name, number in held.items() if number}


@contextmanager
def served() -> Iterator[tuple[str, str]]:
    """URL and key of a running `quire serve`."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.json"
        made = subprocess.run(
            [BIN / "quire", "key", "fuzz", "--role", "admin", "--file", keys],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        command = [BIN / "quire", "serve", "--port", "0", "--memory", "512MiB", "--api-key-file", keys]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                url = next(found[0] for line in server.stdout if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
                yield url, made.stdout.strip()
            finally:
                server.terminate()


def main() -> None:
    """Run and print. Exit code 1 after any failure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--examples", type=int, default=300, help="of each route and phase")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--url", help="of a server that runs; needs --key of an admin")
    parser.add_argument("--key", default="")
    args = parser.parse_args()
    if args.url:
        sys.exit(_tell(args.url, args.key, args))
    with served() as (url, key):
        code = _tell(url, key, args)
    sys.exit(code)


def _tell(url: str, key: str, args: argparse.Namespace) -> int:
    run = fuzz(url, key, examples=args.examples, seed=args.seed)
    print(run.stdout)
    held = left(url, key)
    print(f"left at the end: {held or 'nothing'}")
    return int(run.returncode != 0 or bool(held))


if __name__ == "__main__":
    main()
