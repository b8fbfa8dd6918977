"""Request bodies of Ollama's routes: names, types and defaults."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from quire.errors import RequestError
from quire.params import SamplingParams, StructuredOutputsParams
from quire.server.api.conversation import reasoning_variables
from quire.server.api.pooling import SaltedBody
from quire.server.request_params import (
    Body,
    Listed,
    PerPrompt,
    RequestBody,
    ignored_field,
    optional_field,
    unsupported_field,
)
from quire.tokenizer.messages import MAX_MESSAGES

_NAMES = MappingProxyType(  # of options -> in SamplingParams, for those that differ
    {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
)
ENGINE_NAMES = MappingProxyType(  # the engine's names -> those of these routes, for error messages
    {
        **{ours: f"options.{theirs}" for theirs, ours in _NAMES.items()},
        **{name: f"options.{name}" for name in ("temperature", "top_p", "top_k", "min_p", "seed", "stop")},
        **{name: f"options.{name}" for name in ("presence_penalty", "frequency_penalty")},
        **{"json": "format", "json_object": "format", "structured_outputs": "format", "reasoning": "think"},
        "logprobs": "top_logprobs",
    }
)


class OllamaOptions(Body):
    """`options` of a request. Those of Ollama's runner, such as num_gpu, have no effect."""

    place: ClassVar[str | None] = "options"

    num_predict: int | None = optional_field("Tokens to generate at most; below 0: the rest of the context.")
    temperature: float | None = optional_field("0 is greedy.")
    top_k: int | None = optional_field("Sample from this many tokens; 0 or -1: from all.")
    top_p: float | None = optional_field("Sample from the most likely tokens with this total probability.")
    min_p: float | None = optional_field("Least probability, relative to that of the most likely token.")
    seed: int | None = optional_field("Same seed, same output.")
    repeat_penalty: float | None = optional_field("Divides the logits of tokens in the prompt or output; 1 is none.")
    repeat_last_n: int | None = optional_field("0 turns repeat_penalty off; other values have no effect.")
    presence_penalty: float | None = optional_field("Lowers the logits of tokens that are in the output.")
    frequency_penalty: float | None = optional_field("Lowers the logits of tokens each time they are in the output.")
    stop: str | Listed[str] | None = optional_field("Strings that end the output; not part of it.")

    def sampling_fields(self) -> dict[str, object]:
        """Arguments of SamplingParams."""
        names = ("num_predict", "temperature", "top_k", "top_p", "min_p", "seed", "repeat_penalty", "stop")
        given = {name: getattr(self, name) for name in (*names, "presence_penalty", "frequency_penalty")}
        fields = {_NAMES.get(name, name): value for name, value in given.items() if value is not None}
        if self.num_predict is not None and self.num_predict < 0:
            fields["max_tokens"] = None
        if self.repeat_last_n == 0:
            fields["repetition_penalty"] = 1.0
        return fields


class OllamaBody(SaltedBody):
    """Fields that all of these routes with a body share."""

    model: str | None = optional_field("The served model; /api/tags lists its names. The tag :latest may be added.")
    keep_alive: Any = optional_field("0 without a prompt or messages: the answer says that the model is unloaded.")


class GenerationBody(OllamaBody):
    """Fields of both chat and generate."""

    options: OllamaOptions | None = optional_field("Sampling, length and end of the output.")
    stream: bool | None = optional_field("Send the output as lines of JSON while it is generated; true by default.")
    format: str | dict[str, Any] | None = optional_field('The output is JSON: "json", or a JSON schema.')
    think: bool | Literal["low", "medium", "high"] | None = optional_field(
        "Whether the model reasons, and how much; by default as its chat template says."
    )
    logprobs: bool | None = optional_field("Return the logprob of each token.")
    top_logprobs: int | None = optional_field("Return also those of this many most likely tokens.")

    @property
    def variables(self) -> dict[str, object]:
        """Variables of the chat template."""
        if isinstance(self.think, str):
            return reasoning_variables(self.think)
        return reasoning_variables(None, enabled=self.think)

    def sampling_params(self, defaults: Mapping[str, object]) -> SamplingParams:
        """The SamplingParams. Without a limit the answer can fill the context. Raises RequestError."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs")
        given = {} if self.options is None else self.options.sampling_fields()
        asked = {
            "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
            "structured_outputs": self._constraint(),
        }
        return SamplingParams(**{"max_tokens": None, **defaults, **given, **asked})  # type: ignore[arg-type]  # by name

    def _constraint(self) -> StructuredOutputsParams | None:
        if not self.format:
            return None
        if isinstance(self.format, dict):
            return StructuredOutputsParams(json=self.format)
        if self.format != "json":
            raise RequestError(f'format must be "json" or a JSON schema, not {self.format!r:.80}', "format")
        return StructuredOutputsParams(json_object=True)


class OllamaMessage(Body):
    """One message of a conversation. Further fields go to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Any = unsupported_field([])
    tool_calls: Listed[dict[str, Any]] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatBody(GenerationBody):
    """POST /api/chat."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True, max_length=MAX_MESSAGES)] | None = optional_field(
        "The conversation. Without one, nothing is generated."
    )
    tools: Listed[dict[str, Any]] | None = optional_field("Tools that the model may call.")


class OllamaGenerateBody(GenerationBody):
    """POST /api/generate."""

    prompt: str | None = optional_field("The message of a user. Without one, nothing is generated.")
    system: str | None = optional_field("Instructions, in front of the prompt.")
    raw: bool | None = optional_field("Continue the prompt as it is, without the chat template.")
    suffix: Any = unsupported_field("")
    images: Any = unsupported_field([])
    template: Any = unsupported_field("")
    context: Any = unsupported_field([])
    width: Any = unsupported_field(0)
    height: Any = unsupported_field(0)
    steps: Any = unsupported_field(0)


class OllamaEmbedBody(OllamaBody):
    """POST /api/embed."""

    input: str | PerPrompt[str] = Field(description="A text, or several.")
    truncate: bool | None = optional_field("Keep the begin of a text that is too long; true by default.")
    dimensions: int | None = optional_field("Keep this many numbers of each vector, where the model's files allow it.")


class OllamaEmbeddingsBody(OllamaBody):
    """POST /api/embeddings."""

    prompt: str = Field(description="A text.")


class PullBody(RequestBody):
    """POST /api/pull."""

    model: str | None = optional_field("The served model; /api/tags lists its names.")
    name: str | None = optional_field("Former name of model.")
    stream: bool | None = optional_field("Send the status as lines of JSON; true by default.")
    insecure: Any = ignored_field()


class ShowBody(RequestBody):
    """POST /api/show."""

    model: str | None = optional_field("The served model; also without the tag :latest.")
    name: str | None = optional_field("Former name of model.")
    verbose: Any = ignored_field()
    system: Any = unsupported_field("")
    template: Any = unsupported_field("")
    options: Any = unsupported_field({})
