"""/v1/embeddings, with OpenAI's format."""

import base64
from typing import Literal

import numpy as np
from fastapi import APIRouter, Request, Response

from quire.engine.embeddings import POOLINGS
from quire.engine.inputs import as_prompt_list
from quire.server.api.pooling import (
    PoolingRequest,
    PromptsBody,
    encoded_vector,
    json_response,
    num_values,
    pool,
    usage_of,
)
from quire.server.errors import renamed_fields
from quire.server.request_params import optional_field
from quire.server.service import Service


class EmbeddingBody(PromptsBody):
    """POST /v1/embeddings."""

    encoding_format: Literal["float", "base64"] | None = optional_field(
        "Encoding of vectors: numbers (the default), or base64 of little-endian float32."
    )
    dimensions: int | None = optional_field("Keep this many numbers of each vector, where the model's files allow it.")
    pooling: str | None = optional_field(
        f"How the last layer's states become one: {', '.join(POOLINGS)}. By default as the model's files say, or last."
    )
    normalize: bool | None = optional_field(
        "Scale vectors to length 1; by default as the model's files say, else true."
    )
    prompt_name: str | None = optional_field(
        "The prompt of the model's files to put in front of each text; empty: none. By default the model's default one."
    )


def embedding_routes(service: Service) -> APIRouter:
    """The route /v1/embeddings."""
    router = APIRouter(tags=["OpenAI"], route_class=service.request_bodies.route_class())

    @router.post("/v1/embeddings", response_model=None)
    async def embeddings(body: EmbeddingBody, request: Request) -> Response:
        """Return the vector of one or several prompts."""
        model = await service.served_model(request, body.model)
        embedder = service.embedder
        pooling = embedder.pooling(body.pooling)
        embedder.check_dimensions(body.dimensions)
        with renamed_fields({"prompt": "input"}):
            texts = embedder.texts(as_prompt_list(body.input), body.prompt_name)
            asked = PoolingRequest(model, texts, pooling, body.params(), body.add_special_tokens)
            pooled = await pool(service, request, body, asked, "embd")

        def answer() -> dict[str, object]:
            vectors = embedder.vectors(pooled, normalize=body.normalize, dimensions=body.dimensions)
            written = map(_base64 if body.encoding_format == "base64" else encoded_vector, vectors)
            return {
                "object": "list",
                "data": [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(written)],
                "model": model.name,
                "usage": usage_of(pooled),
            }

        return await json_response(service, request, num_values(pooled), answer)

    return router


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
