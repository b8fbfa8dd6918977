"""/v1/chat/completions, with OpenAI's format."""

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from msgspec import Raw

from quire.chat.parts import CallArguments, CallBegin, Content, Message, Part, Reasoning
from quire.chat.tools import toolbox
from quire.engine.inputs import template_variables
from quire.engine.output_text import RequestOutputProcessor
from quire.engine.outputs import CompletionOutput, Delta
from quire.server.adapters import ServedModel
from quire.server.api.conversation import (
    RENDERING_FIELDS,
    ChatRequest,
    MessageReader,
    Rendering,
    reasoning_variables,
    start_conversations,
)
from quire.server.api.openai.logprobs import LogprobFormat, UsageFormat, prompt_logprobs_json
from quire.server.api.openai.schema import ChatBatchBody, ChatBody, ChatMessage, TemplateBody
from quire.server.errors import renamed_fields
from quire.server.middleware.auth import caller_of
from quire.server.reply import Reply, respond, respond_whole
from quire.server.service import Service
from quire.server.sse import DONE, TimeLimit, event
from quire.tokenizer.messages import plain_messages

_PROMPT_FIELDS = ("prompt_token_ids", "prompt_logprobs")


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, object]]:
    """The messages as dicts for chat templates. The role developer becomes system."""
    plain = [message.model_dump(exclude_unset=True) for message in messages]
    for message in plain:
        if message["role"] == "developer":  # OpenAI's newer name, which few templates accept
            message["role"] = "system"
    return plain


def num_unknown_fields(messages: Sequence[ChatMessage]) -> int:
    """Number of fields that ChatMessage and ContentPart do not name, in messages and their parts."""
    parts = [part for message in messages if isinstance(message.content, list) for part in message.content]
    return sum(len(one.model_extra or ()) for one in (*messages, *parts))


def last_message_content(messages: Sequence[Mapping[str, object]]) -> str:
    """The content of the last message if it is the assistant's; else an empty string."""
    if not messages or messages[-1]["role"] != "assistant":
        return ""
    return str(plain_messages(messages[-1:])[0]["content"] or "")


def rendering_of(body: TemplateBody) -> Rendering:
    """The rendering that a body requests. Raises RequestError."""
    named = [name for name in ("reasoning_effort", "enable_thinking") if getattr(body, name) is not None]
    reasoning = reasoning_variables(body.reasoning_effort, enabled=body.enable_thinking)
    return Rendering(
        tools=None if body.tool_choice == "none" else body.tools,
        documents=body.documents,
        chat_template=body.chat_template,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        add_special_tokens=bool(body.add_special_tokens),
        variables=reasoning | template_variables(body.chat_template_kwargs, (*RENDERING_FIELDS, *named)),
    )


def chat_routes(service: Service) -> APIRouter:
    """The route /v1/chat/completions."""
    router = APIRouter(tags=["OpenAI"], route_class=service.request_bodies.route_class())

    @router.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Generate the next message of a conversation."""
        limit, id = TimeLimit(body.timeout), service.request_ids.make("chatcmpl", request)
        (answer,), reply = await limit.run(_start(service, body, [body.messages], request, id))
        return await respond(request, answer, reply, limit, stream=bool(body.stream))

    @router.post("/v1/chat/completions/batch", tags=["vLLM"], response_model=None)
    async def chat_completions_batch(body: ChatBatchBody, request: Request) -> Response:
        """Generate the next message of several conversations, each as a choice."""
        limit, id = TimeLimit(body.timeout), service.request_ids.make("chatcmpl", request)
        answers, reply = await limit.run(_start(service, body, body.messages, request, id))
        return await respond_whole(request, partial(_batch_response, answers), reply, limit)

    return router


async def _start(
    service: Service, body: ChatBody, conversations: Sequence[Sequence[ChatMessage]], request: Request, id: str
) -> tuple[list["ChatAnswer"], Reply]:
    """Queue the conversations of a body. Returns the answer to each."""
    model = await service.served_model(request, body.model)
    with renamed_fields(body.engine_names()):
        chats = await service.prepare(request, lambda: _chat_requests(service, body, model, conversations, request))
        service.metrics.count_unknown_fields("messages", sum(map(num_unknown_fields, conversations)))
        readers, reply = await start_conversations(service, request, id, chats)
        return [ChatAnswer(id, service, body, chat, reader) for chat, reader in zip(chats, readers, strict=True)], reply


def _chat_requests(
    service: Service,
    body: ChatBody,
    model: ServedModel,
    conversations: Sequence[Sequence[ChatMessage]],
    request: Request,
) -> list[ChatRequest]:
    """The conversations of a body. Raises RequestError."""
    params = body.sampling_params(service.sampling_defaults)
    chat = ChatRequest(
        model=model,
        messages=(),
        params=params,
        rendering=rendering_of(body),
        toolbox=toolbox(body.tools, body.tool_choice, body.parallel_tool_calls),
        separate_reasoning=body.separate_reasoning is not False,
        thinking_budget=body.thinking_token_budget,
        namespace=caller_of(request).namespace(body.cache_salt),
        beams=body.beams(params, vocab_size=service.vocab_size, num_end_tokens=service.num_end_tokens),
        scheduling_params=body.scheduling_params(service.options),
        with_prompt_ids=bool(body.return_token_ids),
        whole=not body.stream,
    )
    return [replace(chat, messages=template_messages(messages)) for messages in conversations]


def _batch_response(answers: Sequence["ChatAnswer"], reply: Reply) -> dict[str, object]:
    """The body of a response with one choice for each conversation. Data of its prompt are in the choice."""
    whole = [answer.full_response(reply) for answer in answers]
    choices = []
    for index, one in enumerate(whole):
        (choice,) = one["choices"]
        choices.append({**choice, "index": index, **{name: one.pop(name) for name in _PROMPT_FIELDS}})
    return {**whole[0], "choices": choices, "usage": reply.usage()}


class ChatAnswer:
    """OpenAI's chat.completion objects for one request."""

    def __init__(
        self,
        id: str,
        service: Service,
        body: ChatBody,
        chat: ChatRequest,
        reader: MessageReader,
    ) -> None:
        self.id = id
        self._head = {
            "id": self.id,
            "created": int(time.time()),
            "model": chat.model.name,
            "system_fingerprint": None,
        }
        self._reader = reader
        self._with_ids = bool(body.return_token_ids)
        self._with_drafted = bool(body.return_drafted)
        self._with_tokens = self._with_ids or self._with_drafted
        self._with_reasoning = body.include_reasoning is not False
        self._logprobs = LogprobFormat(
            chat.params, service.tokenizer, as_token_ids=bool(body.return_tokens_as_token_ids)
        )
        self._usage = UsageFormat(body.stream_options, forced=service.always_reports_usage)
        self._chunk_event = body.chunk_event
        self._echo_text = last_message_content(chat.messages) if body.echo else ""

    def full_response(self, reply: Reply) -> dict[str, Any]:
        """The body of the response."""
        transcript = self._reader.transcript(reply)
        choices = [
            self._choice(output.index, {"message": self._message(message)}, output, finish_reason)
            for message, _, output, finish_reason in self._reader.choices(reply)
        ]
        head = {**self._head, "object": "chat.completion"}
        about_prompt = {**self._prompt_ids(transcript), "prompt_logprobs": _prompt_logprobs(transcript)}
        return {**head, **about_prompt, "choices": choices, "usage": reply.usage()}

    async def events(self, reply: Reply) -> AsyncIterator[bytes]:
        """The events of a stream. The first chunk of each choice has the role."""
        transcript = self._reader.transcript(reply)
        transcript.drop_logprobs()
        head = {**self._head, "object": "chat.completion.chunk"}
        first = self._prompt_ids(transcript)  # chat has one prompt, so its fields are sent once
        for index in range(reply.num_choices):
            choice = self._choice(index, {"delta": {"role": "assistant", "content": self._echo_text}}, None, None)
            yield self._chunk_event({**head, **first, "choices": [choice], **self._usage.of_chunk(reply)})
            first = {}
        about_prompt = transcript.prompt_logprobs is not None  # whether they are still to be sent
        async for deltas in self._reader.deltas(reply):
            chunks = []
            for index, parts, delta, finish_reason in deltas:
                self._usage.count(delta)
                objects = self._delta_objects(parts, with_logprobs=bool(delta.logprobs))
                if not objects and (finish_reason or (self._with_tokens and delta.token_ids)):
                    objects = [{}]
                for place, content in enumerate(objects, 1):
                    first = {}
                    if about_prompt:
                        rows = await reply.about_prompt(transcript, partial(_prompt_logprobs, transcript))
                        about_prompt, first = False, {"prompt_logprobs": rows}
                    whole = (delta, finish_reason) if place == len(objects) else (None, None)
                    choice = self._choice(index, {"delta": content}, *whole)
                    chunks.append(
                        self._chunk_event({**head, **first, "choices": [choice], **self._usage.of_chunk(reply)})
                    )
            yield b"".join(chunks)
        for usage in self._usage.at_end(reply):
            yield event({**head, "choices": [], "usage": usage})
        yield DONE

    def _prompt_ids(self, transcript: RequestOutputProcessor) -> dict[str, object]:
        return {"prompt_token_ids": transcript.prompt.ids if self._with_ids else None}

    def _choice(
        self,
        index: int,
        content: dict[str, object],
        part: CompletionOutput | Delta | None,
        finish_reason: str | None,
    ) -> dict[str, object]:
        """The object of a choice. part: a whole sequence, a delta, or None for a chunk without tokens."""
        ids = part.token_ids if part else []  # a list, to which clients add the next one
        return {
            "index": index,
            **content,
            "logprobs": self._logprobs.chat(part.logprobs) if part else None,
            "finish_reason": finish_reason,
            "stop_reason": part.stop_reason if part else None,
            "matched_stop": part.matched_stop if part else None,
            "token_ids": ids if self._with_ids else None,
            **({"drafted": part.drafted if part else []} if self._with_drafted else {}),
        }

    def _message(self, message: Message) -> dict[str, object]:
        reasoning = message.reasoning if self._with_reasoning else None
        content = self._echo_text + message.content
        calls = [
            _call(self._reader.new_call_id(index, call.name), call.name, call.arguments)
            for index, call in enumerate(message.calls)
        ]
        return {
            "role": "assistant",
            "content": None if calls and not content else content,
            "refusal": None,
            "reasoning": reasoning,
            **({} if reasoning is None else {"reasoning_content": reasoning}),
            **({"tool_calls": calls} if calls else {}),
        }

    def _delta_objects(self, parts: Sequence[Part], *, with_logprobs: bool) -> list[dict[str, object]]:
        """The `delta` objects of a step's parts, in their order: each has content, reasoning or tool calls.

        with_logprobs: there is one object at least, to carry the logprobs.
        """
        objects: list[dict[str, object]] = []
        for part in parts:
            match part:
                case Content(text):
                    objects.append({"content": text})
                case Reasoning(text):
                    if self._with_reasoning:
                        objects.append({"reasoning": text, "reasoning_content": text})
                case CallBegin(index, name):
                    objects.append(
                        {"tool_calls": [{"index": index, **_call(self._reader.new_call_id(index, name), name, "")}]}
                    )
                case CallArguments(index, text):
                    objects.append({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
        return objects or ([{"content": ""}] if with_logprobs else [])


def _call(id: str, name: str, arguments: str) -> dict[str, object]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _prompt_logprobs(transcript: RequestOutputProcessor) -> Raw | None:
    rows = transcript.prompt_logprobs
    return None if rows is None else prompt_logprobs_json(rows)
