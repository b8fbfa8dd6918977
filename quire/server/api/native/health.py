"""Routes of models and health."""

import msgspec
from fastapi import APIRouter, Request, Response

from quire.server.middleware.auth import caller_of
from quire.server.middleware.drain import Drain
from quire.server.service import Service


def health_routes(service: Service, drain: Drain) -> APIRouter:
    """The routes. drain: /ready and /health answer 503 once it has begun."""
    router = APIRouter(tags=["Operations"])

    @router.get("/v1/models", tags=["OpenAI"])
    async def models() -> dict[str, object]:
        """List the served model."""
        return {"object": "list", "data": [_model(service)]}

    @router.get("/v1/models/{name:path}", tags=["OpenAI"])
    async def model(name: str) -> dict[str, object]:
        """Describe the served model. 404 for another name."""
        service.check_model(name)
        return _model(service)

    @router.get("/live")
    async def live() -> dict[str, str]:
        """200 while this process answers. A liveness probe; needs no API key."""
        return {"status": "ok"}

    @router.get("/ready", response_model=None)
    async def ready() -> Response:
        """200 if requests can be served, otherwise 503. A readiness probe; needs no API key."""
        return _health(service, drain, with_figures=False)

    @router.get("/health", response_model=None)
    async def health(request: Request) -> Response:
        """200 if requests can be served, otherwise 503 with the reason in `status`. Admins also get figures."""
        return _health(service, drain, with_figures=caller_of(request).is_admin)

    return router


def _model(service: Service) -> dict[str, object]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "quire",
        "max_model_len": service.max_model_len,
    }


def _health(service: Service, drain: Drain, *, with_figures: bool) -> Response:
    """The status, with figures only for admins: they cover all tenants, and the heartbeat age shows the load."""
    health = service.engine.health()
    problem = health.problem or ("draining" if drain.begun else "")
    body: dict[str, object] = {"status": problem or "ok"}
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
            "predicted_step_seconds": health.predicted_step_seconds,
            "engine": health.state,
            "engine_restarts": health.num_restarts,
        }
    return Response(msgspec.json.encode(body), 503 if problem else 200, media_type="application/json")
