"""Driver for `quire serve`: a server process, which gets streaming requests over loopback."""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from urllib.parse import SplitResult, urlsplit

from protocol import Driven, Queries, Result, drive

import quire

_USAGE_BYTES = 2048  # the end of a stream, which contains the usage
_SERVE = (sys.executable, "-c", "from quire.cli import main; main()", "serve")


def load(settings: dict) -> Driven:
    """Start a server. It ends with the process group of this driver."""
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
    return await asyncio.gather(*(_one(urlsplit(url), query) for query in queries))


async def _one(url: SplitResult, query: dict) -> tuple[int, float]:
    """Output tokens as counted by the server, and the time of the first token.

    A real client runs on another machine. This one shares the server's cores, so it does as little work as possible.
    """
    asked = {"prompt": query["prompt"], "max_tokens": query["out"], "temperature": 0, "ignore_eos": True}
    body = json.dumps(asked | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    first, tail = None, b""
    while piece := await reader.read(2**16):
        if first is None and b"data: " in piece:
            first = time.perf_counter()
        tail = (tail + piece)[-_USAGE_BYTES:]
    writer.close()
    usage = re.search(rb'"completion_tokens": ?(\d+)', tail)
    assert first is not None and usage is not None, tail
    return int(usage[1]), first


if __name__ == "__main__":
    drive(load)
