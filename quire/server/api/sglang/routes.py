"""/generate, SGLang's native route."""

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import TypeVar
from uuid import uuid4

from fastapi import APIRouter, Request, Response
from msgspec import Raw

from quire.chat.output import OutputFormat, constrained_params, grammar_field, output_format
from quire.chat.tools import toolbox
from quire.core.adapter import Adapter
from quire.engine.inputs import Generation, as_prompt_list
from quire.engine.output_text import RequestOutputProcessor
from quire.engine.outputs import CompletionOutput
from quire.errors import RequestError
from quire.params import SamplingParams, is_unicode
from quire.server.api.limits import (
    MAX_EVENT_VALUES,
    bounded_answer,
    check_choices,
    check_prompt_values,
    check_values,
    num_prompt_tokens,
)
from quire.server.api.sglang.logprobs import EntryFormat, OutputEntries, Report
from quire.server.api.sglang.schema import ROUTE_NAMES, GenerateBody, GenerateParams
from quire.server.api.tgi.routes import generate as generate_as_tgi
from quire.server.errors import renamed_fields
from quire.server.json_pieces import JsonList
from quire.server.middleware.auth import caller_of
from quire.server.reply import Reply, is_visible, respond
from quire.server.service import Service
from quire.server.sse import DONE, TimeLimit, event

T = TypeVar("T")

MAX_RID = 256  # characters; each event repeats the id


def generate_routes(service: Service) -> APIRouter:
    """The route /generate."""
    router = APIRouter(tags=["SGLang"], route_class=service.request_bodies.route_class())

    @router.post("/generate", response_model=None)
    async def generate(body: GenerateBody, request: Request) -> Response:
        """Continue one or several prompts."""
        if body.inputs is not None or body.parameters is not None:
            return await generate_as_tgi(service, body.as_tgi(), request, stream=bool(body.stream))
        limit, id = TimeLimit(body.timeout), service.request_ids.make("generate", request)
        answer, reply = await limit.run(_start(service, body, request, id))
        return await respond(request, answer, reply, limit, stream=bool(body.stream))

    return router


async def _start(service: Service, body: GenerateBody, request: Request, id: str) -> tuple["GenerateAnswer", Reply]:
    caller = caller_of(request)
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("give either text or input_ids", "text")
    given = body.text if body.input_ids is None else body.input_ids
    with renamed_fields({**ROUTE_NAMES, "prompt": "input_ids" if body.text is None else "text"}):
        prompts = as_prompt_list([] if given is None else given)
        adapters = await _adapters(service, request, body, len(prompts))
        reports = _reports(body, len(prompts))
        params, formats, constraint = await service.prepare(
            request, lambda: _with_tools(service, body, _params(body, reports, service))
        )
        check_choices(params)
        alone = prompts != given and params[0].n == 1 and not isinstance(body.sampling_params, list)
        entries = EntryFormat(service.tokenizer, with_text=bool(body.return_text_in_logprobs))
        answer = GenerateAnswer(id, reports, entries, formats, alone=alone)
        asked: Sequence[Generation] = await service.tokenize(caller.tenant, prompts, params)
        check_prompt_values(asked, ids=False)
        asked = bounded_answer(asked, service.max_model_len)
        if body.stream:
            asked = [same for one in asked for same in bounded_answer([one], service.max_model_len, MAX_EVENT_VALUES)]
        namespace, scheduling_params = caller.namespace(body.salt()), body.scheduling_params(service.options)
        with renamed_fields({"grammar": constraint}), caller.quota.spending(num_prompt_tokens(asked)):
            about = (answer.id, asked, namespace)
            reply = await service.start(
                *about, scheduling_params=scheduling_params, adapters=adapters, whole=not body.stream
            )
            return answer, reply


async def _adapters(service: Service, request: Request, body: GenerateBody, count: int) -> list[Adapter | None]:
    """The adapter of each prompt. Raises RequestError, UnknownModel."""
    if body.lora_path is None:
        return [None] * count
    names: list[str | None] = _each("lora_path", body.lora_path, count)
    models = {name: await service.served_model(request, name, "lora_path") for name in dict.fromkeys(names)}
    return [models[name].adapter for name in names]


def _with_tools(
    service: Service, body: GenerateBody, params: Sequence[SamplingParams]
) -> tuple[Sequence[SamplingParams], Sequence[OutputFormat] | None, str]:
    """`params` with the constraint of the tools, how calls are read from each text, and the field of a grammar.

    Without tools no calls are read. The prompts are not looked at. Raises RequestError.
    """
    tools = toolbox(body.tools, body.tool_choice)
    if tools is None:
        return params, None, "grammar"
    special_texts = service.tokenizer.special_texts
    by_skipping = {
        skips: output_format(
            service.chat_format, tools, "", reasons=False, special_texts=special_texts, skip_special_tokens=skips
        )
        for skips in (False, True)
    }
    formats = [by_skipping[one.skip_special_tokens] for one in params]
    check_values([constrained_params(formats[0], params[0])] * len(params))  # before all are written
    field = grammar_field(tools, params[0].structured_outputs)
    return [constrained_params(*pair) for pair in zip(formats, params, strict=True)], formats, field


def _reports(body: GenerateBody, count: int) -> list[Report]:
    """One Report per prompt. Raises RequestError."""
    if isinstance(body.rid, str) and count != 1:
        raise RequestError(f"rid must be a list of {count} ids", "rid")
    asked = body.token_ids_logprob or []
    ids = [one for one in asked if isinstance(one, int)]
    lists = [one for one in asked if isinstance(one, list)]
    reports = [
        Report(*values)
        for values in zip(
            [uuid4().hex for _ in range(count)] if body.rid is None else _each("rid", body.rid, count),
            _each("return_logprob", body.return_logprob or False, count),
            _each("logprob_start_len", -1 if body.logprob_start_len is None else body.logprob_start_len, count),
            _each("top_logprobs_num", body.top_logprobs_num or 0, count),
            _one_each("token_ids_logprob", lists or [ids] * count, count),
            strict=True,
        )
    ]
    if body.return_text_in_logprobs and not any(report.logprobs for report in reports):
        raise RequestError("return_text_in_logprobs needs return_logprob to be true", "return_text_in_logprobs")
    for report in reports:
        if not 0 < len(report.rid) <= MAX_RID or not is_unicode(report.rid):
            raise RequestError(f"rid must have 1 to {MAX_RID} valid Unicode characters", "rid")
        if report.start < -1:
            raise RequestError("logprob_start_len must be at least -1", "logprob_start_len")
        if not report.logprobs and (report.start > 0 or report.num_top or report.token_ids):
            raise RequestError("options of logprobs need return_logprob to be true", "return_logprob")
        if report.start >= 0 and report.token_ids:
            raise RequestError(
                "token_ids_logprob is not supported for the prompt yet; leave out logprob_start_len",
                "token_ids_logprob",
            )
    return reports


def _params(body: GenerateBody, reports: Sequence[Report], service: Service) -> list[SamplingParams]:
    given = _each("sampling_params", body.sampling_params or GenerateParams(), len(reports))
    return [
        one.make_params(
            service.sampling_defaults,
            logprobs=report.num_top if report.logprobs else None,
            prompt_logprobs=report.num_top if report.logprobs and report.start >= 0 else None,
            prompt_logprobs_start=max(report.start, 0),
            logprob_token_ids=tuple(report.token_ids),
        )
        for one, report in zip(given, reports, strict=True)
    ]


def _each(name: str, value: T | list[T], count: int) -> list[T]:
    """One value per prompt: a list unchanged, another value repeated. Raises RequestError for a wrong length."""
    return _one_each(name, value, count) if isinstance(value, list) else [value] * count


def _one_each(name: str, values: list[T], count: int) -> list[T]:
    if len(values) != count:
        raise RequestError(f"{name} must have one entry for each of the {count} prompts, not {len(values)}", name)
    return values


class GenerateAnswer:
    """SGLang's objects for one request.

    alone: one object instead of a list, for one prompt with n = 1. formats: how the tool calls of each prompt's outputs
    are read; None without tools. The objects have the ids of their reports; request_id is the server's.
    """

    def __init__(
        self,
        request_id: str,
        reports: Sequence[Report],
        entries: EntryFormat,
        formats: Sequence[OutputFormat] | None,
        *,
        alone: bool,
    ) -> None:
        self.id = request_id
        self._reports = reports
        self._entries = entries
        self._formats = formats
        self._alone = alone
        self._prompt_fields: dict[int, dict[str, Raw]] = {}  # by prompt index
        self._output_entries: dict[tuple[int, int], OutputEntries] = {}  # by prompt and sequence index

    def full_response(self, reply: Reply) -> object:
        """The body of the response."""
        objects = [
            self._object(place, transcript, index, whole=True)
            for place, transcript in enumerate(reply.transcripts)
            for index in range(transcript.params.n)
        ]
        return objects[0] if self._alone else objects

    async def events(self, reply: Reply) -> AsyncIterator[bytes]:
        """The events of a stream, each with the whole output of a sequence so far."""
        async for deltas in reply.deltas():
            newest = {reply.choice_index(delta): delta for delta in deltas if is_visible(delta, ids=True)}
            events = []
            for choice, delta in newest.items():
                place = reply.transcript_index(delta)
                transcript = reply.transcripts[place]
                if self._reports[place].logprobs and place not in self._prompt_fields:
                    await reply.about_prompt(transcript, partial(self._fields_of_prompt, place, transcript))
                value = self._object(place, transcript, delta.index)
                events.append(event(value if self._alone else {**value, "index": choice}))
            yield b"".join(events)
        yield DONE

    def _object(
        self, place: int, transcript: RequestOutputProcessor, index: int, *, whole: bool = False
    ) -> dict[str, object]:
        """The object of a sequence so far. whole: it is written once, and its entries are made then."""
        report = self._reports[place]
        output = transcript.sequence(index)
        format = None if self._formats is None else self._formats[place]
        metrics = transcript.metrics
        about: dict[str, object] = {
            "id": report.rid,
            "finish_reason": output.finish_info,
            "prompt_tokens": len(transcript.prompt.ids),
            "completion_tokens": len(output.token_ids),
            "cached_tokens": transcript.num_cached_tokens,
            "e2e_latency": (metrics.finished_time or time.monotonic()) - metrics.arrival_time,
        }
        if transcript.params.has_constraint:
            about["forced_tokens"] = output.num_forced_tokens
        if format is not None and output.finish_reason is not None:
            about["tool_calls"] = format.read(output.text).calls
        if report.logprobs:
            about |= self._logprobs(place, transcript, output, whole=whole)
        text = output.text if format is None else format.plain_text(output.text)
        return {"text": text, "output_ids": output.token_ids, "meta_info": about}

    def _logprobs(
        self, place: int, transcript: RequestOutputProcessor, output: CompletionOutput, *, whole: bool
    ) -> Mapping[str, object]:
        report, of_prompt = self._reports[place], self._fields_of_prompt(place, transcript)
        if whole:
            made = self._entries.of_output(report, output.token_ids, output.logprobs or [])
            return {**of_prompt, **{name: JsonList(entries) for name, entries in made.items()}}
        key = (place, output.index)
        if key not in self._output_entries:
            self._output_entries[key] = OutputEntries(self._entries, report)
        return {**of_prompt, **self._output_entries[key].upto(output)}

    def _fields_of_prompt(self, place: int, transcript: RequestOutputProcessor) -> dict[str, Raw]:
        """The fields of a computed prompt, which are written once."""
        if place not in self._prompt_fields:
            self._prompt_fields[place] = self._entries.of_prompt(self._reports[place], transcript)
        return self._prompt_fields[place]
