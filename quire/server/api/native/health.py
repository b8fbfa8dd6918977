"""Routes of the served model and of health."""

import asyncio
from collections.abc import Mapping
from types import MappingProxyType

import msgspec
from fastapi import APIRouter, Request, Response

from quire import __version__
from quire.core.adapter import Adapter
from quire.errors import EngineStopped, QueueFull
from quire.params import SamplingParams
from quire.server.api.limits import num_prompt_tokens
from quire.server.api.native.fleet import replica_entries
from quire.server.errors import Busy, SequenceFailed
from quire.server.middleware.auth import caller_of
from quire.server.middleware.drain import Drain
from quire.server.service import Service
from quire.supervisor.health import Health
from quire.tokenizer.chat_template import DEFAULT

_GENERATION_SECONDS = 20.0  # for the token of /health_generate


def health_routes(service: Service, drain: Drain) -> APIRouter:
    """The routes. drain: /ready and /health answer 503 once it has begun."""
    router = APIRouter(tags=["Operations"])

    @router.get("/v1/models", tags=["OpenAI"])
    async def models(request: Request) -> dict[str, object]:
        """List the names of the served model, and its adapters that were loaded or used."""
        data = [_model(service, name) for name in service.names.exact]
        adapters = service.adapters.listed(caller_of(request))
        data += [_model(service, name, entry.adapter) for name, entry in adapters]
        return {"object": "list", "data": data}

    @router.get("/v1/models/{name:path}", tags=["OpenAI"])
    async def model(name: str, request: Request) -> dict[str, object]:
        """Describe the served model, or an adapter. 404 for another name."""
        return _model(service, name, (await service.served_model(request, name)).adapter)

    @router.get("/version")
    async def version() -> dict[str, str]:
        """Return quire's version."""
        return {"version": __version__}

    @router.get("/model_info", tags=["SGLang"])
    @router.get("/get_model_info", tags=["SGLang"])
    async def get_model_info() -> dict[str, object]:
        """Describe the served model with SGLang's fields. Paths are the served name."""
        return {
            "model_path": service.model_name,
            "tokenizer_path": service.model_name,
            "is_generation": service.facts.generates,
            "preferred_sampling_params": dict(service.sampling_defaults) or None,
        }

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, object]:
        """Return the special tokens and the chat template, with transformers' names."""
        tokenizer = service.tokenizer
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",  # transformers' class for a tokenizer.json
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": service.max_model_len,
            "chat_template": tokenizer.chat_templates.get(DEFAULT),
            **tokenizer.special_tokens,
        }

    @router.head("/live", include_in_schema=False, response_model=None)
    @router.get("/live", response_model=None)
    async def live() -> Response:
        """200 while this process answers, unless no engine is started any more: then 503, and the process ends.

        A liveness probe; needs no API key.
        """
        return _status(str(service.engine.failure or ""))

    @router.head("/ready", include_in_schema=False, response_model=None)
    @router.get("/ready", response_model=None)
    async def ready() -> Response:
        """200 if requests can be served, otherwise 503. A readiness probe; needs no API key."""
        return _status(_problem(service.engine.health(), drain))

    @router.head("/health", include_in_schema=False, response_model=None)
    @router.get("/health", response_model=None)
    async def health(request: Request) -> Response:
        """200 if requests can be served, otherwise 503 with the reason in `status`. Admins also get figures."""
        health = service.engine.health()
        return _status(_problem(health, drain), _figures(service, health) if caller_of(request).is_admin else {})

    @router.get("/health_generate", tags=["SGLang"], response_model=None)
    async def health_generate(request: Request) -> Response:
        """Generate one token: 200 if that works, otherwise 503 with the reason in `status`."""
        problem = _problem(service.engine.health(), drain)
        return _status(problem or await _generation_problem(service, request))

    return router


async def _generation_problem(service: Service, request: Request) -> str:
    """Why no token can be generated; "" if one was. A server that is too busy for another request has no problem.

    Raises RateLimited.
    """
    caller, id = caller_of(request), service.request_ids.make("generate", request)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    try:
        async with asyncio.timeout(_GENERATION_SECONDS):
            asked = await service.tokenize(caller.tenant, [[0]], [params])
            with caller.quota.spending(num_prompt_tokens(asked)):
                reply = await service.start(id, asked, caller.namespace(None))
            try:
                await reply.end()
            finally:
                reply.close()
    except TimeoutError:
        return f"no token was generated within {_GENERATION_SECONDS:g} s"
    except EngineStopped as error:
        return str(error)
    except SequenceFailed:  # the server's log has the reason
        return "the generation of a token failed"
    except (Busy, QueueFull):
        return ""
    return ""


def _model(service: Service, name: str, adapter: Adapter | None = None) -> dict[str, object]:
    """The entry of a name in /v1/models, with vLLM's fields. adapter: None for the model itself."""
    permission = {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": service.created,
        **dict.fromkeys(("allow_create_engine", "allow_fine_tuning", "is_blocking"), False),
        **dict.fromkeys(("allow_sampling", "allow_logprobs", "allow_search_indices", "allow_view"), True),
        "organization": "*",
        "group": None,
    }
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "quire",
        "root": service.model_name if adapter is None else adapter.path,
        "parent": None if adapter is None else service.model_name,
        "max_model_len": service.max_model_len,
        "permission": [permission],
    }


def _problem(health: Health, drain: Drain) -> str:
    return health.problem or ("draining" if drain.begun else "")


def _figures(service: Service, health: Health) -> dict[str, object]:
    """Figures for admins only: they cover all tenants, and the heartbeat age shows the load. None: no engine runs."""
    stats = health.stats
    figures: dict[str, object] = {
        "engine": health.state,
        "engine_restarts": health.num_restarts,
        "engine_start_error": health.start_error or None,
        "requests_running": stats.num_running,
        "requests_waiting": stats.num_waiting,
        "steps": stats.num_steps,
        "failed_steps": stats.failed_steps,
    }
    age = health.heartbeat_age
    of_engine: dict[str, object] = {
        "heartbeat_age_seconds": None if age is None else round(age, 3),
        "kv_blocks_used": stats.kv_blocks_used,
        "kv_blocks_total": stats.kv_blocks_total,
        "last_step_seconds": stats.last_step_seconds,
        "predicted_step_seconds": health.predicted_step_seconds,
    }
    figures |= dict.fromkeys(of_engine) if age is None else of_engine
    if service.engine.num_replicas > 1:
        figures["replicas"] = replica_entries(service.engine.statuses())
    return figures


def _status(problem: str, figures: Mapping[str, object] = MappingProxyType({})) -> Response:
    body = msgspec.json.encode({"status": problem or "ok", **figures})
    return Response(body, 503 if problem else 200, media_type="application/json")
