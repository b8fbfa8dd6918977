"""Hosts: where an engine runs, in a process of its own or on a thread of this one. Knows processes and signals.

The socket is one of a pair, which no name leads to: nobody else can connect to it.
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
from quire.startup.build import Facts
from quire.supervisor import protocol
from quire.supervisor.engine_loop import EngineLoop
from quire.supervisor.protocol import Begin, News, received

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


STARTS = 5  # that may fail in a row
PAUSE = 0.25  # seconds behind the first of them; twice as long behind each of the others
_END_SECONDS = 5.0  # for an engine that is to end, or has hung up, until it is killed


class Keeper:
    """All methods belong to one event loop, and only `abandon` may be called while another one is at work."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._work: asyncio.Task[Any] | None = None  # what a thread of the host does, or did last
        self._is_left = False  # whether that is the start of an engine that nobody waits for any more

    async def launch(self) -> bool:
        """Start another engine, with several attempts; whether there is one."""
        for attempt in range(STARTS):
            try:
                self._work = asyncio.ensure_future(asyncio.to_thread(self._host.launch))
                self._work.add_done_callback(_look_at)  # also where nobody waits for it any more
                await asyncio.shield(self._work)
                return True
            except asyncio.CancelledError:
                self._is_left = True
                raise
            except (QuireError, OSError):  # also where the system has no memory for a process
                log.exception("the engine could not be started")
                await asyncio.sleep(PAUSE * 2**attempt)
        return False

    async def ended(self) -> str:
        """Wait for the end of the engine, which is killed if that takes long; how it ended."""
        self._work = waiting = asyncio.ensure_future(asyncio.to_thread(self._host.wait))
        await asyncio.wait({waiting}, timeout=_END_SECONDS)
        if not waiting.done():
            self._host.kill()
        return await asyncio.shield(waiting)

    async def abandon(self) -> None:
        """End an engine that is being started, or that is about to end: nobody wants it any more."""
        while self._work is not None and not self._work.done():  # a process may come only after the first signal
            self._host.kill()
            await asyncio.wait({self._work}, timeout=PAUSE)
        if self._work is not None and self._is_left and self._work.exception() is None:  # it was there before
            self._is_left = False
            self._host.connection.close()
            await self.ended()


def _look_at(work: "asyncio.Future[Any]") -> None:
    if not work.cancelled():
        work.exception()
