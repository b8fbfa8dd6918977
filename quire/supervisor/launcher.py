"""Hosts: where an engine runs, in a process of its own or on a thread of this one. Knows processes and signals.

The socket is one of a pair, which no name leads to: nobody else can connect to it.
"""

import logging
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from quire.config import EngineOptions
from quire.engine.engine import Engine
from quire.errors import EngineStopped
from quire.startup.build import Facts
from quire.supervisor import protocol
from quire.supervisor.engine_loop import EngineLoop
from quire.supervisor.frames import received
from quire.supervisor.protocol import Begin, News

log = logging.getLogger(__name__)

DUMP_SIGNAL = signal.SIGUSR1  # upon which an engine process writes the stacks of its threads
_PROGRAM = ("-m", "quire.supervisor")
_SIGNALS = {one.value: one.name for one in signal.Signals}  # most real-time signals have no name


class Host(Protocol):
    """One engine that runs, or another one after it."""

    can_restart: bool
    facts: Facts
    connection: socket.socket

    def launch(self) -> None:
        """Start an engine, and wait until it is ready. Raises ConfigError, ModelError, EngineStopped, OSError."""

    def dump_stacks(self) -> None:
        """Let it write what its threads do."""

    def kill(self) -> None:
        """End it at once."""

    def wait(self) -> str:
        """Wait until it has ended; how it did."""


class EngineProcess:
    """An engine in a process of its own.

    report(line) and progress(done, total) are told what the first one says while it starts; later ones say nothing.
    program: what Python runs in the process, with the number of the socket's file as its last argument.
    """

    can_restart = True
    facts: Facts
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
                start_new_session=True,  # a Ctrl-C is for the front end, which lets it finish
            )
        try:
            with suppress(ConnectionError):  # it has died, as will be seen
                self.connection.sendall(protocol.packed([Begin(self._next_options())]))
            self.facts = self._until_ready()
        except BaseException:
            self.connection.close()
            self.kill()
            self.wait()
            raise
        self._num_starts += 1

    def dump_stacks(self) -> None:
        """Let it write what its threads do, to its standard error."""
        self._process.send_signal(DUMP_SIGNAL)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def wait(self) -> str:
        """Wait until it has ended; how it did."""
        code = self._process.wait()
        return f"by signal {_SIGNALS.get(-code, -code)}" if code < 0 else f"with exit code {code}"

    def _next_options(self) -> EngineOptions:
        """A journal is of one engine: those that come later write to files of their own."""
        journal = self._options.journal
        if journal is None or self._num_starts == 0:
            return self._options
        return replace(self._options, journal=f"{journal}.{self._num_starts}")

    def _until_ready(self) -> Facts:
        while (message := self._receive()) is not None:
            facts = self._hear(protocol.news_of(message))
            if facts is not None:
                return facts  # what comes behind it is for whoever uses the connection then
        self.connection.close()
        raise EngineStopped(f"the engine process ended {self.wait()} while it started")

    def _receive(self) -> bytes | None:
        try:
            return received(self.connection)
        except ConnectionError:
            return None

    def _hear(self, news: News) -> Facts | None:
        """The facts, once they come. Raises what the engine process says is wrong."""
        match news:
            case protocol.Ready(facts):
                return facts
            case protocol.Refused(failure):
                raise protocol.error_of(failure)
            case protocol.Report(line) if self._num_starts == 0:
                self._report(line)
            case protocol.Loading(done, total) if self._num_starts == 0:
                self._progress(done, total)
        return None


class EngineThread:
    """An engine on a thread of this process, which cannot be killed and is not started again."""

    can_restart = False
    connection: socket.socket

    def __init__(self, engine: Engine, facts: Facts) -> None:
        self.facts = facts
        self._engine = engine
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._theirs: socket.socket
        self._failed = False

    def launch(self) -> None:
        """Start the thread."""
        self.connection, self._theirs = socket.socketpair()
        self._thread.start()

    def dump_stacks(self) -> None:
        """Nothing: whoever debugs this process sees its threads."""

    def kill(self) -> None:
        """Nothing: a thread cannot be ended."""

    def wait(self) -> str:
        """Wait until it has ended; how it did."""
        self._thread.join()
        return "with an error" if self._failed else "as it was told"

    def _run(self) -> None:
        try:
            EngineLoop(self._engine, self._theirs).run()
        except Exception:
            log.exception("the engine failed")
            self._failed = True
