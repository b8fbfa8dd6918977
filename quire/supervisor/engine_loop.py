"""Main loop of an engine whose front end is at the other end of a socket.

One thread runs the loop. A second thread reads commands, which are executed between steps. A third thread sends
heartbeats, also during a long step. A turn sends one message: the outputs of the step before, and the step that begins
now. It is sent before that step is launched, so that after a crash the front end has the requests of the step.
"""

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from quire.core.adapter import Adapter
from quire.core.output import Output
from quire.core.step import Step
from quire.engine.engine import Engine
from quire.errors import QueueFull
from quire.supervisor import protocol
from quire.supervisor.gc_policy import GCPolicy
from quire.supervisor.protocol import (
    Answer,
    BadFrame,
    Batch,
    Command,
    EngineMessage,
    FrameReader,
    Launched,
    Pulse,
    Result,
)

log = logging.getLogger(__name__)

IDLE_SECONDS = 0.5  # the longest wait of an idle engine for commands
HEARTBEAT_SECONDS = 0.25
_RECV_BYTES = 2**18  # bytes
_MonitorCall = protocol.MonitorUpdate | protocol.MonitorNode
_NO_WORK = (protocol.MonitorUpdate, protocol.MonitorNode, protocol.ForgetViewer, protocol.ServedElsewhere)
_PAUSE_PER_MONITOR_CALL = 100  # pause after a call, times its CPU time: calls take at most 1 % of the time


class EngineLoop:
    """Runs one engine on one socket. `run` returns when the other end closes the socket or sends Close."""

    def __init__(self, engine: Engine, connection: socket.socket, gc_policy: GCPolicy | None = None) -> None:
        """gc_policy: policy of this process; None if the process has other work."""
        self._engine = engine
        self._gc_policy = gc_policy
        self._connection = connection
        self._wake = threading.Condition()
        self._commands: deque[Command] = deque()
        self._closing = False
        self._sending = threading.Lock()
        self._turn_began = time.monotonic()
        self._last_request_ids: list[str] = []  # request ids of the last step that was sent
        self._outputs: list[Output] = []  # not sent yet
        self._answers: list[Answer] = []  # not sent yet
        self._sent_batch = False  # whether this turn has sent its message
        self._next_check = 0.0  # when the block accounting of an idle engine may be checked
        self._last_work = time.monotonic()  # when there was something to do for requests
        self._monitor_calls: deque[_MonitorCall] = deque()  # not executed yet, oldest first
        self._next_monitor_call = 0.0  # when the next of them may be executed
        self._adapters_read: deque[tuple[int, Future[Adapter]]] = deque()  # results of ReadAdapter calls, by number

    def run(self) -> None:
        """Execute commands and run steps until the end. Closes the socket and the engine."""
        self._send_batch(begins=False)
        for work in (self._listen, self._heartbeat):
            threading.Thread(target=work, name=f"quire-{work.__name__.strip('_')}", daemon=True).start()
        try:
            while self._turn():
                pass
        finally:
            self._close_connection()
            self._engine.close()

    def _turn(self) -> bool:
        with self._wake:
            if not (self._commands or self._closing or self._engine.has_work or self._adapters_read):
                self._wake.wait(self._idle_seconds())
            commands = list(self._commands)
            self._commands.clear()
        self._turn_began, self._sent_batch = time.monotonic(), False
        if self._engine.has_work or not all(isinstance(one, _NO_WORK) for one in commands):
            self._last_work = self._turn_began
        idle = self._turn_began - self._last_work >= IDLE_SECONDS
        if idle and self._turn_began >= self._next_check:
            self._next_check = self._turn_began + IDLE_SECONDS
            self._check_block_accounting()
        if self._gc_policy is not None:
            self._gc_policy.collect_if_due(idle=idle)
        for command in commands:
            self._execute(command)
        while self._adapters_read:
            number, read = self._adapters_read.popleft()
            self._answer_call(number, read.result)
        self._call_monitor()
        if self._engine.has_work and not self._closing:
            outputs = self._engine.step(self._launching)  # which sends and clears self._outputs meanwhile
            self._outputs += outputs
        if not (self._sent_batch and self._engine.has_work):  # otherwise sent with the next step, which begins at once
            self._send_batch(begins=False)
        return not self._closing

    def _launching(self, _step: Step) -> None:
        """Send the outputs so far, beside the step that begins."""
        self._send_batch(begins=True)

    def _idle_seconds(self) -> float:
        """How long an idle engine waits for commands: until the next call of the monitor, if there is one."""
        if not self._monitor_calls:
            return IDLE_SECONDS
        return min(IDLE_SECONDS, max(0.0, self._next_monitor_call - time.monotonic()))

    def _call_monitor(self) -> None:
        """Execute the oldest call of the monitor if it is due. The pause behind it bounds the share of all calls."""
        if not self._monitor_calls or time.monotonic() < self._next_monitor_call:
            return
        call = self._monitor_calls.popleft()
        began = time.thread_time()
        self._answer_call(call.number, lambda: self._monitored(call))
        self._next_monitor_call = time.monotonic() + _PAUSE_PER_MONITOR_CALL * (time.thread_time() - began)

    def _monitored(self, call: _MonitorCall) -> bytes:
        match call:
            case protocol.MonitorUpdate(_, viewer, watcher, num_seen):
                return self._engine.monitor_update(viewer, watcher, num_seen)
            case protocol.MonitorNode(_, watcher, node):
                return msgspec.json.encode(self._engine.node(watcher, node))

    def _check_block_accounting(self) -> None:
        try:
            self._engine.check_block_accounting()
        except Exception:  # an error of the check must not end the engine
            log.exception("the check of the KV block accounting failed")

    def _execute(self, command: Command) -> None:
        match command:
            case protocol.Abort(request_ids):
                # the front end may add a request of the same id before these outputs are sent
                self._outputs = [output for output in self._outputs if output.request_id not in request_ids]
                for request_id in request_ids:
                    self._engine.abort(request_id)
            case protocol.Finish(seq_id, num_tokens):
                self._engine.finish(seq_id, num_tokens)
            case protocol.EndProgram(tenant, program, branch):
                self._engine.end_program(tenant, program, branch)
            case protocol.ServedElsewhere(service):
                self._engine.served_elsewhere(service)
            case protocol.Close():
                self._closing = True
            case protocol.MonitorUpdate() | protocol.MonitorNode():
                self._monitor_calls.append(command)
            case protocol.ForgetViewer(viewer):
                self._monitor_calls = deque(
                    one for one in self._monitor_calls if getattr(one, "viewer", None) != viewer
                )
                self._engine.forget_viewer(viewer)
            case protocol.ReadAdapter(number, name, path):
                self._read_adapter(number, name, path)
            case (
                protocol.Add(number)
                | protocol.Explain(number)
                | protocol.Flush(number)
                | protocol.PinAdapter(number)
                | protocol.AskCosts(number)
            ):
                self._answer_call(number, lambda: self._answer(command))

    def _read_adapter(self, number: int, name: str, path: str) -> None:
        """Have the engine read an adapter on a thread. A later turn sends the answer."""

        def done(read: "Future[Adapter]") -> None:
            with self._wake:
                self._adapters_read.append((number, read))
                self._wake.notify()

        try:
            self._engine.read_adapter(name, path, done)
        except Exception as error:
            self._answers.append(Answer(number, failure=protocol.encode_error(error)))

    def _answer_call(self, number: int, answer: Callable[[], Result]) -> None:
        try:
            self._answers.append(Answer(number, answer()))
        except Exception as error:  # any error of a call is sent to its caller
            self._answers.append(Answer(number, failure=protocol.encode_error(error)))

    def _answer(self, command: Command) -> Result:
        match command:
            case protocol.Add():
                self._add(command)
                return None
            case protocol.Explain():
                found = map(self._engine.explain, command.request_ids)
                return [one for one in found if one is not None]
            case protocol.Flush():
                return self._engine.flush_cache()
            case protocol.PinAdapter(_, adapter, pinned):
                self._engine.pin_adapter(adapter, pinned=pinned)
                return None
        return self._engine.cost_figures()

    def _add(self, command: protocol.Add) -> None:
        for i, request in enumerate(command.requests):
            self._turn_began = time.monotonic()  # adding many requests is slow, and must not count as a stall
            try:
                self._engine.add(request)
            except Exception as error:
                for before in command.requests[:i]:
                    self._engine.abort(before.id)
                if i and isinstance(error, QueueFull):
                    error.spacing = None  # the requests before it had room, so that the next single request has
                raise

    def _send_batch(self, *, begins: bool) -> None:
        """Send outputs, answers and metrics. begins: with the step that is launched now."""
        stats = self._engine.stats()
        launched = self._launched() if begins else None
        counted, keys = self._engine.num_counted, self._engine.take_key_changes()
        service = self._engine.take_service()
        batch = Batch(self._outputs, self._answers, stats.num_steps, launched, stats, counted, keys, service)
        self._send(batch)
        self._outputs, self._answers, self._sent_batch = [], [], True

    def _launched(self) -> Launched:
        rows = self._engine.last_step_positions
        names = [request_id for request_id, _ in rows]
        changed, self._last_request_ids = names != self._last_request_ids, names
        positions = [position for _, position in rows]
        return Launched(names if changed else None, positions, self._engine.predicted_seconds)

    def _send(self, message: EngineMessage) -> None:
        try:
            with self._sending:
                self._connection.sendall(protocol.encode_frame(message))
        except OSError:  # the front end has closed the socket
            self._closing = True

    # Threads of `_listen` and `_heartbeat`

    def _listen(self) -> None:
        frames = FrameReader()
        try:
            while data := self._connection.recv(_RECV_BYTES):
                for message in frames.feed(data):
                    commands = protocol.decode_commands(message)
                    with self._wake:
                        self._commands += commands
                        self._wake.notify()
        except OSError:
            pass
        except BadFrame:
            log.exception("cannot decode a message of the front end")
        with self._wake:
            self._closing = True
            self._wake.notify()

    def _heartbeat(self) -> None:
        while not self._closing:
            self._send(Pulse(self._turn_began))
            time.sleep(HEARTBEAT_SECONDS)

    def _close_connection(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError):  # the other end is already closed
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
