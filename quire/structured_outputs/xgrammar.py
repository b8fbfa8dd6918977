"""The xgrammar backend, an optional extra: a byte-level pushdown automaton with precomputed masks."""

import importlib
import json
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np

from quire.core.constraint import Matcher
from quire.errors import ConfigError, RequestError
from quire.params import StructuredOutputsParams
from quire.structured_outputs.ebnf import ebnf_to_lark, is_ebnf
from quire.structured_outputs.forced_tokens import forced_tokens
from quire.structured_outputs.json_schema.bounds import children
from quire.structured_outputs.json_schema.reader import read_schema
from quire.structured_outputs.library_matcher import LibraryMatcher, Masks
from quire.structured_outputs.limits import MAX_MESSAGE, VocabularyCache, checked_regex, choice_alternatives
from quire.structured_outputs.vocabulary import Vocabulary

_MAX_WHITESPACE = 128
_MAX_SPAN = 4096  # bytes that are tokenized at once
# Keywords that xgrammar 0.2 enforces in every output. It ignores the others, some of them with a warning.
_ENFORCED = frozenset(
    {
        *("type", "enum", "const", "$ref", "$defs", "anyOf", "oneOf"),
        *("properties", "additionalProperties", "required"),
        *("items", "prefixItems", "minItems", "maxItems"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    }
)


_EXCLUSIVE = frozenset({"$ref", "const", "enum", "anyOf", "oneOf"})
_TYPES = {"string": str, "integer": int, "boolean": bool}


class XgrammarBackend:
    """See Backend. Its methods raise ConfigError if xgrammar is not installed."""

    def __init__(self) -> None:
        self._compiler = VocabularyCache(_Compiler)
        self._byte_vocabulary = Vocabulary(
            [bytes([i]) for i in range(256)] + [b""], (256,), frozenset({256}), _no_tokens
        )

    def check(self, params: StructuredOutputsParams) -> None:
        """See Backend. It compiles the constraint, with single bytes as tokens."""
        self.compile(params, self._byte_vocabulary)

    def compile(self, params: StructuredOutputsParams, vocabulary: Vocabulary) -> "XgrammarGrammar":
        """See Backend."""
        return self._compiler(vocabulary).compile(params)


class XgrammarGrammar:
    """See Grammar."""

    def __init__(self, compiled: Any, vocabulary: Vocabulary, masks: Masks) -> None:  # noqa: ANN401 (no types without it)
        self._compiled = compiled
        self._vocabulary = vocabulary
        self._masks = masks

    def new_matcher(self, *, fast_forward: bool) -> Matcher:
        """See Grammar."""
        matcher = _module().GrammarMatcher(self._compiled, override_stop_tokens=list(self._vocabulary.end_ids))
        parser = _XgrammarParser(matcher, self._vocabulary, self._masks)
        return LibraryMatcher(parser, self._masks, fast_forward=fast_forward)


class _Compiler:
    """Compiles constraints for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        xgrammar = _module()
        self._vocabulary = vocabulary
        self._masks = Masks(vocabulary)
        known = xgrammar.TokenizerInfo(
            list(vocabulary.tokens), vocab_size=vocabulary.size, stop_token_ids=list(vocabulary.end_ids)
        )
        self._compiler = xgrammar.GrammarCompiler(known, max_threads=1, cache_enabled=False)

    def compile(self, params: StructuredOutputsParams) -> XgrammarGrammar:
        """The grammar of a constraint. Raises RequestError."""
        try:
            compiled = self._compiled(params)
        except RuntimeError as error:
            # The message begins with a time and a place in xgrammar's source.
            message = str(error).partition(": ")[2].strip()[:MAX_MESSAGE]
            raise RequestError(f"{params.kind} cannot be enforced: {message}", params.kind) from error
        grammar = XgrammarGrammar(compiled, self._vocabulary, self._masks)
        words = np.zeros(self._vocabulary.num_words, np.uint32)
        grammar.new_matcher(fast_forward=False).fill_bitmask(words)
        if not words.any():
            raise RequestError(f"no output satisfies this {params.kind}", params.kind)
        return grammar

    def _compiled(self, params: StructuredOutputsParams) -> Any:  # noqa: ANN401
        match params.kind:
            case "json":
                return self._compiler.compile_json_schema(_schema(params), **_whitespace(params))
            case "regex":
                return self._compiler.compile_regex(checked_regex(params))
            case "choice":
                return self._compiler.compile_grammar(f"root ::= {choice_alternatives(params)}\n")
            case "grammar" if is_ebnf(params.text):
                ebnf_to_lark(params.text)  # raises RequestError for an invalid grammar
                return self._compiler.compile_grammar(params.text)
        raise RequestError(
            f"the xgrammar backend does not support this {params.kind}: use the llguidance backend", params.kind
        )


class _XgrammarParser:
    """See Parser."""

    def __init__(self, matcher: Any, vocabulary: Vocabulary, masks: Masks) -> None:  # noqa: ANN401
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._masks = masks

    def accept_tokens(self, tokens: Sequence[int]) -> str:
        """See Parser."""
        for token in tokens:
            if not self._matcher.accept_token(token):
                return f"token {token} does not fit the constraint"
        return ""

    def forced_tokens(self) -> list[int]:
        """See Parser."""
        try:
            data = self._matcher.find_jump_forward_string().encode()
        except UnicodeError:  # the string ends within a character
            return []
        if not data:
            return []
        ahead = self._matcher.fork()
        is_last = len(data) <= _MAX_SPAN and ahead.accept_string(data) and self._is_terminated(ahead)
        return forced_tokens(data[:_MAX_SPAN], self._vocabulary, closed=is_last)

    def may_end(self) -> bool:
        """See Parser."""
        return bool(self._matcher.is_completed())

    def is_over(self) -> bool:
        """See Parser."""
        return self._is_terminated(self._matcher)

    def fill_bitmask(self, words: np.ndarray) -> None:
        """See Parser."""
        words[:] = 0xFFFFFFFF
        self._matcher.fill_next_token_bitmask(words.view(np.int32)[None])

    def _is_terminated(self, matcher: Any) -> bool:  # noqa: ANN401
        if not matcher.is_completed():
            return False
        words = np.full(self._vocabulary.num_words, 0xFFFFFFFF, np.uint32)
        matcher.fill_next_token_bitmask(words.view(np.int32)[None])
        return not (words & self._masks.allowed & ~self._masks.ends).any()


def _schema(params: StructuredOutputsParams) -> str:
    """The schema as JSON. Raises RequestError for keywords that xgrammar does not enforce."""
    schema = read_schema(params.text, "json", closed=True)
    if isinstance(schema, dict):
        definitions = schema.get("$defs", {})
        assert isinstance(definitions, dict)
        for one in (schema, *definitions.values()):
            _check(one)
    return json.dumps(schema)


def _check(schema: object) -> None:
    """Raises RequestError for what xgrammar would ignore completely or partly."""
    if not isinstance(schema, Mapping):
        return
    keys = schema.keys() - {"$defs"}
    for key in keys - _ENFORCED:
        raise _not_enforced(repr(key))
    alone = keys & _EXCLUSIVE
    if alone and len(keys) > 1 and not _is_typed(schema):
        raise _not_enforced(f"other keywords beside {min(alone)!r}")
    if keys - alone and "type" not in keys:
        raise _not_enforced(f"{min(keys - alone)!r} without a type")
    if any(isinstance(value, float) for value in schema.get("enum", [schema.get("const")])):
        raise _not_enforced("constants with a fraction")
    for side in ("Minimum", "Maximum"):
        bounds = [schema[key] for key in (side.lower(), f"exclusive{side}") if key in schema]
        if len(bounds) > 1 or any(bound % 1 for bound in bounds):
            raise _not_enforced("several bounds, and bounds with a fraction")
    _check_object(schema, keys)
    for _, child in children(schema):
        _check(child)


def _check_object(schema: Mapping[str, Any], keys: Set[str]) -> None:
    if "properties" in keys and schema["additionalProperties"] is not False:
        raise _not_enforced("additionalProperties beside properties")
    for name in schema.get("required", ()):
        if name not in schema.get("properties", {}):
            raise _not_enforced(f"required {name!r:.100}, which is not in properties")


def _is_typed(schema: Mapping[str, Any]) -> bool:
    """Whether the schema is a const or enum with its type, and nothing else."""
    kind = _TYPES.get(schema["type"]) if isinstance(schema.get("type"), str) else None
    values = schema.get("enum", [schema.get("const")])
    return kind is not None and len(schema.keys() - {"$defs"}) == 2 and all(type(value) is kind for value in values)


def _not_enforced(what: str) -> RequestError:
    return RequestError(f"the xgrammar backend does not enforce {what}: use the llguidance backend", "json")


def _whitespace(params: StructuredOutputsParams) -> dict[str, object]:
    if params.whitespace_pattern is not None and not params.disable_any_whitespace:
        raise RequestError("the xgrammar backend has no whitespace_pattern: leave it out", "whitespace_pattern")
    if params.disable_any_whitespace:
        return {"any_whitespace": False, "separators": (", ", ": "), "strict_mode": False}
    return {"any_whitespace": True, "max_whitespace_cnt": _MAX_WHITESPACE, "strict_mode": False}


def _no_tokens(text: str) -> list[int]:
    return []


def _module() -> Any:  # noqa: ANN401
    """The library, imported on first use because it imports torch. Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module("xgrammar")
    except ImportError as error:
        raise ConfigError("the xgrammar backend needs a package: pip install quire[xgrammar]") from error
