"""Parameters of one request, with vLLM's names. Every value has bounds."""

import json as jsonlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Self

from quire.errors import RequestError, known_arguments_only

ConstraintKind = Literal["json", "regex", "choice", "grammar", "structural_tag"]

MAX_CHARACTERS = 131_072  # of a pattern, grammar or tag, and of all choices
MAX_SCHEMA = 524_288  # characters of a JSON schema
MAX_CHOICES = 4096
MAX_LITERAL = 4096  # characters of one choice, or of one text in a schema or a grammar
MAX_NESTING = 64  # of a schema or tag
MAX_WHITESPACE = 256  # characters of a whitespace pattern
MAX_TAG = 256  # characters of the begin or the end of reasoning
MAX_PATTERN = 1024  # tokens of a pattern whose repetition is detected, and repetitions of it
MAX_NGRAM = 64  # tokens
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@known_arguments_only(RequestError)
@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """A constraint: exactly one of json, regex, choice, grammar, json_object, structural_tag.

    json: a JSON schema as text or mapping. regex: a pattern that the whole output matches. choice: the possible
    outputs. grammar: Lark, or EBNF as in llama.cpp and xgrammar. json_object: any JSON object. structural_tag: text
    with constrained parts between tags. whitespace_pattern: whitespace allowed between the tokens of JSON.
    disable_any_whitespace: exactly one space after each comma and colon, as json.dumps writes. None: see `is_compact`.
    disable_additional_properties: objects have only the properties that their schema names.
    unknown_keywords: "ignore" or "refuse" keywords and formats that JSON schema does not have.
    fast_forward: forced tokens are appended without sampling.
    Raises RequestError for a value out of bounds. The schema, pattern or grammar itself is checked when it is compiled.
    """

    json: str | Mapping[str, object] | bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, object] | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool = False
    unknown_keywords: str = "ignore"
    whitespace_pattern: str | None = None
    fast_forward: bool = True

    def __post_init__(self) -> None:
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        if self.json is not None:
            object.__setattr__(self, "json", _as_json("json", self.json, MAX_SCHEMA))
        if self.structural_tag is not None:
            object.__setattr__(self, "structural_tag", _as_json("structural_tag", self.structural_tag, MAX_CHARACTERS))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            given_ones = " and ".join(given) or "none"
            raise RequestError(
                f"give one constraint (json, regex, choice, grammar, ...), not {given_ones}", "structured_outputs"
            )
        for name in ("disable_any_whitespace", "disable_additional_properties", "fast_forward", "json_object"):
            value = getattr(self, name)
            may_be_none = name in ("json_object", "disable_any_whitespace")
            if not isinstance(value, bool) and not (value is None and may_be_none):
                raise RequestError(f"{name} must be true or false", name)
        if self.unknown_keywords not in ("ignore", "refuse"):
            raise RequestError(
                f"unknown_keywords must be 'ignore' or 'refuse', not {self.unknown_keywords!r:.100}", "unknown_keywords"
            )
        for name in ("regex", "grammar"):
            _check_text(name, getattr(self, name), MAX_CHARACTERS)
        _check_text("whitespace_pattern", self.whitespace_pattern, MAX_WHITESPACE)

    @property
    def kind(self) -> ConstraintKind:
        """The kind of `text`. json_object counts as "json"."""
        if self.json_object:
            return "json"
        kinds: tuple[ConstraintKind, ...] = ("json", "regex", "choice", "grammar", "structural_tag")
        return next(name for name in kinds if getattr(self, name) is not None)

    @property
    def text(self) -> str:
        """The schema, pattern, grammar or tag; choices as a JSON list."""
        if self.json_object:
            return '{"type": "object"}'
        if self.choice is not None:
            return jsonlib.dumps(self.choice)
        text = getattr(self, self.kind)
        assert isinstance(text, str), "__post_init__ converts it to text"
        return text

    @property
    def is_compact(self) -> bool:
        """Whether JSON has one space after each comma and colon, and no other white space.

        Without `disable_any_whitespace` it has in outputs of a schema, unless there is a whitespace_pattern: separators
        without a choice are forced text. Any JSON object, and JSON within a grammar or a tag, has optional white space.
        """
        if self.disable_any_whitespace is not None:
            return self.disable_any_whitespace
        return self.json is not None and self.whitespace_pattern is None

    @property
    def identity(self) -> tuple[object, ...]:
        """All that a grammar of this constraint depends on."""
        asked = (self.kind, self.text, self.is_compact, self.disable_additional_properties)
        return (*asked, self.unknown_keywords, self.whitespace_pattern)


@known_arguments_only(RequestError)
@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningParams:
    """How a model writes its reasoning, which stands before the answer. The chat layers set it, no client does.

    begin, end: the texts around the reasoning. Each may be one special token or several tokens. begun: the prompt ends
    inside of the reasoning, so that the output begins there; `begin` may be empty then. If False, the output has
    reasoning only if its first text, apart from white space, is `begin`. budget: tokens of reasoning, not counting the
    tokens of `begin` and `end`, after which `end` is forced; None: no limit. answer_begin: text before a constrained
    answer, which is forced. may_end: whether an output with a constraint may end inside of the reasoning.
    Raises RequestError for a value out of bounds.
    """

    begin: str
    end: str
    begun: bool = False
    budget: int | None = None
    answer_begin: str = ""
    may_end: bool = False

    def __post_init__(self) -> None:
        for name, flag in (("begun", self.begun), ("may_end", self.may_end)):
            if not isinstance(flag, bool):
                raise RequestError(f"{name} must be true or false", "reasoning")
        for name, text in (("begin", self.begin), ("end", self.end), ("answer_begin", self.answer_begin)):
            if not isinstance(text, str) or len(text) > MAX_TAG or not is_unicode(text):
                raise RequestError(f"{name} must have at most {MAX_TAG} valid Unicode characters", "reasoning")
        if not self.end.strip():
            raise RequestError("end must have characters that are no white space", "reasoning")
        if self.begin[:1].isspace() or not (self.begin or self.begun):
            raise RequestError("begin must start with a character that is no white space", "reasoning")
        _check_number("budget", self.budget, int, 0, MAX_TOKENS, optional=True)


@known_arguments_only(RequestError)
@dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionDetectionParams:
    """vLLM's early end of an output that repeats itself.

    The output ends if its last tokens are the same pattern `min_count` times (2 to 1024), one directly behind another,
    for a pattern of `min_pattern_size` to `max_pattern_size` tokens (up to 1024). A min_pattern_size of 0 counts as 1.
    A max_pattern_size of 0 detects nothing.
    Raises RequestError for a value out of bounds.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        for name in ("max_pattern_size", "min_pattern_size", "min_count"):
            _check_number("repetition_detection", getattr(self, name), int, 0, MAX_PATTERN, label=name)
        if self.min_pattern_size > self.max_pattern_size:
            raise RequestError("min_pattern_size is above max_pattern_size", "repetition_detection")
        if self.max_pattern_size and self.min_count < 2:
            raise RequestError("min_count must be at least 2", "repetition_detection")


class Constraint(NamedTuple):
    """What a matcher enforces: `structured_outputs`, which apply behind the reasoning, and the reasoning's budget."""

    structured_outputs: StructuredOutputsParams | None
    reasoning: ReasoningParams | None = None

    @property
    def kind(self) -> str:
        """What an error message names."""
        return "reasoning" if self.structured_outputs is None else self.structured_outputs.kind

    @property
    def text(self) -> str:
        """The schema, pattern, grammar or tag, empty without one."""
        return "" if self.structured_outputs is None else self.structured_outputs.text

    @property
    def identity(self) -> tuple[object, ...]:
        """All that a grammar of this constraint depends on."""
        return (None if self.structured_outputs is None else self.structured_outputs.identity, self.reasoning)

    @property
    def fast_forward(self) -> bool:
        """Whether forced tokens are appended without sampling."""
        return self.structured_outputs is None or self.structured_outputs.fast_forward


def _as_json(name: str, value: object, most: int) -> str:
    """A schema or tag as JSON text of at most `most` characters.

    Raises RequestError if it is invalid, too long or nested too deeply.
    """
    if isinstance(value, str):
        _check_text(name, value, most)
        try:
            parsed = jsonlib.loads(value)
            _check_depth(name, parsed, most)
            check_unicode(name, jsonlib.dumps(parsed, ensure_ascii=False))
        except (ValueError, RecursionError) as error:
            if isinstance(error, RequestError):
                raise
            raise RequestError(f"{name} is not valid JSON: {error}", name) from error
        return value
    _check_depth(name, value, most)
    try:
        text = jsonlib.dumps(value, allow_nan=False)
        check_unicode(name, jsonlib.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"{name} cannot be written as JSON: {error}", name) from error
    _check_text(name, text, most)
    return text


def _check_depth(name: str, value: object, most: int) -> None:
    """Raises RequestError for a value that is nested too deeply, or that cannot be JSON of `most` characters.

    The loop is bounded: each item takes at least two characters of JSON.
    """
    level, items_left, text_left = [value], most // 2, most
    for _ in range(MAX_NESTING + 1):
        containers = [one for one in level if isinstance(one, (dict, list, tuple))]
        items_left -= sum(map(len, containers))
        text_left -= sum(len(one) for one in level if isinstance(one, str))
        if items_left < 0 or text_left < 0:
            raise RequestError(f"{name} must have 1 to {most:,} characters, and has more", name)
        level = [one for outer in containers for one in (outer.values() if isinstance(outer, dict) else outer)]
        if not level:
            return
    raise RequestError(f"{name} is nested more than {MAX_NESTING} levels deep", name)


def _choices(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        raise RequestError("choice must be a list of strings", "choice")
    if not 0 < len(value) <= MAX_CHOICES or not all(value):
        raise RequestError(f"choice must have 1 to {MAX_CHOICES} strings, none of them empty", "choice")
    for one in value:
        if len(one) > MAX_LITERAL:
            raise RequestError(f"one choice must have at most {MAX_LITERAL:,} characters, not {len(one):,}", "choice")
        check_unicode("choice", one)
    if sum(map(len, value)) > MAX_CHARACTERS:
        raise RequestError(f"choice must have at most {MAX_CHARACTERS:,} characters together", "choice")
    return tuple(dict.fromkeys(value))


def _check_text(name: str, text: object, most: int) -> None:
    if text is None:
        return
    if not isinstance(text, str):
        raise RequestError(f"{name} must be text, not {type(text).__name__}", name)
    if not 0 < len(text) <= most:
        raise RequestError(f"{name} must have 1 to {most:,} characters, not {len(text):,}", name)
    check_unicode(name, text)


def check_unicode(name: str, text: str) -> None:
    """Raises RequestError for text with an unpaired surrogate, which a JSON escape can produce."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} is not valid Unicode: an unpaired surrogate at {error.start}", name) from error


MAX_N = 128
MAX_LOGPROBS = 128
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024  # characters, of a stop string, a pattern that ends the output, or a bad word
MAX_STOP_PATTERNS = 8
MAX_TOKENS = 2**31 - 1
MAX_TEMPERATURE = 100.0
MAX_LISTED_TOKENS = 65536  # of logit_bias and allowed_token_ids
_MAX_NAMED = 8  # wrong keys that an error names
MAX_BAD_WORDS = 1024
MAX_BAD_CHARACTERS = 16384  # of all bad words
MAX_LOGPROB_IDS = 128
MAX_PREDICTION = 2**20  # characters
MAX_PROCESSORS = 64
MAX_BEAMS = 128
MAX_LENGTH_PENALTY = 10.0  # of either sign; length ** penalty stays finite


@known_arguments_only(RequestError)
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling, end conditions and requested logprobs of one request.

    Sequences: n are returned. best_of: number generated, of which the n with the highest mean logprob per token are
    returned; None means n.
    Sampling: temperature 0 is greedy. top_k: 0 or -1 keeps all tokens. seed: None means that a seed is derived from
    the engine's. presence_penalty and frequency_penalty apply to output tokens, repetition_penalty also to prompt
    tokens. no_repeat_ngram_size: no sequence of so many tokens occurs twice in prompt and output, unless it ends with
    an end token; 0: off. logit_bias: token id -> value added to its logit. bad_words: texts that are never generated.
    allowed_token_ids: None allows all. deterministic: the output does not depend on the rest of the batch, also in
    half precision, at some cost in speed. logits_processors: functions (output tokens, logits) -> logits, or with the
    prompt's tokens as first argument, that are called before each sampled token, in LLM only (docs/sampling.md).
    End: max_tokens: None means up to max_model_len; 0 computes the prompt only. min_tokens: least number of tokens
    before an end token, stop token or stop string ends the sequence. stop: strings, which are left out of the
    returned text unless include_stop_str_in_output is set. stop_regex: patterns, behind the first match of which the
    output ends. repetition_detection: RepetitionDetectionParams, or a mapping with its fields: ends an output that
    repeats itself.
    Constraint: structured_outputs: StructuredOutputsParams, or a mapping with its fields. json_schema, regex and ebnf
    are SGLang's names for some of these fields; they are moved to structured_outputs and set to None.
    Reasoning: reasoning: ReasoningParams, or a mapping with its fields, of a model that writes its reasoning before its
    answer. Structured outputs then apply to the answer alone.
    Logprobs: logprobs and prompt_logprobs: number of most likely tokens beside each token. prompt_logprobs_start: only
    prompt tokens after this position, so that the tokens before it may come from the prefix cache.
    logprob_token_ids: further tokens whose logprobs are returned.
    Prompt: truncate_prompt_tokens: number of tokens kept of the prompt; -1 means as many as fit. truncation_side:
    "left" drops tokens at the prompt's begin, "right" at its end.
    Speed: prediction: text that the output probably is, in whole or in part. speculation: whether tokens may be drafted
    and verified, if the engine does so. Neither changes a token.
    Raises RequestError for a value out of bounds and for an unknown name, with the nearest known one.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    deterministic: bool = False
    logits_processors: tuple[Any, ...] = ()
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    repetition_detection: RepetitionDetectionParams | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    logprob_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: str = "left"
    prediction: str | None = None
    speculation: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    reasoning: ReasoningParams | None = None
    json_schema: str | Mapping[str, object] | None = None
    regex: str | None = None
    ebnf: str | None = None

    def __post_init__(self) -> None:
        self._gather_constraint()
        for name, one in _LISTS.items():
            object.__setattr__(self, name, _as_tuple(name, one, getattr(self, name)))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _as_tuple("allowed_token_ids", int, self.allowed_token_ids))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        object.__setattr__(self, "repetition_detection", _as_repetition_detection(self.repetition_detection))
        self._gather_processors()
        for name, (kind, low, high) in NUMBERS.items():
            _check_number(name, getattr(self, name), kind, low, high, optional=name in _OPTIONAL)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false", name)
        self._check_relations()
        self._check_texts()
        self._check_tokens()

    @property
    def constraint(self) -> Constraint | None:
        """What a matcher enforces; None if it has nothing to do, as for reasoning without a budget alone."""
        has_budget = self.reasoning is not None and self.reasoning.budget is not None
        if self.structured_outputs is None and not has_budget:
            return None
        return Constraint(self.structured_outputs, self.reasoning)

    @property
    def has_constraint(self) -> bool:
        """Whether a matcher restricts the output."""
        return self.constraint is not None

    @property
    def num_sequences(self) -> int:
        """Number of sequences that are generated; the n best of them are returned."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_ranked(self) -> bool:
        """Whether more sequences are generated than returned."""
        return self.num_sequences > self.n

    @property
    def num_logprobs_needed(self) -> int | None:
        """`logprobs`, or 0 (sampled tokens only) if it is None and sequences have to be ranked."""
        return 0 if self.logprobs is None and self.is_ranked else self.logprobs

    def check_streamable(self) -> None:
        """Raises RequestError for ranked sequences, because which are returned is known only at the end."""
        if self.is_ranked:
            raise RequestError("best_of above n cannot be streamed: the best are known only at the end", "best_of")

    def resolved(self, max_tokens: int, seed: int) -> Self:
        """A copy with these values; min_tokens is at most max_tokens."""
        return self.changed(max_tokens=max_tokens, min_tokens=min(self.min_tokens, max_tokens), seed=seed)

    def changed(self, **values: object) -> Self:
        """A copy with other values, which are not checked: lists may be long, and every prompt has a copy."""
        params = object.__new__(type(self))  # `copy` takes twice as long
        for name in self.__slots__:
            object.__setattr__(params, name, values.pop(name) if name in values else getattr(self, name))
        if values:
            raise AttributeError(f"SamplingParams has no {', '.join(values)}")
        return params

    def _gather_constraint(self) -> None:
        """Move SGLang's fields to `structured_outputs`. Raises RequestError if two constraints are given."""
        constraint = _as_constraint(self.structured_outputs)
        for name, kind in _SGLANG_CONSTRAINT_FIELDS.items():
            value = getattr(self, name)
            if value is None:
                continue
            if constraint is not None:
                raise RequestError(f"{name} is another name for structured_outputs; give one constraint", name)
            constraint = _as_constraint({kind: value})
            object.__setattr__(self, name, None)
        object.__setattr__(self, "structured_outputs", constraint)
        object.__setattr__(self, "reasoning", _as_reasoning(self.reasoning))

    def _gather_processors(self) -> None:
        """A single processor as a list. Drafts would be verified without processors, so there are none."""
        given = () if self.logits_processors is None else self.logits_processors
        processors = tuple(given) if isinstance(given, list | tuple) else (given,)
        if len(processors) > MAX_PROCESSORS or not all(map(callable, processors)):
            why = f"logits_processors must be at most {MAX_PROCESSORS} functions"
            raise RequestError(why, "logits_processors")
        object.__setattr__(self, "logits_processors", processors)
        if processors:
            object.__setattr__(self, "speculation", False)

    def _check_relations(self) -> None:
        if self.top_p == 0:
            raise RequestError("top_p must be above 0; use temperature=0 for greedy sampling", "top_p")
        if self.repetition_penalty == 0:
            raise RequestError("repetition_penalty must be above 0; 1 means no penalty", "repetition_penalty")
        if self.truncation_side not in ("left", "right"):
            raise RequestError(
                f"truncation_side must be 'left' or 'right', not {self.truncation_side!r:.80}", "truncation_side"
            )
        if self.truncate_prompt_tokens == 0:
            raise RequestError("truncate_prompt_tokens must be -1 or at least 1", "truncate_prompt_tokens")
        if self.num_sequences < self.n:
            raise RequestError(f"best_of ({self.best_of}) must be at least n ({self.n})", "best_of")
        _check_span(self.min_tokens, self.max_tokens)
        if self.logprob_token_ids and self.logprobs is None:
            raise RequestError("logprob_token_ids needs logprobs, which may be 0", "logprob_token_ids")

    def _check_texts(self) -> None:
        if len(self.stop) > MAX_STOPS or len(self.stop_token_ids) > MAX_STOPS:
            raise RequestError(f"at most {MAX_STOPS} stop strings and stop_token_ids", "stop")
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise RequestError(f"at most {MAX_BAD_WORDS} bad_words", "bad_words")
        if len(self.stop_regex) > MAX_STOP_PATTERNS:
            raise RequestError(f"at most {MAX_STOP_PATTERNS} patterns of stop_regex", "stop_regex")
        for name, what in (("stop", "stop string"), ("stop_regex", "stop_regex"), ("bad_words", "bad word")):
            for text in getattr(self, name):
                if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_LENGTH or not is_unicode(text):
                    raise RequestError(f"a {what} must have 1 to {MAX_STOP_LENGTH} valid Unicode characters", name)
        if sum(map(len, self.bad_words)) > MAX_BAD_CHARACTERS:
            raise RequestError(f"bad_words must have at most {MAX_BAD_CHARACTERS} characters together", "bad_words")
        _check_text("prediction", self.prediction, MAX_PREDICTION)
        if self.prediction is not None and self.max_tokens == 0:
            raise RequestError("prediction needs max_tokens above 0; leave one of them out", "prediction")

    def _check_tokens(self) -> None:
        if self.allowed_token_ids is not None and not 0 < len(self.allowed_token_ids) <= MAX_LISTED_TOKENS:
            raise RequestError(f"allowed_token_ids must have 1 to {MAX_LISTED_TOKENS} tokens", "allowed_token_ids")
        if len(self.logprob_token_ids) > MAX_LOGPROB_IDS:
            raise RequestError(f"at most {MAX_LOGPROB_IDS} logprob_token_ids", "logprob_token_ids")
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            for token in getattr(self, name) or ():
                _check_number(name, token, int, 0, MAX_TOKENS, label=f"a token id in {name}")


_LISTS: Mapping[str, type] = MappingProxyType(
    {"stop": str, "stop_regex": str, "stop_token_ids": int, "bad_words": str, "logprob_token_ids": int}
)
_SGLANG_CONSTRAINT_FIELDS: Mapping[str, str] = MappingProxyType(
    {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}
)
_FLAGS = (
    *("ignore_eos", "deterministic", "include_stop_str_in_output"),
    *("skip_special_tokens", "spaces_between_special_tokens", "speculation"),
)
_OPTIONAL = ("best_of", "seed", "max_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens")
NUMBERS: Mapping[str, tuple[type[int] | type[float], float, float]] = MappingProxyType(  # bounds are allowed
    {
        "n": (int, 1, MAX_N),
        "best_of": (int, 1, MAX_N),
        "temperature": (float, 0, MAX_TEMPERATURE),
        "top_p": (float, 0, 1),
        "top_k": (int, -1, MAX_TOKENS),
        "min_p": (float, 0, 1),
        "seed": (int, -(2**63), 2**64 - 1),
        "presence_penalty": (float, -2, 2),
        "frequency_penalty": (float, -2, 2),
        "repetition_penalty": (float, 0, 100),
        "no_repeat_ngram_size": (int, 0, MAX_NGRAM),
        "max_tokens": (int, 0, MAX_TOKENS),
        "min_tokens": (int, 0, MAX_TOKENS),
        "logprobs": (int, 0, MAX_LOGPROBS),
        "prompt_logprobs": (int, 0, MAX_LOGPROBS),
        "prompt_logprobs_start": (int, 0, MAX_TOKENS),
        "truncate_prompt_tokens": (int, -1, MAX_TOKENS),
    }
)


@known_arguments_only(RequestError)
@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Beam search for the most likely sequences, instead of sampling.

    beam_width: number of beams, and of returned sequences. max_tokens: None means up to max_model_len.
    length_penalty: finished sequences are ranked by sum of logprobs / length ** length_penalty, where length counts
    generated tokens with the end token; above 0 favours long sequences. early_stopping: True ends the search when
    beam_width sequences have finished; False when no live beam scores better now; "never" when none could become
    better. min_tokens: least number of tokens before an end token. include_stop_str_in_output: the text includes the
    end token. temperature: only 0 is allowed.
    Raises RequestError for a value out of bounds and for an unknown name, with the nearest known one.
    """

    beam_width: int
    max_tokens: int | None
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    min_tokens: int = 0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        _check_number("beam_width", self.beam_width, int, 1, MAX_BEAMS)
        _check_number("max_tokens", self.max_tokens, int, 1, MAX_TOKENS, optional=True)
        _check_number("min_tokens", self.min_tokens, int, 0, MAX_TOKENS)
        _check_number("length_penalty", self.length_penalty, float, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        _check_number("temperature", self.temperature, float, 0, MAX_TEMPERATURE)
        if self.temperature != 0:
            raise RequestError("a beam search does not sample: temperature must be 0, or left out", "temperature")
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false", name)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise RequestError("early_stopping must be true, false or 'never'", "early_stopping")
        _check_span(self.min_tokens, self.max_tokens)

    def sampling_params(self, **others: object) -> SamplingParams:
        """The SamplingParams of a request with this search. others: further fields of SamplingParams, such as n."""
        asked: dict[str, object] = {
            "n": self.beam_width,
            "temperature": 0.0,
            "max_tokens": self.max_tokens,
            "min_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
            "include_stop_str_in_output": self.include_stop_str_in_output,
        }
        return SamplingParams(**{**asked, **others})  # type: ignore[arg-type]  # checked by name when called


def _check_span(min_tokens: int, max_tokens: int | None) -> None:
    if max_tokens is not None and min_tokens > max_tokens:
        raise RequestError(f"min_tokens ({min_tokens}) is above max_tokens ({max_tokens})", "min_tokens")


def _as_tuple(name: str, one: type, value: object) -> tuple[object, ...]:
    """A list as a tuple. A single item counts as a list of one; None as an empty list."""
    items = () if value is None else (value,) if isinstance(value, one) else value
    if not isinstance(items, list | tuple):
        raise RequestError(f"{name} must be a list, not {type(value).__name__}", name)
    return tuple(items)


def _as_constraint(value: object) -> StructuredOutputsParams | None:
    """StructuredOutputsParams from the same, or from a mapping with its fields. Raises RequestError for other types."""
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise RequestError("structured_outputs must be StructuredOutputsParams or a mapping", "structured_outputs")
    return StructuredOutputsParams(**value)


def _as_reasoning(value: object) -> ReasoningParams | None:
    """ReasoningParams from the same, or from a mapping with its fields. Raises RequestError for other types."""
    if value is None or isinstance(value, ReasoningParams):
        return value
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise RequestError("reasoning must be ReasoningParams or a mapping", "reasoning")
    return ReasoningParams(**value)


def _as_repetition_detection(value: object) -> RepetitionDetectionParams | None:
    """RepetitionDetectionParams from the same, or from a mapping with its fields; None if they detect nothing.

    Raises RequestError for other types.
    """
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        value = RepetitionDetectionParams(**value)
    if value is None or (isinstance(value, RepetitionDetectionParams) and not value.max_pattern_size):
        return None
    if not isinstance(value, RepetitionDetectionParams):
        why = "repetition_detection must be RepetitionDetectionParams or a mapping"
        raise RequestError(why, "repetition_detection")
    return value


def _biases(value: object) -> dict[int, float]:
    """Token ids, which are strings in JSON, to biases. Raises RequestError."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or len(value) > MAX_LISTED_TOKENS:
        raise RequestError(f"logit_bias must map at most {MAX_LISTED_TOKENS} token ids to numbers", "logit_bias")
    biases: dict[int, float] = {}
    wrong = []
    for key, bias in value.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 11 else key
        if isinstance(token, int) and not isinstance(token, bool):
            _check_number("logit_bias", token, int, 0, MAX_TOKENS, label="a token id in logit_bias")
            _check_number("logit_bias", bias, float, -100, 100, label=f"the bias of {token} in logit_bias")
            biases[token] = float(bias)
        else:
            wrong.append(key)
    if wrong:
        shown = ", ".join(f"{key!r:.80}" for key in wrong[:_MAX_NAMED])
        more = f" and {len(wrong) - _MAX_NAMED} more" if len(wrong) > _MAX_NAMED else ""
        raise RequestError(f"token ids in logit_bias must be integers, not {shown}{more}", "logit_bias")
    return biases


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded as UTF-8, which needs that it has no unpaired surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_number(
    name: str,
    value: object,
    kind: type[int] | type[float],
    low: float,
    high: float,
    *,
    optional: bool = False,
    label: str = "",
) -> None:
    """Raises RequestError for a wrong type or a value out of bounds. label: name of the value in messages."""
    if value is None and optional:
        return
    allowed = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed):
        what = "an integer" if kind is int else "a number"
        raise RequestError(f"{label or name} must be {what}, not {value!r:.80}", name)
    if not low <= value <= high:  # also rejects NaN
        bounds = f"{int(low):,} and {int(high):,}"  # all bounds are whole numbers
        raise RequestError(f"{label or name} must be between {bounds}, not {value!r:.80}", name)


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A LoRA adapter for offline use, with vLLM's names.

    lora_name: for messages. lora_int_id: has no effect, as an adapter is known by its content. lora_path: its folder.
    load_inplace: the folder is read again, because its files have changed. base_model_name: has no effect.
    Raises RequestError for an empty name or path.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str | PathLike[str] = ""
    load_inplace: bool = False
    base_model_name: str | None = None

    def __post_init__(self) -> None:
        for name, kinds in (("lora_name", str), ("lora_path", str | PathLike)):
            value = getattr(self, name)
            if not isinstance(value, kinds) or not str(value):
                raise RequestError(f"{name} must be a text that is not empty", name)
