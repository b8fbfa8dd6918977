"""Main function of the engine process, which `python -m quire.supervisor` starts.

It builds the engine from the options in the first message, and runs it until the front end closes the socket.
"""

import faulthandler
import signal
import socket
from collections.abc import Callable

from quire.control_characters import show_in_logs
from quire.errors import QuireError
from quire.startup.build import Built, build
from quire.startup.freed_memory import return_freed_memory
from quire.startup.model_info import model_info_of
from quire.startup.replica_share import block_keys
from quire.supervisor import protocol
from quire.supervisor.engine_handle import DUMP_SIGNAL
from quire.supervisor.engine_loop import EngineLoop
from quire.supervisor.gc_policy import GCPolicy
from quire.supervisor.protocol import BadFrame, Begin, EngineMessage, Loading, Ready, Refused, Report, receive_frame

_LOADING_STEPS = 100  # progress messages per load


def run(connection: socket.socket, build: Callable[..., Built] = build) -> None:
    """Build the engine that the other end of `connection` asks for, and run it until that end is closed.

    Sends Ready, or Refused with the error if the engine could not be built.
    """
    show_in_logs()
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the front end ends this process with Close, or by its own end

    def say(message: EngineMessage) -> None:
        connection.sendall(protocol.encode_frame(message))

    try:
        begin = _receive_begin(connection)
        built = build(
            begin.options,
            report=lambda line: say(Report(line)),
            progress=_LoadingProgress(say),
            is_restart=begin.is_restart,
            share=begin.share,
        )
        keys = block_keys(built.share, built)
    except QuireError as error:
        say(Refused(protocol.encode_error(error)))
        return
    return_freed_memory()  # of the checkpoint's description, which `build` has dropped
    if keys is not None:
        built.engine.report_keys(keys)
        built.engine.scheduler.report_service()
    say(Ready(model_info_of(built), built.share))
    EngineLoop(built.engine, connection, GCPolicy()).run()


class _LoadingProgress:
    """Progress callback that sends at most one message per percent."""

    def __init__(self, say: Callable[[EngineMessage], None]) -> None:
        self._send = say
        self._last_percent = -1

    def __call__(self, done: int, total: int) -> None:
        part = _LOADING_STEPS * done // max(1, total)
        if part != self._last_percent:
            self._last_percent = part
            self._send(Loading(done, total))


def _receive_begin(connection: socket.socket) -> Begin:
    message = receive_frame(connection)
    if message is None:
        raise SystemExit  # the front end has closed the socket
    match protocol.decode_commands(message):
        case [Begin() as begin]:
            return begin
    raise BadFrame("the first message of the front end must be Begin")
