"""Request body fields that several routes share."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    JsonValue,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from quire.config import EngineOptions
from quire.core.request import Beams
from quire.core.scheduling_params import Retention, SchedulingParams
from quire.engine.inputs import make_scheduling_params
from quire.errors import RequestError, nearest
from quire.params import MAX_CHOICES, MAX_LISTED_TOKENS, BeamSearchParams, SamplingParams, StructuredOutputsParams
from quire.scheduler.beam_search import plan_beams
from quire.server.errors import renamed_fields
from quire.server.known_fields import Split, described, is_same, split

NEUTRAL = "x-neutral-values"


def unsupported_field(*neutral: JsonValue) -> Any:  # noqa: ANN401 (a field of any type)
    """A field that is not supported yet. It accepts null and the `neutral` values, which change nothing."""
    named = ", ".join(["null", *(f"{value!r}" for value in neutral)])
    return Field(
        default=None,
        description=f"Not supported yet; accepted with a value that has no effect ({named}).",
        json_schema_extra={NEUTRAL: list(neutral)},
    )


def ignored_field() -> Any:  # noqa: ANN401 (a field of any type)
    """A field that is accepted and ignored."""
    return Field(default=None, description="Accepted; it has no effect.")


def optional_field(description: str, alias: str | None = None) -> Any:  # noqa: ANN401 (a field of any type)
    """An optional field. alias: its name in the body if Python or pydantic reserves that name."""
    return Field(default=None, description=description, alias=alias)


class Body(BaseModel):
    """A JSON object that rejects unknown fields. An unknown field that is null counts as absent.

    place: of the table of known fields. The names of those without effect are added to the list that is the context of
    the validation.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    place: ClassVar[str | None] = None
    _neutral: ClassVar[Mapping[str, list[JsonValue]]] = {}  # by field that is not supported yet
    _field_names: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **_options: object) -> None:
        """Called by pydantic. Reading `model_fields` is slow, and a body can have thousands of messages."""
        extras = {name: field.json_schema_extra for name, field in cls.model_fields.items()}
        cls._neutral = {
            name: extra[NEUTRAL]  # type: ignore[misc]  # a list, see not_yet
            for name, extra in extras.items()
            if isinstance(extra, dict) and NEUTRAL in extra
        }
        cls._field_names = frozenset(field.alias or name for name, field in cls.model_fields.items())

    @model_validator(mode="wrap")
    @classmethod
    def _check_unknown_fields(
        cls, body: object, validate: ModelWrapValidatorHandler[Self], info: ValidationInfo[list[str] | None]
    ) -> Self:
        if not isinstance(body, dict) or cls.model_config["extra"] == "allow" or body.keys() <= cls._field_names:
            return validate(body)
        found = split(cls.place, body, cls._field_names)
        if info.context is not None:
            info.context.extend(found.ignored)
        return cls._from(found, validate)

    @classmethod
    def _from(cls, found: Split, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """The body from its own fields. Raises PydanticCustomError if there are unknown ones."""
        for name in found.unknown:
            raise unknown_field(name, cls._field_names)
        return validate(found.own)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The JSON schema, with the fields of the table."""
        found = handler(schema)
        properties = handler.resolve_ref_schema(found).setdefault("properties", {})
        for name, description, accepted in described(cls.place, cls._field_names):
            values = {} if accepted is None else {NEUTRAL: list(accepted)}
            properties.setdefault(name, {"description": description, **values})
        return found

    @model_validator(mode="after")
    def _reject_unsupported_values(self) -> Self:
        for name in self._neutral.keys() & self.model_fields_set:
            value = getattr(self, name)
            if value is not None and not any(is_same(value, neutral) for neutral in self._neutral[name]):
                raise PydanticCustomError("not_supported", "{name} is not supported yet", {"name": name})
        return self


class RequestBody(Body):
    """The body of a request. Its own unknown fields are set aside, for the server to refuse or to ignore.

    If a required field is missing, an unknown one is refused at once: it is probably the misspelled name.
    """

    place: ClassVar[str | None] = ""
    _unknown: list[Any] = PrivateAttr(default_factory=list)
    _renamed: dict[str, str] = PrivateAttr(default_factory=dict)

    @classmethod
    def _from(cls, found: Split, validate: ModelWrapValidatorHandler[Self]) -> Self:
        unknown = found.unknown
        try:
            body = validate(found.own)
        except ValidationError as error:
            if unknown and any(problem["type"] == "missing" for problem in error.errors(include_input=False)):
                raise unknown_field(unknown[0], cls._field_names) from None
            raise
        body._unknown, body._renamed = unknown, found.renamed
        return body

    def other_names(self) -> Mapping[str, str]:
        """The engine's names -> those of other servers, for the fields that are set under such a name."""
        return self._renamed

    @property
    def unknown_fields(self) -> Sequence[Any]:
        """Names of the fields that the route does not have, except those that are null."""
        return self._unknown

    def refuse_unknown_fields(self) -> None:
        """Raises RequestValidationError for the first unknown field."""
        for name in self._unknown:
            error = unknown_field(name, self._field_names)
            raise RequestValidationError(
                [{"type": error.type, "loc": ("body",), "msg": error.message(), "ctx": error.context}]
            )


def unknown_field(name: object, known: Iterable[str]) -> PydanticCustomError:
    """The error for an unknown field. known: names for the hint."""
    shown = str(name)[:100].encode("utf-8", "replace").decode()
    hint = nearest(shown, sorted(known))
    return PydanticCustomError("unknown_field", "unknown field '{name}'{hint}", {"name": shown, "hint": hint})


def with_default_max_tokens(defaults: Mapping[str, object], limit: int) -> Mapping[str, object]:
    """`defaults` with the max_tokens of a route, `limit`. A model's recommendation can only lower it."""
    recommended = defaults.get("max_tokens")
    return {**defaults, "max_tokens": min(limit, recommended) if isinstance(recommended, int) else limit}


T = TypeVar("T")

MAX_PROMPTS = 2048  # of embeddings; other routes accept fewer
MAX_PROMPT_TOKENS = 2**20  # in one body, before truncation
MAX_SALT = 256  # characters
_LEAST_BIAS = -100.0  # with which a token is never sampled

Listed = Annotated[list[T], Field(fail_fast=True, max_length=MAX_LISTED_TOKENS)]
PerPrompt = Annotated[list[T], Field(fail_fast=True, max_length=MAX_PROMPTS)]
TokenIds = Annotated[list[int], Field(fail_fast=True, max_length=MAX_PROMPT_TOKENS)]


def _validate_prompts(value: object, read: ValidatorFunctionWrapHandler) -> object:
    if isinstance(value, list) and len(value) > MAX_PROMPTS and not isinstance(value[0], int):
        raise PydanticCustomError("too_many", f"has {len(value):,} prompts, more than {MAX_PROMPTS:,}")
    try:
        return read(value)
    except ValidationError as error:
        if any(problem["type"] == "too_long" for problem in error.errors(include_input=False, include_url=False)):
            raise PydanticCustomError("too_many", f"has more than {MAX_PROMPT_TOKENS:,} token ids") from None
        raise PydanticCustomError("prompts_type", "must be a text, token ids, or a list of either") from None


def _check_biases(value: object) -> object:
    """The biases by token id. llama.cpp's form is a list of pairs; false as a bias is its least one."""
    if isinstance(value, list | dict) and len(value) > MAX_LISTED_TOKENS:
        raise PydanticCustomError("too_many", f"has more than {MAX_LISTED_TOKENS:,} token ids")
    if isinstance(value, list):
        if not all(isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is int for pair in value):
            raise PydanticCustomError("bias_type", "must map token ids to numbers, or be a list of [token id, number]")
        value = {str(token): _LEAST_BIAS if bias is False else bias for token, bias in value}
    if isinstance(value, dict):
        for bias in value.values():
            if type(bias) is not float and type(bias) is not int:
                raise PydanticCustomError("bias_type", "must map token ids to numbers")
    return value


Salt = Annotated[str, Field(min_length=1, max_length=MAX_SALT)]
Prompts = Annotated[str | PerPrompt[str] | TokenIds | PerPrompt[TokenIds], WrapValidator(_validate_prompts)]
Biases = Annotated[dict[str, float], BeforeValidator(_check_biases)]


# Fields that a beam search does not support -> their values without effect. Null is accepted for every field.
_BEAM_NEUTRAL_VALUES: Mapping[str, tuple[JsonValue, ...]] = MappingProxyType(
    {
        **{"temperature": (0, 1), "top_p": (1,), "top_k": (0, -1), "min_p": (0,), "deterministic": (False,)},
        **{"presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,)},
        **{"logit_bias": ({},), "allowed_token_ids": (), "bad_words": ([],), "stop": ([],)},
        **{"no_repeat_ngram_size": (0,), "repetition_detection": (), "stop_regex": ([],)},
        **{"seed": (), "stream": (False,), "logprobs": (False,), "logprob_token_ids": ([],), "prompt_logprobs": ()},
    }
)


def _check_early_stopping(value: object) -> object:
    if not isinstance(value, bool) and value != "never":
        raise PydanticCustomError("early_stopping", "must be true, false or 'never'")
    return value


Stopping = Annotated[bool | Literal["never"], BeforeValidator(_check_early_stopping)]


class BeamSearchBody(Body):
    """Fields of beam search and best_of."""

    best_of: int | None = optional_field(
        "Completions: generate this many sequences for each prompt, and return the n best (n to 128)."
    )
    use_beam_search: bool | None = optional_field("Search for the most likely sequences instead of sampling.")
    length_penalty: float | None = optional_field(
        "Beam search: above 0 it favours long sequences (-10 to 10); 1 by default."
    )
    early_stopping: Stopping | None = optional_field("Beam search: when to end (docs/api.md); false by default.")

    def with_beam_search(self, params: SamplingParams) -> SamplingParams:
        """`params`, adapted if a beam search is requested.

        Raises RequestError for a field that needs a beam search or excludes one.
        """
        if not self.use_beam_search:
            for name, neutral in (("length_penalty", 1), ("early_stopping", False)):
                if getattr(self, name) not in (None, neutral):
                    raise RequestError(f"{name} needs use_beam_search to be true", name)
            return params
        for name, values in _BEAM_NEUTRAL_VALUES.items():
            given = getattr(self, name, None)
            if given is not None and not any(is_same(given, value) for value in values):
                raise RequestError(f"{name} cannot be combined with use_beam_search; leave it out", name)
        return replace(params, best_of=None, temperature=0.0)

    def beam_names(self) -> Mapping[str, str]:
        """The engine's name of the beam width -> the field of this body that sets it."""
        return {"beam_width": "n" if self.best_of is None else "best_of"} if self.use_beam_search else {}

    def beams(self, params: SamplingParams, *, vocab_size: int, num_end_tokens: int) -> Beams | None:
        """The requested beam search, of width best_of or n; None if none is requested. Raises RequestError."""
        if not self.use_beam_search:
            return None
        with renamed_fields(self.beam_names()):
            search = BeamSearchParams(
                beam_width=self.best_of or params.n,
                max_tokens=params.max_tokens,
                ignore_eos=params.ignore_eos,
                length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
                early_stopping=self.early_stopping or False,
            )
            num_stop_ids = len(params.stop_token_ids)
            return plan_beams(search, vocab_size=vocab_size, num_end_tokens=num_end_tokens, num_stop_ids=num_stop_ids)


class RepetitionDetection(Body):
    """vLLM's `repetition_detection`: the output ends if a pattern of tokens is repeated directly behind itself."""

    max_pattern_size: int | None = optional_field("Tokens of the longest pattern (0 to 1024); 0 detects nothing.")
    min_pattern_size: int | None = optional_field("Tokens of the shortest pattern; 1 by default.")
    min_count: int | None = optional_field("How often the pattern has to occur (2 to 1024).")

    def arguments(self) -> Mapping[str, int]:
        """Arguments of RepetitionDetectionParams."""
        return {name: value for name in self.model_fields_set if (value := getattr(self, name)) is not None}


MAX_NAME = 256  # characters of a schema's name

Schema = str | bool | dict[str, Any]
Tag = str | dict[str, Any]
Choices = Annotated[list[str], Field(fail_fast=True, max_length=MAX_CHOICES)]

_FORMAT = "response_format"
_CONSTRAINT_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_OTHER_NAMES = MappingProxyType(  # fields of SGLang and of older vLLM -> names in StructuredOutputsParams
    {
        **{"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"},
        **{"json_schema": "json", "regex": "regex", "ebnf": "grammar", "grammar": "grammar"},
    }
)

CONSTRAINT_FIELDS = frozenset(  # of all dialects
    {"response_format", "structured_outputs", "structural_tag", "output_config", "format", *_OTHER_NAMES}
)


class JsonSchema(Body):
    """`json_schema` of a response_format."""

    name: Annotated[str, Field(max_length=MAX_NAME)]
    description: Any = ignored_field()
    schema_: Schema | None = optional_field("The JSON schema of the output; required.", alias="schema")
    strict: bool | None = optional_field("Accepted, true or false: the output always matches the schema.")


class ResponseFormat(Body):
    """OpenAI's `response_format`, with vLLM's structural tags."""

    type: Literal["text", "json_object", "json_schema", "structural_tag", "json", "regex"]
    value: Any = optional_field(
        "TGI's name: with the type regex a pattern, with other types the JSON schema of the output (the type json too)."
    )
    json_schema: JsonSchema | None = optional_field("With the type json_schema.")
    schema_: Schema | None = optional_field(
        "With the type json_object or json_schema: the JSON schema of the output, as in llama.cpp and Together.",
        alias="schema",
    )
    format: dict[str, Any] | None = optional_field("With the type structural_tag: the format, as in xgrammar.")
    structures: PerPrompt[dict[str, Any]] | None = optional_field(
        "With the type structural_tag, instead of format: begin, schema and end of each tag."
    )
    triggers: PerPrompt[str] | None = optional_field("With structures: texts at which a tag may begin.")

    def constraint_args(self) -> Mapping[str, object]:
        """Arguments of StructuredOutputsParams; empty for text. Raises RequestError."""
        beside = {
            "json": ("value",),
            "regex": ("value",),
            "json_object": ("schema_", "value"),
            "json_schema": ("json_schema", "schema_", "value"),
            "structural_tag": ("format", "structures", "triggers"),
        }
        own = {name: value for name in beside.get(self.type, ()) if (value := getattr(self, name)) is not None}
        for name in self.model_fields_set - {"type", *own}:
            if getattr(self, name) is not None:
                without = _without_underscore(name)
                raise RequestError(f"response_format of type {self.type} has no {without}; leave it out", _FORMAT)
        match self.type:
            case "text":
                return {}
            case "structural_tag":
                return {"structural_tag": {"type": self.type, **own}}
            case "regex":
                if not isinstance(self.value, str):
                    raise RequestError("response_format of type regex needs a pattern as its value", _FORMAT)
                return {"regex": self.value}
        named = None if self.json_schema is None else self.json_schema.schema_
        schemas = [schema for schema in (named, self.schema_, self.value) if schema is not None]
        if not schemas and self.type == "json_object":
            return {"json_object": True}
        if len(schemas) > 1:
            raise RequestError("response_format has two schemas; give one of json_schema, schema and value", _FORMAT)
        if not schemas:
            needed = "a value" if self.type == "json" else "a json_schema with a schema"
            raise RequestError(f"response_format of type {self.type} needs {needed}", _FORMAT)
        if not isinstance(schemas[0], str | bool | dict):
            raise RequestError("the value of response_format must be a JSON schema", _FORMAT)
        return {"json": schemas[0]}


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: one constraint on the output, with options."""

    json_: Schema | None = optional_field("A JSON schema.", alias="json")
    regex: str | None = optional_field("A pattern for the whole output.")
    choice: Choices | None = optional_field("The output is one of these texts.")
    grammar: str | None = optional_field("A grammar as Lark or EBNF.")
    json_object: bool | None = optional_field("Any JSON object.")
    structural_tag: Tag | None = optional_field("Text with constrained parts between tags.")
    disable_any_whitespace: bool | None = optional_field(
        "Exactly one space after each comma and colon of JSON, and no other white space; the default of a JSON schema."
    )
    disable_additional_properties: bool | None = optional_field("Only properties that the schema names.")
    unknown_keywords: Literal["ignore", "refuse"] | None = optional_field(
        "Whether keywords and formats that JSON schema does not have are ignored (default) or refused."
    )
    whitespace_pattern: str | None = optional_field("Pattern of whitespace between the tokens of JSON.")
    fast_forward: bool | None = optional_field("Append forced tokens without sampling; true by default.")

    def constraint_args(self) -> Mapping[str, object]:
        """Arguments of StructuredOutputsParams."""
        given = {_without_underscore(name): getattr(self, name) for name in self.model_fields_set}
        if given.get("json_object") is False:
            given.pop("json_object")
        return {name: value for name, value in given.items() if value is not None}


class ConstraintBody(Body):
    """Fields of constraints on the output."""

    response_format: ResponseFormat | None = optional_field(
        "The constraint on the output: text (none), any JSON object, a JSON schema."
    )
    structured_outputs: StructuredOutputs | None = optional_field("The constraint on the output, with vLLM's fields.")
    json_schema: Schema | None = optional_field("SGLang's name of structured_outputs.json.")
    regex: str | None = optional_field("SGLang's name of structured_outputs.regex.")
    ebnf: str | None = optional_field("SGLang's name of structured_outputs.grammar.")
    grammar: str | None = optional_field("llama.cpp's name of structured_outputs.grammar.")
    guided_json: Schema | None = optional_field("vLLM's former name of structured_outputs.json.")
    guided_regex: str | None = optional_field("vLLM's former name of structured_outputs.regex.")
    guided_choice: Choices | None = optional_field("vLLM's former name of structured_outputs.choice.")
    guided_grammar: str | None = optional_field("vLLM's former name of structured_outputs.grammar.")

    def constraint(self) -> StructuredOutputsParams | None:
        """The requested constraint, from any of the fields; None if there is none.

        Raises RequestError for two constraints and for an invalid one, with StructuredOutputsParams' field names.
        """
        constraints = dict(self._constraints())
        if any(one != next(iter(constraints.values())) for one in constraints.values()):
            raise several_constraints(list(constraints))
        options = {} if self.structured_outputs is None else self.structured_outputs.constraint_args()
        if not constraints and self.structured_outputs is None:
            return None
        asked = next(iter(constraints.values()), {})
        return StructuredOutputsParams(**{**options, **asked})  # type: ignore[arg-type]  # checked by name

    def constraint_field(self) -> str | None:
        """The field that has the constraint; None if there is none."""
        return next((name for name, _ in self._constraints()), None)

    def constraint_names(self) -> Mapping[str, str]:
        """Field names of StructuredOutputsParams -> fields of this body."""
        names = {
            name: f"structured_outputs.{name}" for name in map(_without_underscore, StructuredOutputs.model_fields)
        }
        for field, arguments in self._constraints():
            if field != "structured_outputs":
                names |= dict.fromkeys(arguments, field)
        return names

    def _constraints(self) -> Iterator[tuple[str, Mapping[str, object]]]:
        """The constraints by field. Options of `structured_outputs` alone are no constraint."""
        if self.response_format is not None and (arguments := self.response_format.constraint_args()):
            yield _FORMAT, arguments
        if self.structured_outputs is not None:
            arguments = self.structured_outputs.constraint_args()
            if not arguments.keys().isdisjoint(_CONSTRAINT_KINDS):
                yield "structured_outputs", arguments
        for field, kind in _OTHER_NAMES.items():
            if (value := getattr(self, field)) is not None:
                yield field, {kind: value}


def several_constraints(fields: Sequence[str]) -> RequestError:
    """The error for several constraints. fields: those that have one."""
    return RequestError(f"{' and '.join(fields)} each set a constraint on the output; give one", fields[1])


def _without_underscore(name: str) -> str:
    """The name without the underscore that avoids a clash with pydantic."""
    return name.rstrip("_")


MAX_TIMEOUT = 86_400.0  # seconds
Timeout = Annotated[float, Field(gt=0, le=MAX_TIMEOUT, allow_inf_nan=False)]


class RetentionBody(Body):
    """Retention of the KV that a request leaves in the cache (docs/eviction.md)."""

    priority: int | None = optional_field(
        "0 to 100; KV of lower priority is evicted first. Other than 50 needs --eviction priority or cost."
    )
    ttl: float | None = optional_field("Seconds after the end of the request for which it applies; null: for ever.")
    pin: bool | None = optional_field("Not evicted, within limits (docs/eviction.md); false by default.")

    @classmethod
    def _from(cls, found: Split, validate: ModelWrapValidatorHandler[Self]) -> Self:
        if "session" in found.unknown:
            text = "unknown field '{name}': it was removed; set priority, ttl and pin in each request of a conversation"
            raise PydanticCustomError("unknown_field", text, {"name": "session"})
        return super()._from(found, validate)


class ProgramBody(Body):
    """The program that a request belongs to (docs/programs.md)."""

    id: str = Field(description="Id of one run of the program (1 to 256 characters); its requests are served together.")
    branch: str | None = optional_field("Branch of the program; the trunk by default.")
    expects_more: bool | None = optional_field(
        "Whether another request will continue from the KV of this one; true by default."
    )
    ttl: float | None = optional_field(
        "Seconds after the end of the request for which that is expected, up to 600; 60 by default."
    )


class SchedulingParamsBody(RequestBody):
    """Fields of scheduling parameters, and the timeout."""

    priority: int | None = optional_field(
        "A lower number runs earlier; 0 by default. Other values need a server with --policy priority."
    )
    deadline: float | None = optional_field(
        "Seconds after arrival at which the last token stops being useful; rejected if it cannot be met."
    )
    timeout: Timeout | None = optional_field(
        "Seconds after which the request is aborted: with 408, or a stream with an error."
    )
    retention: RetentionBody | None = optional_field("How long the KV of this request is kept.")
    program: ProgramBody | None = optional_field("The program of this request: a hint, never rejected.")

    def scheduling_params(self, options: EngineOptions) -> SchedulingParams:
        """The engine's scheduling parameters. Raises RequestError."""
        retention = Retention(**_set_fields(self.retention))
        program = _set_fields(self.program) or None
        return make_scheduling_params(options, self.priority, self.deadline, retention, program)


def _set_fields(body: Body | None) -> dict[str, Any]:
    """The fields that are set and not null; none for None."""
    fields = () if body is None else body.model_fields_set
    return {name: value for name in fields if (value := getattr(body, name)) is not None}
