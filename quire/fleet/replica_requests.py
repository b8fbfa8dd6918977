"""The requests of one replica: which of them its engine has, which may run after a crash, and the calls to it."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from quire.cache.key_report import KeyChanges
from quire.core.adapter import Adapter
from quire.core.output import Output
from quire.core.request import Request
from quire.errors import EngineStopped, QueueFull, RequestError
from quire.fleet.crash_isolation import CrashBisection, Crashes, Denylist
from quire.fleet.open_requests import OpenRequests
from quire.fleet.stream import Stream
from quire.fleet.tenant_service import TenantService
from quire.supervisor import protocol
from quire.supervisor.engine_handle import EngineHandle
from quire.supervisor.pending_calls import PendingCall, PendingCalls
from quire.supervisor.protocol import Answer, BadFrame, Batch
from quire.supervisor.replica import EndedWork, Replica
from quire.supervisor.steps_in_flight import StepsInFlight

log = logging.getLogger(__name__)

MOST_GIVEN = 4096  # ids that are kept, for explanations
MAX_PENDING_CALLS = 4096  # the most pending calls
RETRY_AFTER_SECONDS = 5.0  # Retry-After of requests beyond MAX_PENDING_CALLS
CRASH_MESSAGE = "the engine crashed each time that it computed this request; it is not tried again"


class RequestOwner(Protocol):
    """What the requests of all replicas have in common, and what is done beyond one replica."""

    open_requests: OpenRequests
    crashes: Crashes
    denylist: Denylist
    pinned: dict[str, Adapter]  # by digest
    tenant_service: TenantService

    def deliver(self, output: Output) -> Stream | None:
        """Give an output to its stream. Returns the stream if the engine should compute no more for it at present."""

    def on_turn(self, home: "ReplicaRequests", keys: KeyChanges | None, num_counted: Mapping[str, int]) -> None:
        """An engine may have changed its cache, and has counted prompt tokens of requests that are placed there."""

    def on_cache_lost(self, home: "ReplicaRequests") -> None:
        """The engine of a replica has ended, and its cache with it."""

    def on_removed(self, home: "ReplicaRequests", request_id: str) -> None:
        """A request has ended or is no longer placed on a replica."""

    def relocate(self, home: "ReplicaRequests") -> None:
        """Move the requests that a replica cannot go on with to others that serve."""

    def on_stopped(self, home: "ReplicaRequests", error: EngineStopped) -> None:
        """No engine of a replica will be started any more."""


class ReplicaRequests:
    """The requests that are placed on one replica. All methods must be called on one event loop.

    ids: of these requests, in the order of placing, those included whose Add the engine has not answered. An output
    counts only if it comes from the replica that has the request at present.
    """

    def __init__(
        self,
        engine_handle: EngineHandle,
        owner: RequestOwner,
        *,
        watchdog: float,
        restart_timeout: float,
        number: int | None = None,
    ) -> None:
        """number: of the replica, for the log; None for the only one."""
        self.number = number or 0
        self.replica = Replica(engine_handle, self, watchdog=watchdog, restart_timeout=restart_timeout, number=number)
        self.ids: dict[str, None] = {}
        self.is_drained = False
        # requests that the current engine has had and another replica got, the last MOST_GIVEN of them
        self.given_ids: dict[str, None] = {}
        self._owner = owner
        self._open_requests = owner.open_requests
        self._bisection = CrashBisection(owner.crashes)
        self._submitted_ids: set[str] = set()  # open requests that the current engine has
        self._resubmitting: dict[str, PendingCall] = {}  # among them, those whose Add it has not answered
        self._paused: dict[str, object] = {}  # open requests that were taken from the engine -> their pause
        self._pausing: set[asyncio.Task[None]] = set()
        self._stepped_ids: set[str] = set()  # of the current engine's requests, those in its committed steps
        self._waiting_ids: set[str] = set()  # those that may have ended the last engine, and wait for the next one
        self._was_killed = False  # the last engine
        self._pending_calls = PendingCalls()

    @property
    def takes_requests(self) -> bool:
        """Whether a new request would be computed now: the engine serves, and searches for no cause of a crash."""
        is_searching = self._bisection.current_group is not None or self._pending_calls.has_suspects
        return not self.is_drained and self.replica.is_serving and not is_searching

    @property
    def is_serving(self) -> bool:
        """Whether an engine makes progress."""
        return self.replica.is_serving

    @property
    def num_open(self) -> int:
        """Number of the requests that an engine has accepted."""
        return len(self.ids) - sum(len(call.requests) for call in self._pending_calls.adding)

    async def add(self, requests: Sequence[Request], command: Callable[[int], protocol.Add]) -> None:
        """Place requests here, and queue them, all or none. They may move before that.

        Raises the engine's error, QueueFull beyond MAX_PENDING_CALLS pending calls, and EngineStopped.
        """
        self._check_calls()
        self._place(request.id for request in requests)
        await self._answer_of(self._pending_calls.add(command, requests))

    async def call(self, command: Callable[[int], Any], *, resend: bool = True) -> Any:  # noqa: ANN401  (of each command its own)
        """Send a command, and return the engine's answer, which it gives between two steps.

        resend: whether it is sent to the next engine if this one ends before it answers. Raises the engine's error,
        QueueFull beyond MAX_PENDING_CALLS pending calls, and EngineStopped.
        """
        self._check_calls()
        return await self._answer_of(self._pending_calls.add(command, resend=resend))

    def send(self, command: Any) -> None:  # noqa: ANN401  (one of protocol.Commands)
        """Send a command that has no answer. Has no effect while there is no engine."""
        self.replica.send(command)

    def abort(self, ids: Sequence[str]) -> None:
        """Abort requests that are placed here. Ignores others."""
        known = [request_id for request_id in ids if request_id in self.ids]
        for request_id in known:
            self._open_requests.remove(request_id)
        if known:  # the engine ignores a request that has ended
            self.send(protocol.Abort(known))
        for request_id in known:
            self.release_if_ended(request_id)

    def finish(self, request_id: str, seq_id: int, num_tokens: int) -> None:
        """End a sequence after `num_tokens` tokens, if the engine has it: another one's may have the same id."""
        if request_id in self._submitted_ids:
            self.send(protocol.Finish(seq_id, num_tokens))

    def release_if_ended(self, request_id: str) -> None:
        """If a request has ended, remove it from the bisection, and submit the requests that it held back."""
        if request_id in self._open_requests:
            return
        self._remove(request_id)
        if self._bisection.has_suspects:
            self._bisection.forget(request_id)
            self.submit()

    def submit(self) -> None:
        """Submit the open requests that the engine does not have: during bisection only those of the current group.

        A call that was pending when an engine crashed is tried first, on an engine without requests.
        """
        if not self.replica.has_engine:
            return
        trying = self._bisection.current_group
        if trying is None and self._pending_calls.has_suspects:
            self._send_pending_calls()
            return
        for request_id in list(self.ids) if trying is None else trying:
            is_known = request_id in self._submitted_ids or request_id in self._paused
            if not is_known and request_id in self._open_requests:
                self._submitted_ids.add(request_id)
                self._resubmit(request_id)
        self._send_pending_calls()

    def pin(self, adapter: Adapter, *, pinned: bool) -> None:
        """Have the engine pin an adapter, or unpin it, without waiting for its answer. A refusal is logged."""
        call = self._pending_calls.add(partial(protocol.PinAdapter, adapter=adapter, pinned=pinned), resend=False)
        call.answer.add_done_callback(partial(_log_failed_pin, adapter.name))
        self._send_pending_calls()

    def close(self) -> None:
        """Stop the tasks of paused requests."""
        for task in self._pausing:
            task.cancel()

    # Moves

    @property
    def movable(self) -> list[str]:
        """The ids of the open requests that the engine does not have, and that need not wait for the next one.

        Of a replica that is drained or stopped, also those that its engine has. Without a connection the end of the
        engine is still to be recorded, with the requests of its last steps.
        """
        kept = self._waiting_ids | self._bisection.suspects
        if self.replica.error is None and not (self.is_drained and self.replica.has_engine):
            kept |= self._submitted_ids | self._paused.keys()
        return [name for name in self.ids if name in self._open_requests and name not in kept]

    @property
    def movable_adds(self) -> list[PendingCall]:
        """The unanswered calls that may be sent to another replica.

        One that was pending when an engine crashed waits for the next engine, unless the engine was killed. That is
        no proof that the call is innocent, so that it moves once.
        """
        calls = [call for call in self._pending_calls.adding if not call.sent]
        moves_all = self._was_killed or self.replica.error is not None
        return [call for call in calls if not call.was_pending_at_crash or (moves_all and not call.was_moved)]

    def give(self, name: str, other: "ReplicaRequests") -> None:
        """Place an open request on another replica, which must `submit` afterwards."""
        if name in self._submitted_ids:
            self.send(protocol.Abort([name]))
        self._remove(name)
        if self.replica.has_engine:
            self.given_ids[name] = None
            if len(self.given_ids) > MOST_GIVEN:
                del self.given_ids[next(iter(self.given_ids))]
        other._place([name])

    def give_add(self, call: PendingCall, other: "ReplicaRequests") -> None:
        """Give another replica a call that adds requests. It must `submit` afterwards."""
        self._pending_calls.give(call, other._pending_calls)
        call.answer.add_done_callback(lambda _: other._forget(call))
        for request in call.requests:
            self._remove(request.id)
        other._place(request.id for request in call.requests)

    def _place(self, ids: Iterable[str]) -> None:
        for request_id in ids:
            self.ids[request_id] = None
            self.given_ids.pop(request_id, None)

    def fail(self, error: Exception) -> None:
        """Fail all pending calls, because no engine will answer."""
        self._pending_calls.fail(error)

    # The current engine: calls of the replica

    def on_engine_started(self) -> None:
        """Pin adapters, submit all open requests, and send the pending calls. See ReplicaOwner."""
        for adapter in self._owner.pinned.values():
            self.pin(adapter, pinned=True)
        self._waiting_ids.clear()
        self._owner.tenant_service.forget(self)
        self.submit()

    def on_batch(self, batch: Batch, committed: list[dict[str, int]]) -> None:
        """Record progress, and deliver answers and outputs. See ReplicaOwner."""
        self._record_progress(committed)
        self._owner.tenant_service.add(self, batch.service)
        for answer in batch.answers:
            self._on_answer(answer)
        counted = {name: number for name, number in batch.num_counted.items() if self._has(name)}
        self._owner.on_turn(self, batch.keys, self._open_requests.record_prompts(counted))
        for output in batch.outputs:
            if self._has(output.request_id):
                self._deliver(output)

    def _has(self, request_id: str) -> bool:
        """Whether the engine has an open request: what it sent before the answer to its Add is of an earlier one."""
        is_open = request_id in self.ids and request_id in self._open_requests
        return is_open and request_id not in self._resubmitting

    def on_engine_ended(self, steps: StepsInFlight, *, was_killed: bool) -> EndedWork:
        """Record the requests in flight as suspects, and fail one that is found guilty. See ReplicaOwner.

        Requests of the last steps wait for the next engine if their work may be the cause. All others may move.
        """
        had_work = bool(self.ids or self._pending_calls)
        rows, found_culprit = self._record_crash(steps)
        if not was_killed:  # beside those of an engine before it that sent no message
            self._waiting_ids |= rows.keys()
        self._submitted_ids.clear()
        self.given_ids.clear()
        self._paused.clear()
        self._resubmitting.clear()
        self._stepped_ids.clear()
        self._pending_calls.mark_unsent()
        self._was_killed = was_killed
        self._owner.on_cache_lost(self)
        self._owner.relocate(self)
        return EndedWork(had_work, found_culprit)

    def on_stopped(self, error: EngineStopped) -> None:
        """Move or fail all requests and pending calls. See ReplicaOwner."""
        self._waiting_ids.clear()
        self._owner.on_stopped(self, error)

    def _resubmit(self, request_id: str) -> None:
        request = self._open_requests.resume(request_id)
        call = self._pending_calls.add(lambda number: protocol.Add(number, [request]), resend=False, resumes=request_id)
        self._resubmitting[request_id] = call
        call.answer.add_done_callback(lambda answer: self._on_refused(request_id, answer.exception()))

    def _on_refused(self, request_id: str, error: BaseException | None) -> None:
        """Fail a request that an engine does not resume. error: None if it does."""
        is_here = request_id in self.ids and request_id in self._open_requests
        if is_here and error is not None and not isinstance(error, EngineStopped):
            log.error("request %s could not be resumed: %s", request_id, error)
            self._fail(request_id, str(error))

    def _remove(self, request_id: str) -> None:
        self._owner.on_removed(self, request_id)
        self.ids.pop(request_id, None)
        self._paused.pop(request_id, None)
        self._resubmitting.pop(request_id, None)
        self._submitted_ids.discard(request_id)
        self._stepped_ids.discard(request_id)

    # Pending calls

    def _check_calls(self) -> None:
        if self.replica.error is not None:
            raise self.replica.error
        if len(self._pending_calls) >= MAX_PENDING_CALLS:
            raise QueueFull("too many requests wait for the engine", RETRY_AFTER_SECONDS)

    async def _answer_of(self, call: PendingCall) -> Any:  # noqa: ANN401  (of each command its own)
        """Send a call, and wait for its answer, also if the call moves to another replica."""
        call.answer.add_done_callback(lambda _: self._forget(call))
        self._send_pending_calls()
        return await call.answer

    def _forget(self, call: PendingCall) -> None:
        """Remove a call whose caller waits no longer."""
        if self._pending_calls.remove(call) and call.was_pending_at_crash:
            self.submit()  # open requests may have waited for this call

    def _send_pending_calls(self) -> None:
        """Send the pending calls that may be sent now."""
        if not self.replica.has_engine:
            return
        for number, call in self._pending_calls.to_send(allow_adds=self._bisection.current_group is None):
            try:
                self.send(call.command(number))
                call.sent = True
            except BadFrame as error:
                wrong = f"the request is too large for a message to the engine: {error}; send less at once"
                call.answer.set_exception(RequestError(wrong))

    def _on_answer(self, answer: Answer) -> None:
        call = self._pending_calls.pop(answer.number)
        if call is None:
            return
        if self._resubmitting.get(call.resumes) is call:
            del self._resubmitting[call.resumes]
        if call.answer.done():  # the caller was cancelled and has aborted its requests
            pass
        elif answer.failure is not None:
            call.answer.set_exception(protocol.decode_error(answer.failure))
        else:
            self._submitted_ids.update(request.id for request in call.requests)
            self._open_requests.add(call.requests, call.began)
            call.answer.set_result(answer.result)
        if call.was_pending_at_crash:  # the next suspect, or the open requests
            self.submit()

    def _deliver(self, output: Output) -> None:
        delivered, stopped_after = self._open_requests.record_output(output)
        if stopped_after is not None:
            self.send(protocol.Finish(output.seq_id, stopped_after))
        stream = None if delivered is None else self._owner.deliver(delivered)
        if stream is not None:
            self._pause(stream)
        self.release_if_ended(output.request_id)

    # Paused requests: their outputs were not read

    def _pause(self, stream: Stream) -> None:
        """Take the requests of a stream from the engine until the stream may go on. The KV stays in the prefix cache.

        Requests that would start over stay. Requests also stay while suspects of a crash are tried.
        """
        if self._bisection.current_group is not None or self._pending_calls.has_suspects:
            return
        ids = [
            request_id
            for request_id in stream.request_ids
            if request_id in self._submitted_ids
            and request_id not in self._resubmitting
            and self._open_requests.can_pause(request_id)
        ]
        if not ids:
            return
        self._submitted_ids.difference_update(ids)
        self._stepped_ids.difference_update(ids)
        pause = object()
        self._paused |= dict.fromkeys(ids, pause)
        self.send(protocol.Abort(ids))
        call = self._pending_calls.add(lambda number: protocol.Explain(number, []))
        self._send_pending_calls()
        task = asyncio.ensure_future(self._resume_later(stream, ids, pause, call.answer))
        self._pausing.add(task)
        task.add_done_callback(self._pausing.discard)

    async def _resume_later(
        self, stream: Stream, ids: Sequence[str], pause: object, left: "asyncio.Future[Any]"
    ) -> None:
        """Submit requests again, once the stream may go on. left: after it the engine sends no output of them."""
        with contextlib.suppress(EngineStopped):
            await left
        await stream.wait()
        for request_id in ids:
            if self._paused.get(request_id) is pause:
                del self._paused[request_id]
                self._open_requests.count_from_now(request_id)
        self.submit()

    # Crashes

    def _record_progress(self, committed: list[dict[str, int]]) -> None:
        for rows in committed:
            self._stepped_ids.update(rows.keys() & self._submitted_ids)
            if not self._bisection.has_suspects:
                continue
            here = [(name, position) for name, position in rows.items() if name in self.ids]  # others may have moved
            if any([self._bisection.record_progress(name, position) for name, position in here]):
                self.submit()

    def _record_crash(self, steps: StepsInFlight) -> tuple[dict[str, int], bool]:
        """Record suspects. Returns them, and whether a request is found guilty, which then fails."""
        here = {name for name in self.ids if name in self._open_requests}
        rows, num_gone = steps.at_crash(here)
        # a request can also crash the engine while it is added again: until the first step it makes no progress
        rows |= {name: 0 for name in self._resubmitting if name in here and name not in rows}
        # and while its constraint is compiled or its adapter is loaded, beside the steps of other requests
        rows |= {name: 0 for name in self._preparing_ids() if name not in rows}
        if rows:
            log.error("%d requests were in the last step of the engine or were being added", len(rows))
        culprit = self._bisection.record_crash(rows, num_gone)
        if culprit is not None:
            log.error("request %s fails: the engine crashed each time that it computed it", culprit)
            self._owner.denylist.add(self._open_requests.request(culprit))
            self._fail(culprit, CRASH_MESSAGE)
        guilty = self._pending_calls.record_crash(has_other_work=bool(rows or num_gone or steps.num_committed))
        for call in guilty:
            if not call.answer.done():
                call.answer.set_exception(RequestError(CRASH_MESSAGE))
        return rows, culprit is not None or bool(guilty)

    def _preparing_ids(self) -> Iterator[str]:
        """Requests with a constraint or an adapter that the engine has and that no committed step has computed."""
        new = (name for name in self._submitted_ids - self._stepped_ids if name in self._open_requests)
        return (name for name in new if self._open_requests.request(name).waits_for)

    def _fail(self, request_id: str, error: str) -> None:
        for output in self._open_requests.fail(request_id, error):
            self._owner.deliver(output)
        self.release_if_ended(request_id)


def _log_failed_pin(name: str, answer: "asyncio.Future[Any]") -> None:
    error = answer.exception()
    if error is not None and not isinstance(error, EngineStopped):
        log.error("the adapter %r could not be pinned or unpinned: %s", name, error)
