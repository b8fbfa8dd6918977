"""/v1/batches, with OpenAI's format: requests of a file that are sent in the background."""

from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import Field

from quire.errors import RequestError
from quire.server.api.openai.files import MIN_TTL
from quire.server.api.openai.objects import json_response, page_response
from quire.server.api.openai.responses_schema import Metadata
from quire.server.batch.background import Batches
from quire.server.batch.file_format import Url
from quire.server.batch.stored_files import TTL
from quire.server.errors import UnknownObject
from quire.server.held_answer import answer_in_turn
from quire.server.middleware.auth import caller_of, same_origin_only
from quire.server.request_params import Body, RequestBody, optional_field
from quire.server.service import Service
from quire.server.store import Store

BATCH_BYTES = 2**14  # that count for each batch of a list while it is built: most of them are metadata


class OutputExpiry(Body):
    """`output_expires_after`."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_TTL, le=TTL)]


class BatchBody(RequestBody):
    """POST /v1/batches."""

    input_file_id: str = Field(description="A stored file with the purpose batch.")
    endpoint: Url = Field(description="The url of all requests in the file.")
    completion_window: Literal["24h"] = Field(description="The time after which the batch ends.")
    metadata: Metadata | None = optional_field("Up to 16 texts by name, stored with the batch.")
    output_expires_after: OutputExpiry | None = optional_field(
        "Seconds for which the files with results are stored; 30 days by default."
    )


def batch_routes(service: Service, store: Store, batches: Batches) -> APIRouter:
    """The routes below /v1/batches."""
    creating = APIRouter(tags=["OpenAI"], route_class=service.request_bodies.route_class())
    router = APIRouter(tags=["OpenAI"])

    @creating.post("/v1/batches", response_model=None)
    async def create_batch(body: BatchBody, request: Request) -> Response:
        """Send the requests of a file in the background."""
        caller = caller_of(request)
        file = await store.get(caller.tenant, "file", body.input_file_id)
        if file is None:
            raise UnknownObject("file", body.input_file_id, "input_file_id")
        purpose = msgspec.json.decode(file)["purpose"]
        if purpose != "batch":
            raise RequestError(f"the file has the purpose {purpose}; upload it with the purpose batch", "input_file_id")
        ttl = None if body.output_expires_after is None else body.output_expires_after.seconds
        batch = await batches.create(caller, body.endpoint, body.input_file_id, body.metadata or {}, ttl)
        return json_response(batch)

    @router.get("/v1/batches", response_model=None)
    async def list_batches(
        request: Request, *, after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
    ) -> Response:
        """List batches, newest first."""
        caller = caller_of(request)
        caller.quota.count_download()

        async def page() -> Response:
            found = await batches.page(caller.tenant, limit + 1, after)
            if found is None:
                raise UnknownObject("batch", str(after), "after")
            response = page_response(found, limit)
            caller.quota.spend_bytes(len(response.body))
            return response

        return await answer_in_turn(service.memories.of(caller.tenant), BATCH_BYTES * limit, page)

    @router.get("/v1/batches/{id}", response_model=None)
    async def retrieve_batch(id: str, request: Request) -> Response:
        """Describe a batch."""
        return await _answer(id, request)

    @router.post("/v1/batches/{id}/cancel", response_model=None, dependencies=[Depends(same_origin_only)])
    async def cancel_batch(id: str, request: Request) -> Response:
        """Cancel a batch, which keeps the results that it has. Returns it."""
        batches.cancel(caller_of(request).tenant, id)
        return await _answer(id, request)

    async def _answer(id: str, request: Request) -> Response:
        batch = await batches.get(caller_of(request).tenant, id)
        if batch is None:
            raise UnknownObject("batch", id)
        return json_response(batch)

    router.include_router(creating)
    return router
