"""/v1/chat/completions, with OpenAI's format."""

import time
from collections.abc import AsyncIterator, Mapping, Sequence

from fastapi import APIRouter, Request, Response
from msgspec import Raw

from quire.engine.inputs import Generation, TokenizedPrompt, prepare_generations, template_variables, tokenize
from quire.engine.output_text import RequestOutputProcessor
from quire.engine.outputs import CompletionOutput, Delta
from quire.params import SamplingParams
from quire.server.api.limits import check_prompt_values, num_prompt_tokens
from quire.server.api.openai.logprobs import LogprobFormat, UsageFormat, prompt_logprobs_json
from quire.server.api.openai.schema import ChatBody, ChatMessage, TemplateBody
from quire.server.errors import renamed_fields
from quire.server.middleware.auth import caller_of
from quire.server.reply import Reply, is_visible, respond
from quire.server.service import Service
from quire.server.sse import DONE, TimeLimit, event
from quire.tokenizer.messages import plain_messages
from quire.tokenizer.tokenizer import Tokenizer

_OWN_FIELDS = (
    *("messages", "tools", "documents", "chat_template"),
    *("add_generation_prompt", "continue_final_message"),
)


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


def tokenize_conversation(
    messages: Sequence[Mapping[str, object]], body: TemplateBody, tokenizer: Tokenizer
) -> TokenizedPrompt:
    """The conversation as rendered by the chat template, with token ids. Raises RequestError, ModelError."""
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    variables = template_variables(body.chat_template_kwargs, (*_OWN_FIELDS, *effort))
    text = tokenizer.apply_chat_template(
        messages,
        None if body.tool_choice == "none" else body.tools,
        body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        documents=body.documents,
        chat_template=body.chat_template,
        **(variables | effort),
    )
    return tokenize(text, tokenizer, add_special_tokens=bool(body.add_special_tokens))


def chat_routes(service: Service) -> APIRouter:
    """The route /v1/chat/completions."""
    router = APIRouter(tags=["OpenAI"], route_class=service.request_bodies.route_class())

    @router.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Generate the next message of a conversation."""
        limit, id = TimeLimit(body.timeout), service.request_ids.make("chatcmpl", request)
        answer, reply = await limit.run(_start(service, body, request, id))
        return await respond(request, answer, reply, limit, stream=bool(body.stream))

    return router


async def _start(service: Service, body: ChatBody, request: Request, id: str) -> tuple["ChatAnswer", Reply]:
    caller = caller_of(request)
    service.check_model(body.model)
    with renamed_fields(body.engine_names()):
        params = await service.prepare(request, lambda: body.sampling_params(service.sampling_defaults))
        beams = body.beams(params, vocab_size=service.vocab_size, num_end_tokens=service.num_end_tokens)
        asked, beginning = await service.thread_pool.run(caller.tenant, lambda: _read(service, body, params))
        check_prompt_values(asked, ids=bool(body.return_token_ids), choices=False)
        answer = ChatAnswer(id, service, body, params, beginning)
        namespace, scheduling_params = caller.namespace(body.cache_salt), body.scheduling_params(service.options)
        with caller.quota.spending(num_prompt_tokens(asked)):
            return answer, await service.start(answer.id, asked, namespace, beams, scheduling_params)


def _read(service: Service, body: ChatBody, params: SamplingParams) -> tuple[list[Generation], str]:
    """The conversation as a Generation, and the text that the answer begins with if `echo` is set."""
    messages = template_messages(body.messages)
    service.metrics.count_unknown_fields("messages", num_unknown_fields(body.messages))
    service.check_size([messages, body.tools, body.documents, body.chat_template_kwargs], "messages")
    prompt = tokenize_conversation(messages, body, service.tokenizer)
    asked = prepare_generations([prompt], [params], service.tokenizer, service.max_model_len)
    return asked, last_message_content(messages) if body.echo else ""


class ChatAnswer:
    """OpenAI's chat.completion objects for one request."""

    def __init__(self, id: str, service: Service, body: ChatBody, params: SamplingParams, echo_text: str) -> None:
        self.id = id
        self._head = {
            "id": self.id,
            "created": int(time.time()),
            "model": service.model_name,
            "system_fingerprint": None,
        }
        self._with_ids = bool(body.return_token_ids)
        self._logprobs = LogprobFormat(params, service.tokenizer, as_token_ids=bool(body.return_tokens_as_token_ids))
        self._usage = UsageFormat(body.stream_options)
        self._chunk_event = body.chunk_event
        self._echo_text = echo_text

    def full_response(self, reply: Reply) -> dict[str, object]:
        """The body of the response."""
        (transcript,) = reply.transcripts
        choices = [
            self._choice(
                sequence.index,
                {"message": _message(self._echo_text + sequence.text)},
                sequence,
            )
            for sequence in transcript.result().outputs
        ]
        head = {**self._head, "object": "chat.completion"}
        about_prompt = {**self._prompt_ids(transcript), "prompt_logprobs": _prompt_logprobs(transcript)}
        return {**head, **about_prompt, "choices": choices, "usage": reply.usage()}

    async def events(self, reply: Reply) -> AsyncIterator[bytes]:
        """The events of a stream. The first chunk of each choice has the role."""
        (transcript,) = reply.transcripts
        transcript.drop_logprobs()
        head = {**self._head, "object": "chat.completion.chunk"}
        first = self._prompt_ids(transcript)  # chat has one prompt, so its fields are sent once
        for index in range(reply.num_choices):
            choice = self._choice(index, {"delta": {"role": "assistant", "content": self._echo_text}}, None)
            yield self._chunk_event({**head, **first, "choices": [choice], **self._usage.of_chunk(reply)})
            first = {}
        about_prompt = transcript.prompt_logprobs is not None  # whether they are still to be sent
        async for deltas in reply.deltas():
            chunks = []
            for delta in deltas:
                self._usage.count(delta)
                if is_visible(delta, ids=self._with_ids):
                    first = {"prompt_logprobs": _prompt_logprobs(transcript)} if about_prompt else {}
                    about_prompt = False
                    choice = self._choice(delta.index, {"delta": _delta_content(delta)}, delta)
                    chunk = {**head, **first, "choices": [choice], **self._usage.of_chunk(reply)}
                    chunks.append(self._chunk_event(chunk))
            yield b"".join(chunks)
        for usage in self._usage.at_end(reply):
            yield event({**head, "choices": [], "usage": usage})
        yield DONE

    def _prompt_ids(self, transcript: RequestOutputProcessor) -> dict[str, object]:
        return {"prompt_token_ids": transcript.prompt.ids if self._with_ids else None}

    def _choice(
        self, index: int, content: dict[str, object], part: CompletionOutput | Delta | None
    ) -> dict[str, object]:
        """The object of a choice. part: a whole sequence, a delta, or None for a chunk without tokens."""
        return {
            "index": index,
            **content,
            "logprobs": self._logprobs.chat(part.logprobs) if part else None,
            "finish_reason": part.finish_reason if part else None,
            "stop_reason": part.stop_reason if part else None,
            "matched_stop": part.matched_stop if part else None,
            "token_ids": part.token_ids if part and self._with_ids else None,
        }


def _message(content: str) -> dict[str, object]:
    return {"role": "assistant", "content": content, "refusal": None, "reasoning": None}


def _prompt_logprobs(transcript: RequestOutputProcessor) -> Raw | None:
    rows = transcript.prompt_logprobs
    return None if rows is None else prompt_logprobs_json(rows)


def _delta_content(delta: Delta) -> dict[str, str]:
    return {"content": delta.text} if delta.text or delta.logprobs else {}
