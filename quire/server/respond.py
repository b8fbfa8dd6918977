"""Respond: how an answer leaves, whole or as a stream. Knows no format; the answer does."""

from collections.abc import AsyncIterator
from typing import Protocol

import msgspec
from fastapi import Request, Response

from quire.engine.outputs import Delta
from quire.server.reply import Reply
from quire.server.sse import EventStream, while_connected

REQUEST_ID = "x-request-id"  # header with the id that `/v1/requests/{id}/explain` takes


class Answer(Protocol):
    """One request's objects in some format. id: the request's."""

    id: str

    def whole(self, reply: Reply) -> object:
        """Everything at once, when all sequences have ended."""

    def events(self, reply: Reply) -> AsyncIterator[bytes]:
        """Server-sent events while the sequences grow."""


async def respond(request: Request, answer: Answer, reply: Reply, *, stream: bool) -> Response:
    """The response; `reply` is closed at its end. Raises ClientGone, SequenceFailed, EngineStopped."""
    headers = {REQUEST_ID: answer.id}
    if stream:
        return EventStream(answer.events(reply), reply.close, headers)
    try:
        await while_connected(request.receive, reply.end())
    finally:
        reply.close()
    return Response(msgspec.json.encode(answer.whole(reply)), headers=headers, media_type="application/json")


def shows(delta: Delta, *, ids: bool) -> bool:
    """Whether a client sees anything of a delta. ids: whether it asked for those of tokens."""
    return bool(delta.text or delta.logprobs or delta.finish_reason or (ids and delta.token_ids))
