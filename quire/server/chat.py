"""/v1/chat/completions: a conversation in, the next turn out. Knows OpenAI's format; the work is the service's."""

import time
from collections.abc import AsyncIterator, Sequence
from uuid import uuid4

from fastapi import APIRouter, Request, Response

from quire.engine.messages import Message
from quire.engine.outputs import CompletionOutput, Delta
from quire.engine.prompts import TokenizedPrompt
from quire.engine.tokenizer import Tokenizer
from quire.errors import RequestError
from quire.params import SamplingParams
from quire.server.logprobs import chat_logprobs
from quire.server.respond import respond
from quire.server.schema import ChatBody
from quire.server.service import Reply, Service
from quire.server.sse import DONE, event

_OWN_VARIABLES = ("messages", "tools", "add_generation_prompt")


def chat_routes(service: Service) -> APIRouter:
    """The route of chat completions."""
    router = APIRouter(tags=["OpenAI"])

    @router.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answer a conversation."""
        service.check_model(body.model)
        params = sampling_params(body)
        messages = spoken(body)
        service.check_length([messages, body.tools, body.chat_template_kwargs], "messages")
        prompt = await service.aside.run(lambda: tokenize_chat(body, messages, service.tokenizer))
        answer = ChatAnswer(service.model_name, params, service.tokenizer)
        reply = await service.start(answer.id, [prompt], params)
        return await respond(request, body, answer, reply)

    return router


def sampling_params(body: ChatBody) -> SamplingParams:
    """Without a limit an answer may fill the context, other than a completion."""
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return body.sampling_params(max_tokens=limit, logprobs=(body.top_logprobs or 0) if body.logprobs else None)


def spoken(body: ChatBody) -> list[dict[str, object]]:
    """The messages as chat templates know them."""
    messages = [message.model_dump(exclude_none=True) for message in body.messages]
    for message in messages:
        if message["role"] == "developer":  # OpenAI's newer name, which few templates know
            message["role"] = "system"
    return messages


def tokenize_chat(body: ChatBody, messages: Sequence[Message], tokenizer: Tokenizer) -> TokenizedPrompt:
    """The conversation as the model's chat template writes it. Raises RequestError, ModelError."""
    variables = body.chat_template_kwargs or {}
    for name in _OWN_VARIABLES:
        if name in variables:
            raise RequestError(f"{name} has a field of its own; take it out of chat_template_kwargs", name)
    tools = None if body.tool_choice == "none" else body.tools
    text = tokenizer.apply_chat_template(messages, tools, body.add_generation_prompt is not False, **variables)
    return TokenizedPrompt(text, tokenizer.encode(text, add_special_tokens=False))


class ChatAnswer:
    """OpenAI's chat.completion objects for one request."""

    def __init__(self, model_name: str, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self.id = f"chatcmpl-{uuid4().hex}"
        self._head = {"id": self.id, "created": int(time.time()), "model": model_name}
        self._num_logprobs = params.logprobs or 0
        self._tokenizer = tokenizer

    def whole(self, sequences: Sequence[CompletionOutput], usage: dict[str, object]) -> dict[str, object]:
        """Everything at once."""
        choices = [
            {
                "index": sequence.index,
                "message": {"role": "assistant", "content": sequence.text, "refusal": None},
                "logprobs": chat_logprobs(sequence.logprobs, self._num_logprobs, self._tokenizer),
                "finish_reason": sequence.finish_reason,
                "stop_reason": sequence.stop_reason,
            }
            for sequence in sequences
        ]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage}

    async def events(self, reply: Reply, *, with_usage: bool) -> AsyncIterator[bytes]:
        """Server-sent events while the sequences grow; the first of each choice names the role."""
        head = {**self._head, "object": "chat.completion.chunk"}
        usage = {"usage": None} if with_usage else {}
        for index in range(reply.num_choices):
            opening = {"role": "assistant", "content": ""}
            yield event({**head, "choices": [_choice(index, opening, None, None, None)], **usage})
        async for deltas in reply.deltas():
            chunks = [
                {**head, "choices": [self._chunk(delta)], **usage}
                for delta in deltas
                if delta.text or delta.logprobs or delta.finish_reason
            ]
            yield b"".join(event(chunk) for chunk in chunks)
        if with_usage:
            yield event({**head, "choices": [], "usage": reply.usage()})
        yield DONE

    def _chunk(self, delta: Delta) -> dict[str, object]:
        logprobs = chat_logprobs(delta.logprobs, self._num_logprobs, self._tokenizer)
        added = {"content": delta.text} if delta.text or delta.logprobs else {}
        return _choice(delta.index, added, logprobs, delta.finish_reason, delta.stop_reason)


def _choice(
    index: int,
    delta: dict[str, str],
    logprobs: dict[str, object] | None,
    finish_reason: str | None,
    stop_reason: str | int | None,
) -> dict[str, object]:
    return {
        "index": index,
        "delta": delta,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
    }
