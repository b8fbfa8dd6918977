"""/v1/responses, with OpenAI's format: generation, responses in the background, and the stored ones of a tenant."""

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from msgspec import Raw

from quire.errors import RequestError
from quire.server.api.openai.objects import json_response, page_response
from quire.server.api.openai.responses_generation import Responses, encoded_event
from quire.server.api.openai.responses_schema import Item, ResponseBody
from quire.server.errors import UnknownObject
from quire.server.middleware.auth import caller_of, same_origin_only
from quire.server.observability.request_record import record_of
from quire.server.request_body import release_body
from quire.server.service import Service
from quire.server.sse import EventStream, TimeLimit, while_connected


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
        tenant = caller_of(request).tenant
        if stream:
            return await _events(responses, tenant, id, 0 if starting_after is None else starting_after + 1)
        running = responses.running(tenant, id)
        return json_response((await responses.stored(tenant, id)).response if running is None else running.response)

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
        items = await responses.input_items(caller_of(request).tenant, id)
        return page_response(_items_after(items if order == "asc" else items[::-1], after), limit)

    @router.post("/v1/responses/{id}/cancel", response_model=None, dependencies=[Depends(same_origin_only)])
    async def cancel_response(id: str, request: Request) -> Response:
        """Cancel a response that is generated in the background. Returns it."""
        tenant = caller_of(request).tenant
        running = responses.running(tenant, id)
        if running is not None:
            await running.cancel()
            return json_response(running.response)
        response = (await responses.stored(tenant, id)).response
        if not msgspec.json.decode(response)["background"]:
            raise RequestError("only a response that was created with background can be cancelled", "id")
        return json_response(response)

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
        return EventStream(running.events(), _nothing) if body.stream else json_response(running.response)
    if body.stream:
        return EventStream(generation.stream(request.scope), generation.reply.close)
    try:
        await while_connected(request.receive, generation.run)
    finally:
        generation.reply.close()
    return json_response(generation.writer.response)


async def _events(responses: Responses, tenant: str, id: str, first: int) -> Response:
    """The events of a response in the background, from this sequence number on."""
    running = responses.running(tenant, id)
    if running is not None and running.keeps_events:
        return EventStream(running.events(first), _nothing)
    stored = None if running is not None else await responses.stored(tenant, id)
    if stored is None or stored.events is None:
        raise RequestError("only a response that was created with background and stream has events", "stream")
    return EventStream(_replayed(stored.events[first:]), _nothing)


def _items_after(items: Sequence[Item], after: str | None) -> Sequence[Item]:
    """The items behind the one with this id."""
    if after is None:
        return items
    for place, item in enumerate(items, 1):
        if item.get("id") == after:
            return items[place:]
    raise UnknownObject("item", after, "after")


async def _replayed(events: list[Raw]) -> AsyncIterator[bytes]:
    yield b"".join(map(encoded_event, events))


def _nothing() -> None:
    """What is to be done at the end of a stream that others generate."""
