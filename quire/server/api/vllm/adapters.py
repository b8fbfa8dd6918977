"""Routes that load, unload and list LoRA adapters, in the formats of vLLM, SGLang and llama.cpp."""

from typing import Any, NoReturn

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import Field
from starlette.exceptions import HTTPException

from quire.server.middleware.auth import admins_only, caller_of, same_origin_only
from quire.server.request_params import RequestBody, ignored_field, optional_field
from quire.server.service import Service

_SCALES = (
    "an adapter is chosen for each request, with its own scale; name it as the model of the request, or load one with "
    "/v1/load_lora_adapter"
)


class LoadAdapterBody(RequestBody):
    """POST /v1/load_lora_adapter, and /load_lora_adapter."""

    lora_name: str = Field(description="The name by which requests will use it.")
    lora_path: str = Field(description="Its folder, absolute or relative to --lora-dir, below which it must be.")
    load_inplace: bool | None = optional_field("Let a name that exists stand for this adapter from now on.")
    pinned: bool | None = optional_field("Load it now, and keep it in memory.")
    added_tokens_config: Any = ignored_field()
    is_3d_lora_weight: Any = ignored_field()


class UnloadAdapterBody(RequestBody):
    """POST /v1/unload_lora_adapter, and /unload_lora_adapter."""

    lora_name: str | None = optional_field("Its name.")
    lora_int_id: int | None = optional_field("The id of the name, as /lora-adapters lists it.")


def adapter_routes(service: Service) -> APIRouter:
    """The routes. Those that change something need the role admin."""
    router = APIRouter(tags=["vLLM"])
    bodies = APIRouter(tags=["vLLM"], route_class=service.request_bodies.route_class())

    @bodies.post("/v1/load_lora_adapter", response_model=None)
    async def load_lora_adapter(body: LoadAdapterBody, request: Request) -> Response:
        """Let a name stand for an adapter below --lora-dir."""
        await _load(service, body, request)
        return Response(f"Success: LoRA adapter '{body.lora_name}' added successfully.", media_type="text/plain")

    @bodies.post("/v1/unload_lora_adapter", response_model=None)
    async def unload_lora_adapter(body: UnloadAdapterBody, request: Request) -> Response:
        """Take the name of an adapter away. Requests that run keep the adapter."""
        name = await _unload(service, body, request)
        return Response(f"Success: LoRA adapter '{name}' removed successfully.", media_type="text/plain")

    @bodies.post("/load_lora_adapter", tags=["SGLang"], response_model=None)
    async def load(body: LoadAdapterBody, request: Request) -> Response:
        """Let a name stand for an adapter below --lora-dir."""
        await _load(service, body, request)
        return _loaded(service, request)

    @bodies.post("/unload_lora_adapter", tags=["SGLang"], response_model=None)
    async def unload(body: UnloadAdapterBody, request: Request) -> Response:
        """Take the name of an adapter away. Requests that run keep the adapter."""
        await _unload(service, body, request)
        return _loaded(service, request)

    @router.get("/lora-adapters", response_model=None)
    async def lora_adapters(request: Request) -> Response:
        """List the adapters that were loaded or used, with llama.cpp's fields and their names."""
        listed = service.adapters.listed(caller_of(request))
        return _json(
            [
                {"id": entry.number, "name": name, "path": entry.adapter.path, "scale": 1.0, "pinned": entry.pinned}
                for name, entry in listed
            ]
        )

    @router.post("/lora-adapters", include_in_schema=False, response_model=None)
    async def set_lora_adapters() -> NoReturn:
        """Refuse llama.cpp's scales of all requests."""
        raise HTTPException(405, _SCALES, {"allow": "GET"})

    router.include_router(bodies)
    return router


async def _load(service: Service, body: LoadAdapterBody, request: Request) -> None:
    _check_caller(request)
    in_place, pinned = bool(body.load_inplace), bool(body.pinned)
    await service.adapters.load(body.lora_name, body.lora_path, in_place=in_place, pinned=pinned)


async def _unload(service: Service, body: UnloadAdapterBody, request: Request) -> str:
    _check_caller(request)
    return await service.adapters.unload(body.lora_name, body.lora_int_id)


def _check_caller(request: Request) -> None:
    """Raises Forbidden, CrossSite. Routes that get bodies have no dependencies."""
    admins_only(request)
    same_origin_only(request)


def _loaded(service: Service, request: Request) -> Response:
    """SGLang's answer: the paths of adapters by name."""
    listed = service.adapters.listed(caller_of(request))
    return _json({"success": True, "loaded_adapters": {name: entry.adapter.path for name, entry in listed}})


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
