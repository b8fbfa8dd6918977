"""The health check of a container against servers with other ports, with TLS, and beside proxies."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from embedded_model_server import run_app

from quire.server.health_check import DEFAULT_HOST, DEFAULT_PORT, Address, address_of, problem, running_servers
from quire.server.options import ServerOptions

QUIRE = ["/opt/quire/bin/python3.12", "/opt/quire/bin/quire"]
PROXIES = {
    name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY")
}
LAUNCHER = "import sys; from quire.cli import main; main()"


def test_defaults_are_those_of_the_server():
    assert (ServerOptions().host, ServerOptions().port) == (DEFAULT_HOST, DEFAULT_PORT)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["serve"], Address("127.0.0.1", 8000, "http")),
        (["serve", "--host", "0.0.0.0", "--weight-cache", "/weights"], Address("127.0.0.1", 8000, "http")),
        (["serve", "owner/name", "--port", "9000"], Address("127.0.0.1", 9000, "http")),
        (["serve", "--port=9000", "--port", "9001", "--host=::"], Address("::1", 9001, "http")),
        (["serve", "--ssl-certfile", "c.pem", "--ssl-keyfile", "k.pem"], Address("127.0.0.1", 8000, "https")),
        (["serve", "--ssl-certfile=c.pem", "--host", "10.0.0.7"], Address("10.0.0.7", 8000, "https")),
        (["serve", "--", "--port", "9000"], Address("127.0.0.1", 8000, "http")),
        (["serve", "--port"], Address("127.0.0.1", 8000, "http")),
        (["key", "serve"], None),
        (["chat"], None),
        ([], None),
    ],
)
def test_the_address_is_that_of_the_command_line(arguments, expected):
    assert address_of([*QUIRE, *arguments]) == expected
    assert address_of([QUIRE[1], *arguments]) == expected


@pytest.mark.parametrize(
    "command", [[], [""], ["python", "-m", "quire.supervisor", "3"], ["sh", "-c", "quire serve"], ["vllm", "serve"]]
)
def test_other_processes_are_no_servers(command):
    assert address_of(command) is None


def test_servers_are_found_among_processes(tmp_path):
    for number, command in {"1": ["tini", "--", "quire"], "7": [*QUIRE, "serve", "--port", "9"], "8": []}.items():
        (tmp_path / number).mkdir()
        (tmp_path / number / "cmdline").write_bytes("".join(f"{one}\0" for one in command).encode())
    (tmp_path / "9").mkdir()  # has ended
    (tmp_path / "self").mkdir()
    assert list(running_servers(tmp_path)) == [Address("127.0.0.1", 9, "http")]


async def ready(scope, receive, send):
    if scope["type"] == "http":
        status = 200 if scope["path"] == "/ready" else 404
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})


async def busy(scope, receive, send):
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 503, "headers": []})
        await send({"type": "http.response.body", "body": b"it starts"})


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_server_is_asked_past_proxies_with_and_without_tls(certificate, monkeypatch, scheme):
    for name, value in PROXIES.items():
        monkeypatch.setenv(name, value)
    cert, key = certificate if scheme == "https" else (None, None)
    options = ServerOptions(ssl_certfile=cert, ssl_keyfile=key)
    with run_app(ready, options) as url:
        port = int(url.rsplit(":", 1)[1])
        assert problem(Address("127.0.0.1", port, scheme)) is None
        assert problem(Address("127.0.0.1", port, "http" if scheme == "https" else "https")) is not None
    assert "refused" in problem(Address("127.0.0.1", port, scheme))


def test_a_server_that_is_not_ready_is_described():
    with run_app(busy) as url:
        port = int(url.rsplit(":", 1)[1])
        assert problem(Address("127.0.0.1", port, "http")) == f"127.0.0.1 port {port}: status 503 it starts"


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="there is no /proc")
def test_the_check_finds_a_server_with_tls_on_another_port(certificate, tmp_path):
    cert, key = certificate
    script = tmp_path / "quire"
    script.write_text(LAUNCHER)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = [sys.executable, script, "serve", "--port", str(port), "--ssl-certfile", cert, "--ssl-keyfile", key]
    ask = [sys.executable, "-c", CHECK_ONE, str(port)]
    env = {**os.environ, **PROXIES}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        before = subprocess.run(ask, env=env, capture_output=True, text=True, timeout=300, check=False)
        assert any(re.search("^ready", line) for line in server.stdout)
        during = subprocess.run(ask, env=env, capture_output=True, text=True, timeout=300, check=False)
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=300)
    after = subprocess.run(ask, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert (during.returncode, during.stderr) == (0, "")
    assert before.returncode == after.returncode == 1
    assert "no process `quire serve` is running here" in after.stderr


# Other servers may run on this machine: only the one with this port is looked at.
CHECK_ONE = """
import sys
from quire.server import health_check
found = health_check.running_servers
health_check.running_servers = lambda: [one for one in found() if one.port == int(sys.argv[1])]
health_check.main()
"""
