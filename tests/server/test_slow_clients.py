"""A client that does not read slows down no other, needs little memory, and can still read everything later."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from embedded_model_server import STORY, run_app, service_of, small_engine
from waiting import wait_until

from quire.server.app import make_app

NUM_STUCK = 4
LONG = {"prompt": STORY, "max_tokens": 300, "ignore_eos": True, "logprobs": 20, "seed": 1, "stream": True}
SHORT = {"prompt": STORY, "max_tokens": 40, "ignore_eos": True, "stream": True}
SEND_BUFFER = 2**14  # bytes of the socket buffer
MOST = 2**17  # bytes of unread data per connection: twice the kernel's buffer, and uvicorn's


class Counting:
    """The app, with a count of the bytes sent on each connection of a stream with the query "stuck"."""

    def __init__(self, app):
        self._app = app
        self.taken = []

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http" or scope["query_string"] != b"stuck":
            await self._app(scope, receive, send)
            return
        place = len(self.taken)
        self.taken.append(0)

        async def counted(message):
            await send(message)  # returns once the connection has room again
            self.taken[place] += len(message.get("body", b""))

        await self._app(scope, receive, counted)


@pytest.fixture(scope="module")
def server():
    app = Counting(make_app(service_of(small_engine())))
    with run_app(app, send_buffer=SEND_BUFFER) as url:
        yield app, url


@contextmanager
def stuck(url):
    """A connection that requested a long stream and reads nothing."""
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps(LONG).encode()
    head = f"POST /v1/completions?stuck HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(60)
        client.connect((host, int(port)))
        client.sendall(f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        yield client


def others(url):
    """CPU seconds of this process for eight streams, which other programs do not change, and their texts."""

    def one(_):
        with httpx.stream("POST", f"{url}/v1/completions", json={**SHORT, "seed": 3}, timeout=60) as answer:
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])

    begun = time.process_time()
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(one, range(8)))
    return time.process_time() - begun, texts


def is_idle(url):
    health = httpx.get(f"{url}/health", timeout=60).json()
    return health["requests_running"] + health["requests_waiting"] + health["kv_blocks_used"] == 0


def resident():
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_clients_that_never_read_do_not_slow_other_clients(server):
    app, url = server
    others(url)  # warm-up
    alone, texts = min(others(url) for _ in range(2))
    with ExitStack() as stack:
        before = resident()
        clients = [stack.enter_context(stuck(url)) for _ in range(NUM_STUCK)]
        wait_until(lambda: len(app.taken) == NUM_STUCK)
        assert others(url)[1] == texts  # while the engine computes theirs
        wait_until(lambda: is_idle(url))  # all is computed and holds no blocks, though unread
        assert resident() - before < 64 * 2**20
        for _ in range(10):  # one run that other programs do not slow is enough
            beside, again = others(url)
            assert again == texts
            if beside < 1.5 * alone:
                break
        assert beside < 1.5 * alone
        assert max(app.taken) < MOST
        whole = b"".join(iter(lambda: clients[0].recv(2**20), b""))
        assert len(whole) > 1.5 * MOST
    lines = [line for line in whole.split(b"\n") if line.startswith(b"data: ")]
    tokens = [json.loads(line[6:])["choices"][0]["logprobs"]["tokens"] for line in lines[:-1] if b'"tokens"' in line]
    assert sum(map(len, tokens)) == 300
    assert lines[-1] == b"data: [DONE]"
    wait_until(lambda: is_idle(url))
