"""/v1/files, with OpenAI's format: files that a tenant uploads, and the results of its batches."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any, Literal, get_args
from uuid import uuid4

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from starlette.responses import StreamingResponse

from quire.errors import RequestError, nearest
from quire.server.api.openai.objects import json_response, page_response
from quire.server.batch.stored_files import PIECE_BYTES, TTL, file_object
from quire.server.errors import UnknownObject
from quire.server.held_answer import answer_in_turn
from quire.server.middleware.auth import caller_of, same_origin_only
from quire.server.service import Service
from quire.server.store import LIMITS, Store

MIN_TTL = 3600  # seconds of expires_after
UPLOAD_SECONDS = 3600  # for which an incomplete file counts; request_body.py cuts off slow ones before
MAX_NAME = 512  # characters of a filename
OBJECT_BYTES = 4096  # that count for each object of a list while it is built

Purpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]
_FIELDS = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")
_FORM = {  # as the OpenAPI document describes it
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": list(get_args(Purpose))},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": MIN_TTL, "maximum": TTL},
    },
}


def file_routes(service: Service, store: Store) -> APIRouter:
    """The routes below /v1/files."""
    router = APIRouter(tags=["OpenAI"])

    @router.post(
        "/v1/files",
        response_model=None,
        dependencies=[Depends(same_origin_only)],
        openapi_extra={"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}},
    )
    async def upload_file(request: Request) -> Response:
        """Store a file."""
        return json_response(await _upload(service, store, request))

    @router.get("/v1/files", response_model=None)
    async def list_files(
        request: Request,
        *,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        order: Literal["asc", "desc"] = "desc",
        purpose: str | None = None,
    ) -> Response:
        """List files."""
        caller, where = caller_of(request), {} if purpose is None else {"purpose": purpose}
        caller.quota.count_download()

        async def page() -> Response:
            ascending = order == "asc"
            files = await store.page(caller.tenant, "file", limit + 1, after=after, ascending=ascending, where=where)
            if files is None:
                raise UnknownObject("file", str(after), "after")
            caller.quota.spend_bytes(sum(map(len, files)))
            return page_response([msgspec.Raw(file) for file in files], limit)

        num_bytes = OBJECT_BYTES * min(limit, LIMITS["file"].number)
        return await answer_in_turn(service.memories.of(caller.tenant), num_bytes, page)

    @router.get("/v1/files/{id}", response_model=None)
    async def retrieve_file(id: str, request: Request) -> Response:
        """Describe a file."""
        return json_response(msgspec.Raw(await _body(store, caller_of(request).tenant, id)))

    @router.get("/v1/files/{id}/content", response_model=None)
    async def retrieve_content(id: str, request: Request) -> Response:
        """Return the content of a file."""
        tenant, quota = caller_of(request).tenant, caller_of(request).quota
        quota.count_download()
        file = msgspec.json.decode(await _body(store, tenant, id))
        quota.spend_bytes(file["bytes"])
        headers = {"content-length": str(file["bytes"]), "x-content-type-options": "nosniff"}
        pieces = _pieces(store, tenant, id, file["bytes"])
        return StreamingResponse(pieces, headers=headers, media_type="application/octet-stream")

    @router.delete("/v1/files/{id}", response_model=None, dependencies=[Depends(same_origin_only)])
    async def delete_file(id: str, request: Request) -> Response:
        """Delete a file."""
        if not await store.delete(caller_of(request).tenant, "file", id):
            raise UnknownObject("file", id)
        return json_response({"id": id, "object": "file", "deleted": True})

    return router


async def _body(store: Store, tenant: str, id: str) -> bytes:
    body = await store.get(tenant, "file", id)
    if body is None:
        raise UnknownObject("file", id)
    return body


async def _pieces(store: Store, tenant: str, id: str, num_bytes: int) -> AsyncIterator[bytes]:
    """The first `num_bytes` of the content. A running batch may add more while they are sent."""
    place = 0
    while num_bytes and (piece := await store.content(tenant, "file", id, place)) is not None:
        yield piece[:num_bytes]
        num_bytes -= len(piece[:num_bytes])
        place += 1


async def _upload(service: Service, store: Store, request: Request) -> dict[str, Any]:
    """Store the file of a form, whose content is not kept in memory. Returns its object.

    Raises RequestError, StoreFull, StoreUnavailable, and as `RequestBodies.form`.
    """
    caller_of(request).quota.check_tokens()
    tenant, id, now = caller_of(request).tenant, f"file-{uuid4().hex}", int(store.clock())
    await store.create(tenant, "file", id, None, expires_at=now + UPLOAD_SECONDS, pinned=True)
    try:
        fields, name, num_bytes, buffer = dict[str, bytes](), None, 0, bytearray()
        async with aclosing(service.request_bodies.form(request)) as parts:
            async for part, piece in parts:
                if part.name not in _FIELDS and not service.ignores_unknown_fields:
                    raise RequestError(
                        f"unknown field {part.name!r:.100}{nearest(part.name, _FIELDS)}", part.name[:100]
                    )
                if part.name != "file":
                    fields[part.name] = fields.get(part.name, b"") + piece
                    continue
                if not piece and name is not None:
                    raise RequestError("the form has more than one file; upload each with a request of its own", "file")
                name = part.filename or "file"
                num_bytes += len(piece)
                buffer += piece
                while len(buffer) >= PIECE_BYTES:
                    await store.append(tenant, "file", id, bytes(buffer[:PIECE_BYTES]))
                    del buffer[:PIECE_BYTES]
        if buffer:
            await store.append(tenant, "file", id, bytes(buffer))
        if name is None or len(name) > MAX_NAME:
            raise RequestError(f"the form needs a file, with a filename of at most {MAX_NAME} characters", "file")
        purpose, ttl = _purpose(fields), _ttl(fields)
        file = file_object(id, name, purpose, num_bytes, now, ttl)
        await store.update(tenant, "file", id, msgspec.json.encode(file), expires_at=now + ttl, pinned=True)
    except BaseException:
        await store.delete(tenant, "file", id)
        raise
    return file


def _purpose(fields: dict[str, bytes]) -> str:
    purpose = fields.get("purpose", b"").decode("utf-8", "replace")
    if purpose not in get_args(Purpose):
        raise RequestError(f"purpose must be one of {', '.join(get_args(Purpose))}, not {purpose!r:.80}", "purpose")
    return purpose


def _ttl(fields: dict[str, bytes]) -> int:
    """Seconds for which the file is stored."""
    anchor, seconds = (fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    if anchor is None and seconds is None:
        return TTL
    ttl = int(seconds) if seconds is not None and seconds.isdigit() and len(seconds) < 10 else 0
    if anchor != b"created_at" or not MIN_TTL <= ttl <= TTL:
        raise RequestError(
            f"expires_after needs the anchor created_at and {MIN_TTL} to {TTL} seconds; or leave it out",
            "expires_after",
        )
    return ttl
