"""Request bodies of completions and chat: names, types and defaults. SamplingParams checks bounds."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from quire.errors import RequestError
from quire.params import SamplingParams
from quire.server.api.request_params import (
    Biases,
    Body,
    FormBody,
    Listed,
    Prompts,
    Salt,
    SearchBody,
    TermsBody,
    about,
    not_yet,
    unknown_field,
    with_limit,
    without_effect,
)
from quire.tokenizer.messages import MAX_MESSAGES


class ContentPart(BaseModel):
    """A part of a message. Only text is supported."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str
    text: str | None = None

    @model_validator(mode="after")
    def _know_all_fields_of_a_text(self) -> Self:
        for name in self.model_extra if self.text is not None and self.model_extra else ():
            raise unknown_field(name, type(self).model_fields)
        return self


class ChatMessage(Body):
    """One message of a conversation. Messages from responses of this server are accepted unchanged."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Listed[ContentPart] | None = None
    name: str | None = None
    tool_calls: Listed[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: Any = not_yet([])
    audio: Any = not_yet()
    function_call: Any = not_yet()


Messages = Annotated[list[ChatMessage], Field(fail_fast=True, max_length=MAX_MESSAGES)]


class TemplateBody(Body):
    """Fields for rendering a conversation with the chat template."""

    tools: Listed[dict[str, Any]] | None = about("Passed to the model's chat template.")
    documents: Listed[dict[str, Any]] | None = about("Passed to the model's chat template.")
    chat_template_kwargs: dict[str, Any] | None = about("Switches of the chat template, such as enable_thinking.")
    add_generation_prompt: bool | None = about("Begin the assistant's turn; true by default.")
    continue_final_message: bool | None = about("Go on with the last message in place of a new turn.")
    add_special_tokens: bool | None = about("Let the tokenizer add begin and end tokens; false by default.")
    tool_choice: Any = not_yet("auto", "none")
    reasoning_effort: str | None = about("Passed to the model's chat template.")
    chat_template: str | None = about("Name of one of the model's own templates.")


_PASSED_ON = (
    *("n", "best_of", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "deterministic"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words"),
    *("stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output"),
    *("skip_special_tokens", "spaces_between_special_tokens"),
    *("prompt_logprobs", "logprob_token_ids", "truncate_prompt_tokens"),
)
_COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens


class StreamOptions(Body):
    """Further content of a stream."""

    include_usage: bool | None = about("Send a last chunk with the usage.")
    continuous_usage_stats: bool | None = about("With include_usage: send the usage so far in every chunk.")
    include_obfuscation: bool | None = without_effect()


class SamplingBody(SearchBody, TermsBody, FormBody):
    """Fields of both completions and chat."""

    model: str | None = about("The served model; /v1/models lists it.")
    stream: bool | None = about("Send the output as server-sent events while it grows.")
    stream_options: StreamOptions | None = None
    n: int | None = about("Sequences to generate for each prompt (1 to 128).")
    max_tokens: int | None = about("Tokens to generate at most; 0 computes the prompt only.")
    min_tokens: int | None = about("No end before this many tokens.")
    temperature: float | None = about("0 is greedy; 1 by default.")
    top_p: float | None = about("Sample from the most likely tokens with this total.")
    top_k: int | None = about("Sample from this many tokens; 0 or -1: from all.")
    min_p: float | None = about("Least probability, as a share of the most likely one's.")
    seed: int | None = about("Same seed, same output.")
    deterministic: bool | None = about("The output does not depend on who shares a step, at some cost.")
    presence_penalty: float | None = about("Lowers the logits of tokens that are in the output (-2 to 2).")
    frequency_penalty: float | None = about("The same for each time they are (-2 to 2).")
    repetition_penalty: float | None = about("Divides the logits of tokens in the prompt or output; 1 is none.")
    logit_bias: Biases | None = about("Token id -> what is added to its logit (-100 to 100).")
    allowed_token_ids: Listed[int] | None = about("Nothing but these tokens.")
    bad_words: str | Listed[str] | None = about("Texts that may not come up.")
    stop: str | Listed[str] | None = about("Strings that end the output; not part of it.")
    stop_token_ids: Listed[int] | None = about("Tokens that end the output.")
    ignore_eos: bool | None = about("Go on after the model's end token.")
    include_stop_str_in_output: bool | None = about("What ended the output is part of it.")
    skip_special_tokens: bool | None = about("Special tokens are not text; true by default.")
    spaces_between_special_tokens: bool | None = about("Keep the spaces that a tokenizer puts there; true by default.")
    truncate_prompt_tokens: int | None = about("Keep that many tokens at the prompt's end; -1: as many as fit.")
    prompt_logprobs: int | None = about("Report the prompt's tokens, with this many of the most likely ones.")
    logprob_token_ids: Listed[int] | None = about("With logprobs: report these tokens, too.")
    return_tokens_as_token_ids: bool | None = about("Logprobs name tokens as 'token_id:5'.")
    return_token_ids: bool | None = about("Add the ids of the prompt and of the output.")
    echo: bool | None = about("Begin the output with the prompt; in chat, with the last message of the assistant.")
    cache_salt: Salt | None = about("Share cached tokens only with requests of the same salt (1 to 256 characters).")

    user: Any = without_effect()
    metadata: Any = without_effect()
    store: Any = without_effect()
    service_tier: Any = without_effect()
    prompt_cache_key: Any = without_effect()
    prompt_cache_options: Any = without_effect()
    prompt_cache_retention: Any = without_effect()
    safety_identifier: Any = without_effect()

    def make_params(self, defaults: Mapping[str, object], **overrides: object) -> SamplingParams:
        """The SamplingParams of the body. Raises RequestError for an invalid value.

        defaults: for missing fields. overrides: take precedence unless None.
        """
        given = {name: value for name in _PASSED_ON if (value := getattr(self, name)) is not None}
        form = self.form()
        if form is not None and self.use_beam_search:
            field = self.form_field()
            raise RequestError(f"{field} does not go with use_beam_search; leave it out", field)
        chosen = {name: value for name, value in overrides.items() if value is not None}
        if self.use_beam_search:  # except for the length, the model's recommendations are for sampling
            defaults = {"max_tokens": defaults.get("max_tokens")}
        params = SamplingParams(**{**defaults, **given, **chosen, "structured_outputs": form})
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream to be true", "stream_options")
        params = self.searched(params)
        if self.stream:
            params.check_streamable()
        return params


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: Prompts = Field(description="A text, token ids, or a list of several of either.")
    logprobs: int | None = about("Report each token, with this many of the most likely ones (0 to 20).")
    add_special_tokens: bool | None = about("Let the tokenizer add begin and end tokens to a text; true by default.")
    suffix: Any = not_yet("")

    def sampling_params(self, defaults: Mapping[str, object]) -> SamplingParams:
        """The SamplingParams of the body. With echo, `logprobs` applies to prompt tokens, too. Raises RequestError."""
        echoed = self.logprobs if self.echo else None
        if echoed is not None and self.prompt_logprobs not in (None, echoed):
            raise RequestError("with echo, prompt_logprobs must equal logprobs or be left out", "prompt_logprobs")
        defaults = with_limit(defaults, _COMPLETION_TOKENS)
        return self.make_params(defaults, logprobs=self.logprobs, prompt_logprobs=echoed)


class ChatBody(TemplateBody, SamplingBody):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: int | None = about("As max_tokens, which it replaces.")
    logprobs: bool | None = about("Report the logprob of each token.")
    top_logprobs: int | None = about("Report this many of the most likely ones (0 to 20).")

    parallel_tool_calls: Any = not_yet(True)  # noqa: FBT003 (a value of the field)
    modalities: Any = not_yet(["text"])
    audio: Any = not_yet()
    function_call: Any = not_yet("auto", "none")
    functions: Any = not_yet([])
    moderation: Any = not_yet()
    verbosity: Any = not_yet("medium")
    web_search_options: Any = not_yet()
    prediction: Any = without_effect()

    def engine_names(self) -> Mapping[str, str]:
        """The engine's names -> names in this body, for those that differ."""
        limit = {} if self.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
        top = {} if self.top_logprobs is None else {"logprobs": "top_logprobs"}
        return {"prompt": "messages", **top, **limit, **self.search_names(), **self.form_names()}

    def sampling_params(self, defaults: Mapping[str, object]) -> SamplingParams:
        """The SamplingParams of the body. Without a limit the answer can fill the context. Raises RequestError."""
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs")
        if self.best_of not in (None, self.n or 1):
            raise RequestError("best_of other than n is for completions; leave it out", "best_of")
        return self.make_params(
            {"max_tokens": None, **defaults},
            max_tokens=self.max_completion_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )
