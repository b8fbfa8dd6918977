"""What the engine's process does, which `python -m quire.supervisor` starts.

It builds the engine that it is told to, runs it, and ends with whoever started it.
"""

import faulthandler
import signal
import socket
from collections.abc import Callable

from quire.errors import QuireError
from quire.startup.build import Built, build, facts_of
from quire.supervisor import protocol
from quire.supervisor.engine_loop import EngineLoop, Garbage
from quire.supervisor.launcher import DUMP_SIGNAL
from quire.supervisor.protocol import BadFrame, Begin, Loading, News, Ready, Refused, Report, received

_LOADING_STEPS = 100  # how often is told how much is loaded


def run(connection: socket.socket, build: Callable[..., Built] = build) -> None:
    """Build the engine that the other end of `connection` asks for, and run it until that end is closed."""
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # whoever started it says when to end, and is told by the system if not

    def say(news: News) -> None:
        connection.sendall(protocol.packed(news))

    try:
        built = build(_begin(connection).options, report=lambda line: say(Report(line)), progress=_Loads(say))
    except QuireError as error:
        say(Refused(protocol.failure_of(error)))
        return
    say(Ready(facts_of(built)))
    EngineLoop(built.engine, connection, Garbage()).run()


class _Loads:
    """Tells how many bytes are loaded, but not each time."""

    def __init__(self, say: Callable[[News], None]) -> None:
        self._say = say
        self._told = -1

    def __call__(self, done: int, total: int) -> None:
        part = _LOADING_STEPS * done // max(1, total)
        if part != self._told:
            self._told = part
            self._say(Loading(done, total))


def _begin(connection: socket.socket) -> Begin:
    message = received(connection)
    if message is None:
        raise SystemExit  # whoever started it has gone
    match protocol.commands_of(message):
        case [Begin() as begin]:
            return begin
    raise BadFrame("something else came before the engine was there")
