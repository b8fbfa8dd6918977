"""Main function of the engine process, which `python -m quire.supervisor` starts.

It builds the engine from the options in the first message, and runs it until the front end closes the socket.
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

_LOADING_STEPS = 100  # progress messages per load


def run(connection: socket.socket, build: Callable[..., Built] = build) -> None:
    """Build the engine that the other end of `connection` asks for, and run it until that end is closed.

    Sends Ready, or Refused with the error if the engine could not be built.
    """
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the front end ends this process with Close, or by its own end

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
    """Progress callback that sends at most one message per percent."""

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
        raise SystemExit  # the front end has closed the socket
    match protocol.commands_of(message):
        case [Begin() as begin]:
            return begin
    raise BadFrame("something else came before the engine was there")
