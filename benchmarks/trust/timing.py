"""Timing side channels: whether latencies reveal which schema or which prompt another tenant used.

In each trial the victim sends a request, or another one of the same size. Then the observer sends the first request and
measures the latency. A request has a schema, which is compiled and cached, or a prompt, whose KV is cached and whose
answer has drafts if it is known.
"""

import json
import tempfile
import time
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from random import Random
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np
from rich.console import Console
from rich.progress import track

from benchmarks.commit import commit_of
from benchmarks.trust.server import served
from quire.server.api_keys import add_key, new_key
from quire.startup.hardware import cpu_description

FLAGS = (
    *("--dtype", "float32", "--memory", "512MiB", "--max-num-seqs", "8", "--max-model-len", "1024"),
    *("--speculation", "auto"),
)
BOUNDS = (0.45, 0.55)  # of an AUC that reveals nothing
_NUM_PROPERTIES = 12
_PROMPT_TOKENS = 12
_OUTPUT_TOKENS = 24
_WARM_UP = 20  # trials

Ask = Callable[[str, dict[str, object]], float]


class Channel(NamedTuple):
    """Results. AUC: the probability that a request that the victim sent is answered faster; 0.5: no information."""

    auc: float  # the victim is another tenant
    auc_same_tenant: float  # the victim has the observer's tenant: the cache is shared
    seconds: float  # median latency of the observer, request not sent by the victim

    @property
    def good(self) -> bool:
        """Whether requests of other tenants are not revealed, although the trial can tell."""
        return BOUNDS[0] <= self.auc <= BOUNDS[1] < self.auc_same_tenant


class Timing(NamedTuple):
    """Results of all channels."""

    num_trials: int  # for each AUC
    schemas: dict[str, float]  # fields of a Channel
    answers: dict[str, float]
    good: bool
    commit: str
    machine: str


def timing(num_trials: int = 2000, seed: int = 1) -> Timing:
    """Run the trials at a real server with two tenants."""
    commit = commit_of()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "keys.json")
        keys = {}
        for tenant in ("victim", "observer"):
            keys[tenant], entry = new_key(tenant, "user")
            add_key(path, entry)
        with served(*FLAGS, "--api-key-file", str(path)) as server:
            place = urlsplit(server.url).netloc
            connections = {tenant: HTTPConnection(place, timeout=60) for tenant in keys}

            def ask(tenant: str, body: dict[str, object]) -> float:
                return _ask(connections[tenant], keys[tenant], body)

            channels = []
            for draw in (_schema_request, _prompt_request):
                auc, seconds = _trials(num_trials, Random(seed), draw, ask, "victim")
                auc_same_tenant, _ = _trials(num_trials, Random(seed + 1), draw, ask, "observer")
                channels.append(Channel(auc, auc_same_tenant, seconds))
            for connection in connections.values():
                connection.close()
    schemas, answers = (channel._asdict() for channel in channels)
    good = all(channel.good for channel in channels)
    return Timing(num_trials, schemas, answers, good, commit, cpu_description())


def _trials(
    num_trials: int, chance: Random, draw: Callable[[Random], dict[str, object]], ask: Ask, victim: str
) -> tuple[float, float]:
    """AUC and median latency without use by the victim, over `num_trials` trials. draw: makes a request."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for i in track(range(num_trials + _WARM_UP), f"{draw.__name__}, {victim}", console=Console(stderr=True)):
        body, other = draw(chance), draw(chance)
        is_used = bool(chance.getrandbits(1))
        ask(victim, body if is_used else other)
        seconds = ask("observer", body)
        if i >= _WARM_UP:
            times[is_used].append(seconds)
    used, unused = np.array(times[True]), np.array(times[False])
    auc = (used[:, None] < unused).mean() + (used[:, None] == unused).mean() / 2
    return round(float(auc), 4), round(float(np.median(unused)), 6)


def _prompt_request(chance: Random) -> dict[str, object]:
    """A request with a prompt that no request had before. All have the same length."""
    prompt = [chance.randrange(3, 2048) for _ in range(_PROMPT_TOKENS)]
    return {"prompt": prompt, "max_tokens": _OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}


def _schema_request(chance: Random) -> dict[str, object]:
    """A request with a schema that no request had before. All have the same length."""
    names = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=10)) for _ in range(_NUM_PROPERTIES)]
    properties = {name: {"type": "string", "pattern": "^[a-f]{3,9}-[0-9]{2}$"} for name in names}
    schema = {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
    form = {"json": json.dumps(schema)}
    return {"prompt": "A record: ", "max_tokens": 1, "temperature": 0, "structured_outputs": form}


def _ask(connection: HTTPConnection, key: str, body: dict[str, object]) -> float:
    """Send a request. Returns its latency in seconds."""
    data = json.dumps(body).encode()
    begin = time.perf_counter()
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    connection.request("POST", "/v1/completions", data, headers)
    answer = connection.getresponse()
    answer.read()
    seconds = time.perf_counter() - begin
    if answer.status != 200:
        raise RuntimeError(f"a request of a trial was answered with {answer.status}")
    return seconds
