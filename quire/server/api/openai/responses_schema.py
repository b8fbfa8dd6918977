"""Request bodies of /v1/responses, and their translation into messages, tools and parameters of chat."""

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from quire.errors import RequestError
from quire.params import SamplingParams, StructuredOutputsParams
from quire.server.api.openai.responses_tools import INPUT, ResponseTools
from quire.server.api.openai.schema import ThinkingBudget
from quire.server.request_params import (
    MAX_NAME,
    Biases,
    Body,
    Listed,
    Salt,
    SchedulingParamsBody,
    Schema,
    ignored_field,
    optional_field,
    unsupported_field,
)
from quire.tokenizer.messages import MAX_MESSAGES

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"

Item = Mapping[str, Any]  # an item of a conversation, as in the body and in stored responses
_Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class InputPart(BaseModel):
    """A part of an item's content. Only text is supported."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(BaseModel):
    """One item of a conversation. Further fields are kept and ignored: other programs write histories, too."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str | None = optional_field(
        "message (the default), function_call, function_call_output, custom_tool_call, custom_tool_call_output, "
        "reasoning or item_reference."
    )
    id: str | None = optional_field("Of the item; for an item_reference, of the item that it stands for.")
    role: Literal["system", "developer", "user", "assistant"] | None = optional_field("Of a message.")
    content: str | Listed[InputPart] | None = optional_field("Of a message, or of reasoning.")
    call_id: str | None = optional_field("Of a call and of its output.")
    name: str | None = optional_field("Of the called tool.")
    namespace: str | None = optional_field("Of the called tool, if it is in one.")
    arguments: str | None = optional_field("Of a function_call, as JSON text.")
    input: str | None = optional_field("Of a custom_tool_call.")
    output: str | Listed[InputPart] | None = optional_field("Of a function_call_output or custom_tool_call_output.")
    summary: Listed[InputPart] | None = optional_field("Of reasoning.")
    encrypted_content: str | None = optional_field("Of reasoning, as an earlier response had it.")
    status: str | None = ignored_field()

    def plain(self) -> dict[str, Any]:
        """The item as a dict, with its type and without null fields."""
        return {"type": "message", **self.model_dump(exclude_none=True)}


class TextFormat(Body):
    """`text.format`: the constraint on the output."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(max_length=MAX_NAME)] | None = optional_field("Of the schema.")
    description: Any = ignored_field()
    schema_: Schema | None = optional_field("The JSON schema of the output, with the type json_schema.", alias="schema")
    strict: bool | None = optional_field("Accepted, true or false: the output always matches the schema.")

    def constraint(self) -> StructuredOutputsParams | None:
        """The constraint; None for text. Raises RequestError."""
        match self.type:
            case "text":
                return None
            case "json_object":
                return StructuredOutputsParams(json_object=True)
        if self.schema_ is None:
            raise RequestError("text.format of type json_schema needs a schema", "text.format")
        return StructuredOutputsParams(json=self.schema_)


class TextOptions(Body):
    """`text`: the format of the output text."""

    format: TextFormat | None = optional_field("text (no constraint), any JSON object, or a JSON schema.")
    verbosity: Any = ignored_field()


class ReasoningOptions(Body):
    """`reasoning`."""

    effort: str | None = optional_field(
        "Passed to the chat template as reasoning_effort. none turns reasoning off, others turn it on."
    )
    summary: Literal["auto", "concise", "detailed"] | None = optional_field(
        "With any value, the reasoning is the item's summary, whole, and not its content."
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = optional_field("Former name of summary.")
    context: Any = ignored_field()
    mode: Any = ignored_field()


class ResponseStreamOptions(Body):
    """Options of a stream."""

    include_obfuscation: bool | None = optional_field(
        "Pad each event with text by a random `obfuscation` to a multiple of 256 bytes."
    )


_SAMPLING_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "stop", "ignore_eos", "min_tokens"),
)


class ResponseBody(SchedulingParamsBody):
    """POST /v1/responses."""

    input: str | Annotated[list[InputItem], Field(fail_fast=True, max_length=MAX_MESSAGES)] = Field(
        description="A text of the user, or the items of a conversation."
    )
    model: str | None = optional_field("The served model; /v1/models lists it.")
    instructions: str | None = optional_field("Text of the system, before the conversation. Not carried over.")
    previous_response_id: str | None = optional_field("A stored response whose conversation goes on.")
    store: bool | None = optional_field("Keep the response, so that it can be retrieved and continued; true.")
    background: bool | None = optional_field("Answer at once, and generate in the background; needs store.")
    stream: bool | None = optional_field("Send the output as server-sent events while it is generated.")
    stream_options: ResponseStreamOptions | None = None
    metadata: Metadata | None = optional_field("Up to 16 texts by name, stored with the response.")
    include: Listed[_Include] | None = optional_field("Further parts of the output.")

    tools: Listed[dict[str, Any]] | None = optional_field(
        "Tools that the model may call, and the client runs: functions, custom tools, namespaces of both. Others are "
        "left out."
    )
    tool_choice: str | dict[str, Any] | None = optional_field(
        "auto, none, required, or an object that names a function or the allowed tools."
    )
    parallel_tool_calls: bool | None = optional_field("With tools: whether there may be several calls; true.")
    text: TextOptions | None = optional_field("The format of the output text.")
    reasoning: ReasoningOptions | None = optional_field("Whether and how the model reasons.")
    max_output_tokens: int | None = optional_field("Tokens to generate at most, those of reasoning included.")
    truncation: Literal["auto", "disabled"] | None = optional_field(
        "auto: drop the oldest turns of a conversation that is too long; disabled, the default: refuse it."
    )
    top_logprobs: int | None = optional_field(
        "Return the logprob of each token of text, and those of this many most likely tokens."
    )

    temperature: float | None = optional_field("0 is greedy; 1 by default.")
    top_p: float | None = optional_field("Sample from the most likely tokens with this total probability.")
    top_k: int | None = optional_field("Sample from this many tokens; 0 or -1: from all.")
    min_p: float | None = optional_field("Least probability, relative to that of the most likely token.")
    seed: int | None = optional_field("Same seed, same output.")
    presence_penalty: float | None = optional_field("Lowers the logits of tokens that are in the output (-2 to 2).")
    frequency_penalty: float | None = optional_field("Lowers them for each time that they are (-2 to 2).")
    repetition_penalty: float | None = optional_field(
        "Divides the logits of tokens in the prompt or output; 1 is none."
    )
    logit_bias: Biases | None = optional_field("Token id -> value added to its logit (-100 to 100).")
    stop: str | Listed[str] | None = optional_field("Strings that end the output; not part of it.")
    ignore_eos: bool | None = optional_field("Continue after the model's end token.")
    min_tokens: int | None = optional_field("Least number of tokens before the output may end.")
    thinking_token_budget: ThinkingBudget | None = optional_field("Most tokens of reasoning; then its end is forced.")
    chat_template_kwargs: dict[str, Any] | None = optional_field(
        "Variables of the chat template, such as enable_thinking."
    )
    cache_salt: Salt | None = optional_field(
        "Share cached tokens only with requests of the same salt (1 to 256 characters)."
    )

    conversation: Any = unsupported_field()
    prompt: Any = unsupported_field()
    context_management: Any = unsupported_field([])
    moderation: Any = unsupported_field()

    def check(self) -> None:
        """Raises RequestError for fields that exclude each other."""
        if self.background and self.store is False:
            raise RequestError("background needs store: the response is fetched when it is done", "background")
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream to be true", "stream_options")

    def engine_names(self) -> Mapping[str, str]:
        """The engine's names -> names in this body, for those that differ."""
        constraint = dict.fromkeys(("json", "json_object", "structured_outputs", "response_format"), "text.format")
        other = {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}
        return {**constraint, **other, "prompt": "input", "messages": "input"}

    def sampling_params(self, defaults: Mapping[str, object]) -> SamplingParams:
        """The SamplingParams of the body. Without a limit the output can fill the context. Raises RequestError.

        defaults: for missing fields.
        """
        given = {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        if self.max_output_tokens is not None:
            given["max_tokens"] = self.max_output_tokens
        format = None if self.text is None else self.text.format
        return SamplingParams(
            **{
                **{"max_tokens": None, **defaults, **given},
                "logprobs": (self.top_logprobs or 0) if self.wants_logprobs else None,
                "structured_outputs": None if format is None else format.constraint(),
            }
        )

    @property
    def wants_logprobs(self) -> bool:
        """Whether the text of messages has logprobs."""
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    @property
    def summary(self) -> str | None:
        """The kind of summary that is requested; None without one."""
        return None if self.reasoning is None else self.reasoning.summary or self.reasoning.generate_summary


def chat_messages(items: Sequence[Item], instructions: str | None, tools: ResponseTools) -> list[dict[str, object]]:
    """The conversation in the form of chat requests. tools: for the names of functions in calls. Raises RequestError.

    Reasoning, text and calls that follow each other are one message of the assistant, as the model wrote them.
    Instructions and the messages of the system at the begin are one message: many chat templates take only one.
    """
    messages: list[dict[str, object]] = [{"role": "system", "content": instructions}] if instructions else []
    names: dict[str, object] = {}  # of functions, by call id
    for place, item in enumerate(items):
        match item["type"]:
            case "message":
                _add_message(messages, item, place)
            case "reasoning":
                message = _assistant_message(messages, "reasoning_content", "content", "tool_calls")
                message["reasoning_content"] = _reasoning_text(item, place)
            case "function_call" | "custom_tool_call" as kind:
                text = "arguments" if kind == "function_call" else INPUT
                id, name, arguments = (_needed(item, field, place) for field in ("call_id", "name", text))
                names[id] = name = tools.function_name(name, item.get("namespace"))
                arguments = arguments if kind == "function_call" else json.dumps({INPUT: arguments}, ensure_ascii=False)
                call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
                calls = _assistant_message(messages).setdefault("tool_calls", [])
                calls.append(call)  # type: ignore[attr-defined]  # a list
            case "function_call_output" | "custom_tool_call_output" as kind:
                id = _needed(item, "call_id", place)
                if id not in names:
                    raise RequestError(
                        f"input.{place}: there is no call with the call_id {id!r:.80} before its output; "
                        "send the call, or the previous_response_id of the response that has it",
                        "input",
                    )
                content = _content(_needed(item, "output", place), place)
                messages.append({"role": "tool", "tool_call_id": id, "name": names[id], "content": content})
            case kind:
                raise RequestError(f"input.{place}: items of type {kind!r:.80} are not supported", "input")
    return [message for message in messages if message.keys() != {"role", "reasoning_content"}]


def _add_message(messages: list[dict[str, object]], item: Item, place: int) -> None:
    role, content = _needed(item, "role", place), _content(_needed(item, "content", place), place)
    if role == "assistant":
        _assistant_message(messages, "content", "tool_calls")["content"] = content
        return
    role = "system" if role == "developer" else role
    first = messages[0] if len(messages) == 1 else None
    if role == "system" and first is not None and first["role"] == "system":
        texts = (first["content"], content)
        if all(isinstance(text, str) for text in texts):
            first["content"] = "\n\n".join(map(str, texts))
            return
    messages.append({"role": role, "content": content})


def _assistant_message(messages: list[dict[str, object]], *without: str) -> dict[str, object]:
    """The last message if it is the assistant's and has none of the fields `without`; else a new one, added."""
    if not messages or messages[-1]["role"] != "assistant" or not messages[-1].keys().isdisjoint(without):
        messages.append({"role": "assistant"})
    return messages[-1]


def _needed(item: Item, field: str, place: int) -> Any:  # noqa: ANN401 (validated by InputItem)
    value = item.get(field)
    if value is None:
        raise RequestError(f"input.{place}: an item of type {item['type']} needs {field}", "input")
    return value


def _content(content: str | Sequence[Item], place: int) -> str | list[dict[str, object]]:
    """Text, or several text parts, of chat requests."""
    if isinstance(content, str):
        return content
    parts: list[dict[str, object]] = [{"type": "text", "text": _part_text(part, place)} for part in content]
    return str(parts[0]["text"]) if len(parts) == 1 else parts or ""


def _part_text(part: Item, place: int) -> str:
    kind = part["type"]
    text = part.get("refusal") if kind == "refusal" else part.get("text")
    if kind not in ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"):
        raise RequestError(f"input.{place}: content of type {kind!r:.80} is not supported, only text", "input")
    if text is None:
        raise RequestError(f"input.{place}: a part of type {kind} needs its text", "input")
    return str(text)


_ENCODED = "quire:"  # begin of `encrypted_content`


def encode_reasoning(text: str) -> str:
    """`encrypted_content` of reasoning. It is encoded and not encrypted: the client has the text, too."""
    return _ENCODED + base64.b64encode(text.encode()).decode()


def _reasoning_text(item: Item, place: int) -> str:
    """The reasoning of an item: its content, or what encodes it, or its summary."""
    if item.get("content"):
        return "".join(_part_text(part, place) for part in _parts(item["content"]))
    encoded = item.get("encrypted_content") or ""
    if encoded.startswith(_ENCODED):
        try:
            return base64.b64decode(encoded[len(_ENCODED) :], validate=True).decode()
        except (binascii.Error, ValueError):
            raise RequestError(f"input.{place}: encrypted_content is not as a response had it", "input") from None
    return "\n\n".join(_part_text(part, place) for part in item.get("summary") or ())


def _parts(content: str | Sequence[Item]) -> Sequence[Item]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
