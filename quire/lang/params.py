"""Sampling parameters of a `gen`, with SGLang's names and defaults."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypedDict

from quire.chat.tools import Toolbox, toolbox
from quire.errors import RequestError, nearest
from quire.params import is_unicode

# White space is allowed after a number and ends it: otherwise the model could only continue with digits.
REGEX_INT = r"[-+]?[0-9]+[ \n]*"
REGEX_FLOAT = r"[-+]?[0-9]*\.?[0-9]+[ \n]*"
REGEX_BOOL = r"(True|False)"
REGEX_STR = r'"[^"\\\n]*"'
_DTYPES: Mapping[object, tuple[str, tuple[str, ...]]] = {
    int: (REGEX_INT, (" ", "\n")),
    float: (REGEX_FLOAT, (" ", "\n")),
    bool: (REGEX_BOOL, ()),
    str: (REGEX_STR, ()),
}
_DTYPE_NAMES: Mapping[object, type] = {
    **{kind.__name__: kind for kind in (int, float, bool, str)},
    "string": str,
}


class Sampling(TypedDict, total=False):
    """Parameters of a `gen`, or defaults of a run. None means the default."""

    min_tokens: int | None
    n: int | None
    stop: str | list[str] | tuple[str, ...] | None
    stop_token_ids: list[int] | tuple[int, ...] | None
    stop_regex: str | list[str] | tuple[str, ...] | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    ignore_eos: bool | None
    seed: int | None
    prediction: str | None
    adapter: str | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    return_logprob: bool | None
    logprob_start_len: int | None
    top_logprobs_num: int | None
    return_text_in_logprobs: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenParams:
    """Parameters of one `gen`, or the defaults of a run. The default values are those of SGLang's language.

    regex, json_schema, ebnf: the constraint of the output, at most one. prediction: text that the output probably is,
    in whole or in part; it changes the time, not the output. adapter: the name of a LoRA adapter; None: the model
    alone. tools, tool_choice: functions that the model may call, as in OpenAI's chat; the meta info then has the
    `tool_calls` of the text. return_logprob and the three fields after it select what the meta info of the variable
    contains.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    ignore_eos: bool = False
    seed: int | None = None
    prediction: str | None = None
    adapter: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    return_logprob: bool = False
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    regex: str | None = None
    json_schema: str | None = None
    ebnf: str | None = None

    @property
    def returns_prompt_logprobs(self) -> bool:
        """Whether the meta info contains logprobs of prompt tokens."""
        return self.return_logprob and self.logprob_start_len is not None and self.logprob_start_len >= 0

    @property
    def constraint(self) -> tuple[str, str] | None:
        """The constraint as ("regex", "json_schema" or "ebnf", its text); None if there is none."""
        for name in _CONSTRAINTS:
            if (text := getattr(self, name)) is not None:
                return name, text
        return None

    @property
    def toolbox(self) -> Toolbox | None:
        """The tools that may be called; None without tools. Raises RequestError."""
        return toolbox(list(self.tools), self.tool_choice)

    def check(self) -> None:
        """Raises RequestError if a field about logprobs is set without return_logprob, or tools are wrong."""
        if self.toolbox is not None and self.constraint is not None:
            raise RequestError(f"{self.constraint[0]} cannot be combined with tools; leave one of them out", "tools")
        for name in ("logprob_start_len", "top_logprobs_num", "return_text_in_logprobs"):
            if getattr(self, name) and not self.return_logprob:
                raise RequestError(f"{name} needs return_logprob=True", name)

    def with_overrides(self, overrides: Mapping[str, Any]) -> "GenParams":
        """A copy with the fields `overrides` of a gen."""
        return replace(self, **overrides) if overrides else self


_CONSTRAINTS = ("regex", "json_schema", "ebnf")
_NAMES = {field.name for field in fields(GenParams)}
_SCHEMA = "json_schema"
_INTEGER: tuple[Any, str] = (int, "a whole number")
_NUMBER: tuple[Any, str] = (int | float, "a number")
_BOOL: tuple[Any, str] = (bool, "True or False")
_TEXT: tuple[Any, str] = (str, "Unicode text")
_TYPES: Mapping[str, tuple[Any, str]] = {
    **dict.fromkeys(("max_tokens", "min_tokens", "n", "top_k", "seed"), _INTEGER),
    **dict.fromkeys(("logprob_start_len", "top_logprobs_num"), _INTEGER),
    **dict.fromkeys(("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty"), _NUMBER),
    **dict.fromkeys(("ignore_eos", "return_logprob", "return_text_in_logprobs"), _BOOL),
    **dict.fromkeys(("regex", "ebnf", "prediction", "adapter"), _TEXT),
}
_LISTS: Mapping[str, tuple[Any, str]] = {
    **{"stop": _TEXT, "stop_regex": _TEXT, "stop_token_ids": _INTEGER},
    "tools": (Mapping, "an object"),
}
_ALIASES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}


def normalize_params(given: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that are set, checked and normalized: no None, dtype as a regex, lists as tuples.

    Raises RequestError for an unknown name, a wrong type and two constraints. Ranges of values are checked by the
    backend.
    """
    normalized: dict[str, Any] = {}
    for name, value in given.items():
        name = _ALIASES.get(name, name)
        if value is None:
            continue
        if name not in _NAMES and name != "dtype":
            raise RequestError(f"unknown parameter {name!r}{nearest(name, _NAMES)}", name)
        normalized[name] = _normalize_value(name, value)
    constraints = [name for name in ("dtype", *_CONSTRAINTS) if name in normalized]
    if len(constraints) > 1:
        raise RequestError(f"{' and '.join(constraints)} both constrain the output; give one", constraints[1])
    if "dtype" in normalized:
        normalized["regex"], ends = _dtype_constraint(normalized.pop("dtype"))
        normalized["stop"] = (*normalized.get("stop", ()), *ends)
    return normalized


def _normalize_value(name: str, value: Any) -> Any:  # noqa: ANN401  (the type is checked here)
    if name in _LISTS:
        kind, what = _LISTS[name]
        given = tuple(value) if isinstance(value, list | tuple) else (value,)
        if not all(_is_a(kind, one) for one in given):
            raise RequestError(f"{name} must be {what}, or a list of them, not {value!r:.80}", name)
        return given
    if name == "json_schema":
        return _schema(value)
    kinds, what = _TYPES.get(name, (object, ""))
    if not _is_a(kinds, value):
        raise RequestError(f"{name} must be {what}, not {value!r:.80}", name)
    if name == "regex":
        _check_regex(value)
    if name == "logprob_start_len" and value < -1:
        raise RequestError("logprob_start_len must be a position in the prompt, or -1 for no prompt logprobs", name)
    return value


def _is_a(kind: Any, value: object) -> bool:  # noqa: ANN401  (a type, or several)
    """Whether a value is of this type. A bool is no number, and a string must not have lone surrogates."""
    if isinstance(value, bool) and kind is not bool:
        return kind is object
    return isinstance(value, kind) and (not isinstance(value, str) or is_unicode(value))


def _schema(value: object) -> str:
    """A schema as JSON text. Raises RequestError if it is no JSON."""
    if not isinstance(value, str | bool | Mapping):
        hint = "; for a pydantic model use its model_json_schema()" if hasattr(value, "model_json_schema") else ""
        raise RequestError(f"json_schema must be a JSON schema, as text or as a dict, not {value!r:.80}{hint}", _SCHEMA)
    try:
        text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
        json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(f"json_schema is not valid JSON: {error}", _SCHEMA) from error
    if not is_unicode(text):
        raise RequestError("json_schema must be Unicode text, without lone surrogates", _SCHEMA)
    return text


def _check_regex(pattern: str) -> None:
    """Raises RequestError, when the gen is created, for a regex that Python cannot compile: no backend can either."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise RequestError(f"regex is not a regular expression: {error}", "regex") from error


def _dtype_constraint(dtype: object) -> tuple[str, tuple[str, ...]]:
    """The regex of a dtype, and the stop strings that end it. Raises RequestError for another dtype."""
    kind = _DTYPE_NAMES.get(dtype, dtype)
    if kind not in _DTYPES:
        raise RequestError(f"dtype must be int, float, str or bool, not {dtype!r:.80}", "dtype")
    return _DTYPES[kind]
