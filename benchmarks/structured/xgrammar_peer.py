"""Grammars of the xgrammar package, as a peer in the measurements of masks.

quire has no xgrammar backend. The package is imported when it is measured, so it is needed only then. Unlike quire's
backends it compiles schemas that it does not enforce completely, such as bounds on the length of a string.
"""

import importlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from quire.core.constraint import Matcher
from quire.errors import ConfigError, RequestError
from quire.params import StructuredOutputsParams
from quire.structured_outputs.forced_tokens import forced_tokens
from quire.structured_outputs.library_matcher import LibraryMatcher, Masks
from quire.structured_outputs.limits import choice_alternatives
from quire.structured_outputs.vocabulary import Vocabulary


class XgrammarGrammar:
    """See Grammar."""

    def __init__(self, compiled: Any, vocabulary: Vocabulary, masks: Masks) -> None:  # noqa: ANN401 (no types without it)
        self._compiled = compiled
        self._vocabulary = vocabulary
        self._masks = masks

    def new_matcher(self, *, fast_forward: bool) -> Matcher:
        """See Grammar."""
        matcher = _module().GrammarMatcher(self._compiled, override_stop_tokens=list(self._vocabulary.end_ids))
        return LibraryMatcher(_Parser(matcher, self._vocabulary, self._masks), self._masks, fast_forward=fast_forward)


class _Parser:
    """See Parser."""

    def __init__(self, matcher: Any, vocabulary: Vocabulary, masks: Masks) -> None:  # noqa: ANN401
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._masks = masks

    def accept_tokens(self, tokens: Sequence[int]) -> str:
        """See Parser."""
        refused = next((token for token in tokens if not self._matcher.accept_token(token)), None)
        return "" if refused is None else f"token {refused} does not fit the constraint"

    def forced_tokens(self) -> list[int]:
        """See Parser."""
        try:
            data = self._matcher.find_jump_forward_string().encode()
        except UnicodeError:  # the string ends within a character
            return []
        return forced_tokens(data, self._vocabulary) if data else []

    def may_end(self) -> bool:
        """See Parser."""
        return bool(self._matcher.is_completed())

    def is_over(self) -> bool:
        """See Parser."""
        if not self._matcher.is_completed():
            return False
        words = np.zeros(self._vocabulary.num_words, np.uint32)
        self.fill_bitmask(words)
        return not (words & self._masks.allowed & ~self._masks.ends).any()

    def fill_bitmask(self, words: np.ndarray) -> None:
        """See Parser."""
        words[:] = 0xFFFFFFFF
        self._matcher.fill_next_token_bitmask(words.view(np.int32)[None])


def compile_grammar(params: StructuredOutputsParams, vocabulary: Vocabulary) -> XgrammarGrammar:
    """The grammar of a JSON schema, regex or choice.

    Raises RequestError for other kinds, ConfigError if the package is not installed.
    """
    compiler, masks = _compiler(vocabulary)
    match params.kind:
        case "json" if params.is_compact:
            compiled = compiler.compile_json_schema(
                params.text, any_whitespace=False, separators=(", ", ": "), strict_mode=False
            )
        case "json":
            compiled = compiler.compile_json_schema(params.text, max_whitespace_cnt=128, strict_mode=False)
        case "regex":
            compiled = compiler.compile_regex(params.text)
        case "choice":
            compiled = compiler.compile_grammar(f"root ::= {choice_alternatives(params)}\n")
        case kind:
            raise RequestError(f"{kind} is not measured with xgrammar", kind)
    return XgrammarGrammar(compiled, vocabulary, masks)


@lru_cache(maxsize=4)
def _compiler(vocabulary: Vocabulary) -> tuple[Any, Masks]:
    xgrammar = _module()
    known = xgrammar.TokenizerInfo(
        list(vocabulary.tokens), vocab_size=vocabulary.size, stop_token_ids=list(vocabulary.end_ids)
    )
    return xgrammar.GrammarCompiler(known, max_threads=1, cache_enabled=False), Masks(vocabulary)


def _module() -> Any:  # noqa: ANN401
    try:
        return importlib.import_module("xgrammar")
    except ImportError as error:
        raise ConfigError("this measurement needs a package: pip install xgrammar") from error
