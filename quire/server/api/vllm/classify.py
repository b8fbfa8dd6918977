"""/classify, vLLM's route of classification heads."""

import time

from fastapi import APIRouter, Request, Response

from quire.core.step import Pooling
from quire.engine.embeddings import PooledPrompt
from quire.engine.inputs import as_prompt_list
from quire.engine.scoring import activation_of, probabilities
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
from quire.server.observability.request_record import record_of
from quire.server.request_params import optional_field
from quire.server.service import Service


class ClassifyBody(PromptsBody):
    """POST /v1/classify."""

    use_activation: bool | None = optional_field("False returns logits in place of probabilities; true by default.")


def classify_routes(service: Service) -> APIRouter:
    """The routes /classify and /v1/classify."""
    router = APIRouter(tags=["vLLM"], route_class=service.request_bodies.route_class())

    @router.post("/classify", response_model=None)
    @router.post("/v1/classify", response_model=None)
    async def classify(body: ClassifyBody, request: Request) -> Response:
        """Return the probability of each class, for one or several prompts."""
        model = await service.served_model(request, body.model)
        with renamed_fields({"prompt": "input"}):
            prompts = as_prompt_list(body.input)
            asked = PoolingRequest(model, prompts, Pooling.CLASS, body.params(), body.add_special_tokens)
            pooled = await pool(service, request, body, asked, "classify")
        classification = service.facts.classification
        assert classification is not None, "the engine refuses to classify without a classification head"
        activation = activation_of(classification, used=body.use_activation is not False)
        id = record_of(request).answer_id

        def described(index: int, one: PooledPrompt) -> dict[str, object]:
            logits = one.state()
            label, probs = classification.labels[int(logits.argmax())], probabilities(logits, activation)
            return {"index": index, "label": label, "probs": encoded_vector(probs), "num_classes": len(probs)}

        def answer() -> dict[str, object]:
            return {
                "id": id,
                "object": "list",
                "created": int(time.time()),
                "model": model.name,
                "data": [described(index, one) for index, one in enumerate(pooled)],
                "usage": usage_of(pooled),
            }

        return await json_response(service, request, num_values(pooled), answer)

    return router
