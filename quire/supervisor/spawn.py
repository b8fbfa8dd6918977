"""New engine processes. Imports the standard library only, so that the command line can start one at once.

An engine process needs a second to import torch. Meanwhile the HTTP process imports FastAPI.
"""

import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

PROGRAM = ("-m", "quire.supervisor")  # arguments of the Python interpreter; the socket's file descriptor is appended


class Spawned(NamedTuple):
    """A new engine process that waits for Begin, and the socket to it."""

    process: "subprocess.Popen[bytes]"
    connection: socket.socket


def spawn(program: Sequence[str] = PROGRAM) -> Spawned:
    """Start an engine process. It ends when the socket is closed. Raises OSError."""
    ours, theirs = socket.socketpair()
    with ExitStack() as on_error, theirs:
        on_error.callback(ours.close)
        process = subprocess.Popen(
            [sys.executable, *program, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C must reach the front end only, which drains requests
        )
        on_error.pop_all()
    return Spawned(process, ours)


@contextmanager
def spawned_engine(spawned: Spawned | None = None) -> Iterator[Spawned]:
    """Context manager: a new engine process, or `spawned`. If it still runs at the end of the block, it is killed."""
    spawned = spawned or spawn()
    try:
        yield spawned
    finally:
        spawned.connection.close()
        spawned.process.kill()
        spawned.process.wait()
