"""The health check of a container: asks the running `quire serve` whether it is ready.

    python -m quire.server.health_check

Port, host and TLS are those that the server was started with, found in its command line. Proxies of the environment are
not used. It imports little, because a container runs it every few seconds. Exit code 1, with the reason, unless all
servers that are found answer /ready with 200.
"""

import http.client
import ssl
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000  # of `quire serve`
TIMEOUT_SECONDS = 4.0
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class Address(NamedTuple):
    """Where a server answers."""

    host: str
    port: int
    scheme: str


def address_of(command: Sequence[str]) -> Address | None:
    """Where the server with this command line answers; None if it is no command line of `quire serve`."""
    start = next((i for i, one in enumerate(command[:3]) if Path(one).name == "quire"), None)
    if start is None or list(command[start + 1 : start + 2]) != ["serve"]:
        return None
    given: dict[str, str] = {}
    rest = iter(command[start + 2 :])
    for one in rest:
        if one == "--":
            break
        flag, has_value, value = one.partition("=")
        if flag in ("--host", "--port", "--ssl-certfile"):
            given[flag] = value if has_value else next(rest, "")
    host, port = given.get("--host", DEFAULT_HOST), given.get("--port", "")
    number = int(port) if port.isdecimal() else DEFAULT_PORT
    return Address(_ANY_ADDRESS.get(host, host), number, "https" if "--ssl-certfile" in given else "http")


def running_servers(processes: Path = Path("/proc")) -> Iterator[Address]:
    """Where the servers of this container answer."""
    for file in processes.glob("[0-9]*/cmdline"):
        try:
            command = file.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # the process has ended, or belongs to another user
            continue
        if (address := address_of(command)) is not None:
            yield address


def problem(address: Address) -> str | None:
    """Why the server there is not ready; None if it is."""
    host, port, scheme = address
    connection: http.client.HTTPConnection
    if scheme == "https":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False  # the certificate is for the name that clients use
        context.verify_mode = ssl.CERT_NONE
        connection = http.client.HTTPSConnection(host, port, timeout=TIMEOUT_SECONDS, context=context)
    else:
        connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_SECONDS)
    try:
        connection.request("GET", "/ready")
        answer = connection.getresponse()
        text = answer.read(500).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return f"{host} port {port}: {error or type(error).__name__}"
    finally:
        connection.close()
    return None if answer.status == 200 else f"{host} port {port}: status {answer.status} {text}"


def main() -> None:
    """Ask all servers. Ends the process with 1 if one is not ready, or if there is none."""
    addresses = list(running_servers())
    problems = list(filter(None, map(problem, addresses)))
    if not addresses:
        problems = ["no process `quire serve` is running here"]
    if problems:
        sys.exit("; ".join(problems))


if __name__ == "__main__":
    main()
