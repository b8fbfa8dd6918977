"""Asyncio client of an engine, which a `Supervisor` keeps serving: streams of requests, and calls.

After a crash the next engine gets all open requests again, with the tokens delivered so far (`OpenRequests`). A
request that crashes one engine after the other is found by bisection and fails alone (`CrashBisection`). Requests and
outputs are token ids.
"""

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec

from quire.core.adapter import Adapter
from quire.core.explanation import Explanation
from quire.core.output import Output
from quire.core.request import Request, nth_seed
from quire.cost.step_time import CostFigures
from quire.errors import EngineStopped, QueueFull, RequestError
from quire.monitor.update import Watcher
from quire.params import is_unicode
from quire.supervisor import protocol
from quire.supervisor.crash_isolation import CrashBisection, Denylist
from quire.supervisor.engine_handle import EngineHandle
from quire.supervisor.health import STALL_SECONDS, Health
from quire.supervisor.open_requests import OpenRequests, StepsInFlight
from quire.supervisor.pending_calls import PendingCalls
from quire.supervisor.protocol import Answer, BadFrame, Batch
from quire.supervisor.restart_policy import RESTART_TIMEOUT
from quire.supervisor.stream import Stream, WholeAnswers
from quire.supervisor.supervisor import EndedWork, Supervisor
from quire.tenant_memory import TenantMemories

log = logging.getLogger(__name__)

MAX_PENDING_CALLS = 4096  # the most pending calls
_RETRY_AFTER_SECONDS = 5.0  # Retry-After of requests beyond MAX_PENDING_CALLS
_CRASH_MESSAGE = "the engine crashed each time that it computed this request; it is not tried again"


class AsyncEngine:
    """The engine of a server, across restarts. All methods must be called on the event loop of `start`.

    engine_handle, watchdog, restart_timeout: as in Supervisor. memories: the bytes that are held for each tenant.
    """

    def __init__(
        self, engine_handle: EngineHandle, *, watchdog: float = 0.0, restart_timeout: float = RESTART_TIMEOUT
    ) -> None:
        self.engine_handle = engine_handle
        self._supervisor = Supervisor(engine_handle, self, watchdog=watchdog, restart_timeout=restart_timeout)
        self._streams: dict[str, Stream] = {}
        self.memories = TenantMemories()
        self._whole_answers: defaultdict[str, WholeAnswers] = defaultdict(WholeAnswers)  # by tenant
        self._open_requests = OpenRequests()
        self._bisection = CrashBisection()
        self._submitted_ids: set[str] = set()  # open requests that the current engine has
        self._resubmitting_ids: set[str] = set()  # among them, those whose Add it has not answered
        self._paused: dict[str, object] = {}  # open requests that were taken from the engine -> their pause
        self._pausing: set[asyncio.Task[None]] = set()
        self._stepped_ids: set[str] = set()  # of the current engine's requests, those in its committed steps
        self._pending_calls = PendingCalls()
        self._denylist = Denylist()
        self._num_requests = 0
        self._pinned: dict[str, Adapter] = {}  # by digest

    async def start(self) -> None:
        """Connect to the engine that the engine handle has launched, and supervise it."""
        await self._supervisor.start()

    async def close(self) -> None:
        """End the engine after its current step, or kill it if the step takes long. Open streams fail."""
        await self._supervisor.close()
        for task in self._pausing:
            task.cancel()

    @property
    def failure(self) -> EngineStopped | None:
        """Why no engine is started any more; None while the engine serves or is restarted, and after `close`."""
        return self._supervisor.failure

    async def generate(self, requests: Sequence[Request], *, whole: bool = False) -> Stream:
        """Queue requests, all or none, of one tenant. Raises RequestError if one cannot be served, and EngineStopped.

        whole: their outputs are kept until all have come; then the stream must be released.
        """
        self._check_running()
        ids = [request.id for request in requests]
        if any(request_id in self._streams for request_id in ids):
            raise RequestError("a request id is in use; choose another", "request_id")
        if not all(map(is_unicode, ids)):
            raise RequestError("a request id must be valid Unicode", "request_id")
        if any(request.params.logits_processors for request in requests):
            why = "logits_processors are functions, which cannot be sent to the engine process; use LLM"
            raise RequestError(why, "logits_processors")
        if any(request in self._denylist for request in requests):
            raise RequestError(_CRASH_MESSAGE)
        requests = [self._seeded(request) for request in requests]
        tenant = requests[0].namespace.tenant
        answers = self._whole_answers[tenant] if whole else None
        stream = Stream(self.memories.of(tenant), partial(self._abort, ids), answers, ids)
        self._streams.update(dict.fromkeys(ids, stream))
        try:
            await self._call(lambda number: protocol.Add(number, requests), requests)
        except BaseException:  # also when the caller is cancelled
            stream.release()
            raise
        return stream

    def finish(self, request_id: str, index: int, num_tokens: int) -> None:
        """End a sequence at a stop string, after `num_tokens` output tokens."""
        seq_id = self._open_requests.finish(request_id, index, num_tokens)
        if seq_id is not None:
            self._send(protocol.Finish(seq_id, num_tokens))
        elif request_id not in self._open_requests:  # the engine may have the request although it sent no output yet
            self._send(protocol.Abort([request_id]))
        self._release_if_ended(request_id)

    def end_program(self, tenant: str, program: str, branch: str | None = None) -> None:
        """End a branch of a program (None: all branches): no request will continue from it.

        Has no effect during a restart, because a new engine has no KV.
        """
        self._send(protocol.EndProgram(tenant, program, branch))

    async def explain(self, request_ids: Iterable[str]) -> list[Explanation]:
        """Explanations of requests, without those that are unknown or ended too long ago. Raises EngineStopped."""
        ids = list(request_ids)
        found: list[Explanation] = await self._call(lambda number: protocol.Explain(number, ids))
        return found

    async def flush_cache(self) -> int:
        """Evict cached KV that no running request uses. Returns the number of freed blocks. Raises EngineStopped."""
        freed: int = await self._call(protocol.Flush)
        return freed

    async def read_adapter(self, name: str, path: str) -> Adapter:
        """Read and check the files of an adapter beside the steps. Raises ModelError and EngineStopped."""
        adapter: Adapter = await self._call(lambda number: protocol.ReadAdapter(number, name, path))
        return adapter

    async def pin_adapter(self, adapter: Adapter, *, pinned: bool) -> None:
        """Load an adapter and keep it in memory, also in later engines, or let it leave again.

        Raises RequestError if it does not fit beside others that are pinned, and EngineStopped.
        """
        if not pinned:  # at once: an engine that starts before the answer must not pin it again
            self._pinned.pop(adapter.digest, None)
        await self._call(lambda number: protocol.PinAdapter(number, adapter, pinned))
        if pinned:
            self._pinned[adapter.digest] = adapter

    async def monitor_update(self, viewer: int, watcher: Watcher, num_seen: int) -> bytes:
        """The next Update of a viewer as JSON, once the engine has time for it. Raises EngineStopped.

        After a restart the engine knows no viewer, and returns the whole state.
        """
        update: bytes = await self._call(lambda number: protocol.MonitorUpdate(number, viewer, watcher, num_seen))
        return update

    async def node(self, watcher: Watcher, node: int) -> bytes:
        """A node of the radix trees as JSON; b"null" if there is none. See Engine.node. Raises EngineStopped."""
        detail: bytes = await self._call(lambda number: protocol.MonitorNode(number, watcher, node))
        return detail

    def forget_viewer(self, viewer: int) -> None:
        """A viewer has left. Has no effect during a restart, because a new engine knows no viewer."""
        self._send(protocol.ForgetViewer(viewer))

    async def cost_figures(self) -> CostFigures | None:
        """Figures of the cost model; None if the engine does not answer within STALL_SECONDS."""
        try:
            figures: CostFigures = await asyncio.wait_for(self._call(protocol.AskCosts), STALL_SECONDS)
        except (EngineStopped, TimeoutError):
            return None
        return figures

    def health(self) -> Health:
        """The health of the engine as seen by the front end."""
        return self._supervisor.health(len(self._open_requests))

    def _seeded(self, request: Request) -> Request:
        """The request with a seed, because another engine that continues it needs the same seed."""
        self._num_requests += 1
        if request.params.seed is not None:
            return request
        seed = nth_seed(self.engine_handle.model_info.options.seed, self._num_requests - 1)
        return msgspec.structs.replace(request, params=request.params.changed(seed=seed))

    def _abort(self, ids: Sequence[str]) -> None:
        known = [request_id for request_id in ids if self._streams.pop(request_id, None) is not None]
        for request_id in known:
            self._open_requests.remove(request_id)
            self._paused.pop(request_id, None)
        if known:  # the engine ignores a request that has ended
            self._send(protocol.Abort(known))
        for request_id in known:
            self._release_if_ended(request_id)

    def _release_if_ended(self, request_id: str) -> None:
        """If a request has ended, remove it from the bisection, and submit the requests that it held back."""
        if request_id in self._open_requests:
            return
        self._submitted_ids.discard(request_id)
        self._stepped_ids.discard(request_id)
        if self._bisection.has_suspects:
            self._bisection.forget(request_id)
            self._submit()

    # Pending calls

    async def _call(self, command: Callable[[int], Any], requests: Sequence[Request] = ()) -> Any:  # noqa: ANN401
        """Send a command, and return the engine's answer, which it gives between two steps.

        Raises the engine's error, QueueFull beyond MAX_PENDING_CALLS pending calls, and EngineStopped.
        """
        self._check_running()
        if len(self._pending_calls) >= MAX_PENDING_CALLS:
            raise QueueFull("too many requests wait for the engine", _RETRY_AFTER_SECONDS)
        number, call = self._pending_calls.add(command, requests)
        self._send_pending_calls()
        try:
            return await call.answer
        finally:
            if self._pending_calls.pop(number) is not None and call.was_pending_at_crash:
                self._submit()  # open requests may have waited for this call

    def _send_pending_calls(self) -> None:
        """Send the pending calls that may be sent now."""
        if not self._supervisor.has_engine:
            return
        for number, call in self._pending_calls.to_send(allow_adds=self._bisection.current_group is None):
            try:
                self._send(call.command(number))
                call.sent = True
            except BadFrame as error:
                wrong = f"the request is too large for a message to the engine: {error}; send less at once"
                call.answer.set_exception(RequestError(wrong))

    def _on_answer(self, answer: Answer) -> None:
        call = self._pending_calls.pop(answer.number)
        if call is None:
            return
        if call.answer.done():  # the caller was cancelled and has aborted its requests
            pass
        elif answer.failure is not None:
            call.answer.set_exception(protocol.decode_error(answer.failure))
        else:
            self._submitted_ids.update(request.id for request in call.requests)
            self._open_requests.add(call.requests)
            call.answer.set_result(answer.result)
        if call.was_pending_at_crash:  # the next suspect, or the open requests
            self._submit()

    # The current engine: calls of the supervisor

    def on_engine_started(self) -> None:
        """Pin adapters, submit all open requests, and send the pending calls. See RequestOwner."""
        for adapter in self._pinned.values():
            pin = partial(protocol.PinAdapter, adapter=adapter, pinned=True)
            _, call = self._pending_calls.add(pin, resend=False)
            call.answer.add_done_callback(partial(_log_failed_pin, adapter.name))
        self._submit()

    def on_batch(self, batch: Batch, committed: list[dict[str, int]]) -> None:
        """Record progress, and deliver answers and outputs. See RequestOwner."""
        self._record_progress(committed)
        for answer in batch.answers:
            self._on_answer(answer)
        self._open_requests.record_prompts(batch.num_counted)
        for output in batch.outputs:
            self._deliver(output)

    def on_engine_ended(self, steps: StepsInFlight) -> EndedWork:
        """Record the requests in flight as suspects, and fail one that is found guilty. See RequestOwner."""
        had_work = bool(self._open_requests or self._pending_calls)
        found_culprit = self._record_crash(steps)
        self._submitted_ids.clear()
        self._paused.clear()
        self._resubmitting_ids.clear()
        self._stepped_ids.clear()
        self._pending_calls.mark_unsent()
        return EndedWork(had_work, found_culprit)

    def on_stopped(self, error: EngineStopped) -> None:
        """Fail all streams and pending calls. See RequestOwner."""
        for stream in set(self._streams.values()):
            stream.fail(error)
        self._pending_calls.fail(error)

    def _submit(self) -> None:
        """Submit the open requests that the engine does not have: during bisection only those of the current group.

        A call that was pending when an engine crashed is tried first, on an engine without requests.
        """
        if not self._supervisor.has_engine:
            return
        trying = self._bisection.current_group
        if trying is None and self._pending_calls.has_suspects:
            self._send_pending_calls()
            return
        for request_id in list(self._open_requests) if trying is None else trying:
            is_known = request_id in self._submitted_ids or request_id in self._paused
            if not is_known and request_id in self._open_requests:
                self._submitted_ids.add(request_id)
                self._resubmit(request_id)
        self._send_pending_calls()

    def _resubmit(self, request_id: str) -> None:
        request = self._open_requests.resume(request_id)
        self._resubmitting_ids.add(request_id)
        _, call = self._pending_calls.add(lambda number: protocol.Add(number, [request]), resend=False)
        call.answer.add_done_callback(partial(self._on_resubmitted, request_id))

    def _on_resubmitted(self, request_id: str, answer: "asyncio.Future[Any]") -> None:
        self._resubmitting_ids.discard(request_id)
        error = None if answer.cancelled() else answer.exception()
        if error is not None and self._supervisor.error is None and request_id in self._open_requests:
            log.error("request %s could not be resumed: %s", request_id, error)
            self._fail(request_id, str(error))

    def _send(self, command: Any) -> None:  # noqa: ANN401  (one of protocol.Commands)
        self._supervisor.send(command)

    def _deliver(self, output: Output) -> None:
        delivered, stopped_after = self._open_requests.record_output(output)
        if stopped_after is not None:
            self._send(protocol.Finish(output.seq_id, stopped_after))
        stream = self._streams.get(output.request_id)
        if delivered is not None and stream is not None:
            stream.put(delivered)
            if stream.must_wait:
                self._pause(stream)
        self._release_if_ended(output.request_id)

    # Paused requests: their outputs were not read

    def _pause(self, stream: Stream) -> None:
        """Take the requests of a stream from the engine until the stream may go on. The KV stays in the prefix cache.

        Requests that would start over stay. Requests also stay while suspects of a crash are tried.
        """
        if self._bisection.has_suspects or self._pending_calls.has_suspects:
            return
        ids = [
            request_id
            for request_id in stream.request_ids
            if request_id in self._submitted_ids
            and request_id not in self._resubmitting_ids
            and self._open_requests.can_pause(request_id)
        ]
        if not ids:
            return
        self._submitted_ids.difference_update(ids)
        self._stepped_ids.difference_update(ids)
        pause = object()
        self._paused |= dict.fromkeys(ids, pause)
        self._send(protocol.Abort(ids))
        _, call = self._pending_calls.add(lambda number: protocol.Explain(number, []))
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
        self._submit()

    # Crashes

    def _record_progress(self, committed: list[dict[str, int]]) -> None:
        for rows in committed:
            self._stepped_ids.update(rows)
            if self._bisection.has_suspects:
                for name, position in rows.items():
                    self._bisection.record_progress(name, position)
                self._submit()

    def _record_crash(self, steps: StepsInFlight) -> bool:
        """Record suspects. Returns whether a request is found guilty, which then fails."""
        rows, num_gone = steps.at_crash(self._open_requests)
        # a request can also crash the engine while it is added again: until the first step it makes no progress
        rows |= {name: 0 for name in self._resubmitting_ids if name in self._open_requests and name not in rows}
        # and while its constraint is compiled or its adapter is loaded, beside the steps of other requests
        rows |= {name: 0 for name in self._preparing_ids() if name not in rows}
        if rows:
            log.error("%d requests were in the last step of the engine or were being added", len(rows))
        culprit = self._bisection.record_crash(rows, num_gone)
        if culprit is not None:
            log.error("request %s fails: the engine crashed each time that it computed it", culprit)
            self._denylist.add(self._open_requests.request(culprit))
            self._fail(culprit, _CRASH_MESSAGE)
        guilty = self._pending_calls.record_crash(has_other_work=bool(rows or num_gone or steps.num_committed))
        for call in guilty:
            if not call.answer.done():
                call.answer.set_exception(RequestError(_CRASH_MESSAGE))
        return culprit is not None or bool(guilty)

    def _preparing_ids(self) -> list[str]:
        """Requests with a constraint or an adapter that the engine has and that no committed step has computed."""
        new = [name for name in self._submitted_ids - self._stepped_ids if name in self._open_requests]
        return [name for name in new if self._open_requests.request(name).waits_for]

    def _fail(self, request_id: str, error: str) -> None:
        outputs = self._open_requests.fail(request_id, error)
        stream = self._streams.get(request_id)
        for output in outputs if stream is not None else ():
            stream.put(output)  # type: ignore[union-attr]  # it is not None
        self._release_if_ended(request_id)

    def _check_running(self) -> None:
        if self._supervisor.error is not None:
            raise self._supervisor.error


def _log_failed_pin(name: str, answer: "asyncio.Future[Any]") -> None:
    error = None if answer.cancelled() else answer.exception()
    if error is not None:
        log.error("the adapter %r could not be pinned in the new engine: %s", name, error)
