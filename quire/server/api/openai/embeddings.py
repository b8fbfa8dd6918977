"""/v1/embeddings, with OpenAI's format."""

import base64
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Literal

import msgspec
import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import Field

from quire.engine.embeddings import EmbeddingBatch, EmbeddingDeadlineMissed, EmbeddingFailed, parse_pooling
from quire.engine.inputs import Generation, as_prompt_list
from quire.engine.outputs import RequestMetrics
from quire.errors import EngineStopped, RequestError
from quire.params import SamplingParams
from quire.server.api.limits import num_prompt_tokens
from quire.server.api.request_params import (
    MAX_PROMPTS,
    Prompts,
    Salt,
    SchedulingParamsBody,
    ignored_field,
    optional_field,
)
from quire.server.errors import DeadlineMissed, renamed_fields
from quire.server.middleware.auth import caller_of
from quire.server.observability.metrics import FinishedRequestStats
from quire.server.observability.request_record import RequestStats, record_of
from quire.server.request_body import release_body
from quire.server.service import Service
from quire.server.sse import TimeLimit, while_connected


class EmbeddingBody(SchedulingParamsBody):
    """POST /v1/embeddings."""

    input: Prompts = Field(description="A text, token ids, or a list of several of either.")
    model: str | None = optional_field("The served model; /v1/models lists it.")
    encoding_format: Literal["float", "base64"] | None = optional_field(
        "Encoding of vectors: numbers (the default), or base64 of little-endian float32."
    )
    dimensions: int | None = optional_field("Accepted if it is the size of the model's vectors.")
    pooling: str | None = optional_field(
        "Which of the last layer's states: that of the last token ('last'), or the 'mean' over all tokens."
    )
    normalize: bool | None = optional_field("Scale vectors to length 1; true by default.")
    truncate_prompt_tokens: int | None = optional_field("Keep this many tokens of the input; -1: as many as fit.")
    truncation_side: Literal["left", "right"] | None = optional_field(
        "With truncate_prompt_tokens: drop tokens at the begin (left, the default) or at the end (right)."
    )
    add_special_tokens: bool | None = optional_field(
        "Let the tokenizer add begin and end tokens to a text; true by default."
    )
    cache_salt: Salt | None = optional_field(
        "Share cached tokens only with requests of the same salt (1 to 256 characters)."
    )
    user: object = ignored_field()


def embedding_routes(service: Service) -> APIRouter:
    """The route /v1/embeddings."""
    router = APIRouter(tags=["OpenAI"], route_class=service.request_bodies.route_class())

    @router.post("/v1/embeddings", response_model=None)
    async def embeddings(body: EmbeddingBody, request: Request) -> Response:
        """Return the vector of one or several prompts."""
        service.check_model(body.model)
        pooling = parse_pooling(body.pooling or "last")
        if body.dimensions not in (None, service.hidden_size):
            raise RequestError(
                f"dimensions other than the model's {service.hidden_size} are not supported", "dimensions"
            )
        with renamed_fields({"prompt": "input"}):
            limit, caller = TimeLimit(body.timeout), caller_of(request)
            asked = await limit.run(_tokenize(service, caller.tenant, body))
            release_body(request)
            id = service.request_ids.make("embd", request)
            batch = EmbeddingBatch(
                asked, pooling, caller.namespace(body.cache_salt), body.scheduling_params(service.options), id
            )
            record_of(request).get_stats = partial(_stats, batch)
            cost = num_prompt_tokens(asked)
            work = partial(_embed, service, batch, caller.quota.spending(cost))
            await limit.run(while_connected(request.receive, work))
        vectors = [one.vector(normalized=body.normalize is not False) for one in batch]
        answer = _answer(service, vectors, sum(len(one.prompt_token_ids) for one in batch), body.encoding_format)
        return Response(msgspec.json.encode(answer), media_type="application/json")

    return router


async def _tokenize(service: Service, tenant: str, body: EmbeddingBody) -> list[Generation]:
    prompts = as_prompt_list(body.input)
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise RequestError(f"input must be 1 to {MAX_PROMPTS} texts or lists of token ids", "input")
    params = SamplingParams(
        max_tokens=0,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side or "left",
    )
    return await service.tokenize(tenant, prompts, [params] * len(prompts), add_special_tokens=body.add_special_tokens)


async def _embed(service: Service, batch: EmbeddingBatch, spending: AbstractContextManager[None]) -> None:
    """Compute the batch, and update the metrics. spending: counts the prompt tokens while the engine accepts them.

    Raises RequestError, RateLimited, DeadlineMissed, EmbeddingFailed, EngineStopped.
    """
    metrics = RequestMetrics(time.monotonic())
    with spending:
        stream = await service.engine.generate(batch.requests)
    unfinished = "abort"
    try:
        while not batch.finished:
            for output in await anext(stream):
                batch.process_output(output)
    except EmbeddingDeadlineMissed as late:
        raise DeadlineMissed(late) from late
    except (EngineStopped, EmbeddingFailed):
        unfinished = "error"
        raise
    finally:
        stream.close()
        for one in batch:
            service.metrics.observe_finished_sequence(one.finish_reason or unfinished)
            service.metrics.observe_finished_request(
                FinishedRequestStats(metrics, len(one.prompt_token_ids), one.num_cached_tokens), time.monotonic()
            )


def _stats(batch: EmbeddingBatch, content: bool) -> RequestStats:  # noqa: FBT001
    """Figures for the request record, without vectors. Prompts are token ids."""
    return RequestStats(
        num_prompt_tokens=sum(len(one.prompt_token_ids) for one in batch),
        num_output_tokens=0,
        num_cached_tokens=sum(one.num_cached_tokens for one in batch),
        finish_reasons=[one.finish_reason or "abort" for one in batch],
        prompts=tuple(one.prompt_token_ids for one in batch) if content else (),
    )


def _answer(
    service: Service, vectors: Sequence[np.ndarray], num_tokens: int, encoding: str | None
) -> dict[str, object]:
    written = [_base64(vector) if encoding == "base64" else vector.tolist() for vector in vectors]
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(written)],
        "model": service.model_name,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
