"""Request body of SGLang's /generate: names, types, defaults."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from quire.errors import RequestError
from quire.params import SamplingParams, StructuredOutputsParams
from quire.server.api.tgi.schema import TgiBody, TgiParameters
from quire.server.request_params import (
    Biases,
    Body,
    Listed,
    PerPrompt,
    RepetitionDetection,
    Salt,
    SchedulingParamsBody,
    Schema,
    Tag,
    TokenIds,
    optional_field,
    several_constraints,
    unsupported_field,
    with_default_max_tokens,
)

ROUTE_NAMES = MappingProxyType(  # the engine's name -> the route's, for error messages
    {
        "prompt": "text",
        "max_tokens": "max_new_tokens",
        "min_tokens": "min_new_tokens",
        "seed": "sampling_seed",
        "include_stop_str_in_output": "no_stop_trim",
        "logprobs": "top_logprobs_num",
        "prompt_logprobs": "top_logprobs_num",
        "logprob_token_ids": "token_ids_logprob",
        "json": "json_schema",
        "grammar": "ebnf",
    }
)
_CONSTRAINTS = MappingProxyType(  # the route's name -> the name in StructuredOutputsParams
    {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}
)
_OUTPUT_TOKENS = 128  # SGLang's default of max_new_tokens


class GenerateParams(Body):
    """`sampling_params` of /generate."""

    place: ClassVar[str | None] = "sampling_params"

    n: int | None = optional_field("Sequences to generate for each prompt.")
    max_new_tokens: int | None = optional_field("Tokens to generate at most; 128 by default.")
    min_new_tokens: int | None = optional_field("Least number of tokens before the output may end.")
    temperature: float | None = optional_field("0 is greedy; 1 by default.")
    top_p: float | None = optional_field("Sample from the most likely tokens with this total probability.")
    top_k: int | None = optional_field("Sample from this many tokens; -1: from all.")
    min_p: float | None = optional_field("Least probability, relative to that of the most likely token.")
    frequency_penalty: float | None = optional_field("Lowers the logits of tokens each time they are in the output.")
    presence_penalty: float | None = optional_field("Lowers the logits of tokens that are in the output.")
    repetition_penalty: float | None = optional_field(
        "Divides the logits of tokens in the prompt or output; 1 is none."
    )
    no_repeat_ngram_size: int | None = optional_field(
        "No sequence of so many tokens occurs twice in prompt and output (1 to 64); 0: off."
    )
    logit_bias: Biases | None = optional_field("Token id -> value added to its logit.")
    sampling_seed: int | None = optional_field("Same seed, same output.")
    stop: str | Listed[str] | None = optional_field("Strings that end the output; not part of it.")
    stop_regex: str | Listed[str] | None = optional_field("Patterns; the output ends behind the first match of one.")
    stop_token_ids: Listed[int] | None = optional_field("Tokens that end the output.")
    repetition_detection: RepetitionDetection | None = optional_field("End an output that repeats itself.")
    ignore_eos: bool | None = optional_field("Continue after the model's end token.")
    no_stop_trim: bool | None = optional_field("Include the stop string or token that ended the output.")
    skip_special_tokens: bool | None = optional_field("Leave special tokens out of the text; true by default.")
    spaces_between_special_tokens: bool | None = optional_field(
        "Keep the tokenizer's spaces between special tokens; true by default."
    )
    speculation: bool | None = optional_field("Draft and verify tokens, which changes none of them; true by default.")
    prediction: str | None = optional_field("Text that the output probably is, in whole or in part.")
    json_schema: Schema | None = optional_field("The output is JSON that this schema allows.")
    regex: str | None = optional_field("The output matches this pattern.")
    ebnf: str | None = optional_field("The output is what this grammar allows, as EBNF or Lark.")
    structural_tag: Tag | None = optional_field("The output is text with constrained parts between tags.")

    def make_params(self, defaults: Mapping[str, object], **report: object) -> SamplingParams:
        """The SamplingParams, with `defaults` for missing fields. report: further arguments. Raises RequestError."""
        theirs = {theirs: ours for ours, theirs in ROUTE_NAMES.items()}
        given = {
            theirs.get(name, name): value
            for name in self.model_fields_set
            if name not in _CONSTRAINTS and (value := getattr(self, name)) is not None
        }
        given["structured_outputs"] = self._constraint()
        if self.repetition_detection is not None:
            given["repetition_detection"] = self.repetition_detection.arguments()
        return SamplingParams(**{**with_default_max_tokens(defaults, _OUTPUT_TOKENS), **given, **report})

    def _constraint(self) -> StructuredOutputsParams | None:
        constraints = {name: value for name in _CONSTRAINTS if (value := getattr(self, name)) is not None}
        if len(constraints) > 1:
            raise several_constraints(list(constraints))
        return (
            StructuredOutputsParams(**{_CONSTRAINTS[name]: value for name, value in constraints.items()})
            if constraints
            else None
        )


class GenerateBody(SchedulingParamsBody):
    """POST /generate. Fields that are lists have one entry per prompt. With `inputs` it is TGI's request."""

    inputs: str | None = optional_field("TGI's name of text: the answer has TGI's form.")
    parameters: TgiParameters | None = optional_field("With inputs: sampling, length and end of the output.")
    text: str | PerPrompt[str] | None = optional_field("A prompt, or several.")
    input_ids: TokenIds | PerPrompt[TokenIds] | None = optional_field("The same as token ids, instead of text.")
    sampling_params: GenerateParams | PerPrompt[GenerateParams] | None = None
    stream: bool | None = optional_field("Send server-sent events, each with the whole output so far.")
    tools: Listed[dict[str, Any]] | None = optional_field(
        "Functions that the model may call, as in chat; meta_info has the tool_calls of the text."
    )
    tool_choice: str | dict[str, Any] | None = optional_field("With tools: as in chat.")
    return_logprob: bool | PerPrompt[bool] | None = optional_field("Return the logprob of each token.")
    logprob_start_len: int | PerPrompt[int] | None = optional_field(
        "Return also those of prompt tokens from this position on; -1, the default: none."
    )
    top_logprobs_num: int | PerPrompt[int] | None = optional_field("With each, this many of the most likely tokens.")
    token_ids_logprob: Listed[int] | PerPrompt[Listed[int]] | None = optional_field(
        "With each output token, these tokens."
    )
    return_text_in_logprobs: bool | None = optional_field("Write the text of tokens in logprobs, instead of null.")
    rid: str | PerPrompt[str] | None = optional_field("The id of the response.")
    cache_salt: Salt | None = optional_field(
        "Share cached tokens only with requests of the same salt (1 to 256 characters)."
    )
    extra_key: Salt | None = optional_field("Another name for cache_salt.")
    input_embeds: Any = unsupported_field()
    lora_path: str | PerPrompt[str | None] | None = optional_field(
        "The name of an adapter, or one for each prompt; null: the model alone."
    )

    def as_tgi(self) -> TgiBody:
        """The request in TGI's form. Raises RequestError for a field that this form does not have."""
        if self.inputs is None:
            raise RequestError("parameters is a field of TGI's form; give inputs, or sampling_params", "parameters")
        given = {name: value for name in self.model_fields_set if (value := getattr(self, name)) is not None}
        for name in given.keys() - TgiBody.model_fields.keys():
            raise RequestError(f"{name} is no field of TGI's form, which inputs begins; leave it out", name)
        return TgiBody.model_construct(**given)

    def salt(self) -> str | None:
        """The salt of the namespace, from either field. Raises RequestError if they differ."""
        if None not in (self.cache_salt, self.extra_key) and self.cache_salt != self.extra_key:
            raise RequestError("extra_key is another name for cache_salt; give one of them", "extra_key")
        return self.cache_salt or self.extra_key
