"""What a 404 says about known routes of other servers that quire does not serve: what to use in their place."""

from collections.abc import Mapping
from types import MappingProxyType

_TEXT_ONLY = "quire serves text models only"
ONE_MODEL = "the model is named when the server starts (`quire serve MODEL`)"
_STATE = "quire keeps no conversations; send the whole one to /v1/chat/completions, or use /v1/responses with store"

# By path, or by beginning of paths if it ends with a slash.
HINTS: Mapping[str, str] = MappingProxyType(
    {
        "/v1/v1/": "the path has v1 twice: the client adds it to a base URL that has it; leave one of them out",
        "/openai/deployments/": "use /v1/chat/completions: with OpenAI's client in place of Azure's",
        "/api/v0/": "use /v1/models and /v1/chat/completions",
        # OpenAI
        "/v1/audio/": f"{_TEXT_ONLY}, neither speech nor transcription",
        "/v1/images/": f"{_TEXT_ONLY}, no images",
        "/v1/videos/": f"{_TEXT_ONLY}, no videos",
        "/v1/realtime/": f"{_TEXT_ONLY}; stream from /v1/chat/completions",
        "/v1/moderations": "quire has no moderation model; serve a classifier, and use /v1/classify",
        "/v1/assistants/": _STATE,
        "/v1/threads/": _STATE,
        "/v1/conversations/": _STATE,
        "/v1/vector_stores/": "quire stores no vectors; /v1/embeddings computes them",
        "/v1/fine_tuning/": "quire trains no models",
        "/v1/uploads/": "send a whole file to /v1/files",
        "/v1/edits": "use /v1/chat/completions",
        "/v1/engines/": "use /v1/models",
        **{path: f"use /v1{path}" for path in ("/chat/completions", "/completions", "/embeddings", "/models")},
        **{path: f"use /v1{path}" for path in ("/responses", "/messages")},
        # Anthropic
        "/v1/complete": "use /v1/messages",
        "/v1/messages/batches/": "use /v1/batches",
        # vLLM, SGLang
        "/pooling": "use /v1/embeddings or /v1/classify",
        "/encode": "use /v1/embeddings",
        "/reset_prefix_cache": "use /flush_cache",
        "/abort_request": "close the connection of the request; its memory is freed within a step",
        "/get_load": "use /load",
        "/update_weights_from_disk": "start another server with the new weights",
        "/sleep": "stop the server; --weight-cache makes the next start fast",
        "/wake_up": "start the server again; --weight-cache makes starts fast",
        "/start_profile": "use /metrics, and /v1/requests/ID/explain for one request",
        "/stop_profile": "use /metrics, and /v1/requests/ID/explain for one request",
        "/invocations": "use /v1/chat/completions or /v1/completions",
        "/ping": "use /health",
        # llama.cpp
        "/embedding": "use /v1/embeddings",
        "/reranking": "use /v1/rerank",
        "/infill": "infilling is not supported; use /v1/completions with the model's own markup in the prompt",
        "/slots": "use /health and /v1/requests/ID/explain",
        # Ollama
        **{f"/api/{name}": ONE_MODEL for name in ("push", "create", "copy", "delete")},
        "/api/blobs/": ONE_MODEL,
        "/api/web_search": "quire reaches no other server; offer a tool that searches",
        "/api/web_fetch": "quire reaches no other server; offer a tool that reads pages",
    }
)


_LONGEST = max(map(len, HINTS))


def route_hint(path: str) -> str:
    """What to use in place of a route that does not exist."""
    path = path.rstrip("/") or path
    folders = [path[: end + 1] for end, character in enumerate(path[:_LONGEST]) if character == "/"]
    for name in (path, f"{path}/", *folders):
        if name in HINTS:
            return HINTS[name]
    return "/openapi.json lists the routes"
