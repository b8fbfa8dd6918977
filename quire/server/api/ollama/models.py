"""Ollama's routes about models: the one that is served."""

import hashlib
from datetime import UTC, datetime

import msgspec
from fastapi import APIRouter, Response

from quire.server.api.ollama.chat import check_model
from quire.server.api.ollama.schema import ShowBody
from quire.server.service import Service
from quire.tokenizer.chat_template import DEFAULT

API_VERSION = "0.12.11"  # of Ollama, whose API these routes have: clients compare it with the one that they need
_NEVER = "2318-04-04T00:00:00Z"  # far in the future: the model stays loaded
_TAG = ":latest"
_PRECISIONS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_UNITS = ((10**9, "B"), (10**6, "M"), (10**3, "K"))


def model_routes(service: Service) -> APIRouter:
    """The routes /api/tags, /api/ps, /api/show and /api/version."""
    router = APIRouter(tags=["Ollama"])
    bodies = APIRouter(tags=["Ollama"], route_class=service.request_bodies.route_class())

    @router.get("/api/tags")
    async def tags() -> dict[str, object]:
        """List the names of the served model."""
        return {"models": [_listed(service, name) for name in service.model_names]}

    @router.get("/api/ps")
    async def ps() -> dict[str, object]:
        """List the names of the loaded model, which is the served one."""
        size = service.facts.weight_bytes
        on_device = 0 if service.options.device == "cpu" else size
        more = {"expires_at": _NEVER, "size_vram": on_device, "context_length": service.max_model_len}
        return {"models": [{**_listed(service, name), **more} for name in service.model_names]}

    @router.get("/api/version")
    async def version() -> dict[str, str]:
        """Return the version of Ollama whose API this is."""
        return {"version": API_VERSION}

    @bodies.post("/api/show", response_model=None)
    async def show(body: ShowBody) -> Response:
        """Describe the served model."""
        check_model(service, body.model or body.name)
        return Response(msgspec.json.encode(_shown(service)), media_type="application/json")

    router.include_router(bodies)
    return router


def _listed(service: Service, name: str) -> dict[str, object]:
    tagged = name if ":" in name else name + _TAG
    return {
        "name": tagged,
        "model": tagged,
        "modified_at": _started_at(service),
        "size": service.facts.weight_bytes,
        "digest": hashlib.sha256(service.facts.model_name.encode()).hexdigest(),
        "details": _details(service),
    }


def _shown(service: Service) -> dict[str, object]:
    facts, family, tokenizer = service.facts, _family(service), service.tokenizer
    can = {
        "completion": facts.generates,
        "tools": facts.generates and service.chat_format.tools is not None,
        "thinking": facts.generates and service.chat_format.reasoning is not None,
        "embedding": not facts.generates and facts.classification is None,
    }
    return {
        "license": "",
        "modelfile": f"FROM {service.model_name}\n",
        "parameters": "\n".join(f"{name} {value}" for name, value in facts.sampling_defaults.items()),
        "template": tokenizer.chat_templates.get(DEFAULT, ""),
        "details": _details(service),
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


def _details(service: Service) -> dict[str, object]:
    family, options = _family(service), service.options
    return {
        "parent_model": "",
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
