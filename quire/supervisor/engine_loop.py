"""EngineLoop: runs an engine for somebody at the other end of a socket. Knows messages, no text and no tokenizer.

One thread runs it; another one reads commands, which are carried out between steps; a third shows that the process
lives, also while a step takes long. What a turn has to say is one message: the outputs of the step before, with the
step that begins now, which whoever reads it must know about before it begins: it may be the last that is heard.
"""

import contextlib
import gc
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from quire.core.explanation import Explanation
from quire.core.output import Output
from quire.engine.engine import Engine, Learnt
from quire.supervisor import protocol
from quire.supervisor.protocol import Answer, BadFrame, Batch, Command, Frames, Launched, News, Pulse

_NEVER = 2**31 - 1
_IDLE_SHARE = 1 / 100  # of the time that full collections may take while there is nothing else to do
_BUSY_SHARE = 1 / 2000  # the same while requests wait for them
_BUSY_SECONDS = 300.0  # that there are at least between those: the last one may say little of a queue that has grown


class Garbage:
    """Full collections of this process, from now on. There can be one of it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """What lives now stays: it is not searched any more."""
        self._clock = clock
        self._took = 0.0  # seconds, what the last full collection
        gc.collect()
        gc.freeze()
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, _NEVER)
        self._ended = clock()

    def look(self, *, idle: bool) -> None:
        """Search now, if it is time to. idle: whether nobody waits."""
        begin = self._clock()
        pause = self._took / _IDLE_SHARE if idle else max(self._took / _BUSY_SHARE, _BUSY_SECONDS)
        if begin - self._ended < pause or not gc.get_count()[2]:
            return
        gc.collect()
        self._ended = self._clock()
        self._took = self._ended - begin


log = logging.getLogger(__name__)

IDLE_SECONDS = 0.5  # how long an idle engine sleeps at most
PULSE_SECONDS = 0.25
_AT_ONCE = 2**18  # bytes


class EngineLoop:
    """One engine, one socket. `run` returns when the other end closes it, or asks for the end."""

    def __init__(self, engine: Engine, connection: socket.socket, garbage: Garbage | None = None) -> None:
        """garbage: of this process, where it has no other business."""
        self._engine = engine
        self._garbage = garbage
        self._connection = connection
        self._wake = threading.Condition()
        self._commands: deque[Command] = deque()
        self._closing = False
        self._sending = threading.Lock()
        self._turned = time.monotonic()
        self._rows: list[str] = []  # requests of the step that was told last
        self._outputs: list[Output] = []  # to be told
        self._answers: list[Answer] = []
        self._told = False  # in this turn

    def run(self) -> None:
        """Carry out commands and run steps."""
        self._engine.on_launch = lambda _step: self._tell(begins=True)
        self._tell(begins=False)
        for work in (self._listen, self._beat):
            threading.Thread(target=work, name=f"quire-{work.__name__.strip('_')}", daemon=True).start()
        try:
            while self._turn():
                pass
        finally:
            self._engine.on_launch = None
            self._end()
            self._engine.close()

    def _turn(self) -> bool:
        idle = False
        with self._wake:
            if not (self._commands or self._closing or self._engine.has_work):
                idle = not self._wake.wait(IDLE_SECONDS)
            commands = list(self._commands)
            self._commands.clear()
        self._turned, self._told = time.monotonic(), False
        if idle:
            self._look_over()
        if self._garbage is not None:
            self._garbage.look(idle=idle)
        for command in commands:
            self._carry_out(command)
        if self._engine.has_work and not self._closing:
            outputs = self._engine.step()  # which tells what there was before
            self._outputs += outputs
        if not (self._told and self._engine.has_work):  # otherwise with the next step, which begins at once
            self._tell(begins=False)
        return not self._closing

    def _look_over(self) -> None:
        try:
            self._engine.look_over()
        except Exception:  # what only checks must not be the end of what it checks
            log.exception("the memory could not be checked")

    def _carry_out(self, command: Command) -> None:
        match command:
            case protocol.Abort(request_ids):
                for request_id in request_ids:
                    self._engine.abort(request_id)
            case protocol.Finish(seq_id, num_tokens):
                self._engine.finish(seq_id, num_tokens)
            case protocol.EndProgram(tenant, program, branch):
                self._engine.end_program(tenant, program, branch)
            case protocol.Close():
                self._closing = True
            case protocol.Add(number) | protocol.Explain(number) | protocol.Flush(number) | protocol.AskLearnt(number):
                try:
                    self._answers.append(Answer(number, self._answer(command)))
                except Exception as error:  # whatever is wrong with a question is told to the one who asked it
                    self._answers.append(Answer(number, failure=protocol.failure_of(error)))

    def _answer(self, command: Command) -> int | Learnt | list[Explanation] | None:
        match command:
            case protocol.Add():
                self._add(command)
                return None
            case protocol.Explain():
                found = map(self._engine.explain, command.request_ids)
                return [one for one in found if one is not None]
            case protocol.Flush():
                return self._engine.flush_cache()
        return self._engine.learnt()

    def _add(self, command: protocol.Add) -> None:
        for i, request in enumerate(command.requests):
            self._turned = time.monotonic()  # many requests with long lists take their time
            try:
                self._engine.add(*request)
            except Exception:
                for before in command.requests[:i]:
                    self._engine.abort(before.request_id)
                raise

    def _tell(self, *, begins: bool) -> None:
        """Send what there is to say."""
        stats = self._engine.stats()
        launched = self._launched() if begins else None
        batch = Batch(self._outputs, self._answers, stats.num_steps, launched, stats)
        self._send(batch)
        self._outputs, self._answers, self._told = [], [], True

    def _launched(self) -> Launched:
        rows = self._engine.newest_rows
        names = [request_id for request_id, _ in rows]
        changed, self._rows = names != self._rows, names
        positions = [position for _, position in rows]
        return Launched(names if changed else None, positions, self._engine.predicted_seconds)

    def _send(self, news: News) -> None:
        try:
            with self._sending:
                self._connection.sendall(protocol.packed(news))
        except OSError:  # nobody is left to hear it
            self._closing = True

    # From here on: threads of their own.

    def _listen(self) -> None:
        frames = Frames()
        try:
            while data := self._connection.recv(_AT_ONCE):
                for message in frames.feed(data):
                    commands = protocol.commands_of(message)
                    with self._wake:
                        self._commands += commands
                        self._wake.notify()
        except OSError:
            pass
        except BadFrame:
            log.exception("the front end sent what cannot be read")
        with self._wake:
            self._closing = True
            self._wake.notify()

    def _beat(self) -> None:
        while not self._closing:
            self._send(Pulse(self._turned))
            time.sleep(PULSE_SECONDS)

    def _end(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError):  # the other end has gone before
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
