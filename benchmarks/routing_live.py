"""The part live of `benchmarks.routing`: engine processes behind one front end, beside their simulation."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from secrets import token_bytes

from quire.config import EngineOptions, Routing
from quire.core.request import Request
from quire.fleet.fleet import Fleet
from quire.params import SamplingParams
from quire.planner.reproduce.reuse import r3_engine, r3_requests
from quire.planner.simulation import Simulation
from quire.planner.workloads import Session, tokens_of
from quire.startup.replica_share import SECRET_BYTES, ReplicaShare
from quire.supervisor.engine_handle import EngineProcess

_PROGRAM = ("-m", "benchmarks.routing_engine")
_ROUTINGS: tuple[Routing, ...] = ("predicted", "round-robin")


def live(num_replicas: int, count: int, journal: Path | None = None) -> list[dict[str, float | str]]:
    """Hit rates of `count` requests of R3, live and simulated, by policy. journal: of the first policy's router."""
    requests = r3_requests(num_replicas, count)
    rows: list[dict[str, float | str]] = []
    for routing in _ROUTINGS:
        found = asyncio.run(_hit_rate(num_replicas, requests, routing, journal if routing == _ROUTINGS[0] else None))
        setup = replace(r3_engine(), num_replicas=num_replicas, routing=routing)
        simulated = Simulation(setup).run(requests).hit_rate
        rows.append({"replicas": num_replicas, "routing": routing, "live": found, "simulated": simulated})
    return rows


async def _hit_rate(num_replicas: int, requests: Sequence[Session], routing: Routing, journal: Path | None) -> float:
    """Of requests that arrive in real time."""
    setup = r3_engine()
    secret, costs = token_bytes(SECRET_BYTES), setup.profile.calibration(setup.scheduler.max_num_batched_tokens)
    shares = [ReplicaShare(index, num_replicas, costs=costs, secret=secret) for index in range(num_replicas)]
    handles = [
        EngineProcess(EngineOptions(), report=lambda _: None, progress=lambda *_: None, program=_PROGRAM, share=share)
        for share in shares
    ]
    await asyncio.gather(*(asyncio.to_thread(handle.launch) for handle in handles))
    fleet = Fleet(*handles, routing=routing, journal=None if journal is None else journal.open("wb"))
    await fleet.start()
    began = asyncio.get_running_loop().time()

    async def ask(number: int, session: Session) -> tuple[int, int]:
        """(cached tokens, prompt tokens) of a request."""
        (turn,) = session.turns
        prompt = [token for part in turn.new for token in tokens_of(part, setup.vocab_size)]
        await asyncio.sleep(began + session.at - asyncio.get_running_loop().time())
        params = SamplingParams(max_tokens=turn.num_output, ignore_eos=True)
        stream = await fleet.generate([Request(str(number), prompt, params)])
        try:
            num_cached, ended = 0, False
            while not ended:
                for output in await anext(stream):
                    num_cached = max(num_cached, output.num_cached_tokens)
                    ended = ended or output.end is not None
        finally:
            stream.close()
        return num_cached, len(prompt)

    try:
        found = await asyncio.gather(*(ask(number, session) for number, session in enumerate(requests)))
    finally:
        await fleet.close()
    return sum(cached for cached, _ in found) / sum(size for _, size in found)
