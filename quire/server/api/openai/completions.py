"""/v1/completions, with OpenAI's format."""

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

from fastapi import APIRouter, Request, Response
from msgspec import Raw
from msgspec.json import encode

from quire.engine.inputs import Generation, TokenizedPrompt, as_prompt_list
from quire.engine.output_text import RequestOutputProcessor
from quire.engine.outputs import CompletionOutput, Delta
from quire.params import SamplingParams
from quire.server.adapters import ServedModel
from quire.server.api.limits import bounded_answer, check_choices, check_prompt_values, num_prompt_tokens
from quire.server.api.openai.logprobs import LogprobFormat, UsageFormat, prompt_logprobs_json
from quire.server.api.openai.schema import CompletionBody
from quire.server.api_keys import Caller
from quire.server.errors import renamed_fields
from quire.server.json_pieces import JsonList
from quire.server.middleware.auth import caller_of
from quire.server.reply import Reply, is_visible, respond
from quire.server.service import Service
from quire.server.sse import DONE, TimeLimit, event
from quire.tokenizer.detokenizer import Detokenizer
from quire.tokenizer.tokenizer import Tokenizer


class Echo(NamedTuple):
    """A prompt's text. offsets: per token, the number of characters that the tokens before it completed."""

    text: str
    offsets: list[int]


def echo_of(prompt: TokenizedPrompt, tokenizer: Tokenizer) -> Echo:
    """The echo of a prompt: the caller's text, or the decoded text of token ids, special tokens included.

    Offsets refer to the decoded text. If that differs from the caller's text, they are limited to its length.
    """
    if prompt.text is None:
        return _decoded(prompt.ids, tokenizer, skip_special_tokens=False)
    decodings = [_decoded(prompt.ids, tokenizer, skip_special_tokens=skip) for skip in (False, True)]
    fitting = next((echo for echo in decodings if echo.text == prompt.text), decodings[-1])
    return Echo(prompt.text, [min(offset, len(prompt.text)) for offset in fitting.offsets])


def _decoded(ids: list[int], tokenizer: Tokenizer, *, skip_special_tokens: bool) -> Echo:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    text, offsets = "", []
    for token in ids:
        offsets.append(len(text))
        text += detokenizer.append_token(token)
    return Echo(text + detokenizer.flush(), offsets)


class PromptEcho(NamedTuple):
    """The part of a choice that describes the prompt.

    text: the echo. lists: the first entries of the choice's `logprobs`; None for none. fields: further fields.
    """

    text: str
    lists: Mapping[str, Sequence[object]] | None
    fields: Mapping[str, object]


class PromptEchoes:
    """The PromptEchoes of one request, each written once. echoes: one per prompt; None without echo."""

    def __init__(self, body: CompletionBody, logprobs: LogprobFormat, echoes: Sequence[Echo] | None) -> None:
        self._with_ids = bool(body.return_token_ids)
        self._with_rows = body.prompt_logprobs is not None
        self._with_lists = body.logprobs is not None
        self._logprobs = logprobs
        self._echoes = echoes
        self._written: dict[int, PromptEcho] = {}
        self.is_requested = bool(echoes) or self._with_ids or self._with_rows

    def num_characters(self, place: int) -> int:
        """Length of the echo of the prompt at index `place`."""
        return len(self._echoes[place].text) if self._echoes else 0

    def get(self, place: int, transcript: RequestOutputProcessor) -> PromptEcho:
        """The PromptEcho of the prompt at index `place`, which must be computed."""
        if place not in self._written:
            self._written[place] = self._write(place, transcript)
        return self._written[place]

    def _write(self, place: int, transcript: RequestOutputProcessor) -> PromptEcho:
        rows, ids = transcript.prompt_logprobs, transcript.prompt.ids
        lists = None
        if self._echoes and self._with_lists and rows is not None:
            made = self._logprobs.completion(ids, rows, self._echoes[place].offsets)
            made["top_logprobs"] = (Raw(encode(row)) for row in made["top_logprobs"])
            lists = {name: list(values) for name, values in made.items()}
        fields = {
            "prompt_logprobs": prompt_logprobs_json(rows) if self._with_rows and rows is not None else None,
            "prompt_token_ids": Raw(encode(ids)) if self._with_ids else None,
        }
        return PromptEcho(self._echoes[place].text if self._echoes else "", lists, fields)


def completion_routes(service: Service) -> APIRouter:
    """The route /v1/completions."""
    router = APIRouter(tags=["OpenAI"], route_class=service.request_bodies.route_class())

    @router.post("/v1/completions", response_model=None)
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continue one or several prompts."""
        limit, id = TimeLimit(body.timeout), service.request_ids.make("cmpl", request)
        answer, reply = await limit.run(_start(service, body, request, id))
        return await respond(request, answer, reply, limit, stream=bool(body.stream))

    return router


async def _start(service: Service, body: CompletionBody, request: Request, id: str) -> tuple["CompletionAnswer", Reply]:
    caller = caller_of(request)
    model = await service.served_model(request, body.model)
    with renamed_fields({**body.other_names(), **body.beam_names(), **body.constraint_names()}):
        params = await service.prepare(request, lambda: body.sampling_params(service.sampling_defaults))
        beams = body.beams(params, vocab_size=service.vocab_size, num_end_tokens=service.num_end_tokens)
        prompts = as_prompt_list(body.prompt)
        each = [params] * len(prompts)
        check_choices(each, width=beams.width if beams else 1)
        asked: Sequence[Generation] = await service.tokenize(
            caller.tenant, prompts, each, add_special_tokens=body.add_special_tokens
        )
        check_prompt_values(asked, ids=bool(body.return_token_ids or body.echo))
        if not body.stream:
            asked = bounded_answer(asked, service.max_model_len)
        answer = CompletionAnswer(id, service, model, body, params, await _echoes(service, caller, body, asked))
        namespace, scheduling_params = caller.namespace(body.cache_salt), body.scheduling_params(service.options)
        with caller.quota.spending(num_prompt_tokens(asked)):
            about = (answer.id, asked, namespace, beams, scheduling_params)
            reply = await service.start(*about, adapters=model.adapter, whole=not body.stream)
            return answer, reply


async def _echoes(
    service: Service, caller: Caller, body: CompletionBody, asked: Sequence[Generation]
) -> list[Echo] | None:
    if not body.echo:
        return None

    def work() -> list[Echo]:
        return [echo_of(each.prompt, service.tokenizer) for each in asked]

    return await service.thread_pool.run(caller.tenant, work)


class CompletionAnswer:
    """OpenAI's text_completion objects for one request."""

    def __init__(
        self,
        id: str,
        service: Service,
        model: ServedModel,
        body: CompletionBody,
        params: SamplingParams,
        echoes: Sequence[Echo] | None,
    ) -> None:
        self.id = id
        self._head = {
            "id": self.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": None,
        }
        self._with_ids = bool(body.return_token_ids)
        self._with_drafted = bool(body.return_drafted)
        self._with_tokens = self._with_ids or self._with_drafted
        self._logprobs = LogprobFormat(params, service.tokenizer, as_token_ids=bool(body.return_tokens_as_token_ids))
        self._usage = UsageFormat(body.stream_options, forced=service.always_reports_usage)
        self._chunk_event = body.chunk_event
        self._prompt_echoes = PromptEchoes(body, self._logprobs, echoes)

    def full_response(self, reply: Reply) -> dict[str, object]:
        """The body of the response."""
        choices: list[dict[str, object]] = []
        for place, transcript in enumerate(reply.transcripts):
            for output in transcript.result().outputs:
                choices.append(self._choice(len(choices), output, place, self._prompt_echoes.get(place, transcript)))
        return {**self._head, "choices": choices, "usage": reply.usage()}

    async def events(self, reply: Reply) -> AsyncIterator[bytes]:
        """The events of a stream. The first chunk of a choice has its PromptEcho."""
        begun: set[int] = set()
        for transcript in reply.transcripts:
            transcript.drop_logprobs()
        async for deltas in reply.deltas():
            chunks = []
            for delta in deltas:
                self._usage.count(delta)
                index, place = reply.choice_index(delta), reply.transcript_index(delta)
                begins = index not in begun
                if is_visible(delta, ids=self._with_tokens) or (begins and self._prompt_echoes.is_requested):
                    begun.add(index)
                    opening = None
                    if begins:
                        transcript = reply.transcripts[place]
                        write = partial(self._prompt_echoes.get, place, transcript)
                        opening = await reply.about_prompt(transcript, write)
                    choice = self._choice(index, delta, place, opening)
                    chunk = {**self._head, "choices": [choice], **self._usage.of_chunk(reply)}
                    chunks.append(self._chunk_event(chunk))
            yield b"".join(chunks)
        for usage in self._usage.at_end(reply):
            yield event({**self._head, "choices": [], "usage": usage})
        yield DONE

    def _choice(
        self, index: int, part: CompletionOutput | Delta, place: int, prompt_echo: PromptEcho | None
    ) -> dict[str, object]:
        """The object of a choice. part: a whole sequence or a delta. prompt_echo: for the first part of a choice."""
        return {
            "index": index,
            "text": prompt_echo.text + part.text if prompt_echo else part.text,
            "logprobs": self._lists(part, place, prompt_echo),
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
            "matched_stop": part.matched_stop,
            "token_ids": part.token_ids if self._with_ids else None,
            **({"drafted": part.drafted} if self._with_drafted else {}),
            **(prompt_echo.fields if prompt_echo else {}),
        }

    def _lists(
        self, part: CompletionOutput | Delta, place: int, prompt_echo: PromptEcho | None
    ) -> Mapping[str, object] | None:
        """The `logprobs` of the prompt, if reported, then those of the part; None if neither has a token."""
        begun = prompt_echo.lists if prompt_echo else None
        if not part.logprobs:
            return begun
        before = self._prompt_echoes.num_characters(place)
        offsets = (before + offset for offset in part.token_offsets)
        lists = self._logprobs.completion(part.token_ids, part.logprobs, offsets)
        kind = JsonList if isinstance(part, CompletionOutput) else list
        return {name: kind(chain(begun[name], values) if begun else values) for name, values in lists.items()}
