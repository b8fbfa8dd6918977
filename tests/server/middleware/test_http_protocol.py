"""HTTP without a model: headers and bodies that are too long, too slow or invalid, and TLS."""

import asyncio
import json
import select
import socket
import ssl
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from embedded_model_server import run_app
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, StreamingResponse
from waiting import DEADLINE, until, wait_until

from quire.config import EngineOptions
from quire.errors import ConfigError
from quire.server import request_body
from quire.server import serve as serving
from quire.server.error_handlers import install_error_handlers
from quire.server.middleware import http_protocol
from quire.server.middleware.http_protocol import MAX_HEAD
from quire.server.middleware.queue_full import RecentRefusals
from quire.server.options import ServerOptions
from quire.server.request_body import MAX_BODY, BodyReception, HeldBody
from quire.server.serve import check_certificate
from quire.tenant_memory import TenantMemory

POST = b"POST / HTTP/1.1\r\nhost: x\r\n"
SLOW = 0.2  # time limit of headers and bodies in seconds


@dataclass
class Holds:
    """The requests with `?hold`, which are answered once they are released."""

    are_released: threading.Event = field(default_factory=threading.Event)
    num_held: int = 0


def echo_app(middleware=None):
    """An app that answers with the length of the body."""
    app = Starlette()
    app.state.holds = Holds()
    if middleware is not None:
        app.add_middleware(middleware)
    install_error_handlers(app, RecentRefusals(), None)

    async def count(request):
        if "hold" in request.query_params:
            holds = request.app.state.holds
            holds.num_held += 1
            await until(holds.are_released.is_set)
            holds.num_held -= 1
        with HeldBody(TenantMemory()) as held:
            return PlainTextResponse(str(len(await BodyReception(request, held).read())))

    app.add_route("/", count, methods=["GET", "POST"])
    return app


@pytest.fixture
def app():
    return echo_app()


@pytest.fixture
def url(app):
    with run_app(app) as url:
        yield url


@pytest.fixture
def heads_in_time(monkeypatch):
    """Heads must arrive within SLOW. Called where a test is not in a hurry any more."""
    return lambda: monkeypatch.setattr(http_protocol, "HEAD_SECONDS", SLOW)


@pytest.fixture
def bodies_in_time(monkeypatch):
    """The same of bodies."""
    return lambda: monkeypatch.setattr(request_body, "BODY_SECONDS", SLOW)


def address(url):
    host, port = url.rsplit("/", 1)[1].split(":")
    return host, int(port)


def connected(url):
    return socket.create_connection(address(url), timeout=60)


def read_all(client):
    """Status and body of all that is received until the server closes the connection."""
    data = b""
    while piece := client.recv(2**16):
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), body


def refused(client, status):
    got, body = read_all(client)
    assert got == status
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error["message"]


def trickle(client, data, pause=SLOW / 10):
    """Send single bytes until the server answers or closes the connection. Returns whether it did."""
    for i in range(len(data)):
        try:
            client.sendall(data[i : i + 1])
        except ConnectionError:
            return True
        if select.select([client], [], [], pause)[0]:
            return True
    return False


def test_a_connection_without_a_request_head_is_closed(url, heads_in_time):
    heads_in_time()
    begun = time.monotonic()
    with connected(url) as client:
        assert client.recv(1) == b""
        assert time.monotonic() - begun >= SLOW - 0.001, "timers of the loop count whole milliseconds"


@pytest.mark.parametrize("later", [False, True])
def test_a_head_that_comes_byte_by_byte(url, later, heads_in_time):
    with ExitStack() as stack:
        if later:  # on a connection that has served a request
            client = stack.enter_context(connected(url))
            client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
            heads_in_time()
        else:
            heads_in_time()
            client = stack.enter_context(connected(url))
        assert trickle(client, b"GET /" + b"a" * 1000)  # a byte does not restart the time limit
        assert "head of the request took longer than 0.2 s" in refused(client, 408)


@pytest.mark.parametrize("kind", [b"content-length: 1000", b"transfer-encoding: chunked"])
def test_a_body_that_does_not_come(url, kind, bodies_in_time):
    bodies_in_time()
    with connected(url) as client:
        client.sendall(POST + kind + b"\r\n\r\n")
        assert "body of the request did not arrive within 0.2 s" in refused(client, 408)


def test_a_body_that_comes_byte_by_byte(url, bodies_in_time):
    bodies_in_time()
    with connected(url) as client:
        client.sendall(POST + b"content-length: 1000\r\n\r\n")
        assert trickle(client, b"x" * 999)
        assert refused(client, 408)


def test_a_long_body_has_more_time(url, monkeypatch, bodies_in_time):
    bodies_in_time()
    monkeypatch.setattr(request_body, "BYTES_PER_SECOND", 2**5)
    with connected(url) as client:
        client.sendall(POST + b"connection: close\r\ncontent-length: 4096\r\n\r\n" + b"x" * 2048)
        time.sleep(2 * SLOW)
        client.sendall(b"x" * 2048)
        assert read_all(client) == (200, b"4096")


def test_a_slow_answer_is_not_cut_off(app, url, heads_in_time, bodies_in_time):
    holds = app.state.holds
    with connected(url) as client:
        for number in range(2):
            client.sendall(b"POST /?hold HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc")
            if not number:  # the first head needs no time any more, and the second one comes at once
                wait_until(lambda: holds.num_held)
                heads_in_time()
                bodies_in_time()
            wait_until(lambda: holds.num_held)
            time.sleep(1.5 * SLOW)
            holds.are_released.set()
            wait_until(lambda: not holds.num_held)
            holds.are_released.clear()
            data = b""
            while not data.endswith(b"\r\n\r\n3"):
                data += (piece := client.recv(1000))
                assert piece, data
            assert data.startswith(b"HTTP/1.1 200")
            time.sleep(1.5 * SLOW)  # idle time between requests does not count


def test_a_client_that_sends_on_after_the_answer_is_disconnected(heads_in_time):
    class Refuse:
        def __init__(self, app):
            self._app = app

        async def __call__(self, scope, receive, send):
            if scope["type"] == "http":
                await PlainTextResponse("no", 401)(scope, receive, send)
            else:
                await self._app(scope, receive, send)

    with run_app(echo_app(Refuse)) as url, connected(url) as client:
        client.sendall(POST + b"content-length: 1000000\r\n\r\nx")
        assert client.recv(1000).startswith(b"HTTP/1.1 401")
        heads_in_time()
        assert trickle(client, b"x" * 999)


def test_a_head_that_is_too_long(url):
    with connected(url) as client:
        client.sendall(POST + b"x-more: " + b"a" * (MAX_HEAD + 1))
        assert f"longer than {MAX_HEAD} bytes" in refused(client, 431)
    with connected(url) as client:
        client.sendall(
            POST + b"connection: close\r\nx-more: " + b"a" * (MAX_HEAD - 1000) + b"\r\ncontent-length: 0\r\n\r\n"
        )
        assert read_all(client) == (200, b"0")


@pytest.mark.parametrize(
    "data", [b"\x00\x01\x02\r\n\r\n", b"hello\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\r\n\r\n"]
)
def test_bytes_that_are_no_http_are_refused(url, data):
    with connected(url) as client:
        client.sendall(data)
        assert refused(client, 400) == "this is not valid HTTP/1.1"


def test_a_body_that_is_no_http(url):
    with connected(url) as client:
        client.sendall(POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n")
        assert refused(client, 400) == "this is not valid HTTP/1.1"


@pytest.mark.parametrize(
    ("version", "fields"),
    [
        (b"1.1", b"content-length: 3\r\ntransfer-encoding: chunked\r\n"),
        (b"1.1", b"transfer-encoding: chunked\r\ncontent-length: 3\r\n"),
        (b"1.0", b"transfer-encoding: chunked\r\n"),
    ],
)
def test_a_body_of_ambiguous_length_is_refused_and_the_connection_closed(url, version, fields):
    first = b"POST / HTTP/" + version + b"\r\nhost: x\r\n" + fields + b"\r\n0\r\n\r\n"
    with connected(url) as client:
        client.sendall(first + b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert "transfer-encoding beside a content-length" in refused(client, 400)


def test_lengths_that_differ_are_refused_and_the_connection_closed(url):
    with connected(url) as client:
        client.sendall(POST + b"content-length: 3\r\ncontent-length: 4\r\n\r\nabcd")
        assert refused(client, 400) == "this is not valid HTTP/1.1"


def test_a_head_that_is_too_long_in_one_piece(url):
    with connected(url) as client:
        client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n" + b"x-more: " + b"a" * 70_000 + b"\r\n\r\n")
        assert f"longer than {MAX_HEAD} bytes" in refused(client, 431)


def test_near_the_limit_of_descriptors_idle_connections_are_closed(monkeypatch):
    limit = http_protocol.RESERVED_DESCRIPTORS + 4
    monkeypatch.setattr(http_protocol.resource, "getrlimit", lambda _kind: (limit, limit))
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 10 * DEADLINE)  # no time closes an idle connection
    app, ours, made = echo_app(), set(), []
    holds, connection_made = app.state.holds, http_protocol.Connection.connection_made

    def record_made(self, transport):
        if transport.get_extra_info("peername") in ours:
            connection_made(self, transport)
            made.append(self)
        else:  # a client of another test, which had this port before
            self.transport = transport
            transport.abort()

    monkeypatch.setattr(http_protocol.Connection, "connection_made", record_made)

    def accepted(url):
        """A connection that the server has accepted, and for which it has closed another one."""
        before = len(made)
        client = stack.enter_context(socket.socket())
        client.settimeout(DEADLINE)
        client.bind(("127.0.0.1", 0))
        ours.add(client.getsockname())
        client.connect(address(url))
        wait_until(lambda: len(made) > before)
        return client

    with run_app(app) as url, ExitStack() as stack:
        used, waits = (accepted(url) for _ in range(2))
        used.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert used.recv(1000).startswith(b"HTTP/1.1 200")
        waits.sendall(b"GET /?hold HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        wait_until(lambda: holds.num_held)  # a connection without a request would be closed first
        idle = []
        for number in range(6):
            idle.append(accepted(url))
            if number >= 2:
                assert idle[number - 2].recv(1) == b""  # the oldest without a request goes first
        assert not select.select(idle[4:], [], [], 0.1)[0]
        busy = []
        for number in range(3):
            busy.append(accepted(url))
            busy[-1].sendall(b"GET /?hold HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            wait_until(lambda number=number: holds.num_held == number + 2)
        assert used.recv(1) == b""
        holds.are_released.set()
        assert read_all(waits) == (200, b"0")
        assert [read_all(one) for one in busy] == [(200, b"0")] * 3


def test_the_limit_of_descriptors_is_raised():
    code = """
import resource
from quire.server.middleware.http_protocol import raise_descriptor_limit
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
hard = min(hard, 1000)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
raise_descriptor_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_a_client_that_does_not_read_is_cut_off(monkeypatch):
    monkeypatch.setattr(http_protocol, "WRITE_SECONDS", SLOW)
    ended = threading.Event()

    async def endless(request):
        async def pieces():
            try:
                while True:
                    yield b"a" * 2**16
                    await asyncio.sleep(0)
            finally:
                ended.set()

        return StreamingResponse(pieces())

    app = echo_app()
    app.add_route("/endless", endless)
    with run_app(app, send_buffer=2**14) as url, connected(url) as client:
        client.sendall(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
        assert ended.wait(60)
        got = b"".join(iter(lambda: client.recv(2**20), b""))
        assert got
        assert not got.endswith(b"0\r\n\r\n")  # the end of a whole answer


@pytest.mark.parametrize("promised", [True, False])
def test_a_body_that_is_too_long(url, promised):
    with connected(url) as client:
        if promised:
            client.sendall(POST + f"content-length: {MAX_BODY + 1}\r\n\r\n".encode())
            assert f"longer than {MAX_BODY} bytes" in refused(client, 413)
            return
        client.sendall(POST + b"transfer-encoding: chunked\r\n\r\n")
        piece = b"100000\r\n" + b"x" * 2**20 + b"\r\n"
        try:
            for _ in range(MAX_BODY // 2**20 + 1):
                client.sendall(piece)
            assert refused(client, 413)
        except ConnectionError:  # the server closed the connection
            pass


def test_websockets_are_not_spoken(url):
    upgrade = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13", "sec-websocket-key": "a"}
    assert httpx.get(url, headers=upgrade).status_code == 200  # the upgrade is ignored


def test_forwarded_headers_of_unknown_proxies_are_ignored(url):
    async def scheme(request):
        return PlainTextResponse(f"{request.url.scheme} {request.client.host}")

    app = echo_app()
    app.add_route("/who", scheme)
    with run_app(app) as url:
        said = {"x-forwarded-proto": "https", "x-forwarded-for": "192.0.2.7"}
        assert httpx.get(f"{url}/who", headers=said).text == "http 127.0.0.1"


def test_https(certificate):
    cert, key = certificate
    check_certificate(cert, key)
    with run_app(echo_app(), ServerOptions(ssl_certfile=cert, ssl_keyfile=key)) as url:
        url = url.replace("http:", "https:")
        trusting = ssl.create_default_context(cafile=cert)
        with httpx.Client(verify=trusting) as client:
            assert client.post(url, content=b"abc").text == "3"
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(url)
        with connected(url) as client:
            client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert not client.recv(100).startswith(b"HTTP")


def test_certificate_and_key_may_be_in_one_file(certificate, tmp_path):
    both = tmp_path / "both.pem"
    both.write_text("".join(Path(path).read_text() for path in certificate))
    check_certificate(str(both), None)
    check_certificate(None, None)


def test_certificates_that_cannot_be_used(certificate, tmp_path):
    cert, key = certificate
    other, locked, text = tmp_path / "other.pem", tmp_path / "locked.pem", tmp_path / "text.pem"
    text.write_text("hello")
    subprocess.run(["openssl", "ecparam", "-genkey", "-name", "prime256v1", "-out", other], check=True)
    subprocess.run(
        ["openssl", "ec", "-in", key, "-aes256", "-passout", "pass:secret", "-out", locked],
        check=True,
        capture_output=True,
    )
    for files, says in (
        ((None, key), "ssl_keyfile needs ssl_certfile"),
        ((str(tmp_path / "none"), key), "ssl_certfile: .*none cannot be read: No such file"),
        ((cert, str(tmp_path)), "ssl_keyfile: .*Is a directory"),
        ((cert, None), "cannot be used"),
        ((cert, str(text)), "PEM"),
        ((str(text), key), "PEM"),
        ((cert, str(other)), "belong together"),
        ((cert, str(locked)), "must not be encrypted"),
    ):
        with pytest.raises(ConfigError, match=says):
            check_certificate(*files)


def test_a_bad_certificate_is_reported_before_a_model_is_loaded(monkeypatch, tmp_path):
    monkeypatch.setattr(serving, "launched", None)
    with pytest.raises(ConfigError, match="ssl_certfile"):
        serving.serve(EngineOptions(), ServerOptions(ssl_certfile=str(tmp_path / "none")), report=print, progress=print)
