"""Request bodies of the OpenAI routes. Knows names, types and defaults; bounds are SamplingParams' business."""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from quire.errors import nearest
from quire.params import SamplingParams

_NEUTRAL = "x-neutral-values"
_PASSED_ON = (
    *("n", "max_tokens", "temperature", "top_p", "seed", "stop", "top_k", "min_p"),
    *("min_tokens", "stop_token_ids", "ignore_eos"),
)


def not_yet(*neutral: JsonValue) -> Any:  # noqa: ANN401 (a field of any type)
    """A field that quire does not act on yet: only values that change nothing are accepted."""
    named = ", ".join(["null", *(f"{value!r}" for value in neutral)])
    return Field(
        default=None,
        description=f"Not supported yet; accepted when it asks for nothing ({named}).",
        json_schema_extra={_NEUTRAL: list(neutral)},
    )


def without_effect() -> Any:  # noqa: ANN401 (a field of any type)
    """A field that does not concern the output."""
    return Field(default=None, description="Accepted; it has no effect.")


class Body(BaseModel):
    """A JSON object whose fields are all known."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _know_all_fields(cls, body: object) -> object:
        for name in body if isinstance(body, dict) else ():
            if name not in cls.model_fields:
                shown = str(name)[:100].encode("utf-8", "replace").decode()
                hint = nearest(shown, cls.model_fields)
                raise PydanticCustomError(
                    "unknown_field", "unknown field '{name}'{hint}", {"name": shown, "hint": hint}
                )
        return body

    @model_validator(mode="after")
    def _refuse_what_is_not_supported(self) -> Self:
        for name in self.model_fields_set:
            extra = type(self).model_fields[name].json_schema_extra
            value = getattr(self, name)
            if value is None or not isinstance(extra, dict) or _NEUTRAL not in extra:
                continue
            if value not in extra[_NEUTRAL]:  # type: ignore[operator]  # a list, see not_yet
                raise PydanticCustomError("not_supported", "{name} is not supported yet", {"name": name})
        return self


class StreamOptions(Body):
    """What a stream carries beside the text."""

    include_usage: bool | None = Field(default=None, description="Send a last chunk with the usage.")
    include_obfuscation: bool | None = without_effect()


class SamplingBody(Body):
    """What completions and chat have in common."""

    model: str | None = Field(default=None, description="The served model; /v1/models lists it.")
    stream: bool | None = Field(default=None, description="Send the output as server-sent events while it grows.")
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, description="Sequences to generate for each prompt (1 to 128).")
    max_tokens: int | None = Field(default=None, description="Tokens to generate at most.")
    temperature: float | None = Field(default=None, description="0 is greedy; 1 by default.")
    top_p: float | None = Field(default=None, description="Sample from the most likely tokens with this total.")
    seed: int | None = Field(default=None, description="Same seed, same output.")
    stop: str | list[str] | None = Field(default=None, description="Strings that end the output; not part of it.")
    top_k: int | None = Field(default=None, description="Sample from this many tokens; 0 or -1: from all.")
    min_p: float | None = Field(default=None, description="Least probability, as a share of the most likely one's.")
    min_tokens: int | None = Field(default=None, description="No end before this many tokens.")
    stop_token_ids: list[int] | None = Field(default=None, description="Tokens that end the output.")
    ignore_eos: bool | None = Field(default=None, description="Go on after the model's end token.")

    presence_penalty: Any = not_yet(0)
    frequency_penalty: Any = not_yet(0)
    logit_bias: Any = not_yet({})
    repetition_penalty: Any = not_yet(1.0)
    length_penalty: Any = not_yet(1.0)
    best_of: Any = not_yet(1)
    echo: Any = not_yet(False)  # noqa: FBT003 (a value of the field)
    use_beam_search: Any = not_yet(False)  # noqa: FBT003
    structured_outputs: Any = not_yet()
    cache_salt: Any = not_yet()
    priority: Any = not_yet(0)
    skip_special_tokens: Any = not_yet(True)  # noqa: FBT003
    spaces_between_special_tokens: Any = not_yet(True)  # noqa: FBT003
    include_stop_str_in_output: Any = not_yet(False)  # noqa: FBT003
    truncate_prompt_tokens: Any = not_yet()
    prompt_logprobs: Any = not_yet()
    user: Any = without_effect()
    metadata: Any = without_effect()
    store: Any = without_effect()
    service_tier: Any = without_effect()
    prompt_cache_key: Any = without_effect()
    prompt_cache_retention: Any = without_effect()
    safety_identifier: Any = without_effect()

    def sampling_params(self, **overrides: object) -> SamplingParams:
        """As the engine takes them. Raises RequestError for a value out of bounds."""
        given = {name: getattr(self, name) for name in _PASSED_ON if getattr(self, name) is not None}
        return SamplingParams(**{**given, **overrides})


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]] = Field(
        description="A text, token ids, or a list of several of either."
    )
    logprobs: int | None = Field(default=None, description="Report this many of the most likely tokens (0 to 20).")

    suffix: Any = not_yet("")


class ContentPart(BaseModel):
    """A piece of a message. Only text is supported yet."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str
    text: str | None = None


class ChatMessage(Body):
    """One turn of a conversation, also as an answer of this server sends it back."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: Any = not_yet([])
    audio: Any = not_yet()
    function_call: Any = not_yet()


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = Field(default=None, description="As max_tokens, which it replaces.")
    logprobs: bool | None = Field(default=None, description="Report the logprob of each token.")
    top_logprobs: int | None = Field(default=None, description="Report this many of the most likely ones (0 to 20).")
    tools: list[dict[str, Any]] | None = Field(default=None, description="Passed to the model's chat template.")
    tool_choice: Any = not_yet("auto", "none")
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Switches of the model's chat template, such as enable_thinking."
    )
    add_generation_prompt: bool | None = Field(default=None, description="Begin the assistant's turn; true by default.")

    response_format: Any = not_yet({"type": "text"})
    modalities: Any = not_yet(["text"])
    parallel_tool_calls: Any = not_yet(True)  # noqa: FBT003 (a value of the field)
    audio: Any = not_yet()
    function_call: Any = not_yet()
    functions: Any = not_yet([])
    prediction: Any = not_yet()
    reasoning_effort: Any = not_yet()
    verbosity: Any = not_yet()
    web_search_options: Any = not_yet()
