"""Routing of requests to replicas: quire's router beside simpler policies and the rules of other routers.

    python -m benchmarks.routing [--only policies|few-shot|speed ...] [--workloads NAME ...] [--policies NAME ...]
                                 [--loads 0.5 0.8 0.95] [--seeds 3] [--requests 5000] [--json FILE] [--quick]

In virtual time: the real router, schedulers and KV caches, with the steps of Llama-3.1-8B on an H100 by rooflines. Each
replica keeps 80,000 tokens of KV, so that prefixes do not all fit into one.

policies: each workload on 4 replicas. A load is a share of the rate at which the best policy completes requests that
all wait. Goodput is the share of the requests with a first token within 500 ms and 50 ms per further token, the limits
of `quire plan`. The first fifth of the time fills the caches and does not count.
few-shot: the workload of SGLang's paper on 1, 2, 4 and 8 replicas, with so many times the requests, all at once.
speed: processor time of a simulation of 100,000 requests on 8 replicas.
live: hit rates of R3 of docs/reproduction.md on 2 and 4 engine processes whose steps sleep, beside their simulation.
decisions: time of one placement of a prompt of 2,000 tokens beside 100,000 cached blocks, and bytes of the router.
--quick runs everything at sizes whose figures have no meaning.
"""

import argparse
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from types import MappingProxyType

from rich.console import Console
from rich.progress import track

from benchmarks.result_file import write_result
from benchmarks.routing_live import live
from benchmarks.routing_peers import DynamoRouter, SGLangRouter
from quire.cache.key_report import KeyChanges
from quire.config import Routing
from quire.core.block_keys import BlockKeys, token_key
from quire.core.request import Namespace
from quire.fleet.cached_keys import MOST_KEYS
from quire.fleet.routing import RoutedRequest, Router, RouterConfig
from quire.planner.reproduce.engines import Engine
from quire.planner.results import SimulationResult, Window
from quire.planner.simulated_engine import EngineSetup
from quire.planner.simulation import Simulation
from quire.planner.slo import SLO
from quire.planner.workloads import (
    Maker,
    Session,
    Turn,
    Workload,
    make_workload,
    num_requests,
    stationary,
    with_arrivals,
)

NUM_REPLICAS = 4
LOADS = (0.5, 0.8, 0.95)
LIMITS = SLO({"ttft": 0.5, "tpot": 0.05})
CODE = (
    "quire/fleet/routing.py",
    "quire/fleet/cached_keys.py",
    "quire/fleet/request_keys.py",
    "quire/planner/simulation.py",
    "quire/planner/simulated_engine.py",
    "benchmarks/routing.py",
    "benchmarks/routing_peers.py",
)
_LENGTH = 8192
_PAUSE = 1 / 20  # of the pauses of sessions, so that a run has many turns of each
_WARM = 0.2
_TOKEN_SECONDS = 0.01  # of sessions that began before the start

NewRouter = Callable[[RouterConfig], Router]
POLICIES: Mapping[str, tuple[Routing, NewRouter]] = MappingProxyType(
    {
        "predicted": ("predicted", Router),
        "round-robin": ("round-robin", Router),
        "least-loaded": ("least-loaded", Router),
        "cache": ("cache", Router),
        "sglang": ("cache", SGLangRouter),
        "dynamo": ("cache", DynamoRouter),
    }
)
SATURATING = ("predicted", "least-loaded", "sglang", "dynamo")  # those that may complete the most requests


def shared_prefix(maker: Maker, count: int) -> list[Session]:
    """64 prefixes of 1000 to 2000 tokens, more than a replica keeps; a question of 20 to 80 tokens behind one."""
    rng, prefixes = maker.rng, [maker.between(1000, 2000) for _ in range(64)]
    turns = [Turn((rng.choice(prefixes), maker.between(20, 80)), rng.randint(16, 128)) for _ in range(count)]
    return [Session(0.0, (turn,)) for turn in turns]


def hot_prefix(maker: Maker, count: int) -> list[Session]:
    """80 % of the prompts begin with one prefix of 2000 tokens, the others with nothing in common."""
    rng, hot = maker.rng, maker.part(2000)
    turns = [
        Turn((hot, maker.between(50, 200)) if rng.random() < 0.8 else (maker.between(500, 2000),), rng.randint(16, 128))
        for _ in range(count)
    ]
    return [Session(0.0, (turn,)) for turn in turns]


def unique(maker: Maker, count: int) -> list[Session]:
    """Prompts of 200 to 2000 tokens without a common prefix."""
    rng = maker.rng
    return [Session(0.0, (Turn((maker.between(200, 2000),), rng.randint(16, 200)),)) for _ in range(count)]


def heavy_tails(maker: Maker, count: int) -> list[Session]:
    """Lognormal lengths: prompts of 500 tokens (sigma 1.2, at most 7000), outputs of 80 (sigma 1, at most 1000)."""
    rng = maker.rng

    def draw(median: float, sigma: float, most: int) -> int:
        return max(1, min(most, round(median * rng.lognormvariate(0, sigma))))

    return [Session(0.0, (Turn((maker.part(draw(500, 1.2, 7000)),), draw(80, 1.0, 1000)),)) for _ in range(count)]


OWN = MappingProxyType(
    {"shared-prefix": shared_prefix, "unique": unique, "hot-prefix": hot_prefix, "heavy-tails": heavy_tails}
)
WORKLOADS = ("shared-prefix", "chat", "agents", "rag", "unique", "hot-prefix", "heavy-tails")


def sessions_of(name: str, count: int, seed: int) -> list[Session]:
    """The requests of a workload, all sessions at time 0."""
    if name in OWN:
        return OWN[name](Maker(seed, _LENGTH), count)
    made = make_workload(name, count, max_model_len=_LENGTH, seed=seed)
    return [replace(one, turns=tuple(replace(turn, pause=_PAUSE * turn.pause) for turn in one.turns)) for one in made]


def setup_of(num_replicas: int, policy: str = "predicted") -> EngineSetup:
    """The replicas."""
    engine = Engine("llama-3.1-8b", "H100", 80_000, max_model_len=_LENGTH, max_num_seqs=64)
    setup = engine.setup(prefix_index=True)
    scheduler = replace(setup.scheduler, steps_in_flight=2)
    return replace(setup, scheduler=scheduler, num_replicas=num_replicas, routing=POLICIES[policy][0])


def simulate(policy: str, workload: Workload, window: Window | None = None) -> SimulationResult:
    """A workload on the replicas."""
    return Simulation(setup_of(NUM_REPLICAS, policy), window=window, new_router=POLICIES[policy][1]).run(workload)


def saturation(name: str, count: int, policies: Sequence[str]) -> float:
    """The most requests per second that a policy completes if all sessions wait."""
    waiting = [
        replace(session, turns=tuple(replace(turn, pause=0.0) for turn in session.turns))
        for session in sessions_of(name, count, seed=1000)
    ]
    return max(simulate(policy, waiting).steady_rate for policy in policies)


def goodput(result: SimulationResult) -> float:
    """The share of the requests that keep both limits; 0 without requests."""
    kept = [not any(LIMITS.is_late(one, metric) for metric in LIMITS.limits) for one in result.requests]
    return mean(kept) if kept else 0.0


def at_load(policy: str, name: str, rate: float, count: int, seed: int) -> dict[str, float]:
    """The figures of a policy at a rate of requests per second."""
    sessions = with_arrivals(sessions_of(name, count, seed), rate, seed=seed)
    seconds = num_requests(sessions) / rate
    if any(len(session.turns) > 1 for session in sessions):
        sessions = stationary(sessions, seconds, _TOKEN_SECONDS)
    began = time.process_time()
    result = simulate(policy, sessions, Window(_WARM * seconds))
    return {
        "goodput": goodput(result),
        "ttft_p50": result.percentile("ttft", 0.5),
        "ttft_p99": result.percentile("ttft", 0.99),
        "tpot_p99": result.percentile("tpot", 0.99),
        "hit_rate": result.hit_rate,
        "requests_per_second": result.request_rate,
        "cpu_seconds": time.process_time() - began,
    }


Row = dict[str, float | str]


def policies(args: argparse.Namespace) -> list[Row]:
    """Each policy with each workload and load: means over the seeds."""
    rows: list[Row] = []
    console = Console(stderr=True)
    for name in args.workloads:
        best = saturation(name, min(args.requests, 1500), SATURATING)
        runs = [(load, policy) for load in args.loads for policy in args.policies]
        print(f"{name}: {best:.1f} requests/s at most")
        for load, policy in track(runs, name, console=console, transient=True):
            found = [at_load(policy, name, load * best, args.requests, seed) for seed in range(args.seeds)]
            row: Row = {"workload": name, "load": load, "policy": policy}
            row |= {key: mean(one[key] for one in found) for key in found[0]}
            rows.append(row)
            print(
                f"  {load:>4.0%} {policy:<13} goodput {row['goodput']:.3f}   first token p50 "
                f"{1e3 * mean(one['ttft_p50'] for one in found):6.0f} ms, p99 "
                f"{1e3 * mean(one['ttft_p99'] for one in found):6.0f} ms   hit rate {row['hit_rate']:.3f}   "
                f"{row['requests_per_second']:.1f}/s   {row['cpu_seconds']:.0f} CPU s",
                flush=True,
            )
    return rows


def few_shot(args: argparse.Namespace) -> list[Row]:
    """Throughput and hit rate of few-shot prompts, by the number of replicas."""
    rows: list[Row] = []
    for number in (1, 2, 4, 8):
        sessions = make_workload("few-shot", number * args.requests // 2, max_model_len=_LENGTH)
        result = Simulation(setup_of(number)).run(sessions)
        rows.append({"replicas": number, "requests_per_second": result.steady_rate, "hit_rate": result.hit_rate})
        over = result.steady_rate / float(rows[0]["requests_per_second"]) / number
        print(f"  {number} replicas: {result.steady_rate:.1f}/s ({over:.2f} N), hit rate {result.hit_rate:.3f}")
    return rows


def speed(args: argparse.Namespace) -> list[Row]:
    """Processor seconds of many requests on 8 replicas."""
    count = 20 * args.requests
    sessions = with_arrivals(sessions_of("shared-prefix", count, 0), 8 * 60.0)
    began = time.process_time()
    result = Simulation(setup_of(8)).run(sessions)
    seconds = time.process_time() - began
    print(f"  {count} requests on 8 replicas: {seconds:.0f} CPU s, hit rate {result.hit_rate:.3f}")
    return [{"requests": count, "cpu_seconds": seconds, "hit_rate": result.hit_rate}]


def decisions(_: argparse.Namespace) -> list[Row]:
    """Times of placements, and memory of keys and of ended requests."""
    rows: list[Row] = []
    block_keys = BlockKeys(16, bytes(32), "model")
    prompt = token_key([7] * 1600)
    common = list(block_keys.chain(prompt, Namespace()))
    for number in (8, 64):
        router, times = _router_with_keys(number, 100_000), []
        router.update_keys(3, KeyChanges(common[:80]))
        free, allowed = [5] * number, range(number)
        for i in range(5000):
            request = RoutedRequest(str(i), 2000, 1, common + [_key(10**6 + 25 * i + j) for j in range(25)])
            began = time.perf_counter()
            router.place(request, allowed, free, i / 100)
            times.append(time.perf_counter() - began)
            if i >= 6 * number:
                _end(router, str(i - 6 * number), i / 100)
        rows.append({"replicas": number, "median_us": 1e6 * median(times), "p99_us": 1e6 * sorted(times)[4950]})
        print(f"  {number} replicas: {rows[-1]['median_us']:.0f} us, 99th percentile {rows[-1]['p99_us']:.0f} us")
    began = time.perf_counter()
    for _ in range(200):
        list(block_keys.chain(prompt, Namespace()))
    key = (time.perf_counter() - began) / 200 / len(common)
    tracemalloc.start()
    router = _router_with_keys(8, MOST_KEYS)
    before, _ = tracemalloc.get_traced_memory()
    for i in range(100_000):
        router.place(RoutedRequest(str(i), 33, 1, [_key(i), _key(i + 1)], f"t{i}"), range(8), [5] * 8, float(i))
        _end(router, str(i), float(i))
    more = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    print(
        f"  a key {1e6 * key:.2f} us, {MOST_KEYS} keys {before / 1e6:.1f} MB, 100,000 requests {more / 1e6:.1f} MB more"
    )
    rows.append({"key_us": 1e6 * key, "keys_bytes": float(before), "requests_bytes": float(more)})
    return rows


def _key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def _router_with_keys(num_replicas: int, count: int) -> Router:
    router = Router(
        RouterConfig(
            routing="predicted",
            num_replicas=num_replicas,
            block_size=16,
            num_blocks=20_000,
            max_num_seqs=64,
            max_num_batched_tokens=2048,
        )
    )
    for replica in range(num_replicas):
        router.update_keys(replica, KeyChanges([_key(i) for i in range(replica, count, num_replicas)]))
    return router


def _end(router: Router, request_id: str, now: float) -> None:
    router.record_first_token(request_id, now)
    router.remove(request_id, router.placements[request_id].replica, now + 1)


def live_parts(args: argparse.Namespace) -> list[Row]:
    """R3 with engine processes."""
    rows: list[Row] = []
    for number in (2, 4):
        for row in live(number, number * args.requests // 25):
            rows.append(row)
            print(f"  {number} engines, {row['routing']}: hit rate {row['live']:.3f}, simulated {row['simulated']:.3f}")
    return rows


PARTS: Mapping[str, Callable[[argparse.Namespace], list[Row]]] = MappingProxyType(
    {"policies": policies, "few-shot": few_shot, "speed": speed, "live": live_parts, "decisions": decisions}
)


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing", description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=list(PARTS), nargs="+", default=list(PARTS))
    parser.add_argument("--workloads", choices=WORKLOADS, nargs="+", default=list(WORKLOADS))
    parser.add_argument("--policies", choices=list(POLICIES), nargs="+", default=list(POLICIES))
    parser.add_argument("--loads", type=float, nargs="+", default=list(LOADS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=5000, help="of a run of the policies")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.requests, args.loads = 1, 40, [0.8]
    figures: dict[str, object] = {}
    for name in args.only:
        print(name)
        figures[name] = PARTS[name](args)
    if args.json:
        setting = {"seeds": args.seeds, "requests": args.requests, "quick": args.quick}
        write_result(args.json, {"setting": setting, **figures}, CODE)


if __name__ == "__main__":
    main()
