"""Request bodies of /v1/messages: names, types and defaults."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from quire.errors import RequestError
from quire.params import MAX_TOKENS, StructuredOutputsParams
from quire.server.request_params import (
    Body,
    Listed,
    RequestBody,
    Salt,
    SchedulingParamsBody,
    ignored_field,
    optional_field,
    unsupported_field,
)
from quire.tokenizer.messages import MAX_MESSAGES

CACHE_SECONDS = {None: 300.0, "5m": 300.0, "1h": 3600.0}  # by `ttl` of a cache_control


class CacheControl(Body):
    """Asks for the prompt up to its place to stay in the cache."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = optional_field("How long: 5m by default.")


class TextBlock(BaseModel):
    """A block of text. Further fields have no effect."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str
    text: str | None = None
    cache_control: CacheControl | None = None


class ContentBlock(TextBlock):
    """A block of a message: text, a call of a tool, its result, or thinking. Further fields have no effect."""

    thinking: str | None = None
    signature: Any = ignored_field()
    data: Any = ignored_field()  # of redacted_thinking
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | Listed[TextBlock] | None = None
    is_error: bool | None = None


class AnthropicMessage(BaseModel):
    """One message of a conversation. Further fields have no effect."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["user", "assistant", "system"]
    content: str | Listed[ContentBlock]


class ToolBody(BaseModel):
    """A tool that the client runs. Further fields have no effect."""

    model_config = ConfigDict(extra="allow", strict=True)

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class ToolChoiceBody(Body):
    """Whether the model has to call tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = optional_field("With the type tool: the one to call.")
    disable_parallel_tool_use: bool | None = optional_field("At most one call in a message; false by default.")


class ThinkingBody(Body):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = optional_field(
        "With the type enabled: most tokens of reasoning; then its end is forced."
    )
    display: Literal["summarized", "omitted"] | None = optional_field(
        "omitted: thinking blocks have no text; summarized, as the default, returns all of it."
    )


class OutputFormatBody(Body):
    """A constraint on the output."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema", description="The JSON schema of the output.")


class OutputConfig(Body):
    """The form of the output."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = optional_field(
        "Passed to the model's chat template as reasoning_effort; xhigh and max as high."
    )
    format: OutputFormatBody | None = optional_field("A JSON schema of the output.")


class ContextManagement(Body):
    """Edits of the conversation, which only Anthropic's servers make."""

    edits: Listed[dict[str, Any]] | None = optional_field("Accepted if it changes nothing.")


class ConversationBody(RequestBody):
    """Fields that a message and the number of its tokens depend on."""

    model: str | None = optional_field("The served model; /v1/models lists its names.")
    messages: Annotated[list[AnthropicMessage], Field(fail_fast=True, max_length=MAX_MESSAGES)]
    system: str | Listed[TextBlock] | None = optional_field("Instructions, in front of the messages.")
    tools: Listed[ToolBody] | None = optional_field("Tools that the model may call.")
    tool_choice: ToolChoiceBody | None = optional_field("Whether the model has to call them; auto by default.")
    thinking: ThinkingBody | None = optional_field("Whether the model reasons; by default as its chat template says.")
    output_config: OutputConfig | None = optional_field("Effort and form of the output.")
    output_format: OutputFormatBody | None = optional_field("Former name of output_config.format.")
    cache_control: CacheControl | None = optional_field("Keep the KV of the whole request (docs/api.md).")
    context_management: ContextManagement | None = optional_field("Accepted if it changes nothing.")
    chat_template_kwargs: dict[str, Any] | None = optional_field("Variables of the model's chat template.")
    mcp_servers: Any = unsupported_field([])
    container: Any = unsupported_field()
    thread: Any = unsupported_field()
    speed: Any = unsupported_field("standard")

    @property
    def constraint(self) -> StructuredOutputsParams | None:
        """The constraint on the output; None if there is none. Raises RequestError."""
        asked = self.output_format if self.output_config is None else self.output_config.format
        return None if asked is None else StructuredOutputsParams(json=asked.schema_)

    @property
    def cache_seconds(self) -> float:
        """The longest time of any cache_control; 0 if there is none."""
        return max((CACHE_SECONDS[control.ttl] for control in self._cache_controls()), default=0.0)

    def check_edits(self) -> None:
        """Raises RequestError for edits that would change the conversation."""
        for edit in (self.context_management.edits or ()) if self.context_management is not None else ():
            if not str(edit.get("type")).startswith("clear_thinking") or edit.get("keep") != "all":
                raise RequestError(
                    f"context_management: edits of type {edit.get('type')!r:.80} are not supported; leave them out, "
                    "and shorten the messages instead",
                    "context_management",
                )

    def _cache_controls(self) -> Iterator[CacheControl]:
        blocks = [
            block for message in self.messages if not isinstance(message.content, str) for block in message.content
        ]
        places = [self, *(self.system if isinstance(self.system, list) else ()), *(self.tools or ()), *blocks]
        for place in places:
            if place.cache_control is not None:
                yield place.cache_control


class CountTokensBody(ConversationBody):
    """POST /v1/messages/count_tokens."""


class MessagesBody(ConversationBody, SchedulingParamsBody):
    """POST /v1/messages."""

    max_tokens: int = Field(description="Tokens to generate at most; 0 computes the prompt only.")
    stop_sequences: Listed[str] | None = optional_field("Strings that end the output; not part of it.")
    stream: bool | None = optional_field("Send the output as server-sent events while it is generated.")
    temperature: float | None = optional_field("0 is greedy; 1 by default.")
    top_k: int | None = optional_field("Sample from this many tokens; 0 or -1: from all.")
    top_p: float | None = optional_field("Sample from the most likely tokens with this total probability.")
    cache_salt: Salt | None = optional_field(
        "Share cached tokens only with requests of the same salt (1 to 256 characters)."
    )
