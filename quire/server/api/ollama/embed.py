"""/api/embed and the older /api/embeddings, with Ollama's format."""

import time

import msgspec
from fastapi import APIRouter, Request, Response

from quire.core.step import Pooling
from quire.engine.inputs import pooling_params
from quire.server.api.ollama.chat import check_model
from quire.server.api.ollama.schema import OllamaEmbedBody, OllamaEmbeddingsBody
from quire.server.api.openai.embeddings import check_dimensions
from quire.server.api.pooling import PoolingRequest, encoded_vector, num_values, pool
from quire.server.errors import renamed_fields
from quire.server.middleware.auth import caller_of
from quire.server.service import Service


def embed_routes(service: Service) -> APIRouter:
    """The routes /api/embed and /api/embeddings."""
    router = APIRouter(tags=["Ollama"], route_class=service.request_bodies.route_class())

    @router.post("/api/embed", response_model=None)
    async def embed(body: OllamaEmbedBody, request: Request) -> Response:
        """Return the vectors of texts, of length 1."""
        began = time.monotonic()
        check_model(service, body.model)
        check_dimensions(body.dimensions, service)
        texts = [body.input] if isinstance(body.input, str) else body.input
        asked = PoolingRequest(texts, Pooling.LAST, pooling_params(None if body.truncate is False else -1))
        with renamed_fields({"prompt": "input"}):
            pooled = await pool(service, request, body, asked, "embd")
        seconds = time.monotonic() - began

        def answer() -> dict[str, object]:
            return {
                "model": service.model_name,
                "embeddings": [encoded_vector(one.vector(normalized=True)) for one in pooled],
                "total_duration": round(seconds * 10**9),
                "load_duration": 0,
                "prompt_eval_count": sum(len(one.prompt_token_ids) for one in pooled),
            }

        return await service.json_response(caller_of(request).tenant, num_values(pooled), answer)

    @router.post("/api/embeddings", response_model=None)
    async def embeddings(body: OllamaEmbeddingsBody, request: Request) -> Response:
        """Return the vector of a text, as the model computes it."""
        check_model(service, body.model)
        asked = PoolingRequest([body.prompt], Pooling.LAST, pooling_params(-1))
        (pooled,) = await pool(service, request, body, asked, "embd")
        answer = {"embedding": pooled.vector(normalized=False).tolist()}
        return Response(msgspec.json.encode(answer), media_type="application/json")

    return router
