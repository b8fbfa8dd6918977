"""Driver for `quire serve`: a server process, which gets streaming requests over loopback."""

import asyncio
import json
import os
import re
import subprocess
import sys
from urllib.parse import SplitResult, urlsplit

from protocol import Driven, Queries, drive

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
        "--speculation": "off",
    }
    words = [str(word) for flag in flags.items() for word in flag]
    server = subprocess.Popen(
        [*_SERVE, settings["model"], *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    url = next(found[0] for line in server.stdout if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))

    def run(queries: Queries) -> list[int]:
        if server.poll() is not None:  # the process object stays alive, and its pipe open, as long as this function
            raise SystemExit("quire serve has ended; run it in a terminal to see why")
        return asyncio.run(_all(url, queries))

    return Driven(run, quire.__version__, len(os.sched_getaffinity(0)), ["memory is of server and client"])


async def _all(url: str, queries: Queries) -> list[int]:
    return await asyncio.gather(*(_one(urlsplit(url), query) for query in queries))


async def _one(url: SplitResult, query: dict) -> int:
    """Output tokens as counted by the server.

    A real client runs on another machine. This one shares the server's cores, so it does as little work as possible.
    """
    asked = {"prompt": query["prompt"], "max_tokens": query["out"], "temperature": 0, "ignore_eos": True}
    body = json.dumps(asked | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    tail = b""
    while piece := await reader.read(2**16):
        tail = (tail + piece)[-_USAGE_BYTES:]
    writer.close()
    usage = re.search(rb'"completion_tokens": ?(\d+)', tail)
    assert usage is not None, tail
    return int(usage[1])


if __name__ == "__main__":
    drive(load)
