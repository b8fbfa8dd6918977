"""The routes of llama.cpp's server that other servers do not have: /completion, /apply-template, /props."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from quire import __version__
from quire.engine.inputs import Generation, as_prompt_list
from quire.engine.output_text import RequestOutputProcessor
from quire.engine.outputs import CompletionOutput, Delta, RequestMetrics
from quire.params import SamplingParams
from quire.server.adapters import ServedModel
from quire.server.api.limits import bounded_answer, check_choices, check_prompt_values, num_prompt_tokens
from quire.server.api.openai.chat import rendering_of, template_messages
from quire.server.api.openai.logprobs import LogprobFormat
from quire.server.api.openai.schema import CompletionBody, Messages, TemplateBody
from quire.server.errors import renamed_fields
from quire.server.middleware.auth import caller_of
from quire.server.reply import Reply, check_end, is_visible, respond
from quire.server.request_params import RequestBody, optional_field, unsupported_field
from quire.server.service import Service
from quire.server.sse import TimeLimit, event
from quire.tokenizer.chat_template import DEFAULT

_STOP_TYPES = {"length": "limit"}  # of finish reasons; others depend on what ended the sequence
_SETTINGS = (
    "n",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "max_tokens",
)


class LlamaCppBody(CompletionBody):
    """POST /completion: a completion, without what its answer has no place for."""

    best_of: Any = unsupported_field(1)
    use_beam_search: Any = unsupported_field(False)  # noqa: FBT003 (a value of the field)
    echo: Any = unsupported_field(False)  # noqa: FBT003 (a value of the field)
    prompt_logprobs: Any = unsupported_field()
    return_drafted: Any = unsupported_field(False)  # noqa: FBT003 (a value of the field)
    return_tokens_as_token_ids: Any = unsupported_field(False)  # noqa: FBT003 (a value of the field)
    stream_options: Any = unsupported_field()


class TemplateRequestBody(TemplateBody, RequestBody):
    """POST /apply-template."""

    model: str | None = optional_field("The served model; /v1/models lists it.")
    messages: Messages


def llama_cpp_routes(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["llama.cpp"])
    bodies = APIRouter(tags=["llama.cpp"], route_class=service.request_bodies.route_class())

    @bodies.post("/completion", response_model=None)
    async def completion(body: LlamaCppBody, request: Request) -> Response:
        """Continue one or several prompts."""
        limit, id = TimeLimit(body.timeout), service.request_ids.make("generate", request)
        answer, reply = await limit.run(_start(service, body, request, id))
        return await respond(request, answer, reply, limit, stream=bool(body.stream))

    @bodies.post("/apply-template", response_model=None)
    async def apply_template(body: TemplateRequestBody, request: Request) -> Response:
        """Return the prompt that the chat template makes of a conversation."""
        await service.served_model(request, body.model)
        rendering, messages = rendering_of(body), template_messages(body.messages)

        def work() -> bytes:
            rendering.check_size(messages, service)
            ids = rendering.tokenize(messages, service.tokenizer).ids
            return msgspec.json.encode({"prompt": service.tokenizer.decode(ids)})

        found = await service.thread_pool.run(caller_of(request).tenant, work)
        return Response(found, media_type="application/json")

    @router.get("/props")
    async def props() -> dict[str, object]:
        """Describe the served model and the server."""
        defaults = SamplingParams(**{"max_tokens": None, **service.sampling_defaults})  # type: ignore[arg-type]  # by name
        return {
            "default_generation_settings": {"n_ctx": service.max_model_len, "params": _settings(defaults)},
            "total_slots": service.facts.options.max_num_seqs,
            "model_alias": service.model_name,
            "model_path": service.model_name,
            "modalities": {"vision": False, "audio": False},
            "chat_template": service.tokenizer.chat_templates.get(DEFAULT, ""),
            "bos_token": service.tokenizer.special_tokens.get("bos_token", ""),
            "eos_token": service.tokenizer.special_tokens.get("eos_token", ""),
            "build_info": f"quire {__version__}",
        }

    router.include_router(bodies)
    return router


async def _start(service: Service, body: LlamaCppBody, request: Request, id: str) -> tuple["LlamaCppAnswer", Reply]:
    caller = caller_of(request)
    model = await service.served_model(request, body.model)
    with renamed_fields({**body.other_names(), **body.constraint_names()}):
        params = await service.prepare(
            request, lambda: body.make_params({"max_tokens": None, **service.sampling_defaults}, logprobs=body.logprobs)
        )
        prompts = as_prompt_list(body.prompt)
        each = [params] * len(prompts)
        check_choices(each)
        asked: Sequence[Generation] = await service.tokenize(
            caller.tenant, prompts, each, add_special_tokens=body.add_special_tokens
        )
        check_prompt_values(asked, ids=True)  # each choice has its prompt
        asked = asked if body.stream else bounded_answer(asked, service.max_model_len)
        answer = LlamaCppAnswer(id, service, model, body, params, alone=prompts != body.prompt)
        scheduling_params = body.scheduling_params(service.options)
        with caller.quota.spending(num_prompt_tokens(asked)):
            reply = await service.start(
                *(answer.id, asked, caller.namespace(body.cache_salt)),
                scheduling_params=scheduling_params,
                adapters=model.adapter,
                whole=not body.stream,
            )
            return answer, reply


class LlamaCppAnswer:
    """llama.cpp's objects for one request. alone: one object instead of a list, for one prompt with n = 1."""

    def __init__(
        self,
        id: str,
        service: Service,
        model: ServedModel,
        body: LlamaCppBody,
        params: SamplingParams,
        *,
        alone: bool,
    ) -> None:
        self.id = id
        self._model = model.name
        self._params = params
        self._alone = alone and params.n == 1
        self._with_ids = bool(body.return_token_ids)
        self._logprobs = LogprobFormat(params, service.tokenizer)

    def full_response(self, reply: Reply) -> object:
        """The body of the response. Raises RequestError, DeadlineMissed."""
        outputs = [(one, output) for one in reply.transcripts for output in one.result().outputs]
        found = [
            {**self._end(one, output, index=index, content=output.text), **self._probabilities(output)}
            for index, (one, output) in enumerate(outputs)
        ]
        return found[0] if self._alone else found

    async def events(self, reply: Reply) -> AsyncIterator[bytes]:
        """The events of a stream; the last one of a sequence has its figures. Raises RequestError, DeadlineMissed."""
        for transcript in reply.transcripts:
            transcript.drop_logprobs()
        async for deltas in reply.deltas():
            for delta in deltas:
                transcript = reply.transcripts[reply.transcript_index(delta)]
                if delta.finish_reason is not None:
                    output = transcript.sequence(delta.index)
                    last = self._end(transcript, output, index=reply.choice_index(delta), content=delta.text)
                    yield event({**last, **self._probabilities(delta)})
                elif is_visible(delta, ids=self._with_ids):
                    yield event(self._part(transcript, delta, reply.choice_index(delta)))

    def _part(self, transcript: RequestOutputProcessor, delta: Delta, index: int) -> dict[str, object]:
        return {
            **{"index": index, "content": delta.text, "tokens": delta.token_ids, "stop": False, "id_slot": -1},
            "tokens_predicted": transcript.num_output_tokens[delta.index],
            "tokens_evaluated": len(transcript.prompt.ids),
            **self._probabilities(delta),
        }

    def _end(
        self, transcript: RequestOutputProcessor, output: CompletionOutput, *, index: int, content: str
    ) -> dict[str, object]:
        check_end(output.finish_reason, output.stop_reason)
        word = output.stop_reason if isinstance(output.stop_reason, str) else ""
        stop_type = _STOP_TYPES.get(str(output.finish_reason), "word" if word else "eos")
        return {
            **{"index": index, "content": content, "stop": True, "id_slot": -1, "model": self._model},
            "tokens": output.token_ids if self._with_ids else [],
            "tokens_predicted": len(output.token_ids),
            "tokens_evaluated": len(transcript.prompt.ids),
            "tokens_cached": transcript.num_cached_tokens,
            "generation_settings": _settings(self._params),
            "prompt": transcript.prompt.text or "",
            "truncated": False,
            **{"stop_type": stop_type, "stopping_word": word, "has_new_line": "\n" in output.text},
            "timings": timings(transcript, len(output.token_ids)),
        }

    def _probabilities(self, part: CompletionOutput | Delta) -> dict[str, object]:
        described = None if part.logprobs is None else self._logprobs.chat(list(part.logprobs))
        if described is None:
            return {}
        rows = described["content"]
        assert isinstance(rows, list), "it is that of a list of rows"
        return {"completion_probabilities": [{"id": id, **row} for id, row in zip(part.token_ids, rows, strict=False)]}


def _settings(params: SamplingParams) -> Mapping[str, object]:
    """`generation_settings`, by llama.cpp's names."""
    found = {name: getattr(params, name) for name in _SETTINGS}
    most = found.pop("max_tokens")
    return {**found, "n_predict": -1 if most is None else most, "repeat_penalty": params.repetition_penalty}


def timings(transcript: RequestOutputProcessor, num_output: int) -> dict[str, object]:
    """llama.cpp's `timings`. The prompt's time is that from the arrival to the first token, waiting included."""
    metrics, computed = transcript.metrics, len(transcript.prompt.ids) - transcript.num_cached_tokens
    prompt, output = _milliseconds(metrics)
    return {
        "cache_n": transcript.num_cached_tokens,
        **{"prompt_n": computed, "prompt_ms": prompt, **_rates("prompt", computed, prompt)},
        **{"predicted_n": num_output, "predicted_ms": output, **_rates("predicted", num_output, output)},
    }


def _milliseconds(metrics: RequestMetrics) -> tuple[float, float]:
    first, last = metrics.first_token_time, metrics.last_token_time
    if first is None or last is None:
        return 0.0, 0.0
    return 1e3 * (first - metrics.arrival_time), 1e3 * (last - first)


def _rates(name: str, number: int, milliseconds: float) -> dict[str, float]:
    each = milliseconds / number if number else 0.0
    return {f"{name}_per_token_ms": each, f"{name}_per_second": 1e3 / each if each else 0.0}
