"""The rules of other routers in `routing_peers.py` beside these routers themselves.

    python -m benchmarks.routing_check [--sglang-python PYTHON] [--dynamo-python PYTHON] [--requests 400] [--json FILE]

PYTHON: of an environment with `sglang-router==0.3.2`, or with `ai-dynamo-runtime` and `pyzmq`. Neither needs torch.

The router gets a seeded sequence of requests for 4 workers, and the rule says which of them it would choose. Then the
rule goes on from what the router chose, so that one difference does not make others. Requests share prefixes, continue
earlier ones or have nothing in common. In the middle of the sequence most have one prefix and stay open, so that the
loads differ. Where the rule allows several workers, the request counts as a tie: `tie` if the router chose the one that
the rule takes, `other_tie` if another one of them.

SGLang's router gets texts with a character for each token, and forwards them to workers. A worker answers when the
benchmark ends the request. The router is compared with the rule on blocks of 16 tokens, and of one. Dynamo's
`select_service` gets tokens, the ends of prompts and requests, and the cached blocks by ZMQ.
"""

import argparse
import json
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from random import Random
from socket import create_server
from threading import Event, Thread
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import msgspec

from benchmarks.result_file import write_result
from benchmarks.routing_peers import DynamoRouter, SGLangRouter
from quire.cache.key_report import KeyChanges
from quire.core.block_keys import BlockKeys, token_key
from quire.core.request import NO_NAMESPACE
from quire.fleet.routing import RoutedRequest, RouterConfig

NUM_WORKERS, BLOCK_SIZE = 4, 16
CODE = ("benchmarks/routing_check.py", "benchmarks/routing_peers.py")
OUTCOMES = ("same", "other", "tie", "other_tie")
_FIRST = ord("a")  # the character of token 0
_TIMEOUT = 20.0  # seconds
_BURST = 0.3, 0.7  # the part of the sequence whose requests stay open


class Arrival(NamedTuple):
    """A request of the sequence. Its first token and its end come before the arrivals with these numbers."""

    id: str
    kind: str
    tokens: list[int]  # 0 to 25
    first_token_at: int
    end_at: int

    def keys(self, block_size: int = BLOCK_SIZE) -> list[bytes]:
        """The keys of the whole blocks."""
        return list(BlockKeys(block_size).chain(token_key(self.tokens), NO_NAMESPACE))


class Rule(Protocol):
    """A rule of routing_peers.py."""

    config: RouterConfig

    def best(self, request: RoutedRequest, replicas: Sequence[int]) -> list[int]: ...
    def place(self, request: RoutedRequest, allowed: Sequence[int], num_free: Sequence[int], now: float) -> object: ...
    def update_keys(self, replica: int, changes: KeyChanges) -> None: ...
    def record_first_token(self, request_id: str, now: float) -> object: ...
    def remove(self, request_id: str, replica: int, now: float) -> None: ...


class Peer(Protocol):
    """A router that chooses workers."""

    def place(self, arrival: Arrival) -> int:
        """The worker that it chooses."""

    def record_first_token(self, arrival: Arrival, worker: int) -> None:
        """The worker has computed the prompt and keeps its blocks."""

    def end(self, arrival: Arrival) -> None:
        """The request has ended."""


def arrivals(count: int, seed: int) -> list[Arrival]:
    """The sequence."""
    rng = Random(seed)

    def some(least: int, most: int) -> list[int]:
        return [rng.randrange(26) for _ in range(rng.randint(least, most))]

    prefixes = [some(50, 200) for _ in range(8)]
    hot, before = some(200, 200), list[list[int]]()
    done: list[Arrival] = []
    for number in range(count):
        is_burst = _BURST[0] * count <= number < _BURST[1] * count
        kind = rng.choices(("hot", "shared", "continued", "unique"), (20 if is_burst else 1, 4, 2, 3))[0]
        match kind:
            case "hot":
                tokens = hot + some(20, 100)
            case "shared":
                tokens = rng.choice(prefixes) + some(20, 300)
            case "continued" if before:
                tokens = rng.choice(before[-20:]) + some(20, 100)
            case _:
                tokens = some(100, 500)
        before.append(tokens)
        first = number + rng.randint(1, 12)
        end = round(_BURST[1] * count) + rng.randint(0, 10) if is_burst else first + rng.randint(0, 8)
        done.append(Arrival(f"{kind}-{number}", kind, tokens, first, max(first, end)))
    return done


def compare(peer: Peer, rule: Rule, sequence: Sequence[Arrival]) -> dict[str, Counter[str]]:
    """Replay a sequence. The number of requests with each outcome, of all and of each kind."""
    workers: dict[str, int] = {}
    counts: dict[str, Counter[str]] = {"all": Counter()}
    waiting: list[tuple[int, bool, int]] = []  # number of an arrival, whether it is an end, number of the request
    for number, arrival in enumerate(sequence):
        due = sorted(one for one in waiting if one[0] <= number)
        waiting = [one for one in waiting if one[0] > number]
        for _, is_end, which in due:
            _go_on(peer, rule, sequence[which], workers[sequence[which].id], is_end=is_end)
        request = RoutedRequest(arrival.id, len(arrival.tokens), 1, arrival.keys(rule.config.block_size))
        best = rule.best(request, range(NUM_WORKERS))
        chosen = workers[arrival.id] = peer.place(arrival)
        rule.place(request, [chosen], [0], float(number))
        if len(best) == 1 or chosen not in best:
            outcome = "same" if chosen in best else "other"
        else:
            outcome = "tie" if chosen == best[0] else "other_tie"
        counts["all"][outcome] += 1
        counts.setdefault(arrival.kind, Counter())[outcome] += 1
        waiting += [(arrival.first_token_at, False, number), (arrival.end_at, True, number)]
    for _, is_end, which in sorted(waiting):
        _go_on(peer, rule, sequence[which], workers[sequence[which].id], is_end=is_end)
    return counts


def _go_on(peer: Peer, rule: Rule, arrival: Arrival, worker: int, *, is_end: bool) -> None:
    if is_end:
        peer.end(arrival)
        rule.remove(arrival.id, worker, 0.0)
    else:
        peer.record_first_token(arrival, worker)
        rule.update_keys(worker, KeyChanges(arrival.keys(rule.config.block_size)))
        rule.record_first_token(arrival.id, 0.0)


def with_share(count: Mapping[str, int]) -> dict[str, float]:
    """The outcomes, and the share of `same` among those that are no ties."""
    decided = count["same"] + count["other"]
    return {**{outcome: count[outcome] for outcome in OUTCOMES}, "share": count["same"] / max(1, decided)}


# Processes and HTTP


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    with ExitStack() as stack:
        return [stack.enter_context(create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(count)]


def call(port: int, path: str, body: object = None, method: str = "POST") -> Any:  # noqa: ANN401  (JSON)
    """The answer of a server on this machine."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        None if body is None else json.dumps(body).encode(),
        {"Content-Type": "application/json"},
        method=method,
    )
    with urllib.request.urlopen(request, timeout=10 * _TIMEOUT) as answer:
        return json.loads(answer.read() or b"null")


def wait_until(is_true: Callable[[], bool], what: str) -> None:
    """Raises TimeoutError if it does not become true."""
    end = time.monotonic() + _TIMEOUT
    while True:
        with suppress(OSError):
            if is_true():
                return
        if time.monotonic() > end:
            raise TimeoutError(what)
        time.sleep(0.01)


@contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A program that is ended with the block."""
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True
    ) as program:
        try:
            yield program
        finally:
            program.terminate()


# SGLang's router


class _Worker(BaseHTTPRequestHandler):
    """A worker that answers a request when its event is set."""

    protocol_version = "HTTP/1.1"
    number: int
    received: "Queue[tuple[int, Event]]"

    def do_GET(self) -> None:
        """What the router asks of a worker."""
        self._answer({"status": "ok", "model_path": "model", "served_model_name": "model"})

    def do_POST(self) -> None:
        """A request."""
        self.rfile.read(int(self.headers["Content-Length"]))
        may_end = Event()
        self.received.put((self.number, may_end))
        may_end.wait()
        self._answer({"text": "", "meta_info": {}})

    def _answer(self, body: object) -> None:
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


class SGLang:
    """SGLang's router before workers that do nothing."""

    def __init__(self, port: int, received: "Queue[tuple[int, Event]]", pool: ThreadPoolExecutor) -> None:
        self._port = port
        self._received = received
        self._pool = pool
        self._open: dict[str, tuple[Event, Future[Any]]] = {}

    def place(self, arrival: Arrival) -> int:
        """See Peer."""
        text = "".join(chr(_FIRST + token) for token in arrival.tokens)
        answer = self._pool.submit(call, self._port, "/generate", {"text": text})
        worker, may_end = self._received.get(timeout=_TIMEOUT)
        self._open[arrival.id] = may_end, answer
        return worker

    def record_first_token(self, arrival: Arrival, worker: int) -> None:
        """See Peer. The router does not see it."""

    def end(self, arrival: Arrival) -> None:
        """See Peer."""
        may_end, answer = self._open.pop(arrival.id)
        may_end.set()
        answer.result(_TIMEOUT)


@contextmanager
def sglang(python: str, count: int) -> Iterator[SGLang]:
    """Start the router and the workers. count: of requests that may be open."""
    received: Queue[tuple[int, Event]] = Queue()
    with ExitStack() as stack:
        urls = []
        for number in range(NUM_WORKERS):
            handler = type("Worker", (_Worker,), {"number": number, "received": received})
            server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), handler))
            server.daemon_threads, server.block_on_close = True, False
            Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
            urls.append(f"http://127.0.0.1:{server.server_port}")
        pool = stack.enter_context(ThreadPoolExecutor(count))
        port, metrics = free_ports(2)
        options = ("--policy", "cache_aware", "--prometheus-port", str(metrics), "--worker-startup-check-interval", "1")
        launch = ("-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port))
        stack.enter_context(process(python, *launch, "--worker-urls", *urls, *options))
        wait_until(
            lambda: len(call(port, "/workers", method="GET")["workers"]) == NUM_WORKERS, "no router with workers"
        )
        yield SGLang(port, received, pool)


# Dynamo's router

# Writes the lines of its input, "WORKER NUMBER HEX", to the socket of the worker.
_PUBLISHER = """
import sys, zmq
sockets = []
for port in sys.argv[1:]:
    sockets.append(zmq.Context.instance().socket(zmq.PUB))
    sockets[-1].bind(f"tcp://127.0.0.1:{port}")
for line in sys.stdin:
    worker, number, content = line.split()
    sockets[int(worker)].send_multipart([b"", int(number).to_bytes(8, "big"), bytes.fromhex(content)])
"""


class Dynamo:
    """Dynamo's service that selects workers."""

    def __init__(self, port: int, publisher: "subprocess.Popen[str]") -> None:
        self._port = port
        self._publisher = publisher
        self._known = [set[bytes]() for _ in range(NUM_WORKERS)]
        self._num_events = [0] * NUM_WORKERS

    def place(self, arrival: Arrival) -> int:
        """See Peer."""
        body = {"selection_id": arrival.id, "token_ids": arrival.tokens}
        worker: int = call(self._port, "/select_and_reserve", body)["worker_id"]
        return worker

    def record_first_token(self, arrival: Arrival, worker: int) -> None:
        """See Peer. Returns once the service knows the blocks."""
        call(self._port, f"/reservations/{arrival.id}/prefill_complete")
        keys, known = arrival.keys(), self._known[worker]
        first = next((i for i, key in enumerate(keys) if key not in known), len(keys))
        if first < len(keys):
            numbers = [int.from_bytes(key[:7], "big") for key in keys]
            tokens = arrival.tokens[first * BLOCK_SIZE : len(keys) * BLOCK_SIZE]
            stored = ["BlockStored", numbers[first:], numbers[first - 1] if first else None, tokens, BLOCK_SIZE, None]
            content = msgspec.msgpack.encode([0.0, [stored], 0]).hex()
            assert self._publisher.stdin is not None
            self._publisher.stdin.write(f"{worker} {self._num_events[worker]} {content}\n")
            self._publisher.stdin.flush()
            self._num_events[worker] += 1
            known.update(keys)
            wait_until(lambda: self._num_cached(arrival, worker) == len(keys), "blocks that were reported are unknown")

    def _num_cached(self, arrival: Arrival, worker: int) -> int:
        rows = call(self._port, "/overlap_scores", {"token_ids": arrival.tokens})["workers"]
        return next((int(row["device_blocks"]) for row in rows if row["worker_id"] == worker), 0)

    def end(self, arrival: Arrival) -> None:
        """See Peer."""
        call(self._port, f"/reservations/{arrival.id}", method="DELETE")


@contextmanager
def dynamo(python: str, count: int) -> Iterator[Dynamo]:
    """Start the service and what publishes for the workers."""
    del count
    port, *ports = free_ports(1 + NUM_WORKERS)
    with (
        process(python, "-c", _PUBLISHER, *map(str, ports)) as publisher,
        process(python, "-m", "dynamo.select_service", "--port", str(port), "--threads", "1"),
    ):
        wait_until(lambda: bool(call(port, "/health", method="GET")), "no service")
        for worker, events in enumerate(ports):
            about = {"worker_id": worker, "endpoint": f"http://127.0.0.1:{events}", "block_size": BLOCK_SIZE}
            call(port, "/workers", about | {"kv_events_endpoints": {"0": f"tcp://127.0.0.1:{events}"}})
        wait_until(lambda: call(port, "/ready", method="GET")["schedulable_workers"] == NUM_WORKERS, "no workers")
        time.sleep(1)  # subscriptions have no answer
        yield Dynamo(port, publisher)


Start = Callable[[str, int], AbstractContextManager[Peer]]
PEERS: Mapping[str, tuple[Start, Callable[[RouterConfig], Rule], Sequence[int]]] = MappingProxyType(
    {"sglang": (sglang, SGLangRouter, (BLOCK_SIZE, 1)), "dynamo": (dynamo, DynamoRouter, (BLOCK_SIZE,))}
)


def config_of(block_size: int) -> RouterConfig:
    """Of the rules. Only the number of workers and the block size matter to them."""
    return RouterConfig(
        routing="cache",
        num_replicas=NUM_WORKERS,
        block_size=block_size,
        num_blocks=100_000,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
    )


def _compared(name: str, python: str, block_size: int, args: argparse.Namespace) -> dict[str, Any]:
    start, new_rule, _ = PEERS[name]
    total: dict[str, Counter[str]] = {}
    for seed in range(args.seeds):
        with start(python, args.requests) as peer:
            for kind, count in compare(peer, new_rule(config_of(block_size)), arrivals(args.requests, seed)).items():
                total.setdefault(kind, Counter()).update(count)
    return {kind: with_share(count) for kind, count in total.items()}


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing_check", description=__doc__.split("\n")[0])
    for name in PEERS:
        parser.add_argument(f"--{name}-python", metavar="PYTHON", help="of its environment")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    rows = []
    for name, (*_, block_sizes) in PEERS.items():
        python = getattr(args, f"{name}_python")
        for block_size in block_sizes if python else ():
            figures = _compared(name, python, block_size, args)
            rows.append({"router": name, "version": _version(python, name), "block_size": block_size} | figures)
            for kind, row in figures.items():
                counts = ", ".join(f"{row[outcome]} {outcome}" for outcome in OUTCOMES)
                print(f"{name}, blocks of {block_size}, {kind}: {100 * row['share']:.1f} % ({counts})")
    if args.json:
        write_result(args.json, {"setting": {"requests": args.requests, "seeds": args.seeds}, "routers": rows}, CODE)


def _version(python: str, name: str) -> str:
    package = {"sglang": "sglang-router", "dynamo": "ai-dynamo-runtime"}[name]
    program = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
