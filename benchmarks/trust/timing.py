"""Timing side channel of the grammar cache: whether latencies reveal which schema another tenant used.

In each trial the victim sends a request with a schema, or with another schema of the same size. Then the observer sends
a request with the first schema and measures the latency.
"""

import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from random import Random
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np

from benchmarks.trust.server import served
from quire.server.api_keys import add_key, new_key
from quire.startup.hardware import cpu_description

FLAGS = ("--dtype", "float32", "--memory", "512MiB", "--max-num-seqs", "8", "--max-model-len", "1024")
BOUNDS = (0.45, 0.55)  # of an AUC that reveals nothing
_NUM_PROPERTIES = 12
_WARM_UP = 20  # trials

Ask = Callable[[str, str], float]


class Timing(NamedTuple):
    """Results. An AUC is the probability that a schema that the victim used is answered faster; 0.5: no information."""

    num_trials: int  # for each AUC
    auc: float  # the victim is another tenant
    auc_same_tenant: float  # the victim has the observer's tenant: the cache is shared
    seconds: float  # median latency of the observer, schema unused
    commit: str
    machine: str

    @property
    def good(self) -> bool:
        """Whether other tenants' schemas are not revealed, although the trial can tell."""
        return BOUNDS[0] <= self.auc <= BOUNDS[1] < self.auc_same_tenant


def timing(num_trials: int = 2000, seed: int = 1) -> Timing:
    """Run the trials at a real server with two tenants."""
    command = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent
    ).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "keys.json")
        keys = {}
        for tenant in ("victim", "observer"):
            keys[tenant], entry = new_key(tenant, "user")
            add_key(path, entry)
        with served(*FLAGS, "--api-key-file", str(path)) as server:
            place = urlsplit(server.url).netloc
            connections = {tenant: HTTPConnection(place, timeout=60) for tenant in keys}

            def ask(tenant: str, schema: str) -> float:
                return _ask(connections[tenant], keys[tenant], schema)

            auc, seconds = _trials(num_trials, seed, ask, "victim")
            auc_same_tenant, _ = _trials(num_trials, seed + 1, ask, "observer")
            for connection in connections.values():
                connection.close()
    return Timing(num_trials, auc, auc_same_tenant, seconds, commit, cpu_description())


def _trials(num_trials: int, seed: int, ask: Ask, victim: str) -> tuple[float, float]:
    """AUC and median latency without use by the victim, over `num_trials` trials."""
    chance = Random(seed)
    times: dict[bool, list[float]] = {True: [], False: []}
    for i in range(num_trials + _WARM_UP):
        schema, other = _schema(chance), _schema(chance)
        is_used = bool(chance.getrandbits(1))
        ask(victim, schema if is_used else other)
        seconds = ask("observer", schema)
        if i >= _WARM_UP:
            times[is_used].append(seconds)
    used, unused = np.array(times[True]), np.array(times[False])
    auc = (used[:, None] < unused).mean() + (used[:, None] == unused).mean() / 2
    return round(float(auc), 4), round(float(np.median(unused)), 6)


def _schema(chance: Random) -> str:
    """A schema that no request had before. All have the same length."""
    names = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=10)) for _ in range(_NUM_PROPERTIES)]
    properties = {name: {"type": "string", "pattern": "^[a-f]{3,9}-[0-9]{2}$"} for name in names}
    return json.dumps({"type": "object", "properties": properties, "required": names, "additionalProperties": False})


def _ask(connection: HTTPConnection, key: str, schema: str) -> float:
    """Send a request with a schema. Returns its latency in seconds."""
    body = {"prompt": "A record: ", "max_tokens": 1, "temperature": 0, "structured_outputs": {"json": schema}}
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
