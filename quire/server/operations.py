"""Routes that generate nothing and that any caller may ask: models, liveness, readiness, health."""

import msgspec
from fastapi import APIRouter, Request, Response

from quire.server.gate import caller_of
from quire.server.service import Service


def operation_routes(service: Service) -> APIRouter:
    """The routes that generate nothing."""
    router = APIRouter(tags=["Operations"])

    @router.get("/v1/models", tags=["OpenAI"])
    async def models() -> dict[str, object]:
        """The models that requests may name."""
        return {"object": "list", "data": [_model(service)]}

    @router.get("/v1/models/{name:path}", tags=["OpenAI"])
    async def model(name: str) -> dict[str, object]:
        """One model."""
        service.check_model(name)
        return _model(service)

    @router.get("/live")
    async def live() -> dict[str, str]:
        """200 as long as this process answers at all."""
        return {"status": "ok"}

    @router.get("/ready", response_model=None)
    async def ready() -> Response:
        """200 when requests can be served, 503 otherwise."""
        return _health(service, with_figures=False)

    @router.get("/health", response_model=None)
    async def health(request: Request) -> Response:
        """200 when the engine moves, 503 when it has stopped or stalled; with figures for those who run it."""
        return _health(service, with_figures=caller_of(request).is_admin)

    return router


def _model(service: Service) -> dict[str, object]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "quire",
        "max_model_len": service.max_model_len,
    }


def _health(service: Service, *, with_figures: bool) -> Response:
    """Figures are about all tenants together; also how long ago the engine moved tells how busy it is."""
    health = service.engine.health()
    body: dict[str, object] = {"status": health.problem or "ok"}
    if with_figures:
        body |= {
            "heartbeat_age_seconds": round(health.heartbeat_age, 3),
            "requests_running": health.stats.num_running,
            "requests_waiting": health.stats.num_waiting,
            "kv_blocks_used": health.stats.kv_blocks_used,
            "kv_blocks_total": health.stats.kv_blocks_total,
            "steps": health.stats.num_steps,
            "failed_steps": health.stats.failed_steps,
            "last_step_seconds": health.stats.last_step_seconds,
        }
    return Response(msgspec.json.encode(body), 503 if health.problem else 200, media_type="application/json")
