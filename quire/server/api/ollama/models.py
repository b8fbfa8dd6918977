"""Ollama's routes about models: the one that is served."""

import hashlib
from datetime import UTC, datetime

import msgspec
from fastapi import APIRouter, Request, Response

from quire.server.adapters import ServedModel
from quire.server.api.ollama.schema import PullBody, ShowBody
from quire.server.errors import UnknownModel
from quire.server.middleware.auth import caller_of
from quire.server.model_names import TAG
from quire.server.route_hints import ONE_MODEL
from quire.server.service import Service
from quire.server.sse import LINES, line
from quire.tokenizer.chat_template import DEFAULT

API_VERSION = "0.13.5"  # of Ollama, whose API these routes have: clients compare it with the one that they need
_NEVER = "2318-04-04T00:00:00Z"  # far in the future: the model stays loaded
_PRECISIONS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_UNITS = ((10**9, "B"), (10**6, "M"), (10**3, "K"))


def model_routes(service: Service) -> APIRouter:
    """The routes /api/tags, /api/ps, /api/show, /api/pull and /api/version."""
    router = APIRouter(tags=["Ollama"])
    bodies = APIRouter(tags=["Ollama"], route_class=service.request_bodies.route_class())

    @router.get("/api/tags")
    async def tags(request: Request) -> dict[str, object]:
        """List the names of the served model, and its adapters."""
        return {"models": _all(service, request)}

    @router.get("/api/ps")
    async def ps(request: Request) -> dict[str, object]:
        """List the names of the loaded model, which is the served one, and its adapters."""
        is_on_device = service.options.device != "cpu"
        more = {"expires_at": _NEVER, "context_length": service.max_model_len}
        models = _all(service, request)
        return {"models": [{**one, **more, "size_vram": one["size"] if is_on_device else 0} for one in models]}

    @router.get("/api/version")
    async def version() -> dict[str, str]:
        """Return the version of Ollama whose API this is."""
        return {"version": API_VERSION}

    @bodies.post("/api/show", response_model=None)
    async def show(body: ShowBody, request: Request) -> Response:
        """Describe the served model, or an adapter."""
        model = await service.served_model(request, body.model or body.name)
        return Response(msgspec.json.encode(_shown(service, model)), media_type="application/json")

    @bodies.post("/api/pull", response_model=None)
    async def pull(body: PullBody, request: Request) -> Response:
        """Say that the served model is there. Clients pull a model before they use it; others are not fetched."""
        try:
            await service.served_model(request, body.model or body.name)
        except UnknownModel as error:
            raise UnknownModel(f"{error}; {ONE_MODEL}", "model") from None
        statuses = ["success"] if body.stream is False else ["pulling manifest", "success"]
        media = "application/json" if body.stream is False else LINES.media_type
        return Response(b"".join(line({"status": status}) for status in statuses), media_type=media)

    router.include_router(bodies)
    return router


def _all(service: Service, request: Request) -> list[dict[str, object]]:
    """The entries of the served model and of the adapters that the caller may use."""
    facts = service.facts
    of_model = hashlib.sha256(facts.model_name.encode()).hexdigest()
    models = [_listed(service, name, facts.weight_bytes, of_model) for name in service.names.exact]
    for name, entry in service.adapters.listed(caller_of(request)):
        adapter = entry.adapter
        models.append(_listed(service, name, adapter.num_bytes, adapter.digest, service.model_name))
    return models


def _listed(service: Service, name: str, num_bytes: int, digest: str, parent: str = "") -> dict[str, object]:
    tagged = name if ":" in name else name + TAG
    return {
        "name": tagged,
        "model": tagged,
        "modified_at": _started_at(service),
        "size": num_bytes,
        "digest": digest,
        "details": _details(service, parent),
    }


def _shown(service: Service, model: ServedModel) -> dict[str, object]:
    facts, family, tokenizer = service.facts, _family(service), service.tokenizer
    can = {
        "completion": facts.generates,
        "tools": facts.generates and service.chat_format.tools is not None,
        "thinking": facts.generates and service.chat_format.reasoning is not None,
        "embedding": not facts.generates and facts.classification is None,
    }
    return {
        "license": "",
        "modelfile": f"FROM {service.model_name}\n" + (f"ADAPTER {model.name}\n" if model.adapter else ""),
        "parameters": "\n".join(f"{name} {value}" for name, value in facts.sampling_defaults.items()),
        "template": tokenizer.chat_templates.get(DEFAULT, ""),
        "details": _details(service, service.model_name if model.adapter else ""),
        "model_info": {
            "general.architecture": family,
            "general.basename": facts.model_name,
            "general.parameter_count": facts.num_parameters,
            f"{family}.context_length": service.max_model_len,
            f"{family}.embedding_length": facts.hidden_size,
            f"{family}.vocab_size": facts.vocab_size,
        },
        "capabilities": [name for name, has in can.items() if has],
        "modified_at": _started_at(service),
    }


def _details(service: Service, parent: str) -> dict[str, object]:
    """parent: the model of an adapter; empty for the model itself."""
    family, options = _family(service), service.options
    return {
        "parent_model": parent,
        "format": "gguf" if service.facts.path.endswith(".gguf") else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": _number(service.facts.num_parameters),
        "quantization_level": options.quantization or _PRECISIONS.get(options.dtype, options.dtype),
    }


def _family(service: Service) -> str:
    """Such as "llama" of LlamaForCausalLM."""
    return service.facts.architecture.partition("For")[0].removesuffix("LMHeadModel").removesuffix("Model").lower()


def _number(parameters: int) -> str:
    for unit, name in _UNITS:
        if parameters >= unit:
            return f"{parameters / unit:.1f}{name}"
    return str(parameters)


def _started_at(service: Service) -> str:
    return datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z")
