"""The routes of Text Generation Inference: /, /generate_stream, /info, and its form of /generate."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from quire import __version__
from quire.engine.inputs import Generation
from quire.engine.output_text import RequestOutputProcessor
from quire.engine.outputs import CompletionOutput, Delta, LogprobRow
from quire.params import MAX_N, MAX_STOPS
from quire.server.api.limits import bounded_answer, check_prompt_values, num_prompt_tokens
from quire.server.api.openai.logprobs import finite_logprob
from quire.server.api.tgi.schema import ENGINE_NAMES, TgiBody, TgiParameters
from quire.server.errors import renamed_fields
from quire.server.middleware.auth import caller_of
from quire.server.reply import Reply, check_end, respond
from quire.server.service import Service
from quire.server.sse import TimeLimit, event
from quire.tokenizer.tokenizer import Tokenizer


def tgi_routes(service: Service) -> APIRouter:
    """The routes that only Text Generation Inference has."""
    router = APIRouter(tags=["TGI"])
    bodies = APIRouter(tags=["TGI"], route_class=service.request_bodies.route_class())

    @bodies.post("/", response_model=None, include_in_schema=False)  # GET has the page there
    async def root(body: TgiBody, request: Request) -> Response:
        """Continue a prompt."""
        return await generate(service, body, request, stream=bool(body.stream), listed=True)

    @bodies.post("/generate_stream", response_model=None)
    async def generate_stream(body: TgiBody, request: Request) -> Response:
        """Continue a prompt, as server-sent events."""
        return await generate(service, body, request, stream=True)

    @router.get("/info")
    async def info() -> dict[str, object]:
        """Describe the served model and its limits."""
        facts = service.facts
        return {
            "model_id": service.model_name,
            "model_sha": None,
            "model_dtype": service.options.dtype,
            "model_device_type": service.options.device,
            "model_pipeline_tag": "text-generation" if facts.generates else None,
            "max_best_of": MAX_N,
            "max_stop_sequences": MAX_STOPS,
            "max_input_tokens": service.max_model_len - 1,
            "max_total_tokens": service.max_model_len,
            "max_client_batch_size": 1,
            "router": "quire",
            "version": __version__,
        }

    router.include_router(bodies)
    return router


async def generate(
    service: Service, body: TgiBody, request: Request, *, stream: bool, listed: bool = False
) -> Response:
    """The response. listed: whether it is a list of one object. Raises RequestError."""
    limit, id = TimeLimit(body.timeout), service.request_ids.make("generate", request)
    parameters = body.parameters or TgiParameters()
    answer = TgiAnswer(id, service.tokenizer, parameters, listed=listed)
    reply = await limit.run(_start(service, body, parameters, request, id, stream=stream))
    return await respond(request, answer, reply, limit, stream=stream)


async def _start(
    service: Service, body: TgiBody, parameters: TgiParameters, request: Request, id: str, *, stream: bool
) -> Reply:
    caller = caller_of(request)
    model = await service.served_model(request, body.model)
    if parameters.adapter_id is not None:
        model = await service.served_model(request, parameters.adapter_id, "parameters.adapter_id")
    with renamed_fields(ENGINE_NAMES):
        with_tokens = stream or bool(parameters.details)
        params = parameters.sampling_params(service.sampling_defaults, with_tokens=with_tokens)
        asked: Sequence[Generation] = await service.tokenize(caller.tenant, [body.inputs], [params])
        check_prompt_values(asked, ids=bool(parameters.return_full_text))
        asked = asked if stream else bounded_answer(asked, service.max_model_len)
        scheduling_params = body.scheduling_params(service.options)
        with caller.quota.spending(num_prompt_tokens(asked)):
            return await service.start(
                *(id, asked, caller.namespace(body.cache_salt)),
                scheduling_params=scheduling_params,
                adapters=model.adapter,
                whole=not stream,
            )


class TgiAnswer:
    """TGI's objects for one request."""

    def __init__(self, request_id: str, tokenizer: Tokenizer, parameters: TgiParameters, *, listed: bool) -> None:
        self.id = request_id
        self._tokenizer = tokenizer
        self._parameters = parameters
        self._listed = listed

    def full_response(self, reply: Reply) -> object:
        """The body of the response. Raises RequestError, DeadlineMissed."""
        transcript = reply.transcripts[0]
        output = transcript.sequence(0)
        check_end(output.finish_reason, output.stop_reason)
        found: dict[str, object] = {"generated_text": self._whole_text(transcript, output)}
        if self._parameters.details:
            found["details"] = {
                **self._details(transcript, output),
                "prefill": self._prefill(transcript),
                **self._tokens(output.token_ids, output.logprobs or ()),
            }
        return [found] if self._listed else found

    async def events(self, reply: Reply) -> AsyncIterator[bytes]:
        """An event for the tokens of each step; the last has the whole text. Raises RequestError, DeadlineMissed."""
        index = 0
        transcript = reply.transcripts[0]
        transcript.drop_logprobs()
        async for deltas in reply.deltas():
            for delta in deltas:
                index += len(delta.token_ids)
                yield event(self._event(transcript, delta, index))

    def _event(self, transcript: RequestOutputProcessor, delta: Delta, index: int) -> dict[str, object]:
        check_end(delta.finish_reason, delta.stop_reason)
        listed: Any = self._tokens(delta.token_ids, delta.logprobs or ())
        token = {**listed["tokens"][-1], "text": delta.text} if delta.token_ids else None
        found: dict[str, object] = {"index": index, "token": token, "generated_text": None, "details": None}
        if self._parameters.top_n_tokens and delta.token_ids:
            found["top_tokens"] = listed["top_tokens"][-1]
        if delta.finish_reason is not None:
            output = transcript.sequence(0)
            found |= {
                "generated_text": self._whole_text(transcript, output),
                "details": self._details(transcript, output),
            }
        return found

    def _whole_text(self, transcript: RequestOutputProcessor, output: CompletionOutput) -> str:
        if not self._parameters.return_full_text:
            return output.text
        return self._tokenizer.decode(list(transcript.prompt.ids), skip_special_tokens=True) + output.text

    def _details(self, transcript: RequestOutputProcessor, output: CompletionOutput) -> dict[str, object]:
        reason = output.finish_reason
        if reason == "stop":
            reason = "eos_token" if output.stop_reason is None else "stop_sequence"
        return {
            "finish_reason": reason,
            "generated_tokens": len(output.token_ids),
            "input_length": len(transcript.prompt.ids),
            "seed": transcript.params.seed,
        }

    def _prefill(self, transcript: RequestOutputProcessor) -> list[dict[str, object]]:
        rows = transcript.prompt_logprobs
        if rows is None:
            return []
        return [
            {
                "id": token,
                "text": self._text(token),
                "logprob": None if row is None else finite_logprob(row[token].logprob),
            }
            for token, row in zip(transcript.prompt.ids, rows, strict=True)
        ]

    def _tokens(self, ids: Sequence[int], rows: Sequence[LogprobRow]) -> dict[str, object]:
        """`tokens` and, if they are asked for, `top_tokens`."""
        found: dict[str, object] = {"tokens": [self._token(id, row) for id, row in zip(ids, rows, strict=False)]}
        if self._parameters.top_n_tokens:
            found["top_tokens"] = [
                [self._token(id, row) for id in _most_likely(row, self._parameters.top_n_tokens)] for row in rows
            ]
        return found

    def _token(self, id: int, row: LogprobRow) -> dict[str, object]:
        special = id in self._tokenizer.special_ids
        return {"id": id, "text": self._text(id), "logprob": finite_logprob(row[id].logprob), "special": special}

    def _text(self, id: int) -> str:
        return self._tokenizer.decode([id])


def _most_likely(row: LogprobRow, number: int) -> list[int]:
    return sorted(row, key=lambda id: (-row[id].logprob, id))[:number]
