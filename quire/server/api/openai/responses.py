"""/v1/responses, with OpenAI's format: generation, responses in the background, and the stored ones of a tenant."""

from collections.abc import AsyncIterator, Callable
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from msgspec import Raw

from quire.errors import RequestError
from quire.server.api.openai.objects import json_response, page_response
from quire.server.api.openai.responses_generation import Responses
from quire.server.api.openai.responses_schema import ResponseBody
from quire.server.held_answer import held_answer, hold, in_pieces
from quire.server.middleware.auth import caller_of, same_origin_only
from quire.server.observability.request_record import record_of
from quire.server.request_body import MAX_BODY, release_body
from quire.server.service import Service
from quire.server.sse import EventStream, TimeLimit, while_connected
from quire.tenant_memory import HeldBytes


class _Background(msgspec.Struct):
    background: bool


def response_routes(service: Service, responses: Responses) -> APIRouter:
    """The routes below /v1/responses."""
    generating = APIRouter(tags=["OpenAI"], route_class=service.request_bodies.route_class())
    router = APIRouter(tags=["OpenAI"])

    @generating.post("/v1/responses", response_model=None)
    async def create_response(body: ResponseBody, request: Request) -> Response:
        """Generate the next items of a conversation."""
        return await _create(responses, body, request)

    @router.get("/v1/responses/{id}", response_model=None)
    async def retrieve_response(
        id: str, request: Request, *, stream: bool = False, starting_after: Annotated[int | None, Query(ge=0)] = None
    ) -> Response:
        """Return a response, or the events of one that was created with background and stream."""
        caller_of(request).quota.count_download()
        if stream:
            return await _events(service, responses, request, id, 0 if starting_after is None else starting_after + 1)
        response = await _retrieved(service, responses, request, id)
        caller_of(request).quota.spend_bytes(len(response.body))
        return response

    @router.get("/v1/responses/{id}/input_items", response_model=None)
    async def list_input_items(
        id: str,
        request: Request,
        *,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        """List the items that a response continues, those of the responses before it included."""
        caller = caller_of(request)
        caller.quota.count_download()
        with HeldBytes(service.memories.of(caller.tenant)) as held:
            items = await responses.reader.page(
                caller.tenant, id, held, limit + 1, after=after, ascending=order == "asc"
            )
            page = await responses.reader.run(caller.tenant, sum(map(len, items)), lambda: page_response(items, limit))
            caller.quota.spend_bytes(len(page.body))
            return held_answer(page, held)

    @router.post("/v1/responses/{id}/cancel", response_model=None, dependencies=[Depends(same_origin_only)])
    async def cancel_response(id: str, request: Request) -> Response:
        """Cancel a response that is generated in the background. Returns it."""
        tenant = caller_of(request).tenant
        running = responses.running(tenant, id)
        if running is not None:
            await running.cancel()
            return in_pieces(_json(await running.encoded()), service.memories.of(caller_of(request).tenant))
        response = await _retrieved(service, responses, request, id)
        if not msgspec.json.decode(response.body, type=_Background).background:
            raise RequestError("only a response that was created with background can be cancelled", "id")
        return response

    @router.delete("/v1/responses/{id}", response_model=None, dependencies=[Depends(same_origin_only)])
    async def delete_response(id: str, request: Request) -> Response:
        """Delete a response. One that is still generated is cancelled."""
        await responses.delete(caller_of(request).tenant, id)
        return json_response({"id": id, "object": "response", "deleted": True})

    router.include_router(generating)
    return router


async def _create(responses: Responses, body: ResponseBody, request: Request) -> Response:
    limit = TimeLimit(body.timeout)
    generation = await limit.run(responses.start(body, request, limit))
    release_body(request)
    record_of(request).get_stats = generation.reply.stats
    generation.reply.charge(caller_of(request).quota.spend)
    if body.background:
        running = await responses.run_in_background(generation, keep_events=bool(body.stream))
        return EventStream(running.events(), _nothing) if body.stream else _json(await running.encoded())
    if body.stream:
        return EventStream(generation.stream(request.scope), generation.close)
    try:
        await while_connected(request.receive, generation.run)
        return _json(await generation.encoded())
    finally:
        generation.close()


async def _retrieved(service: Service, responses: Responses, request: Request, id: str) -> Response:
    """A response as it is now. Its bytes count for the tenant before they are read, if they are many."""
    tenant = caller_of(request).tenant
    with HeldBytes(service.memories.of(tenant)) as held:
        running = responses.running(tenant, id)
        if running is None:
            response: bytes | Raw = (await responses.stored(tenant, id, held)).response
        else:
            if running.is_long:  # its length is not known before
                await hold(held, MAX_BODY)
            response = await running.encoded()
        return held_answer(_json(bytes(response)), held)


async def _events(service: Service, responses: Responses, request: Request, id: str, first: int) -> Response:
    """The events of a response in the background, from this sequence number on. They count for the caller's key."""
    tenant, spend = caller_of(request).tenant, caller_of(request).quota.spend_bytes
    running = responses.running(tenant, id)
    if running is not None and running.keeps_events:
        return EventStream(_counted(running.events(first), spend), _nothing)
    held = HeldBytes(service.memories.of(tenant))
    try:
        stored = None if running is not None else await responses.stored(tenant, id, held)
        if stored is None or bytes(stored.events) == b"null":
            raise RequestError("only a response that was created with background and stream has events", "stream")
        events = await responses.reader.replayed(tenant, id, stored, first, held)
    except BaseException:
        held.release()
        raise
    return EventStream(_counted(events, spend), held.release)


async def _counted(events: AsyncIterator[bytes], spend: Callable[[int], None]) -> AsyncIterator[bytes]:
    async for data in events:
        spend(len(data))
        yield data


def _json(data: bytes) -> Response:
    return Response(data, media_type="application/json")


def _nothing() -> None:
    """What is to be done at the end of a stream that others generate."""
