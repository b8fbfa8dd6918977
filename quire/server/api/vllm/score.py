"""/score and /rerank: scores of pairs of texts, in the formats of vLLM and of Jina's and Cohere's rerankers."""

import time
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import Field

from quire.engine.embeddings import PooledPrompt
from quire.engine.scoring import activation_of, pair_texts
from quire.errors import RequestError
from quire.server.adapters import ServedModel
from quire.server.api.pooling import PoolingBody, PoolingRequest, json_response, on_thread, pool, usage_of
from quire.server.api.vllm.label_scores import LabelScoreBody, score_labels
from quire.server.errors import renamed_fields
from quire.server.middleware.auth import caller_of
from quire.server.observability.request_record import record_of
from quire.server.request_params import Body, PerPrompt, optional_field, unsupported_field
from quire.server.service import Service

MAX_CHARACTERS = 2**24  # of all pairs of a request; a text is part of each pair that it is in
Texts = str | PerPrompt[str]
_PAIR_FIELDS = ("text_1", "text_2", "data_1", "data_2", "queries", "documents", "use_activation")
_LABEL_FIELDS = ("query", "apply_softmax", "item_first")


class PairsBody(PoolingBody):
    """Fields of both."""

    use_activation: bool | None = optional_field(
        "False returns the logits of a classification head in place of probabilities; true by default."
    )


class ScoreBody(PairsBody, LabelScoreBody):
    """POST /v1/score. The texts have one of several pairs of names, or label_token_ids says what to score."""

    text_1: Texts | None = optional_field("A text, or as many as in text_2.")
    text_2: Texts | None = optional_field("The texts to pair it with.")
    data_1: Texts | None = optional_field("Another name of text_1.")
    data_2: Texts | None = optional_field("Another name of text_2.")
    queries: Texts | None = optional_field("Another name of text_1.")
    documents: Texts | None = optional_field("Another name of text_2, beside queries.")

    def check_labels(self) -> bool:
        """Whether items are scored by next tokens. Raises RequestError for fields of the other kind of score."""
        by_labels = self.label_token_ids is not None
        for name in _PAIR_FIELDS if by_labels else _LABEL_FIELDS:
            if getattr(self, name) is not None:
                why = "cannot be combined with label_token_ids; leave it out" if by_labels else "needs label_token_ids"
                raise RequestError(f"{name} {why}", name)
        return by_labels

    def texts(self) -> tuple[list[str], list[str], dict[str, str]]:
        """First and second texts, and the names of the fields. Raises RequestError unless each is given once."""
        found: list[tuple[str, list[str]]] = []
        for names in (("text_1", "data_1", "queries"), ("text_2", "data_2", "documents", "items")):
            given = [(name, value) for name in names if (value := getattr(self, name)) is not None]
            if len(given) != 1:
                raise RequestError(f"give one of {', '.join(names)}", names[0])
            name, value = given[0]
            values = [value] if isinstance(value, str) else value
            texts = [one for one in values if isinstance(one, str)]
            if len(texts) < len(values):
                raise RequestError(f"{name} must be texts; token ids need label_token_ids", name)
            found.append((name, texts))
        (first, firsts), (second, seconds) = found
        return firsts, seconds, {"data_1": first, "prompt": second}


class DocumentBody(Body):
    """A document as an object."""

    text: str


class RerankBody(PairsBody):
    """POST /v1/rerank."""

    query: str
    documents: Annotated[
        PerPrompt[str | DocumentBody], Field(description="The texts to rank: strings, or objects with a text.")
    ]
    top_n: int | None = optional_field("Return this many of the best; 0 or null: all.")
    return_documents: bool | None = optional_field("Return the text of each document; true by default.")
    max_tokens_per_doc: Any = unsupported_field()


class Scores(NamedTuple):
    """The scores of pairs, and the prompts that were computed for them."""

    values: list[float]
    pooled: list[PooledPrompt]


def score_routes(service: Service) -> APIRouter:
    """The routes of scores and of reranking."""
    router = APIRouter(tags=["vLLM"], route_class=service.request_bodies.route_class())

    @router.post("/score", response_model=None)
    @router.post("/v1/score", response_model=None)
    async def score(body: ScoreBody, request: Request) -> Response:
        """Score pairs of texts, or items by the probabilities of next tokens."""
        model = await service.served_model(request, body.model)
        if body.check_labels():
            return await score_labels(service, request, body, model)
        firsts, seconds, names = body.texts()
        with renamed_fields(names):
            scores = await _score(service, request, body, model, (firsts, seconds), "score")
        answer = {
            "id": record_of(request).answer_id,
            "object": "list",
            "created": int(time.time()),
            "model": model.name,
            "data": [{"index": i, "object": "score", "score": value} for i, value in enumerate(scores.values)],
            "usage": usage_of(scores.pooled),
        }
        return Response(msgspec.json.encode(answer), media_type="application/json")

    @router.post("/rerank", response_model=None)
    @router.post("/v1/rerank", response_model=None)
    @router.post("/v2/rerank", response_model=None)
    async def rerank(body: RerankBody, request: Request) -> Response:
        """Rank documents by their score for a query, best first."""
        model = await service.served_model(request, body.model)
        if body.top_n is not None and body.top_n < 0:
            raise RequestError("top_n must be at least 0, which returns all", "top_n")
        texts = [one if isinstance(one, str) else one.text for one in body.documents]
        with renamed_fields({"data_1": "documents", "prompt": "documents"}):
            scores = await _score(service, request, body, model, ([body.query], texts), "rerank")
        ranked = sorted(enumerate(scores.values), key=lambda pair: (-pair[1], pair[0]))[: body.top_n or None]
        shown = body.return_documents is not False
        id = record_of(request).answer_id

        def answer() -> dict[str, object]:
            return {
                "id": id,
                "model": model.name,
                "results": [
                    {"index": i, **({"document": {"text": texts[i]}} if shown else {}), "relevance_score": value}
                    for i, value in ranked
                ],
                "usage": usage_of(scores.pooled),
            }

        return await json_response(service, request, sum(map(len, texts)), answer)

    return router


async def _score(
    service: Service,
    request: Request,
    body: PairsBody,
    model: ServedModel,
    texts: tuple[Sequence[str], Sequence[str]],
    kind: str,
) -> Scores:
    firsts, seconds = texts
    for text in (*firsts, *seconds):
        service.check_size(text, "prompt")
    num_characters = sum(map(len, seconds)) + sum(map(len, firsts)) * (len(seconds) if len(firsts) == 1 else 1)
    if num_characters > MAX_CHARACTERS:
        raise RequestError(
            f"the pairs have {num_characters:,} characters, more than {MAX_CHARACTERS:,}; send fewer or shorter texts",
            "prompt",
        )
    pairs = await service.thread_pool.run(
        caller_of(request).tenant,
        lambda: pair_texts(firsts, seconds, service.tokenizer, service.facts.classification, service.embedder),
    )
    asked = PoolingRequest(model, [one.ids for one in pairs.prompts], pairs.pooling, body.params())
    pooled = await pool(service, request, body, asked, kind)
    activation = activation_of(service.facts.classification, used=body.use_activation is not False)
    scores = await on_thread(service, request, lambda: pairs.scores(pooled, service.embedder, activation))
    return Scores(scores, pooled)
