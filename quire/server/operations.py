"""Routes for those who run the server: models, liveness, readiness, health, metrics."""

import msgspec
from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

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
        return _health(service)

    @router.get("/health", response_model=None)
    async def health() -> Response:
        """200 when the engine moves, 503 when it has stopped or stalled; with figures."""
        return _health(service)

    @router.get("/metrics", response_model=None)
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(service.metrics.page(), headers={"content-type": CONTENT_TYPE_LATEST})

    return router


def _model(service: Service) -> dict[str, object]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "quire",
        "max_model_len": service.max_model_len,
    }


def _health(service: Service) -> Response:
    health = service.engine.health()
    body = {
        "status": health.problem or "ok",
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
