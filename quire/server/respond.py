"""Respond: how an answer leaves, whole or as a stream. Knows no format; the answer does."""

from collections.abc import AsyncIterator
from typing import Protocol

import msgspec
from fastapi import Request, Response

from quire.engine.outputs import Delta
from quire.server.middleware.auth import caller_of
from quire.server.observability.request_record import record_of
from quire.server.reply import Reply
from quire.server.sse import EventStream, while_connected
from quire.server.time_limit import TimeLimit


class Answer(Protocol):
    """One request's objects in some format. id: the request's."""

    id: str

    def whole(self, reply: Reply) -> object:
        """Everything at once, when all sequences have ended."""

    def events(self, reply: Reply) -> AsyncIterator[bytes]:
        """Server-sent events while the sequences grow."""


async def respond(request: Request, answer: Answer, reply: Reply, limit: TimeLimit, *, stream: bool) -> Response:
    """The response; `reply` is closed at its end. Raises ClientGone, SequenceFailed, EngineStopped, TimedOut."""
    record_of(request).told = reply.told
    reply.charge(caller_of(request).quota.spend)
    if stream:
        return EventStream(limit.each(answer.events(reply)), reply.close)
    try:
        await limit.of(while_connected(request.receive, reply.end))
    finally:
        reply.close()
    return Response(msgspec.json.encode(answer.whole(reply)), media_type="application/json")


def shows(delta: Delta, *, ids: bool) -> bool:
    """Whether a client sees anything of a delta. ids: whether it asked for those of tokens."""
    return bool(delta.text or delta.logprobs or delta.finish_reason or (ids and delta.token_ids))
