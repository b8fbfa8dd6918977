"""Requests that compute vectors of prompts and generate no text: embeddings, classes, scores."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
from fastapi import Request, Response
from msgspec import Raw
from pydantic import Field

from quire.core.step import Pooling
from quire.engine.embeddings import EmbeddingBatch, EmbeddingDeadlineMissed, EmbeddingFailed, PooledPrompt
from quire.engine.inputs import Prompt, pooling_params
from quire.engine.outputs import RequestMetrics
from quire.errors import EngineStopped, RequestError
from quire.params import SamplingParams
from quire.server.adapters import ServedModel
from quire.server.api.limits import num_prompt_tokens
from quire.server.errors import DeadlineMissed
from quire.server.middleware.auth import caller_of
from quire.server.observability.metrics import FinishedRequestStats
from quire.server.observability.request_record import RequestStats, record_of
from quire.server.request_body import release_body
from quire.server.request_params import (
    MAX_PROMPTS,
    Prompts,
    Salt,
    SchedulingParamsBody,
    optional_field,
)
from quire.server.service import Service
from quire.server.sse import TimeLimit, while_connected

T = TypeVar("T")

_MAX_FEW_VALUES = 2**13  # of an answer that is described on the event loop


class SaltedBody(SchedulingParamsBody):
    """Fields that all of these routes share."""

    cache_salt: Salt | None = optional_field(
        "Share cached tokens only with requests of the same salt (1 to 256 characters)."
    )


class PoolingBody(SaltedBody):
    """Fields of the routes in the formats of OpenAI and vLLM."""

    model: str | None = optional_field("The served model; /v1/models lists it.")
    truncate_prompt_tokens: int | None = optional_field("Keep this many tokens of the input; -1: as many as fit.")
    truncation_side: Literal["left", "right"] | None = optional_field(
        "With truncate_prompt_tokens: drop tokens at the begin (left, the default) or at the end (right)."
    )

    def params(self) -> SamplingParams:
        """The truncation, as parameters of a request that generates nothing. Raises RequestError."""
        return pooling_params(self.truncate_prompt_tokens, self.truncation_side or "left")


class PromptsBody(PoolingBody):
    """Fields of the routes whose prompts may be texts or token ids."""

    input: Prompts = Field(description="A text, token ids, or a list of several of either.")
    add_special_tokens: bool | None = optional_field(
        "Let the tokenizer add begin and end tokens to a text; true by default."
    )


class PoolingRequest(NamedTuple):
    """Prompts to pool. params: their truncation. add_special_tokens: as in `Service.tokenize`."""

    model: ServedModel
    prompts: Sequence[Prompt]
    pooling: Pooling
    params: SamplingParams
    add_special_tokens: bool | None = None


async def pool(
    service: Service, request: Request, body: SaltedBody, asked: PoolingRequest, kind: str
) -> list[PooledPrompt]:
    """Compute the pooled state of each prompt. kind: prefix of the response's id.

    Raises RequestError, RateLimited, DeadlineMissed, EmbeddingFailed, EngineStopped, TimedOut, ClientGone.
    """
    limit, caller, prompts = TimeLimit(body.timeout), caller_of(request), asked.prompts
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise RequestError(f"prompt must be 1 to {MAX_PROMPTS} texts or lists of token ids", "prompt")
    each, special = [asked.params] * len(prompts), asked.add_special_tokens
    tokenizing = service.tokenize(caller.tenant, prompts, each, add_special_tokens=special, keep_begin_and_end=True)
    tokenized = await limit.run(tokenizing)
    release_body(request)
    id = service.request_ids.make(kind, request)
    namespace, scheduling_params = caller.namespace(body.cache_salt), body.scheduling_params(service.options)
    adapters = [asked.model.adapter] * len(tokenized)
    batch = EmbeddingBatch(tokenized, asked.pooling, namespace, scheduling_params, id, adapters)
    record_of(request).get_stats = partial(_stats, batch)
    work = partial(_run, service, batch, caller.quota.spending(num_prompt_tokens(tokenized)))
    await limit.run(while_connected(request.receive, work))
    return list(batch)


async def on_thread(service: Service, request: Request, work: Callable[[], T], num_values: int = 0) -> T:
    """The result of `work` on pooled states, on the thread pool if there are many values, or if modules are large.

    Raises Busy.
    """
    if num_values <= _MAX_FEW_VALUES and service.embedder.is_cheap:
        return work()
    return await service.thread_pool.run(caller_of(request).tenant, work)


def num_values(pooled: Sequence[PooledPrompt]) -> int:
    """Number of all numbers of the pooled states."""
    return len(pooled) * len(pooled[0].state())


async def json_response(service: Service, request: Request, num_values: int, answer: Callable[[], object]) -> Response:
    """The response with `answer()` as JSON, which has about `num_values` values. See `on_thread`."""

    def work() -> Response:
        return Response(msgspec.json.encode(answer()), media_type="application/json")

    return await on_thread(service, request, work, num_values)


def encoded_vector(vector: np.ndarray) -> Raw:
    """A vector as JSON, so that the numbers of one vector at a time are Python objects."""
    return Raw(msgspec.json.encode(vector.tolist()))


def usage_of(pooled: Sequence[PooledPrompt]) -> dict[str, object]:
    """OpenAI's usage of prompts without output."""
    num_tokens = sum(len(one.prompt_token_ids) for one in pooled)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


async def _run(service: Service, batch: EmbeddingBatch, spending: AbstractContextManager[None]) -> None:
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
