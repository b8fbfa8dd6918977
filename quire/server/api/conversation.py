"""Conversations: how every chat dialect reaches the engine, and reads the messages that come back.

A dialect translates its body into a `ChatRequest`, and the parts of messages into its own format.
"""

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fastapi import Request

from quire.chat.output import OutputFormat, constrained_params, grammar_field, output_format
from quire.chat.parser import MessageParser
from quire.chat.parts import CallBegin, CallEnd, Message, Part, message_of
from quire.chat.tools import Toolbox
from quire.core.request import Beams, Namespace
from quire.core.scheduling_params import DEFAULT_SCHEDULING_PARAMS, SchedulingParams
from quire.engine.inputs import Generation, TokenizedPrompt, prepare_generations, tokenize
from quire.engine.output_text import RequestOutputProcessor
from quire.engine.outputs import CompletionOutput, Delta, LogprobRow
from quire.errors import RequestError
from quire.params import SamplingParams
from quire.server.adapters import ServedModel
from quire.server.api.limits import (
    MAX_ANSWER_VALUES,
    MAX_EVENT_VALUES,
    bounded_answer,
    check_choices,
    check_prompt_values,
    num_prompt_tokens,
)
from quire.server.errors import renamed_fields
from quire.server.middleware.auth import caller_of
from quire.server.reply import Reply
from quire.server.service import Service
from quire.tokenizer.chat_costs import size_of
from quire.tokenizer.chat_template import REASONING_SWITCHES
from quire.tokenizer.tokenizer import Tokenizer

# Fields of a rendering, and messages: no variable of a template has such a name.
RENDERING_FIELDS = (
    *("messages", "tools", "documents", "chat_template"),
    *("add_generation_prompt", "continue_final_message"),
)


MAX_SHARED = 2**24  # characters that the prompts of one request have from what its conversations share


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """How the chat template renders a conversation. The fields are arguments of `Tokenizer.apply_chat_template`.

    variables: the template's own. add_special_tokens: whether the tokenizer adds its begin and end tokens.
    """

    tools: Sequence[Mapping[str, object]] | None = None
    documents: Sequence[Mapping[str, object]] | None = None
    chat_template: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    variables: Mapping[str, object] = field(default_factory=dict)

    def tokenize(self, messages: Sequence[Mapping[str, object]], tokenizer: Tokenizer) -> TokenizedPrompt:
        """The rendered conversation with its token ids. Raises RequestError, ModelError."""
        text = tokenizer.apply_chat_template(
            messages,
            self.tools,
            self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            documents=self.documents,
            chat_template=self.chat_template,
            **self.variables,
        )
        return tokenize(text, tokenizer, add_special_tokens=self.add_special_tokens)

    def reasons(self, tokenizer: Tokenizer) -> bool:
        """See `Tokenizer.reasons`."""
        return tokenizer.reasons(self.variables, has_tools=bool(self.tools), chat_template=self.chat_template)

    def check_size(self, messages: Sequence[Mapping[str, object]], service: Service) -> None:
        """Raises ContextLengthExceeded for a conversation that cannot fit into the context."""
        service.check_size([messages, self.tools, self.documents, self.variables], "messages")


def reasoning_variables(effort: str | None, *, enabled: bool | None = None) -> dict[str, object]:
    """Variables of the chat template for the effort of reasoning, and for whether the model reasons at all.

    enabled: None leaves it to the effort: not with "none". Without either, the template decides.
    """
    if enabled is None and effort is not None:
        enabled = effort != "none"
    switches = {} if enabled is None else dict.fromkeys(REASONING_SWITCHES, enabled)
    return {**switches, **({} if effort is None else {"reasoning_effort": effort})}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A conversation to continue, in no dialect.

    messages: objects with OpenAI's names. toolbox: None without tools. separate_reasoning: whether reasoning is apart
    from the content; without it, its markup and text are content. thinking_budget: most tokens of reasoning.
    with_prompt_ids: whether the response includes the prompt's token ids. whole: the response is not streamed.
    repeats: its last events have the logprobs of all events before.
    """

    model: ServedModel
    messages: Sequence[Mapping[str, object]]
    params: SamplingParams
    rendering: Rendering
    toolbox: Toolbox | None = None
    separate_reasoning: bool = True
    thinking_budget: int | None = None
    namespace: Namespace
    beams: Beams | None = None
    scheduling_params: SchedulingParams = DEFAULT_SCHEDULING_PARAMS
    with_prompt_ids: bool = False
    whole: bool = False
    repeats: bool = False


class MessageDelta(NamedTuple):
    """What one step adds to the message of a choice. finish_reason: None while the message continues."""

    choice: int
    parts: list[Part]
    delta: Delta
    finish_reason: str | None


class Choice(NamedTuple):
    """One whole message, with the sequence that it was read from. parts: in the order in which they were generated."""

    message: Message
    parts: list[Part]
    output: CompletionOutput
    finish_reason: str | None


class MessageReader:
    """Reads the messages of one conversation. place: of the conversation among those of its request."""

    def __init__(self, format: OutputFormat, place: int = 0) -> None:
        self._format = format
        self._place = place
        self._parsers: dict[int, MessageParser] = {}  # by sequence
        self._reasoning_tokens: defaultdict[int, _ReasoningTokens] = defaultdict(_ReasoningTokens)  # by sequence
        self._calls: defaultdict[int, _Calls] = defaultdict(_Calls)  # by sequence
        self._content_rows: defaultdict[int, _ContentRows] = defaultdict(_ContentRows)  # by sequence

    def new_call_id(self, index: int, name: str) -> str:
        """See OutputFormat."""
        return self._format.new_call_id(index, name)

    def transcript(self, reply: Reply) -> RequestOutputProcessor:
        """The transcript of the conversation."""
        return reply.transcripts[self._place]

    def choices(self, reply: Reply) -> list[Choice]:
        """The messages of all returned sequences, which have ended."""
        transcript = self.transcript(reply)
        choices = []
        for output in transcript.result().outputs:
            parser = self._format.new_parser()
            parts = [*parser.push(output.text), *parser.finish()]
            message = message_of(parts)
            self._count(output.index, parser, output.token_offsets, reply)
            finish_reason = self._finish_reason(output.index, parts, output.finish_reason)
            choices.append(Choice(message, parts, output, finish_reason))
        return choices

    async def deltas(self, reply: Reply) -> AsyncIterator[list[MessageDelta]]:
        """The parts of messages as they come, of a request with one conversation. Raises as `Reply.deltas`."""
        async for deltas in reply.deltas():
            yield [self._read(delta, reply) for delta in deltas]

    def content_logprobs(self, message: MessageDelta) -> list[LogprobRow]:
        """The logprobs of tokens that turn out to be content with this step, whenever they were generated.

        It has to be called for each step. Tokens of reasoning, calls, other markup and the end of the output have none.
        """
        return self._content_rows[message.choice].take(self._parsers[message.choice], message.delta)

    def _read(self, delta: Delta, reply: Reply) -> MessageDelta:
        parser = self._parsers.get(delta.index)
        if parser is None:
            parser = self._parsers[delta.index] = self._format.new_parser()
        parts = parser.push(delta.text)
        if delta.finish_reason is not None:
            parts += parser.finish()
        self._count(delta.index, parser, self.transcript(reply).token_offsets(delta.index), reply)
        return MessageDelta(delta.index, parts, delta, self._finish_reason(delta.index, parts, delta.finish_reason))

    def _finish_reason(self, index: int, parts: Sequence[Part], reason: str | None) -> str | None:
        """The finish reason of a sequence that these further parts and `reason` end.

        It is tool_calls only if every call is complete: a stop string may have cut the last one.
        """
        calls = self._calls[index]
        for part in parts:
            if isinstance(part, CallBegin):
                calls.num_begun += 1
            elif isinstance(part, CallEnd):
                calls.num_complete += 1
        return "tool_calls" if reason == "stop" and calls.num_begun == calls.num_complete > 0 else reason

    def _count(self, index: int, parser: MessageParser, token_offsets: Sequence[int], reply: Reply) -> None:
        """Count the sequence's tokens of reasoning, tags included."""
        if self._format.parsed.reasoning is not None:
            new = self._reasoning_tokens[index].count(parser, token_offsets)
            reply.num_reasoning_tokens = (reply.num_reasoning_tokens or 0) + new


@dataclass(slots=True)
class _Calls:
    """The tool calls of one sequence so far."""

    num_begun: int = 0
    num_complete: int = 0


@dataclass(slots=True)
class _ContentRows:
    """The logprobs of one sequence. pending: those of tokens that may be content or not, with their offsets."""

    pending: deque[tuple[int, LogprobRow]] = field(default_factory=deque)
    num_apart: int = 0  # places of the parser's `apart` that end before all pending tokens

    def take(self, parser: MessageParser, delta: Delta) -> list[LogprobRow]:
        """The logprobs of content about which is known now that it is content."""
        self.pending.extend(zip(delta.token_offsets, delta.logprobs or (), strict=False))
        found, apart, num_decided = [], parser.apart, parser.num_decided
        while self.pending and self.pending[0][0] < num_decided:
            offset, row = self.pending.popleft()
            while self.num_apart < len(apart) and apart[self.num_apart][1] <= offset:
                self.num_apart += 1
            if self.num_apart == len(apart) or offset < apart[self.num_apart][0]:
                found.append(row)
        if parser.open_reasoning is not None:  # all that are left, up to the end of the text so far, are of it
            while self.pending and self.pending[0][0] < parser.open_reasoning[1]:
                self.pending.popleft()
        return found


@dataclass(slots=True)
class _ReasoningTokens:
    """The tokens of reasoning of one sequence so far. Each piece of reasoning that has ended is counted once."""

    num_pieces: int = 0  # that have ended and are counted
    num_in_pieces: int = 0
    num_tokens: int = 0

    def count(self, parser: MessageParser, token_offsets: Sequence[int]) -> int:
        """The number of new tokens."""

        def num_within(piece: tuple[int, int]) -> int:
            start, stop = (bisect_left(token_offsets, place) for place in piece)
            return stop - start

        ended = parser.ended_reasoning[self.num_pieces :]
        self.num_pieces += len(ended)
        self.num_in_pieces += sum(map(num_within, ended))
        before, is_open = self.num_tokens, parser.open_reasoning
        self.num_tokens = self.num_in_pieces + (0 if is_open is None else num_within(is_open))
        return self.num_tokens - before


async def start_conversation(
    service: Service, request: Request, id: str, chat: ChatRequest
) -> tuple[MessageReader, Reply]:
    """Queue a conversation in the engine, under the response's `id`.

    Raises RequestError, Busy, EngineStopped, RateLimited.
    """
    (reader,), reply = await start_conversations(service, request, id, [chat])
    return reader, reply


async def start_conversations(
    service: Service, request: Request, id: str, chats: Sequence[ChatRequest]
) -> tuple[list[MessageReader], Reply]:
    """Queue several conversations in the engine, all or none, with a reader for each. Only their messages differ.

    Raises RequestError, Busy, EngineStopped, RateLimited.
    """
    caller, first = caller_of(request), chats[0]
    prepared = await service.thread_pool.run(caller.tenant, lambda: _prepare_all(service, chats))
    asked: Sequence[Generation] = [generation for _, generation in prepared]
    check_choices([one.params for one in asked])
    check_prompt_values(asked, ids=first.with_prompt_ids, choices=False)
    if first.whole or first.repeats:
        most = MAX_EVENT_VALUES if first.repeats else MAX_ANSWER_VALUES
        asked = bounded_answer(asked, service.max_model_len, most)
    with renamed_fields(_grammar_names(first)), caller.quota.spending(num_prompt_tokens(asked)):
        about = (id, asked, first.namespace, first.beams, first.scheduling_params)
        reply = await service.start(*about, adapters=first.model.adapter, whole=first.whole)
    return [reader for reader, _ in prepared], reply


def _grammar_names(chat: ChatRequest) -> Mapping[str, str]:
    """The field of the grammar that the server writes for tools."""
    return {} if chat.toolbox is None else {"grammar": grammar_field(chat.toolbox, chat.params.structured_outputs)}


def num_calls(messages: Sequence[Mapping[str, object]]) -> int:
    """Number of tool calls in a conversation."""
    calls = [message.get("tool_calls") for message in messages]
    return sum(len(one) for one in calls if isinstance(one, list))


def _prepare_all(service: Service, chats: Sequence[ChatRequest]) -> list[tuple[MessageReader, Generation]]:
    first = chats[0].rendering
    first.check_size([], service)
    num_characters = size_of([first.tools, first.documents, first.variables]) * len(chats)
    if len(chats) > 1 and num_characters > MAX_SHARED:
        raise RequestError(
            f"{len(chats):,} conversations have {num_characters:,} characters of tools and documents together, more "
            f"than {MAX_SHARED:,}, as each prompt has them; send fewer conversations at once",
            "messages",
        )
    return [_prepare(service, chat, place) for place, chat in enumerate(chats)]


def _prepare(service: Service, chat: ChatRequest, place: int) -> tuple[MessageReader, Generation]:
    chat.rendering.check_size(chat.messages, service)
    if chat.toolbox is not None:  # whether the template gets the tools or not, they are kept until the answer ends
        service.check_size([tool.raw for tool in chat.toolbox.tools], "tools")
    prompt = chat.rendering.tokenize(chat.messages, service.tokenizer)
    format = output_format(
        service.chat_format,
        chat.toolbox,
        prompt.text or "",
        reasons=chat.rendering.reasons(service.tokenizer),
        special_texts=service.tokenizer.special_texts,
        separate_reasoning=chat.separate_reasoning,
        skip_special_tokens=chat.params.skip_special_tokens,
        num_earlier_calls=num_calls(chat.messages),
    )
    params = constrained_params(format, chat.params, chat.thinking_budget)
    (asked,) = prepare_generations([prompt], [params], service.tokenizer, service.max_model_len)
    return MessageReader(format, place), asked._replace(new_answer=format.new_answer)
