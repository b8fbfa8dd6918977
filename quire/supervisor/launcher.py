"""Launch and end of an engine, in a process of its own or on a thread of this one.

The engine is connected by an unnamed socket pair, so that no other process can connect to it.
"""

import asyncio
import logging
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from quire.config import EngineOptions
from quire.engine.engine import Engine
from quire.errors import EngineStopped, QuireError
from quire.startup.build import ModelInfo
from quire.supervisor import protocol
from quire.supervisor.engine_loop import EngineLoop
from quire.supervisor.protocol import Begin, EngineMessage, receive_frame

log = logging.getLogger(__name__)

DUMP_SIGNAL = signal.SIGUSR1  # makes an engine process write the stacks of its threads
_PROGRAM = ("-m", "quire.supervisor")
_SIGNALS = {one.value: one.name for one in signal.Signals}  # most real-time signals have no name


class EngineHandle(Protocol):
    """Launches an engine and, if `can_restart`, further ones after it. One engine runs at a time."""

    can_restart: bool
    model_info: ModelInfo
    connection: socket.socket

    def launch(self) -> None:
        """Start an engine, and wait until it is ready. Raises ConfigError, ModelError, EngineStopped, OSError."""

    def dump_stacks(self) -> None:
        """Make the engine write the stacks of its threads."""

    def kill(self) -> None:
        """End the engine at once."""

    def wait(self) -> str:
        """Wait until the engine has ended. Returns how it ended, as part of a sentence."""


class EngineProcess:
    """An engine in a process of its own.

    report(line), progress(done, total): called during the first start only. progress is in bytes.
    program: arguments of the Python interpreter; the file descriptor of the socket is appended.
    """

    can_restart = True
    model_info: ModelInfo
    connection: socket.socket

    def __init__(
        self,
        options: EngineOptions,
        *,
        report: Callable[[str], None],
        progress: Callable[[int, int], None],
        program: Sequence[str] = _PROGRAM,
    ) -> None:
        self._options = options
        self._report = report
        self._progress = progress
        self._program = program
        self._process: subprocess.Popen[bytes]
        self._num_starts = 0

    def launch(self) -> None:
        """Start an engine, and wait until it is ready. Raises ConfigError, ModelError, EngineStopped, OSError."""
        self.connection, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *self._program, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C must reach the front end only, which drains requests
            )
        try:
            with suppress(ConnectionError):  # the process has died, which _wait_until_ready reports
                self.connection.sendall(protocol.encode_frame([Begin(self._next_options())]))
            self.model_info = self._wait_until_ready()
        except BaseException:
            self.connection.close()
            self.kill()
            self.wait()
            raise
        self._num_starts += 1

    def dump_stacks(self) -> None:
        """Make the engine process write the stacks of its threads to its standard error."""
        self._process.send_signal(DUMP_SIGNAL)

    def kill(self) -> None:
        """Kill the engine process."""
        self._process.kill()

    def wait(self) -> str:
        """Wait until the engine process has ended. Returns its signal or exit code as part of a sentence."""
        code = self._process.wait()
        return f"by signal {_SIGNALS.get(-code, -code)}" if code < 0 else f"with exit code {code}"

    def _next_options(self) -> EngineOptions:
        """The options of the next engine. A restarted engine writes a journal of its own, with a numbered suffix."""
        journal = self._options.journal
        if journal is None or self._num_starts == 0:
            return self._options
        return replace(self._options, journal=f"{journal}.{self._num_starts}")

    def _wait_until_ready(self) -> ModelInfo:
        while (message := self._receive()) is not None:
            facts = self._handle_message(protocol.decode_message(message))
            if facts is not None:
                return facts  # later messages are left in the socket for AsyncEngine
        self.connection.close()
        raise EngineStopped(f"the engine process ended {self.wait()} while it started")

    def _receive(self) -> bytes | None:
        try:
            return receive_frame(self.connection)
        except ConnectionError:
            return None

    def _handle_message(self, message: EngineMessage) -> ModelInfo | None:
        """Handle a message of a starting engine. Returns the facts of Ready, else None. Raises the error of Refused."""
        match message:
            case protocol.Ready(facts):
                return facts
            case protocol.Refused(failure):
                raise protocol.decode_error(failure)
            case protocol.Report(line) if self._num_starts == 0:
                self._report(line)
            case protocol.Loading(done, total) if self._num_starts == 0:
                self._progress(done, total)
        return None


class EngineThread:
    """An engine on a thread of this process. It cannot be killed or restarted."""

    can_restart = False
    connection: socket.socket

    def __init__(self, engine: Engine, model_info: ModelInfo) -> None:
        self.model_info = model_info
        self._engine = engine
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._engine_socket: socket.socket
        self._failed = False

    def launch(self) -> None:
        """Start the thread."""
        self.connection, self._engine_socket = socket.socketpair()
        self._thread.start()

    def dump_stacks(self) -> None:
        """Does nothing."""

    def kill(self) -> None:
        """Does nothing, because a thread cannot be killed."""

    def wait(self) -> str:
        """Wait until the thread has ended. Returns how it ended, as part of a sentence."""
        self._thread.join()
        return "with an error" if self._failed else "as requested"

    def _run(self) -> None:
        try:
            EngineLoop(self._engine, self._engine_socket).run()
        except Exception:
            log.exception("the engine failed")
            self._failed = True


MAX_START_ATTEMPTS = 5  # attempts of one restart
RETRY_SECONDS = 0.25  # seconds after the first failed attempt, doubled after each further one
_END_SECONDS = 5.0  # time for an engine to end after its connection is closed, before it is killed


class Launcher:
    """Runs the blocking calls of an EngineHandle on threads.

    All methods must be called on one event loop. Only `abandon` may be called while another method runs.
    """

    def __init__(self, engine_handle: EngineHandle) -> None:
        self._engine_handle = engine_handle
        self._host_call: asyncio.Task[Any] | None = None  # the current or last call of the engine handle
        self._launch_cancelled = False  # whether that call is a launch whose caller was cancelled

    async def launch(self) -> bool:
        """Start another engine, with up to MAX_START_ATTEMPTS attempts. Returns whether it runs."""
        for attempt in range(MAX_START_ATTEMPTS):
            try:
                self._host_call = asyncio.ensure_future(asyncio.to_thread(self._engine_handle.launch))
                self._host_call.add_done_callback(_retrieve_error)  # retrieves the error if the caller is cancelled
                await asyncio.shield(self._host_call)
                return True
            except asyncio.CancelledError:
                self._launch_cancelled = True
                raise
            except (QuireError, OSError):  # OSError: for example no memory for a process
                log.exception("the engine could not be started")
                await asyncio.sleep(RETRY_SECONDS * 2**attempt)
        return False

    async def wait_ended(self) -> str:
        """Wait until the engine has ended; kill it after _END_SECONDS. Returns how it ended."""
        self._host_call = waiting = asyncio.ensure_future(asyncio.to_thread(self._engine_handle.wait))
        await asyncio.wait({waiting}, timeout=_END_SECONDS)
        if not waiting.done():
            self._engine_handle.kill()
        return await asyncio.shield(waiting)

    async def abandon(self) -> None:
        """End an engine that is starting or ending. For shutdown, after the other methods were cancelled."""
        while (
            self._host_call is not None and not self._host_call.done()
        ):  # the process may be created after the first kill
            self._engine_handle.kill()
            await asyncio.wait({self._host_call}, timeout=RETRY_SECONDS)
        if (
            self._host_call is not None and self._launch_cancelled and self._host_call.exception() is None
        ):  # the launch succeeded
            self._launch_cancelled = False
            self._engine_handle.connection.close()
            await self.wait_ended()


def _retrieve_error(work: "asyncio.Future[Any]") -> None:
    if not work.cancelled():
        work.exception()
