"""The fields of a body that say what form an output has: OpenAI's, vLLM's and SGLang's. Knows names, no backend."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field

from quire.errors import RequestError
from quire.params import MAX_CHOICES, StructuredOutputsParams
from quire.server.api.field_types import PerPrompt
from quire.server.api.request_params import Body, about, without_effect

MAX_NAME = 256  # characters of a schema's name

Schema = str | bool | dict[str, Any]
Tag = str | dict[str, Any]
Choices = Annotated[list[str], Field(fail_fast=True, max_length=MAX_CHOICES)]

_FORMAT = "response_format"
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_OTHER_NAMES = MappingProxyType(  # fields of vLLM's past and of SGLang -> what StructuredOutputsParams calls them
    {
        **{"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"},
        **{"json_schema": "json", "regex": "regex", "ebnf": "grammar"},
    }
)

FORM_FIELDS = frozenset({"response_format", "structured_outputs", "structural_tag", *_OTHER_NAMES})


class JsonSchema(Body):
    """`json_schema` of a response_format."""

    name: Annotated[str, Field(max_length=MAX_NAME)]
    description: Any = without_effect()
    schema_: Schema | None = about("What the output has to be like; needed.", alias="schema")
    strict: bool | None = about("Accepted either way: the output always has this form.")


class ResponseFormat(Body):
    """OpenAI's `response_format`, with vLLM's structural tags."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = about("With the type json_schema.")
    format: dict[str, Any] | None = about("With the type structural_tag; no backend takes it yet.")
    structures: PerPrompt[dict[str, Any]] | None = about(
        "With the type structural_tag: begin, schema and end of each tag."
    )
    triggers: PerPrompt[str] | None = about("With structures: texts at which a tag may begin.")

    def form(self) -> Mapping[str, object]:
        """As StructuredOutputsParams takes it; nothing for text. Raises RequestError."""
        beside = {"json_schema": ("json_schema",), "structural_tag": ("format", "structures", "triggers")}
        own = {name: value for name in beside.get(self.type, ()) if (value := getattr(self, name)) is not None}
        for name in self.model_fields_set - {"type", *own}:
            if getattr(self, name) is not None:
                raise RequestError(f"response_format of type {self.type} has no {name}; leave it out", _FORMAT)
        match self.type:
            case "text":
                return {}
            case "json_object":
                return {"json_object": True}
            case "structural_tag":
                return {"structural_tag": {"type": self.type, **own}}
        if self.json_schema is None or self.json_schema.schema_ is None:
            raise RequestError("response_format of type json_schema needs a json_schema with a schema", _FORMAT)
        return {"json": self.json_schema.schema_}


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: one form, and how it is kept."""

    json_: Schema | None = about("A JSON schema.", alias="json")
    regex: str | None = about("A pattern for the whole output.")
    choice: Choices | None = about("The output is one of these texts.")
    grammar: str | None = about("A grammar as Lark or EBNF.")
    json_object: bool | None = about("Any JSON object.")
    structural_tag: Tag | None = about("Text in which what stands between tags has a form.")
    disable_any_whitespace: bool | None = about("One space behind each comma and colon of JSON, and no other.")
    disable_additional_properties: bool | None = about("No properties but those that the schema names.")
    whitespace_pattern: str | None = about("What may stand between the tokens of JSON.")
    fast_forward: bool | None = about("Text that has to come is not generated token by token; true by default.")

    def form(self) -> Mapping[str, object]:
        """As StructuredOutputsParams takes it."""
        given = {_plain(name): getattr(self, name) for name in self.model_fields_set}
        if given.get("json_object") is False:
            given.pop("json_object")
        return {name: value for name, value in given.items() if value is not None}


class FormBody(Body):
    """The part of a body that says what form the output has."""

    response_format: ResponseFormat | None = about("The form of the output: text, any JSON object, a JSON schema.")
    structured_outputs: StructuredOutputs | None = about("The form of the output, as vLLM has it.")
    json_schema: Schema | None = about("structured_outputs.json, as SGLang has it.")
    regex: str | None = about("structured_outputs.regex, as SGLang has it.")
    ebnf: str | None = about("structured_outputs.grammar, as SGLang has it.")
    guided_json: Schema | None = about("structured_outputs.json, as vLLM had it.")
    guided_regex: str | None = about("structured_outputs.regex, as vLLM had it.")
    guided_choice: Choices | None = about("structured_outputs.choice, as vLLM had it.")
    guided_grammar: str | None = about("structured_outputs.grammar, as vLLM had it.")

    def form(self) -> StructuredOutputsParams | None:
        """What is asked for, whatever it is called. Raises RequestError for two forms and for one out of bounds, which
        is called as StructuredOutputsParams calls it.
        """
        forms = dict(self._forms())
        if len(forms) > 1:
            raise two_forms(list(forms))
        options = {} if self.structured_outputs is None else self.structured_outputs.form()
        if not forms and self.structured_outputs is None:
            return None
        asked = next(iter(forms.values()), {})
        return StructuredOutputsParams(**{**options, **asked})  # type: ignore[arg-type]  # checked by name

    def form_field(self) -> str | None:
        """The field that asks for a form; None where nothing does."""
        return next((name for name, _ in self._forms()), None)

    def form_names(self) -> Mapping[str, str]:
        """What StructuredOutputsParams calls its fields -> the field of this body."""
        names = {name: f"structured_outputs.{name}" for name in map(_plain, StructuredOutputs.model_fields)}
        for field, form in self._forms():
            if field != "structured_outputs":
                names |= dict.fromkeys(form, field)
        return names

    def _forms(self) -> Iterator[tuple[str, Mapping[str, object]]]:
        """By field. What is only an option is no form."""
        if self.response_format is not None and (form := self.response_format.form()):
            yield _FORMAT, form
        if self.structured_outputs is not None:
            form = self.structured_outputs.form()
            if not form.keys().isdisjoint(_KINDS):
                yield "structured_outputs", form
        for field, kind in _OTHER_NAMES.items():
            if (value := getattr(self, field)) is not None:
                yield field, {kind: value}


def two_forms(fields: Sequence[str]) -> RequestError:
    """What to raise where several fields ask for a form."""
    return RequestError(f"{' and '.join(fields)} each ask for a form of the output; give one", fields[1])


def _plain(name: str) -> str:
    """Of a field whose name pydantic has another use for."""
    return name.rstrip("_")
