"""Fairness under a flood, through `quire serve` over HTTP with API keys of two tenants, in real time.

The queue limits are the server's defaults. Each request is sent when it is due, whatever the state of earlier ones, and
none is sent again after a refusal. A wait begins when the request is due. The normal load and the flood take turns, so
that both run on the same machine state.
"""

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from benchmarks.policies.fair import Load, arrivals, percentile
from quire.planner.workloads import Session
from quire.server.api_keys import add_key, new_key

_SHAPE = Load(10.0, num_prompt=160, num_output=160)  # long, so that HTTP has a core to spare in the flood
_SHARE = 0.45  # share of the server's rate that the loud tenant normally needs; the quiet one needs half of it
_FLOODS = (1.0, 10.0)
_PATIENCE = 10.0  # seconds after the last request
_MAX_NUM_SEQS = 16
_NUM_TOKENS = 100  # token ids in prompts: below the size of any vocabulary
_FLAGS = ("--port", "0", "--memory", "1GiB", "--max-num-seqs", str(_MAX_NUM_SEQS))
_FLAGS += (
    "--max-num-batched-tokens",
    "256",
    "--threads",
    "1",
    "--speculation",
    "off",
)  # the other core is for HTTP and the clients


class Site(NamedTuple):
    """A server that is ready, and the keys of its tenants."""

    port: int
    keys: Mapping[str, str]
    policy: str


@dataclass
class Found:
    """The quiet tenant's waits under one load, and both tenants' refusals."""

    waits: list[float] = field(default_factory=list)  # seconds to the first token, or to the end of the run without one
    num_unanswered: int = 0
    num_refused: dict[str, int] = field(default_factory=lambda: {"quiet": 0, "loud": 0})

    def figures(self) -> dict[str, float]:
        """The figures."""
        return {
            "p50_s": percentile(self.waits, 0.5),
            "p99_s": percentile(self.waits, 0.99),
            "num": len(self.waits),
            "num_unanswered": self.num_unanswered,
            "num_refused": self.num_refused["quiet"],
            "num_refused_loud": self.num_refused["loud"],
        }


@contextmanager
def site(*flags: str) -> Iterator[Site]:
    """A new `quire serve` process with a key for each of the tenants quiet and loud."""
    with TemporaryDirectory() as folder:
        path, keys = Path(folder) / "keys.json", {}
        for tenant in ("quiet", "loud"):
            keys[tenant], entry = new_key(tenant, "user")
            add_key(path, entry)
        command = [sys.executable, "-u", "-c", "from quire.cli import main; main()", "serve", *_FLAGS, *flags]
        with subprocess.Popen([*command, "--api-key-file", str(path)], stdout=subprocess.PIPE, text=True) as process:
            try:
                lines = iter(process.stdout or ())
                policy = next(line for line in lines if line.startswith("policy")).split()[1].rstrip(":")
                port = next(found[1] for line in lines if (found := re.search(r"ready: .*http://[\d.]+:(\d+)", line)))
                yield Site(int(port), keys, policy)
            finally:
                process.kill()


async def _send(site: Site, one: Session, *, stream: bool) -> tuple[int, float]:
    """(HTTP status, time of the first token or else of the whole answer) of a request, whose answer is read fully."""
    (turn,) = one.turns
    body = {"prompt": [token % _NUM_TOKENS for token in turn.new[0]], "max_tokens": turn.num_output}
    body |= {"temperature": 0, "ignore_eos": True, "stream": stream}
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
    head += f"authorization: Bearer {site.keys[one.tenant]}\r\ncontent-length: {len(content)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    try:
        writer.write(head.encode() + content)
        status = int((await reader.readline()).split()[1])
        if stream and status == 200:
            while not (await reader.readline()).startswith(b"data:"):
                pass
            first = time.monotonic()
            await reader.read()
            return status, first
        await reader.read()
        return status, time.monotonic()
    finally:
        writer.close()


async def play(site: Site, requests: list[Session], found: Found) -> None:
    """Send each request when it is due. The quiet tenant's are streams."""
    begin, tasks = time.monotonic() + 0.2, []

    async def ask(one: Session) -> None:
        tenant = one.tenant
        status, at = await _send(site, one, stream=tenant == "quiet")
        if status == 429:
            found.num_refused[tenant] += 1
        elif status != 200:
            raise AssertionError(f"the server answered {status}")
        elif tenant == "quiet":
            found.waits.append(at - begin - one.at)

    for one in requests:
        await asyncio.sleep(begin + one.at - time.monotonic())
        tasks.append((one, asyncio.create_task(ask(one))))
    quiet = {task: one for one, task in tasks if one.tenant == "quiet"}
    _, late = await asyncio.wait(quiet, timeout=_PATIENCE)
    found.num_unanswered += len(late)
    found.waits += [time.monotonic() - begin - quiet[task].at for task in late]
    for _, task in tasks:
        task.cancel()
    results = await asyncio.gather(*(task for _, task in tasks), return_exceptions=True)
    if errors := [error for error in results if isinstance(error, Exception)]:
        raise errors[0]


def _rate() -> float:
    """Requests of `_SHAPE` per second that the server completes with full rows."""
    requests = arrivals({"loud": _SHAPE}, 8 * _MAX_NUM_SEQS / _SHAPE.rate, 99)

    async def all_at_once(site: Site) -> None:
        await asyncio.gather(*(_send(site, one, stream=False) for one in requests))

    with site() as served:
        begin = time.monotonic()
        asyncio.run(all_at_once(served))
        return len(requests) / (time.monotonic() - begin)


def live(*, quick: bool = False) -> dict[str, object]:
    """The quiet tenant's refusals and 99th percentile of seconds to the first token, normally and in a flood of 10x."""
    seconds, rounds = (4.0, 1) if quick else (50.0, 5)
    able = _rate()
    rows: dict[str, object] = {"requests a second that the server does": able}
    # without the option, the keys of two tenants make fair the policy
    for policy, flags, some in (("fcfs", ("--policy", "fcfs"), 1), ("fair", (), rounds)):
        normal, flooded = Found(), Found()
        for seed in range(some):
            for flood, found in zip(_FLOODS, (normal, flooded), strict=True):
                loud = replace(_SHAPE, rate=flood * _SHARE * able)
                loads = {"quiet": replace(_SHAPE, rate=_SHARE / 2 * able), "loud": loud}
                with site(*flags) as served:
                    assert served.policy == policy, "the server's default is another one"
                    asyncio.run(play(served, arrivals(loads, seconds, seed), found))
        rows[f"{policy}: normally"], rows[f"{policy}: flooded"] = normal.figures(), flooded.figures()
        rows[f"{policy}: p99 changed by"] = flooded.figures()["p99_s"] / normal.figures()["p99_s"] - 1
    return rows
