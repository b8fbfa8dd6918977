"""Request bodies of Text Generation Inference's routes: names, types and defaults."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from quire.errors import RequestError
from quire.params import SamplingParams, StructuredOutputsParams
from quire.server.request_params import Body, Listed, Salt, SchedulingParamsBody, optional_field

_NAMES = MappingProxyType(  # of parameters -> in SamplingParams, for those that differ
    {"max_new_tokens": "max_tokens", "truncate": "truncate_prompt_tokens"}
)
_SAME = ("temperature", "repetition_penalty", "frequency_penalty", "top_k", "top_p", "stop", "seed", "best_of")
_SAMPLING = ("temperature", "top_k", "top_p")  # that make TGI sample, also without do_sample
_OUTPUT_TOKENS = 100  # TGI's default of max_new_tokens
ENGINE_NAMES = MappingProxyType(  # the engine's names -> those of these routes, for error messages
    {
        **{ours: f"parameters.{theirs}" for theirs, ours in _NAMES.items()},
        **{name: f"parameters.{name}" for name in _SAME},
        **{name: "parameters.grammar" for name in ("json", "regex", "structured_outputs")},
        **{"prompt": "inputs", "logprobs": "parameters.top_n_tokens"},
    }
)


class Grammar(Body):
    """`grammar` of the parameters: a constraint on the output."""

    type: Literal["json", "regex", "json_schema"]
    value: Any = Field(description="A JSON schema, or a pattern. With json_schema: an object with the schema.")

    def constraint(self) -> StructuredOutputsParams:
        """The constraint. Raises RequestError."""
        value = self.value.get("schema") if self.type == "json_schema" and isinstance(self.value, dict) else self.value
        if self.type == "regex":
            if not isinstance(value, str):
                raise RequestError("a grammar of type regex needs a pattern as its value", "parameters.grammar")
            return StructuredOutputsParams(regex=value)
        if not isinstance(value, str | bool | dict):
            raise RequestError("the value of a grammar must be a JSON schema", "parameters.grammar")
        return StructuredOutputsParams(json=value)


class TgiParameters(Body):
    """`parameters` of a request."""

    place: ClassVar[str | None] = "parameters"

    max_new_tokens: int | None = optional_field("Tokens to generate at most; 100 by default.")
    do_sample: bool | None = optional_field("Sample; false, the default, is greedy unless a field below is set.")
    temperature: float | None = optional_field("Temperature of sampling.")
    top_k: int | None = optional_field("Sample from this many tokens.")
    top_p: float | None = optional_field("Sample from the most likely tokens with this total probability.")
    repetition_penalty: float | None = optional_field("Divides the logits of tokens in the prompt or output.")
    frequency_penalty: float | None = optional_field("Lowers the logits of tokens each time they are in the output.")
    seed: int | None = optional_field("Same seed, same output.")
    stop: Listed[str] | None = optional_field("Strings that end the output, and are part of it.")
    best_of: int | None = optional_field("Generate this many sequences, and return the most likely one.")
    truncate: int | None = optional_field("Keep this many tokens of the prompt, the last ones.")
    return_full_text: bool | None = optional_field("Begin the text with the prompt; false by default.")
    grammar: Grammar | None = optional_field("The constraint on the output.")
    details: bool | None = optional_field("Return the tokens, and why the output ended.")
    decoder_input_details: bool | None = optional_field("With details: return the tokens of the prompt, too.")
    top_n_tokens: Annotated[int, Field(ge=0)] | None = optional_field(
        "With details: return this many most likely tokens at each place."
    )
    adapter_id: str | None = optional_field("The name of an adapter.")

    def sampling_params(self, defaults: Mapping[str, object], *, with_tokens: bool) -> SamplingParams:
        """The SamplingParams. with_tokens: whether the answer has logprobs of tokens. Raises RequestError."""
        given = {
            _NAMES.get(name, name): value for name in (*_NAMES, *_SAME) if (value := getattr(self, name)) is not None
        }
        samples = self.do_sample or any(getattr(self, name) is not None for name in _SAMPLING)
        if self.decoder_input_details and not self.details:
            raise RequestError("decoder_input_details needs details to be true", "parameters.decoder_input_details")
        fields = {
            **{"max_tokens": _OUTPUT_TOKENS, "include_stop_str_in_output": True},
            **({"temperature": 1.0} if samples else {"temperature": 0.0}),
            **({name: value for name, value in defaults.items() if name in _SAMPLING} if samples else {}),
            **given,
            "logprobs": (self.top_n_tokens or 0) if with_tokens else None,
            "prompt_logprobs": 0 if self.decoder_input_details else None,
            "structured_outputs": None if self.grammar is None else self.grammar.constraint(),
        }
        return SamplingParams(**fields)


class TgiBody(SchedulingParamsBody):
    """POST / and /generate_stream."""

    inputs: str = Field(description="The prompt.")
    parameters: TgiParameters | None = optional_field("Sampling, length and end of the output.")
    stream: bool | None = optional_field("Of the route /: send the output as server-sent events.")
    model: str | None = optional_field("The served model; /v1/models lists it.")
    cache_salt: Salt | None = optional_field(
        "Share cached tokens only with requests of the same salt (1 to 256 characters)."
    )
