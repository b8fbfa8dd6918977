"""/api/embed and the older /api/embeddings, with Ollama's format."""

import time
from functools import partial

import msgspec
from fastapi import APIRouter, Request, Response

from quire.engine.inputs import pooling_params
from quire.server.api.ollama.schema import OllamaEmbedBody, OllamaEmbeddingsBody
from quire.server.api.pooling import PoolingRequest, encoded_vector, json_response, num_values, on_thread, pool
from quire.server.errors import renamed_fields
from quire.server.service import Service

_FITTING = pooling_params(-1, "right")  # the begin of a text, as much as fits, as in Ollama


def embed_routes(service: Service) -> APIRouter:
    """The routes /api/embed and /api/embeddings."""
    router = APIRouter(tags=["Ollama"], route_class=service.request_bodies.route_class())

    @router.post("/api/embed", response_model=None)
    async def embed(body: OllamaEmbedBody, request: Request) -> Response:
        """Return the vectors of texts, of length 1."""
        began, embedder = time.monotonic(), service.embedder
        model = await service.served_model(request, body.model)
        embedder.check_dimensions(body.dimensions)
        texts = embedder.texts([body.input] if isinstance(body.input, str) else body.input)
        params = pooling_params() if body.truncate is False else _FITTING
        asked = PoolingRequest(model, texts, embedder.config.pooling, params)
        with renamed_fields({"prompt": "input"}):
            pooled = await pool(service, request, body, asked, "embd")
        seconds = time.monotonic() - began

        def answer() -> dict[str, object]:
            vectors = embedder.vectors(pooled, normalize=True, dimensions=body.dimensions)
            return {
                "model": model.name,
                "embeddings": list(map(encoded_vector, vectors)),
                "total_duration": round(seconds * 10**9),
                "load_duration": 0,
                "prompt_eval_count": sum(len(one.prompt_token_ids) for one in pooled),
            }

        return await json_response(service, request, num_values(pooled), answer)

    @router.post("/api/embeddings", response_model=None)
    async def embeddings(body: OllamaEmbeddingsBody, request: Request) -> Response:
        """Return the vector of a text, as the model computes it."""
        model = await service.served_model(request, body.model)
        embedder = service.embedder
        asked = PoolingRequest(model, embedder.texts([body.prompt]), embedder.config.pooling, _FITTING)
        pooled = await pool(service, request, body, asked, "embd")
        (vector,) = await on_thread(service, request, partial(embedder.vectors, pooled, normalize=False))
        answer = {"embedding": vector.tolist()}
        return Response(msgspec.json.encode(answer), media_type="application/json")

    return router
