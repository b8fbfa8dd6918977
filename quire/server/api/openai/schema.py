"""Request bodies of completions and chat: names, types and defaults. SamplingParams checks bounds."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from quire.errors import RequestError
from quire.params import MAX_TOKENS, SamplingParams
from quire.server.api.limits import MAX_CHOICES
from quire.server.request_params import (
    BeamSearchBody,
    Biases,
    Body,
    ConstraintBody,
    Listed,
    Prompts,
    RepetitionDetection,
    Salt,
    SchedulingParamsBody,
    optional_field,
    unsupported_field,
    with_default_max_tokens,
)
from quire.server.sse import event, padded_event
from quire.tokenizer.messages import MAX_MESSAGES


class ContentPart(BaseModel):
    """A part of a message. Only text is supported. Further fields go to the chat template."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str
    text: str | None = None


Role = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]  # templates write it into the prompt, beside markup


class ChatMessage(Body):
    """One message of a conversation. Further fields go to the chat template: other programs write histories, too."""

    model_config = ConfigDict(extra="allow")

    role: Role
    content: str | Listed[ContentPart] | None = None
    name: str | None = None
    tool_calls: Listed[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    audio: Any = unsupported_field()
    function_call: Any = unsupported_field()


Messages = Annotated[list[ChatMessage], Field(fail_fast=True, max_length=MAX_MESSAGES)]


ThinkingBudget = Annotated[int, Field(ge=0, le=MAX_TOKENS)]


class TemplateBody(Body):
    """Fields for rendering a conversation with the chat template."""

    tools: Listed[dict[str, Any]] | None = optional_field("Passed to the model's chat template.")
    documents: Listed[dict[str, Any]] | None = optional_field("Passed to the model's chat template.")
    chat_template_kwargs: dict[str, Any] | None = optional_field(
        "Variables of the chat template, such as enable_thinking."
    )
    add_generation_prompt: bool | None = optional_field("Begin the assistant's turn; true by default.")
    continue_final_message: bool | None = optional_field("Continue the last message instead of a new turn.")
    add_special_tokens: bool | None = optional_field("Let the tokenizer add begin and end tokens; false by default.")
    tool_choice: str | dict[str, Any] | None = optional_field(
        "auto, none, required, or an object that names a function or the allowed tools."
    )
    reasoning_effort: str | None = optional_field(
        "Passed to the model's chat template. none turns reasoning off, others turn it on."
    )
    enable_thinking: bool | None = optional_field("Whether the model reasons, for its chat template.")
    chat_template: str | None = optional_field("Name of one of the model's own templates.")


_SAMPLING_FIELDS = (
    *("n", "best_of", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "deterministic"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words"),
    "no_repeat_ngram_size",
    *("stop", "stop_regex", "stop_token_ids", "ignore_eos", "include_stop_str_in_output"),
    *("skip_special_tokens", "spaces_between_special_tokens", "speculation"),
    *("prompt_logprobs", "logprob_token_ids", "truncate_prompt_tokens", "truncation_side"),
)
NO_LIMIT = -1  # of max_tokens: the rest of the context
_COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens


class PredictionPart(Body):
    """A part of a predicted output."""

    type: Literal["text"]
    text: str


class Prediction(Body):
    """OpenAI's predicted output."""

    type: Literal["content"]
    content: str | Listed[PredictionPart]

    @property
    def text(self) -> str | None:
        """The whole text; None if it is empty."""
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        return "".join(parts) or None


class StreamOptions(Body):
    """Further content of a stream."""

    include_usage: bool | None = optional_field("Send a last chunk with the usage.")
    continuous_usage_stats: bool | None = optional_field("With include_usage: send the usage so far in every chunk.")
    include_obfuscation: bool | None = optional_field(
        "Pad each chunk with a random `obfuscation` to a multiple of 256 bytes, against readers of packet sizes."
    )


class SamplingBody(BeamSearchBody, SchedulingParamsBody, ConstraintBody):
    """Fields of both completions and chat."""

    model: str | None = optional_field("The served model; /v1/models lists it.")
    stream: bool | None = optional_field("Send the output as server-sent events while it is generated.")
    stream_options: StreamOptions | None = None
    prediction: Prediction | None = optional_field("Text that the output probably is, in whole or in part.")

    n: int | None = optional_field("Sequences to generate for each prompt (1 to 128).")
    max_tokens: int | None = optional_field(
        "Tokens to generate at most; 0 computes the prompt only, -1 allows the rest of the context."
    )
    min_tokens: int | None = optional_field("Least number of tokens before the output may end.")
    temperature: float | None = optional_field("0 is greedy; 1 by default.")
    top_p: float | None = optional_field("Sample from the most likely tokens with this total probability.")
    top_k: int | None = optional_field("Sample from this many tokens; 0 or -1: from all.")
    min_p: float | None = optional_field("Least probability, relative to that of the most likely token.")
    seed: int | None = optional_field("Same seed, same output.")
    deterministic: bool | None = optional_field("The output does not depend on other requests, at some cost in speed.")
    presence_penalty: float | None = optional_field("Lowers the logits of tokens that are in the output (-2 to 2).")
    frequency_penalty: float | None = optional_field("Lowers them for each time that they are (-2 to 2).")
    repetition_penalty: float | None = optional_field(
        "Divides the logits of tokens in the prompt or output; 1 is none."
    )
    no_repeat_ngram_size: int | None = optional_field(
        "No sequence of so many tokens occurs twice in prompt and output (1 to 64); 0: off."
    )
    logit_bias: Biases | None = optional_field("Token id -> value added to its logit (-100 to 100).")
    allowed_token_ids: Listed[int] | None = optional_field("Only these tokens are generated.")
    bad_words: str | Listed[str] | None = optional_field("Texts that are never generated.")
    stop: str | Listed[str] | None = optional_field("Strings that end the output; not part of it.")
    stop_regex: str | Listed[str] | None = optional_field("Patterns; the output ends behind the first match of one.")
    stop_token_ids: Listed[int] | None = optional_field("Tokens that end the output.")
    ignore_eos: bool | None = optional_field("Continue after the model's end token.")
    include_stop_str_in_output: bool | None = optional_field("Include the stop string or token that ended the output.")
    repetition_detection: RepetitionDetection | None = optional_field("End an output that repeats itself.")
    skip_special_tokens: bool | None = optional_field("Leave special tokens out of the text; true by default.")
    spaces_between_special_tokens: bool | None = optional_field(
        "Keep the tokenizer's spaces between special tokens; true by default."
    )
    speculation: bool | None = optional_field("Draft and verify tokens, which changes none of them; true by default.")
    truncate_prompt_tokens: int | None = optional_field("Keep this many tokens of the prompt; -1: as many as fit.")
    truncation_side: Literal["left", "right"] | None = optional_field(
        "With truncate_prompt_tokens: drop tokens at the begin (left, the default) or at the end (right)."
    )
    prompt_logprobs: int | None = optional_field("Return logprobs of prompt tokens and of this many likeliest ones.")
    logprob_token_ids: Listed[int] | None = optional_field(
        "With logprobs: return those of these tokens, in place of the most likely ones."
    )
    return_tokens_as_token_ids: bool | None = optional_field("Write tokens in logprobs as 'token_id:5'.")
    return_token_ids: bool | None = optional_field("Return the token ids of the prompt and of the output.")
    return_drafted: bool | None = optional_field("Return which tokens of the output were accepted drafts, by index.")
    echo: bool | None = optional_field(
        "Begin the output with the prompt; in chat, with the last message of the assistant."
    )
    cache_salt: Salt | None = optional_field(
        "Share cached tokens only with requests of the same salt (1 to 256 characters)."
    )

    def make_params(self, defaults: Mapping[str, object], **overrides: object) -> SamplingParams:
        """The SamplingParams of the body. Raises RequestError for an invalid value.

        defaults: for missing fields. overrides: take precedence unless None.
        """
        given = {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        constraint = self.constraint()
        if constraint is not None and self.use_beam_search:
            field = self.constraint_field()
            raise RequestError(f"{field} cannot be combined with use_beam_search; leave it out", field)
        chosen = {name: value for name, value in overrides.items() if value is not None}
        if self.prediction is not None:
            chosen["prediction"] = self.prediction.text
        if self.repetition_detection is not None:
            chosen["repetition_detection"] = self.repetition_detection.arguments()
        if chosen.get("max_tokens", given.get("max_tokens")) == NO_LIMIT:
            chosen["max_tokens"] = None
        if self.use_beam_search:  # except for the length, the model's recommendations are for sampling
            defaults = {"max_tokens": defaults.get("max_tokens")}
        params = SamplingParams(**{**defaults, **given, **chosen, "structured_outputs": constraint})
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream to be true", "stream_options")
        params = self.with_beam_search(params)
        if self.stream:
            params.check_streamable()
        return params

    @property
    def chunk_event(self) -> Callable[[dict[str, object]], bytes]:
        """Encodes a chunk with output as an event."""
        return padded_event if self.stream_options is not None and self.stream_options.include_obfuscation else event


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: Prompts = Field(description="A text, token ids, or a list of several of either.")
    logprobs: int | None = optional_field("Return logprobs, with this many of the most likely tokens (0 to 128).")
    add_special_tokens: bool | None = optional_field(
        "Let the tokenizer add begin and end tokens to a text; true by default."
    )
    suffix: Any = unsupported_field("")

    def sampling_params(self, defaults: Mapping[str, object]) -> SamplingParams:
        """The SamplingParams of the body. With echo, `logprobs` applies to prompt tokens, too. Raises RequestError."""
        echoed = self.logprobs if self.echo else None
        if echoed is not None and self.prompt_logprobs not in (None, echoed):
            raise RequestError("with echo, prompt_logprobs must equal logprobs or be left out", "prompt_logprobs")
        defaults = with_default_max_tokens(defaults, _COMPLETION_TOKENS)
        return self.make_params(defaults, logprobs=self.logprobs, prompt_logprobs=echoed)


class ChatBody(TemplateBody, SamplingBody):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: int | None = optional_field("As max_tokens, which it replaces.")
    logprobs: bool | None = optional_field("Return the logprob of each token.")
    top_logprobs: int | None = optional_field("Return also those of this many most likely tokens (0 to 128).")

    parallel_tool_calls: bool | None = optional_field("With tools: whether a message may have several calls; true.")
    include_reasoning: bool | None = optional_field("Return the reasoning; true by default.")
    separate_reasoning: bool | None = optional_field(
        "Return the reasoning apart from the content; true by default. False leaves its text and tags in the content."
    )
    thinking_token_budget: ThinkingBudget | None = optional_field("Most tokens of reasoning; then its end is forced.")
    modalities: Any = unsupported_field(["text"])
    audio: Any = unsupported_field()
    function_call: Any = unsupported_field("auto", "none")
    functions: Any = unsupported_field([])
    moderation: Any = unsupported_field()

    def engine_names(self) -> Mapping[str, str]:
        """The engine's names -> names in this body, for those that differ."""
        limit = {} if self.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
        top = {} if self.top_logprobs is None else {"logprobs": "top_logprobs"}
        names = {**self.beam_names(), **self.constraint_names()}
        return {"prompt": "messages", **self.other_names(), **top, **limit, **names}

    def sampling_params(self, defaults: Mapping[str, object]) -> SamplingParams:
        """The SamplingParams of the body. Without a limit the answer can fill the context. Raises RequestError."""
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs")
        if self.best_of not in (None, self.n or 1):
            raise RequestError("best_of other than n is supported only for completions; leave it out", "best_of")
        return self.make_params(
            {"max_tokens": None, **defaults},
            max_tokens=self.max_completion_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


Conversations = Annotated[
    list[Annotated[Messages, Field(min_length=1)]], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)
]


class ChatBatchBody(ChatBody):
    """POST /v1/chat/completions/batch: vLLM's route for several conversations with the same parameters."""

    messages: Conversations  # type: ignore[assignment]  # several, instead of one
    n: Any = unsupported_field(1)
    best_of: Any = unsupported_field(1)
    use_beam_search: Any = unsupported_field(False)  # noqa: FBT003 (a value of the field)
    stream: Any = unsupported_field(False)  # noqa: FBT003 (a value of the field)
