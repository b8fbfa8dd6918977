"""Respond: how an answer leaves, whole or as a stream. Knows no format; the answer does."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import msgspec
from fastapi import Request, Response

from quire.engine.outputs import CompletionOutput
from quire.server.schema import SamplingBody
from quire.server.service import Reply
from quire.server.sse import EventStream, while_connected


class Answer(Protocol):
    """One request's objects in some format."""

    def whole(self, sequences: Sequence[CompletionOutput], usage: dict[str, object]) -> dict[str, object]:
        """Everything at once."""

    def events(self, reply: Reply, *, with_usage: bool) -> AsyncIterator[bytes]:
        """Server-sent events while the sequences grow."""


async def respond(request: Request, body: SamplingBody, answer: Answer, reply: Reply) -> Response:
    """The response to `body`; `reply` is closed at its end. Raises ClientGone, SequenceFailed, EngineStopped."""
    if body.stream:
        with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        return EventStream(answer.events(reply, with_usage=with_usage), reply.close)
    try:
        results = await while_connected(request.receive, reply.results())
    finally:
        reply.close()
    sequences = [sequence for result in results for sequence in result.outputs]
    return Response(msgspec.json.encode(answer.whole(sequences, reply.usage())), media_type="application/json")
