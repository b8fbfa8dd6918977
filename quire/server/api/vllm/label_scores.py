"""Scores of items by the probabilities of given next tokens, as in SGLang's /v1/score."""

import math
import time
from collections.abc import Sequence
from functools import partial

from fastapi import Request, Response

from quire.engine.inputs import Prompt, as_prompt_list
from quire.errors import RequestError
from quire.params import SamplingParams
from quire.server.adapters import ServedModel
from quire.server.api.limits import check_choices, num_prompt_tokens
from quire.server.api.pooling import PoolingBody
from quire.server.errors import renamed_fields
from quire.server.middleware.auth import caller_of
from quire.server.reply import Reply, respond_whole
from quire.server.request_params import Listed, Prompts, TokenIds, optional_field
from quire.server.service import Service
from quire.server.sse import TimeLimit

_NAMES = {"logprob_token_ids": "label_token_ids", "logprobs": "label_token_ids", "prompt": "items"}


class LabelScoreBody(PoolingBody):
    """Fields of a request that scores items by next tokens."""

    query: str | TokenIds | None = optional_field("With label_token_ids: the text before each item, or its token ids.")
    items: Prompts | None = optional_field("With label_token_ids: texts or lists of token ids. Beside queries: texts.")
    label_token_ids: Listed[int] | None = optional_field("Score each item by the probabilities of these next tokens.")
    apply_softmax: bool | None = optional_field(
        "With label_token_ids: the scores of an item are divided by their sum; false by default."
    )
    item_first: bool | None = optional_field("With label_token_ids: the item stands before the query.")

    def label_prompts(self) -> list[Prompt]:
        """The prompt of each item. Raises RequestError unless there are a query and items of the same kind."""
        if self.query is None or self.items is None:
            name = "query" if self.query is None else "items"
            raise RequestError(f"label_token_ids needs {name}", name)
        return [self._joined(item) for item in as_prompt_list(self.items)]

    def _joined(self, item: Prompt) -> Prompt:
        match self.query, item:
            case str(query), str(text):
                return text + query if self.item_first else query + text
            case list(query), list(ids):
                return [*ids, *query] if self.item_first else [*query, *ids]
        raise RequestError("query and items must both be texts, or both token ids", "items")


async def score_labels(service: Service, request: Request, body: LabelScoreBody, model: ServedModel) -> Response:
    """Respond with the probabilities of the labels behind each item.

    Raises RequestError, RateLimited, Busy, DeadlineMissed, SequenceFailed, EngineStopped, TimedOut, ClientGone.
    """
    limit, id = TimeLimit(body.timeout), service.request_ids.make("score", request)
    reply = await limit.run(_start(service, request, body, model, id))
    return await respond_whole(request, partial(_response, model, body, id), reply, limit)


async def _start(service: Service, request: Request, body: LabelScoreBody, model: ServedModel, id: str) -> Reply:
    caller, labels = caller_of(request), tuple(body.label_token_ids or ())
    if not labels:
        raise RequestError("label_token_ids must have at least one token id", "label_token_ids")
    with renamed_fields(_NAMES):
        prompts = body.label_prompts()
        params = SamplingParams(
            temperature=0,
            max_tokens=1,
            logprobs=0,
            logprob_token_ids=labels,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            truncation_side=body.truncation_side or "left",
        )
        each = [params] * len(prompts)
        check_choices(each)
        asked = await service.tokenize(caller.tenant, prompts, each)
        namespace, scheduling_params = caller.namespace(body.cache_salt), body.scheduling_params(service.options)
        with caller.quota.spending(num_prompt_tokens(asked)):
            return await service.start(
                id, asked, namespace, scheduling_params=scheduling_params, adapters=model.adapter, whole=True
            )


def _response(model: ServedModel, body: LabelScoreBody, id: str, reply: Reply) -> dict[str, object]:
    scores = []
    for transcript in reply.transcripts:
        (output,) = transcript.result().outputs
        assert output.logprobs is not None
        (row,) = output.logprobs
        logprobs = [row[label].logprob for label in body.label_token_ids or ()]
        scores.append(_softmax(logprobs) if body.apply_softmax else list(map(math.exp, logprobs)))
    head = {"id": id, "object": "scoring", "created": int(time.time()), "model": model.name}
    return {**head, "scores": scores, "usage": reply.usage()}


def _softmax(logprobs: Sequence[float]) -> list[float]:
    """The probabilities, divided by their sum."""
    most = max(logprobs)
    weights = [math.exp(one - most) for one in logprobs]
    return [weight / sum(weights) for weight in weights]
