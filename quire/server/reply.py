"""The sequences of one HTTP request, independent of the format of the response."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import accumulate
from typing import Protocol, TypeVar

import msgspec
from fastapi import Request, Response

from quire.core.output import EndCause, Output
from quire.engine.output_text import RequestOutputProcessor
from quire.engine.outputs import Delta, RequestMetrics
from quire.errors import EngineStopped, RequestError
from quire.fleet.stream import Stream
from quire.params import SamplingParams
from quire.server.errors import Busy, DeadlineMissed, SequenceFailed
from quire.server.json_pieces import OnThread, PieceReader, json_bytes, json_pieces
from quire.server.middleware.auth import caller_of
from quire.server.observability.metrics import FinishedRequestStats, Metrics
from quire.server.observability.request_record import RequestStats, record_of
from quire.server.request_body import release_body
from quire.server.sse import EVENTS, EventStream, PiecewiseResponse, StreamFormat, TimeLimit, while_connected

T = TypeVar("T")

_MANY_VALUES = 2**13  # of a response that is written on a thread: they take about 10 ms
_TOKEN_BYTES = 128  # that an output token takes with its id, offset and text
_BUSY_SECONDS = 0.05  # until a response that has begun asks for a thread again
_JSON = "application/json"


def request_stats(
    transcripts: Sequence[RequestOutputProcessor], finish_reasons: list[str], *, content: bool
) -> RequestStats:
    """The figures of transcripts for the request record. content: whether to include prompts and outputs."""
    first = transcripts[0].metrics
    return RequestStats(
        num_prompt_tokens=sum(len(one.prompt.ids) for one in transcripts),
        num_output_tokens=sum(sum(one.num_output_tokens) for one in transcripts),
        num_cached_tokens=sum(one.num_cached_tokens for one in transcripts),
        finish_reasons=finish_reasons,
        params=transcripts[0].params,
        queue_seconds=first.queue_seconds,
        first_token_seconds=_first_token_seconds(first),
        prompts=tuple(one.prompt.text or one.prompt.ids for one in transcripts) if content else (),
        outputs=tuple(output.text for one in transcripts for output in one.result().outputs) if content else (),
    )


def finished_request_stats(transcript: RequestOutputProcessor) -> FinishedRequestStats:
    """The figures of one prompt for the metrics."""
    return FinishedRequestStats(
        transcript.metrics,
        len(transcript.prompt.ids),
        transcript.num_cached_tokens,
        transcript.num_output_tokens,
        transcript.params,
    )


def _first_token_seconds(metrics: RequestMetrics) -> float | None:
    return None if metrics.first_token_time is None else metrics.first_token_time - metrics.arrival_time


class OutputTokens(msgspec.Struct):
    """Running totals of output tokens, as a stream can report usage with every chunk."""

    total: int = 0
    forced: int = 0
    predicted_right: int = 0  # accepted drafts from the prediction of the request
    predicted_wrong: int = 0

    def add(self, delta: Delta) -> None:
        """Count the tokens of a delta."""
        self.total += len(delta.token_ids)
        self.forced += delta.num_forced_tokens
        self.predicted_right += delta.num_predicted_tokens[0]
        self.predicted_wrong += delta.num_predicted_tokens[1]


class Reply:
    """One transcript per prompt, filled while the engine generates. Must be closed, finished or not.

    finish(request_id, index, num_tokens): ends a sequence in the engine at a stop string. run: runs a function on a
    thread for the tenant; without it the reply cannot be large.
    """

    def __init__(
        self,
        transcripts: Sequence[RequestOutputProcessor],
        stream: Stream,
        finish: Callable[[str, int, int], None],
        metrics: Metrics,
        run: OnThread | None = None,
    ) -> None:
        self.transcripts = transcripts
        self._transcript_indices = {transcript.request_id: i for i, transcript in enumerate(transcripts)}
        self._first_choices = [0, *accumulate(transcript.params.num_sequences for transcript in transcripts)]
        self._stream = stream
        self._finish = finish
        self._metrics = metrics
        self._run = run
        self._num_prompt = sum(len(transcript.prompt.ids) for transcript in transcripts)
        self._output = OutputTokens()
        self.num_reasoning_tokens: int | None = None  # set by the reader of messages; None: not counted
        self._num_cached = 0
        self._has_constraints = any(one.params.has_constraint for one in transcripts)
        self._has_predictions = any(one.params.prediction is not None for one in transcripts)
        self._last_tokens: dict[tuple[int, int], float] = {}  # time of the last tokens, by prompt and sequence index
        self._default_finish_reason = "abort"  # finish reason of sequences that have none when it is closed
        self._closed = False
        self._spend: Callable[[int], None] = _no_quota

    @property
    def num_choices(self) -> int:
        """Number of sequences of all prompts."""
        return self._first_choices[-1]

    def transcript_index(self, delta: Delta) -> int:
        """Index of a delta's transcript."""
        return self._transcript_indices[delta.request_id]

    def choice_index(self, delta: Delta) -> int:
        """OpenAI's choice index of a delta: the sequences of the first prompt, then those of the second, ..."""
        return self._first_choices[self.transcript_index(delta)] + delta.index

    def charge(self, spend: Callable[[int], None]) -> None:
        """Call `spend` with the number of output tokens as they arrive."""
        self._spend = spend

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """The new deltas since the last iteration, until all sequences have ended.

        Raises SequenceFailed, RequestError, DeadlineMissed, EngineStopped.
        """
        while not all(transcript.finished for transcript in self.transcripts):
            try:
                outputs = await anext(self._stream)
            except EngineStopped:
                self._default_finish_reason = "error"
                raise
            now = time.monotonic()
            deltas = [delta for output in outputs if (delta := self._read(output, now)) is not None]
            self._observe_latencies(deltas, now)
            if deltas:
                yield deltas

    async def end(self) -> None:
        """Wait until all sequences have ended. Raises the same errors as `deltas`."""
        async for _ in self.deltas():
            pass

    def usage(self, output: OutputTokens | None = None) -> dict[str, object]:
        """OpenAI's usage, of all output that was read or of `output`.

        Each prompt counts once, for any n. Has the forced tokens if there is a constraint, the accepted and rejected
        drafts of a prediction, and the tokens of reasoning if they are counted.
        """
        output = self._output if output is None else output
        details: dict[str, object] = {"forced_tokens": output.forced} if self._has_constraints else {}
        if self._has_predictions:
            details["accepted_prediction_tokens"] = output.predicted_right
            details["rejected_prediction_tokens"] = output.predicted_wrong
        if self.num_reasoning_tokens is not None:
            details["reasoning_tokens"] = self.num_reasoning_tokens
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": output.total,
            "total_tokens": self._num_prompt + output.total,
            "prompt_tokens_details": {"cached_tokens": self._num_cached},
            **({"completion_tokens_details": details} if details else {}),
        }

    def stats(self, content: bool) -> RequestStats:  # noqa: FBT001
        """`request_stats` of this reply."""
        return request_stats(self.transcripts, self._finish_reasons, content=content)

    def close(self) -> None:
        """Abort unfinished sequences, whose blocks are freed within a step. The first call updates the metrics."""
        if self._closed:
            return
        self._closed = True
        self._stream.close()
        for transcript in self.transcripts:
            self._metrics.observe_finished_request(finished_request_stats(transcript), time.monotonic())
        for reason in self._finish_reasons:
            self._metrics.observe_finished_sequence(reason)

    def release(self) -> None:
        """Close it. The bytes that it keeps no longer count for the tenant. Can be called again."""
        self.close()
        self._stream.release()

    def keep_tokens(self) -> None:
        """Count the tokens until `release`, too: they wait for the client now, and the engine no longer has them."""
        self._stream.keep(_TOKEN_BYTES * self._output.total)

    @property
    def is_large(self) -> bool:
        """Whether the event loop would be blocked while the whole response is written."""
        return sum(transcript.num_values for transcript in self.transcripts) > _MANY_VALUES

    async def on_thread(self, work: Callable[[], T]) -> T:
        """The result of `work`, run on a thread for the tenant. Raises EngineStopped, and what `work` raises."""
        assert self._run is not None, "it has a thread pool"
        while True:
            try:
                return await self._run(work)
            except Busy:  # the response has begun, so it waits
                await asyncio.sleep(_BUSY_SECONDS)

    async def about_prompt(self, transcript: RequestOutputProcessor, write: Callable[[], T]) -> T:
        """The result of `write`, which describes a prompt; on a thread if that has many logprobs. See `on_thread`."""
        rows = transcript.prompt_logprobs
        return write() if rows is None or rows.num_values <= _MANY_VALUES else await self.on_thread(write)

    @property
    def _finish_reasons(self) -> list[str]:
        """Finish reasons of all sequences; `_default_finish_reason` for those that have not ended."""
        return [reason or self._default_finish_reason for one in self.transcripts for reason in one.finish_reasons]

    def _read(self, output: Output, now: float) -> Delta | None:
        transcript = self.transcripts[self._transcript_indices[output.request_id]]
        cached, num_bytes = transcript.num_cached_tokens, transcript.num_bytes
        delta = transcript.process_output(output, now)
        self._num_cached += transcript.num_cached_tokens - cached
        if transcript.num_bytes != num_bytes:
            self._stream.keep(transcript.num_bytes - num_bytes)
        if delta is None:
            return None
        self._output.add(delta)
        self._spend(len(delta.token_ids))
        if delta.stopped_after is not None:
            self._finish(delta.request_id, delta.index, delta.stopped_after)
        # After valid output a dead end of the grammar is no error: other sequences of the request continue.
        is_partial = delta.end is EndCause.DEAD_END and transcript.num_output_tokens[delta.index] > 0
        if delta.finish_reason == "error" and not is_partial:
            self._default_finish_reason = "error"
            raise _failure(delta, transcript.params)
        if delta.end is EndCause.DEADLINE and not self._output.total:
            raise DeadlineMissed(delta.stop_reason)
        return delta

    def _observe_latencies(self, deltas: Sequence[Delta], now: float) -> None:
        """Observe the latencies. Deltas of one sequence that were read at once count as one."""
        came = Counter[tuple[int, int]]()
        for delta in deltas:
            came[self.transcript_index(delta), delta.index] += len(delta.token_ids)
        for sequence in (one for one, num_tokens in came.items() if num_tokens):
            metrics = self.transcripts[sequence[0]].metrics
            self._metrics.observe_tokens(metrics, self._last_tokens.get(sequence), now, came[sequence])
            self._last_tokens[sequence] = now


def _no_quota(_num_tokens: int) -> None:
    """The default of `charge`: no quota."""


def _failure(delta: Delta, params: SamplingParams) -> Exception:
    """The error of a failed sequence: RequestError if the request's own parameters caused it, else SequenceFailed."""
    reason = delta.stop_reason
    if delta.end in (EndCause.NOT_COMPILED, EndCause.DEAD_END):
        return RequestError(str(reason), "structured_outputs")
    if delta.end is EndCause.NO_TOKEN and (params.allowed_token_ids is not None or params.bad_words):
        return RequestError(
            "the request allows no further token; allow more in allowed_token_ids, fewer bad_words or min_tokens",
            "allowed_token_ids" if params.allowed_token_ids is not None else "bad_words",
        )
    return SequenceFailed(reason)


def check_end(finish_reason: str | None, stop_reason: str | int | None) -> None:
    """Raise DeadlineMissed or RequestError for a sequence that ended early after some output.

    For dialects that have no name for such an end, as OpenAI's has.
    """
    if finish_reason == "abort":
        raise DeadlineMissed(stop_reason)
    if finish_reason == "error":
        raise RequestError(str(stop_reason), "structured_outputs")


class Answer(Protocol):
    """Formats the response of one request. id: of the response."""

    id: str

    def full_response(self, reply: Reply) -> object:
        """The body of the response, after all sequences have ended."""

    def events(self, reply: Reply) -> AsyncIterator[bytes]:
        """The parts of a streamed response: server-sent events, or lines."""


async def respond(
    request: Request,
    answer: Answer,
    reply: Reply,
    limit: TimeLimit,
    *,
    stream: bool,
    stream_format: StreamFormat = EVENTS,
) -> Response:
    """The response. `reply` is closed at its end. Unstreamed, raises the errors of `deltas`, ClientGone, TimedOut."""
    if not stream:
        return await respond_whole(request, answer.full_response, reply, limit)
    _observe(request, reply)
    return EventStream(limit.iterate(answer.events(reply)), reply.close, stream_format)


async def respond_whole(
    request: Request, full_response: Callable[[Reply], object], reply: Reply, limit: TimeLimit
) -> Response:
    """The response without a stream. Raises as `respond`. A large one is written on a thread, and sent in pieces."""
    _observe(request, reply)
    try:
        await limit.run(while_connected(request.receive, reply.end))
        reply.close()
        if not reply.is_large:
            body = json_bytes(full_response(reply))
            reply.release()
            return Response(body, media_type=_JSON)
        reply.keep_tokens()
        pieces = PieceReader(lambda: json_pieces(full_response(reply)), reply.on_thread)
        await pieces.begin()
    except BaseException:
        reply.release()
        raise
    return PiecewiseResponse(pieces, reply.release)


def _observe(request: Request, reply: Reply) -> None:
    """Release the body of a request whose response begins, and record and charge the tokens of the response."""
    release_body(request)
    record_of(request).get_stats = reply.stats
    reply.charge(caller_of(request).quota.spend)


def is_visible(delta: Delta, *, ids: bool) -> bool:
    """Whether a delta changes the response. ids: whether the response has ids or drafts of tokens."""
    return bool(delta.text or delta.logprobs or delta.finish_reason or (ids and delta.token_ids))
