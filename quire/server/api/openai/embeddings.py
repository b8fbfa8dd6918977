"""/v1/embeddings, with OpenAI's format."""

import base64
from typing import Literal

import numpy as np
from fastapi import APIRouter, Request, Response

from quire.engine.embeddings import parse_pooling
from quire.engine.inputs import as_prompt_list
from quire.errors import RequestError
from quire.server.api.pooling import PoolingRequest, PromptsBody, encoded_vector, num_values, pool, usage_of
from quire.server.api.request_params import optional_field
from quire.server.errors import renamed_fields
from quire.server.middleware.auth import caller_of
from quire.server.service import Service


class EmbeddingBody(PromptsBody):
    """POST /v1/embeddings."""

    encoding_format: Literal["float", "base64"] | None = optional_field(
        "Encoding of vectors: numbers (the default), or base64 of little-endian float32."
    )
    dimensions: int | None = optional_field("Accepted if it is the size of the model's vectors.")
    pooling: str | None = optional_field(
        "Which of the last layer's states: that of the last token ('last'), or the 'mean' over all tokens."
    )
    normalize: bool | None = optional_field("Scale vectors to length 1; true by default.")


def check_dimensions(dimensions: int | None, service: Service) -> None:
    """Raises RequestError for a size of vectors other than the model's."""
    if dimensions not in (None, service.hidden_size):
        raise RequestError(f"dimensions other than the model's {service.hidden_size} are not supported", "dimensions")


def embedding_routes(service: Service) -> APIRouter:
    """The route /v1/embeddings."""
    router = APIRouter(tags=["OpenAI"], route_class=service.request_bodies.route_class())

    @router.post("/v1/embeddings", response_model=None)
    async def embeddings(body: EmbeddingBody, request: Request) -> Response:
        """Return the vector of one or several prompts."""
        service.check_model(body.model)
        pooling = parse_pooling(body.pooling or "last")
        check_dimensions(body.dimensions, service)
        with renamed_fields({"prompt": "input"}):
            asked = PoolingRequest(as_prompt_list(body.input), pooling, body.params(), body.add_special_tokens)
            pooled = await pool(service, request, body, asked, "embd")

        def answer() -> dict[str, object]:
            vectors = (one.vector(normalized=body.normalize is not False) for one in pooled)
            written = map(_base64 if body.encoding_format == "base64" else encoded_vector, vectors)
            return {
                "object": "list",
                "data": [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(written)],
                "model": service.model_name,
                "usage": usage_of(pooled),
            }

        return await service.json_response(caller_of(request).tenant, num_values(pooled), answer)

    return router


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
