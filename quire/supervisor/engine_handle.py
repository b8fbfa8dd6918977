"""Handles that launch and end an engine, in a process of its own or on a thread of this one.

The engine is connected by an unnamed socket pair, so that no other process can connect to it.
"""

import logging
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Protocol

from quire.config import EngineOptions
from quire.engine.engine import Engine
from quire.errors import EngineStopped
from quire.startup.model_info import ModelInfo
from quire.startup.replica_share import WHOLE, ReplicaShare
from quire.supervisor import protocol
from quire.supervisor.engine_loop import EngineLoop
from quire.supervisor.protocol import Begin, EngineMessage, Ready, receive_frame
from quire.supervisor.spawn import PROGRAM, Spawned, spawn

log = logging.getLogger(__name__)

DUMP_SIGNAL = signal.SIGUSR1  # makes an engine process write the stacks of its threads
_SIGNALS = {one.value: one.name for one in signal.Signals}  # most real-time signals have no name


class EngineHandle(Protocol):
    """Launches an engine and, if `can_restart`, further ones after it. One engine runs at a time."""

    can_restart: bool
    model_info: ModelInfo
    share: ReplicaShare
    connection: socket.socket

    @property
    def was_killed(self) -> bool:
        """Whether another process ended the engine. To be asked after `wait`."""

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
    program: see `spawn`. spawned: the process of the first start; None: `launch` starts one.

    share: the part of the machine that the engine may use. After `launch` that of one of several replicas has the
    available memory and the costs that the engine found, and further starts use these. An engine that has the machine
    alone finds them anew at each start.
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
        program: Sequence[str] = PROGRAM,
        spawned: Spawned | None = None,
        share: ReplicaShare = WHOLE,
    ) -> None:
        self._options = options
        self._report = report
        self._progress = progress
        self.program = program
        self._spawned = spawned
        self.share = share
        self.process: subprocess.Popen[bytes]
        self._num_starts = 0

    def launch(self) -> None:
        """Start an engine, and wait until it is ready. Raises ConfigError, ModelError, EngineStopped, OSError."""
        spawned, self._spawned = self._spawned or spawn(self.program), None
        self.process, self.connection = spawned
        with ExitStack() as on_error:
            on_error.callback(self.connection.close)
            on_error.callback(self.wait)
            on_error.callback(self.kill)
            begin = Begin(self._options, is_restart=self._num_starts > 0, share=self.share)
            with suppress(ConnectionError):  # the process has died, which _wait_until_ready reports
                self.connection.sendall(protocol.encode_frame([begin]))
            ready = self._wait_until_ready()
            on_error.pop_all()
        self.model_info = ready.facts
        if self.share.count > 1:
            self.share = ready.share
        self._num_starts += 1

    @property
    def was_killed(self) -> bool:
        """Whether it ended by SIGKILL: signals of its own faults have other numbers. To be asked after `wait`."""
        return self.process.returncode == -signal.SIGKILL

    def dump_stacks(self) -> None:
        """Make the engine process write the stacks of its threads to its standard error."""
        self.process.send_signal(DUMP_SIGNAL)

    def kill(self) -> None:
        """Kill the engine process."""
        self.process.kill()

    def wait(self) -> str:
        """Wait until the engine process has ended. Returns its signal or exit code as part of a sentence."""
        code = self.process.wait()
        return f"by signal {_SIGNALS.get(-code, -code)}" if code < 0 else f"with exit code {code}"

    def _wait_until_ready(self) -> Ready:
        while (message := self._receive()) is not None:
            ready = self._handle_message(protocol.decode_message(message))
            if ready is not None:
                return ready  # later messages are left in the socket for the replica
        raise EngineStopped(f"the engine process ended {self.wait()} while it started")

    def _receive(self) -> bytes | None:
        try:
            return receive_frame(self.connection)
        except ConnectionError:
            return None

    def _handle_message(self, message: EngineMessage) -> Ready | None:
        """Handle a message of a starting engine. Returns Ready, None for others. Raises the error of Refused."""
        match message:
            case Ready():
                return message
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
    was_killed = False
    share = WHOLE
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
