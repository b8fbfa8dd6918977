"""Drives `quire serve` as its clients do: a process of its own beside this one, asked in streams over loopback."""

import asyncio
import json
import os
import re
import subprocess
import sys
import time

import httpx
from protocol import Driven, Queries, Result, drive

import quire

_SERVE = (sys.executable, "-c", "from quire.cli import main; main()", "serve")


def load(settings: dict) -> Driven:
    """A server, which ends with the process group of this driver."""
    flags = {
        "--port": 0,
        "--dtype": "bfloat16",
        "--memory": "4GiB",
        "--max-model-len": settings["max_model_len"],
        "--max-num-seqs": settings["max_num_seqs"],
    }
    words = [str(word) for flag in flags.items() for word in flag]
    server = subprocess.Popen(
        [*_SERVE, settings["model"], *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    url = next(found[0] for line in server.stdout if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))

    def run(queries: Queries) -> Result:
        start = time.perf_counter()
        counts, firsts = zip(*asyncio.run(_all(url, queries)), strict=True)
        return list(counts), firsts[0] - start

    return Driven(run, quire.__version__, len(os.sched_getaffinity(0)), ["memory is of server and client"])


async def _all(url: str, queries: Queries) -> list[tuple[int, float]]:
    limits = httpx.Limits(max_connections=len(queries))
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False) as client:
        return await asyncio.gather(*(_one(client, query) for query in queries))


async def _one(client: httpx.AsyncClient, query: dict) -> tuple[int, float]:
    """Tokens of the output, as the server counts them, and when the first came."""
    body = {"prompt": query["prompt"], "max_tokens": query["out"], "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    first, count = None, 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if first is None and line.startswith("data: "):
                first = time.perf_counter()
            if line.startswith("data: ") and '"completion_tokens":' in line:
                count = json.loads(line[6:])["usage"]["completion_tokens"]
    assert first is not None
    return count, first


if __name__ == "__main__":
    drive(load)
