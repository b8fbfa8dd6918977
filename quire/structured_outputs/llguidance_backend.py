"""The llguidance backend: an Earley parser over derivatives of regular expressions. It compiles in milliseconds.

Forced text is tokenized as the tokenizer would write it. A mask within forced text allows only its next token, so that
an output is the same with and without fast-forward.
"""

import json
import logging
import random
import re
from collections.abc import Sequence
from copy import copy
from threading import Lock
from typing import NamedTuple

import llguidance
import numpy as np

from quire.core.constraint import Matcher
from quire.errors import RequestError
from quire.params import StructuredOutputsParams
from quire.structured_outputs.ebnf import ebnf_to_lark, is_ebnf
from quire.structured_outputs.forced_tokens import encode_within, forced_tokens
from quire.structured_outputs.json_schema.bounds import children, schema_error
from quire.structured_outputs.json_schema.guidance import guidance_schema
from quire.structured_outputs.json_schema.logic import Part, Schema
from quire.structured_outputs.json_schema.reader import read_schema
from quire.structured_outputs.lark import checked_lark
from quire.structured_outputs.library_matcher import LibraryMatcher, Masks
from quire.structured_outputs.limits import (
    MAX_FORCED,
    MAX_MESSAGE,
    VocabularyCache,
    checked_regex,
    choice_alternatives,
)
from quire.structured_outputs.structural_tags import tags_to_lark
from quire.structured_outputs.vocabulary import SpecialTokens, Vocabulary

# White space between two elements of JSON, if any: a space, or a line break with the indentation of eight levels. It is
# bounded, so that a model cannot generate it without end.
WHITESPACE = r"(?: |\n {0,32}|\n\t{1,8})"
_SPACES = r" \n\r\t"
_SPECIAL = re.compile(r"<\[(\d{1,9})\]>")  # a special token in a grammar; a text may have it, too, which allows no more
_WHITESPACE_PATTERN = re.compile(r"(?: |\\[nrts]|\\x20|[\[\]()|?*+\n\r\t]|\(\?:|\{\d{1,4}(?:,\d{0,4})?\})*")


def grammar_of(params: StructuredOutputsParams, special: SpecialTokens) -> str:
    """The constraint as a grammar of llguidance. Raises RequestError if it cannot be enforced exactly.

    special: the tokens that structural tags and directives of Lark grammars may have.
    """

    def write(schema: Schema) -> dict[str, object]:
        return with_options(schema, params)

    match params.kind:
        case "json":
            schema = read_schema(params.text, "json", params)
            if schema is False:
                raise schema_error("#", "no value satisfies the schema", "json")
            return _json_grammar(schema, params)
        case "regex":
            return str(llguidance.LLMatcher.grammar_from_regex(checked_regex(params)))
        case "choice":
            return _lark(f"start: CHOICE\nCHOICE: {choice_alternatives(params)}\n")
        case "grammar":
            return _lark(ebnf_to_lark(params.text) if is_ebnf(params.text) else checked_lark(params, write, special))
        case "structural_tag":
            return _lark(tags_to_lark(params, write, special))


def _json_grammar(schema: Schema, params: StructuredOutputsParams) -> str:
    return str(llguidance.LLMatcher.grammar_from_json_schema(with_options(schema, params)))


def with_options(schema: Schema, params: StructuredOutputsParams) -> dict[str, object]:
    """A schema of `read_schema` with llguidance's options for white space and escapes."""
    options: dict[str, object] = {
        "whitespace_pattern": _whitespace(params),
        "whitespace_flexible": not params.is_compact,
        # The separators of json.dumps, which are the most common in training data.
        "item_separator": ", " if params.is_compact else None,
        "key_separator": ": " if params.is_compact else None,
        # Without \u a name has one spelling: "a" cannot be repeated as "\u0061".
        "json_allowed_escapes": 'nrbtf\\"',
    }
    named = {name: value for name, value in options.items() if value is not None}
    written = guidance_schema(schema, params.kind)
    return {**(written if isinstance(written, dict) else {} if written else {"enum": []}), "x-guidance": named}


def _whitespace(params: StructuredOutputsParams) -> str | None:
    if params.is_compact:
        return None
    pattern = params.whitespace_pattern
    if pattern is None:
        return WHITESPACE
    if not _WHITESPACE_PATTERN.fullmatch(pattern):
        why = "may be made of ' ', \\n, \\r, \\t, \\s, [], (), |, ?, *, + and {m,n} only: JSON allows nothing else"
        raise RequestError(f"whitespace_pattern {why}", "whitespace_pattern")
    return _json_space(pattern)


def _json_space(pattern: str) -> str:
    r"""The pattern with \s replaced by the white space of JSON."""
    out = ""
    in_set = False
    for piece in re.findall(r"\\.|.", pattern, re.DOTALL):
        in_set = (in_set or piece == "[") and piece != "]"
        out += piece if piece != r"\s" else _SPACES if in_set else f"[{_SPACES}]"
    return out


def _lark(text: str) -> str:
    """A Lark grammar in llguidance's JSON format, so that it is not mistaken for another kind of grammar."""
    return json.dumps({"grammars": [{"lark_grammar": text}]})


# Limits of the Earley parser. On one core a compilation takes up to about 0.5 s and a mask up to about 20 ms. In an
# ambiguous grammar the items of a row increase with the text. A schema has some items in a row for each property that
# is not required.
_MAX_ITEMS = 600
_MAX_ITEMS_OF_SCHEMA = 6_000
# Limits of the lexer. Its fuel is the number of expressions that it may construct for one mask: 800,000 take about
# 30 ms. It finds in this way whether a text within two bounds, such as a pattern and a length, can be finished.
_LEXER_FUEL = 800_000
_OWN_LEXER_FUEL = 1_600_000  # of a lexer that one sequence has for itself, because it reached a limit
MAX_LEXER_STATES = 50_000  # of about 0.4 KB
_TOKENS_PER_LEXER = 128  # a sequence that has consumed fewer since it got its own lexer gets no other one
_NUM_TRIAL_WALKS = 4  # through a new grammar
_TRIAL_TOKENS = 48  # of a walk
# Characters of forced text that are tokenized per call: llguidance passes all forced text, for each mask.
_MAX_TOKENISED = 512
_LEXER_ERROR = "lexer error"  # in messages of llguidance about limits of the lexer
_MAX_TRIALS = 24  # compilations of parts of a schema that cannot be enforced, to find the place
_TOKENS_PER_REFILL = 128  # consumed tokens after which a mask is computed: only masks grant lexer fuel

log = logging.getLogger(__name__)


class _Tokens(NamedTuple):
    """What a matcher is made with, and which tokens a walk may take."""

    tokenizer: llguidance.LLTokenizer
    is_text: np.ndarray  # by token id: 1 for text, 0 for special and end tokens


class GuidanceBackend:
    """See Backend."""

    def __init__(self) -> None:
        self._vocabularies = VocabularyCache(_GuidanceVocabulary)  # about 1 s for 100,000 tokens
        self._bytes = _Tokens(llguidance.LLTokenizer("byte"), np.ones(256, np.uint8))

    def check(self, params: StructuredOutputsParams) -> None:
        """See Backend. It compiles the constraint, with single bytes as tokens."""
        _first_matcher(params, grammar_of(params, SpecialTokens({})), self._bytes)

    def compile(self, params: StructuredOutputsParams, vocabulary: Vocabulary) -> "GuidanceGrammar":
        """See Backend."""
        tokens = self._vocabularies(vocabulary)
        return GuidanceGrammar(params, tokens)


class GuidanceGrammar:
    """See Grammar. Raises RequestError.

    Sequences share the lexer of one matcher, because its states are computed on demand. They are limited in number, and
    a lexer that reached a limit fails for all sequences. So a parser that fails gets a matcher of its own, and new
    sequences get another lexer. A mask computes states for tokens that are not sampled; consumed tokens compute one for
    each byte. So a text that consumed all states of its lexer can continue with a new one.
    """

    def __init__(self, params: StructuredOutputsParams, tokens: "_GuidanceVocabulary") -> None:
        self._params = params
        self._vocabulary = tokens
        special = SpecialTokens(tokens.special_ids_by_text)
        self._grammar = grammar_of(params, special)
        self._masks = tokens.masks.allowing(special.used)
        self._shared_matcher = _first_matcher(params, self._grammar, tokens.for_matchers)
        self._lock = Lock()
        self._logged_reason = ""

    def new_matcher(self, *, fast_forward: bool) -> Matcher:
        """See Grammar."""
        parser = _GuidanceParser(self, self._shared_matcher.deep_copy(), self._vocabulary.num_words)
        return LibraryMatcher(parser, self._masks, fast_forward=fast_forward)

    def own_matcher(self, tokens: Sequence[int]) -> llguidance.LLMatcher:
        """A matcher with a lexer of its own that has consumed no token. It has states for these tokens and more."""
        num_bytes = sum(len(self._vocabulary.texts[token]) for token in tokens)
        limits = _limits(self._params.kind, lexer_fuel=_OWN_LEXER_FUEL, num_more_states=2 * num_bytes)
        return llguidance.LLMatcher(self._vocabulary.for_matchers.tokenizer, self._grammar, log_level=0, limits=limits)

    def replace_shared_lexer(self, reason: str) -> None:
        """Let later sequences share another lexer.

        reason: why the parser of a sequence failed. Equal reasons in a row are logged once.
        """
        reason = re.split("<non-verbose/>|<backtrace>", reason)[0].strip()[:MAX_MESSAGE]
        with self._lock:
            if reason != self._logged_reason:
                log.warning("a grammar gets a new lexer: %s", reason)
                self._logged_reason = reason
            self._shared_matcher = llguidance.LLMatcher(
                self._vocabulary.for_matchers.tokenizer, self._grammar, log_level=0, limits=_limits(self._params.kind)
            )


class _GuidanceVocabulary:
    """llguidance's tokenizer for a vocabulary, with its masks."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.masks = Masks(vocabulary)
        self.texts = vocabulary.tokens
        self.special_ids_by_text = vocabulary.special_ids_by_text
        wrapper = _TokenizerAdapter(vocabulary)
        self.num_words = -(-len(wrapper.tokens) // 32)
        tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(wrapper), eos_token=wrapper.end_ids)
        text_ids = (self.masks.allowed & ~self.masks.ends).view(np.uint8)
        self.for_matchers = _Tokens(tokenizer, np.unpackbits(text_ids, bitorder="little")[: vocabulary.size])


class _GuidanceParser:
    """See Parser."""

    def __init__(self, grammar: GuidanceGrammar, matcher: llguidance.LLMatcher, num_words: int) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._num_replayed: int | None = None  # tokens that its own lexer consumed first; None: the lexer is shared
        self._num_words = num_words
        self._tokens: list[int] = []  # consumed so far
        self._num_since_refill = 0  # tokens consumed since a mask

    def accept_tokens(self, tokens: Sequence[int]) -> str:
        """See Parser."""
        ids = list(tokens)
        num_taken = self._consume(ids)
        error = self._failed_at(ids, num_taken)
        if error and self._replace_lexer(error):
            num_taken = self._consume(ids)
            error = self._failed_at(ids, num_taken)
        if error:
            return _failure(error)
        self._tokens += ids[:num_taken]
        return "" if num_taken == len(ids) else f"token {ids[num_taken]} does not fit the constraint"

    def _failed_at(self, tokens: list[int], num_taken: int) -> str:
        """The error of the matcher that has consumed part of the tokens; "" if the grammar does not allow the next one.

        `try_consume_tokens` also stops without an error at a token that needs more states than the lexer may have.
        """
        if self._matcher.is_error() or num_taken == len(tokens):
            return str(self._matcher.get_error())
        trial = self._matcher.deep_copy()
        trial.consume_token(tokens[num_taken])
        error = str(trial.get_error())
        return error if _LEXER_ERROR in error else ""

    def failure(self) -> str:
        """See Parser."""
        return _failure(self._matcher.get_error()) if self._matcher.is_error() else ""

    def forced_tokens(self) -> list[int]:
        """See Parser."""
        span = self._matcher.compute_ff_tokens()
        if self._matcher.is_error() and self._replace_lexer(self._matcher.get_error()):
            span = self._matcher.compute_ff_tokens()
        ahead, more = self._matcher.deep_copy() if span else self._matcher, span
        while more and len(span) < MAX_FORCED and ahead.try_consume_tokens(more) == len(more):
            more = ahead.compute_ff_tokens()
            span = span + more
        return span

    def fork(self) -> "_GuidanceParser":
        """See Parser."""
        fork = copy(self)
        fork._matcher = self._matcher.deep_copy()
        fork._tokens = list(self._tokens)
        return fork

    def may_end(self) -> bool:
        """See Parser."""
        return self._matcher.is_accepting()

    def is_over(self) -> bool:
        """See Parser."""
        return self._matcher.is_stopped() and self._matcher.is_accepting()

    def fill_bitmask(self, words: np.ndarray) -> None:
        """See Parser."""
        found = np.zeros(self._num_words, np.uint32)  # _TokenizerAdapter may have one more token than the vocabulary
        self._matcher.unsafe_compute_mask_ptr(found.ctypes.data, found.nbytes)
        if self._matcher.is_error() and self._replace_lexer(self._matcher.get_error()):
            self._matcher.unsafe_compute_mask_ptr(found.ctypes.data, found.nbytes)
        self._num_since_refill = 0
        words[:] = 0 if self._matcher.is_error() else found[: len(words)]

    def _replace_lexer(self, error: str) -> bool:
        """Continue with a new lexer that no other sequence uses, after an error. False if it would fail, too."""
        num_tokens = len(self._tokens)
        if self._num_replayed is None:
            self._grammar.replace_shared_lexer(error)
        elif num_tokens - self._num_replayed < _TOKENS_PER_LEXER:
            return False
        self._num_replayed = num_tokens
        self._num_since_refill = 0
        self._matcher = self._grammar.own_matcher(self._tokens)
        self._consume(self._tokens)
        return True

    def _consume(self, tokens: list[int]) -> int:
        """Consume tokens. Returns how many fit. A resumed sequence has thousands, more than the lexer's fuel is for."""
        num_taken = 0
        while num_taken < len(tokens):
            piece = tokens[num_taken : num_taken + _TOKENS_PER_REFILL - self._num_since_refill]
            num_fitting = self._matcher.try_consume_tokens(piece)
            num_taken += num_fitting
            self._num_since_refill += num_fitting
            if num_fitting < len(piece) or self._matcher.is_error():
                break
            if self._num_since_refill == _TOKENS_PER_REFILL:
                self._matcher.compute_bitmask()
                self._num_since_refill = 0
        return num_taken


def _first_matcher(params: StructuredOutputsParams, grammar: str, tokens: _Tokens) -> llguidance.LLMatcher:
    """A matcher that has consumed no token. Raises RequestError. For a schema it names the place."""
    try:
        return _compiled(grammar, params.kind, tokens)
    except RequestError as error:
        if params.kind != "json":
            raise
        why = str(error)
        raise schema_error(_place(params, why, tokens), why.removeprefix("json "), "json") from error


def _place(params: StructuredOutputsParams, message: str, tokens: _Tokens) -> str:
    """The JSON pointer of the innermost part of a schema that alone has the same error."""
    if re.search("too (big|large|many)|exceeded|Current row has", message):
        return "#"  # a limit of the whole schema; each trial would take long, too
    root = read_schema(params.text, "json", params)
    definitions = root.get("$defs", {}) if isinstance(root, Part) else {}
    part, num_left = root, _MAX_TRIALS
    while isinstance(part, Part):
        inner = [one for _, one in children(part)]
        inner += [definitions[str(part["$ref"]).removeprefix("#/$defs/")]] if "$ref" in part else []
        for one in inner[:num_left]:
            num_left -= 1
            if isinstance(one, Part) and _has_error(
                Part(one.at, {**one, "$defs": definitions}), params, message, tokens
            ):
                part = one
                break
        else:
            break
    return part.at if isinstance(part, Part) else "#"


def _has_error(schema: Part, params: StructuredOutputsParams, message: str, tokens: _Tokens) -> bool:
    try:
        _compiled(_json_grammar(schema, params), "json", tokens)
    except RequestError as error:
        return str(error) == message
    return False


def _compiled(grammar: str, kind: str, tokens: _Tokens) -> llguidance.LLMatcher:
    """A matcher that has consumed no token. Raises RequestError. kind: of the constraint."""
    matcher = llguidance.LLMatcher(tokens.tokenizer, grammar, log_level=0, limits=_limits(kind))
    error = matcher.get_error() or _error_of_walks(matcher, kind, grammar, tokens.is_text)
    if not error:
        return matcher
    if error.startswith("NoExtension") or (kind == "json" and "nsatisfiable" in error):
        raise RequestError(
            "no value satisfies the schema" if kind == "json" else f"no output satisfies this {kind}", kind
        )
    raise RequestError(f"{kind} cannot be enforced: {_clean_message(error)}", kind)


def _limits(kind: str, *, lexer_fuel: int = _LEXER_FUEL, num_more_states: int = 0) -> llguidance.LLParserLimits:
    """Limits of a matcher. kind: of the constraint."""
    return llguidance.LLParserLimits(
        max_items_in_row=_MAX_ITEMS_OF_SCHEMA if kind == "json" else _MAX_ITEMS,
        initial_lexer_fuel=200_000,
        step_lexer_fuel=lexer_fuel,
        step_max_items=300_000,
        max_lexer_states=MAX_LEXER_STATES + num_more_states,
        max_grammar_size=60_000,
        verbose_errors=False,
    )


def _error_of_walks(matcher: llguidance.LLMatcher, kind: str, grammar: str, is_text: np.ndarray) -> str:
    """The error of walks through a new grammar; "" if there is none.

    Only a walk shows a limit that is exceeded at once or behind few tokens, or a grammar without any text. A walk goes
    on behind the first mask if there are patterns: only with these the lexer has much to do.
    """
    has_patterns = kind != "choice" and (kind != "json" or '"pattern"' in grammar)
    for seed in range(_NUM_TRIAL_WALKS if has_patterns else 1):
        error = _error_of_walk(
            matcher.deep_copy(), _TRIAL_TOKENS if has_patterns else 1, is_text, random.Random(seed), repeats=seed > 0
        )
        if error:
            return error
    return ""


def _error_of_walk(
    walk: llguidance.LLMatcher, num_tokens: int, is_text: np.ndarray, rng: random.Random, *, repeats: bool
) -> str:
    """The error of a walk by random tokens.

    is_text: by token id; special tokens, whose bits may be set, are not taken. repeats: a token comes again as long as
    it is allowed.
    """
    token = -1
    for _ in range(num_tokens):
        walk.consume_tokens(walk.compute_ff_tokens())
        mask = np.unpackbits(np.frombuffer(walk.compute_bitmask(), np.uint8), bitorder="little")
        if walk.is_error():
            return str(walk.get_error())
        mask = mask[: len(is_text)] & is_text
        if walk.is_stopped() or not mask.any():
            break
        if not repeats or token < 0 or not mask[token]:
            token = int(rng.choice(np.flatnonzero(mask)))
        walk.consume_token(token)
    return ""


_TOO_COMPLEX = (
    "patterns, formats and lengths of one text are too complex together; "
    "use a simpler pattern, or lower its repetition counts and the lengths"
)
# Parts of llguidance's messages that have rewritten patterns or names of quire's own, and what they mean.
_MEANINGS = (
    ("patternProperty regexes", "a property name could match two of the patterns"),
    ("circular references", "a recursive $ref has other keywords beside it; leave out the $ref or these keywords"),
    ("Unable to determine if regex is empty", _TOO_COMPLEX),
    ("too many expressions", _TOO_COMPLEX),
    ("lexer precomputation failed", _TOO_COMPLEX),
    ("too many states", "the text is too long for the lengths and repetition counts of its patterns; lower them"),
    ("min/maxProperties only supported", "minProperties and maxProperties beside optional properties are not enforced"),
    ("lookaround", "look-around is not supported in patterns"),
    ("look-around", "look-around is not supported in patterns"),
    ("panic", "the backend failed"),
    ("Traceback", "the backend failed"),
)


def _failure(error: str) -> str:
    """The error of a sequence whose matcher failed."""
    return f"the matcher of the constraint failed: {_clean_message(error)}"


def _clean_message(error: str) -> str:
    """An error message of llguidance without parser state, lines of the grammar, and names of quire's own."""
    meaning = next((meaning for part, meaning in _MEANINGS if part in error), None)
    if meaning is not None:
        return meaning
    first = re.split(r"<non-verbose/>|  while processing |\n +\d+ \|", error)[0]
    return first.strip()[:MAX_MESSAGE]


class _TokenizerAdapter:
    """A vocabulary with the attributes that llguidance's TokenizerWrapper reads."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = list(vocabulary.tokens)
        self.end_ids = [token for token in vocabulary.end_ids if token < vocabulary.size]
        if not self.end_ids:  # llguidance needs an end token that is no text
            self.end_ids = [len(self.tokens)]
            self.tokens.append(b"")
        self.eos_token_id = self.end_ids[0]
        self.special_token_ids = sorted(token for token in vocabulary.special_ids if token < vocabulary.size)
        self._vocabulary = vocabulary
        self._ids = {data: token for token, data in enumerate(self.tokens) if data}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str) -> list[int]:
        """Tokens with exactly the bytes of a text, or of a prefix if it is longer than _MAX_TOKENISED."""
        if len(text) <= _MAX_TOKENISED:
            return encode_within(text, self._vocabulary) or self._longest_first(text.encode())
        data = text[:_MAX_TOKENISED].encode()
        return forced_tokens(data, self._vocabulary) or self._longest_first(data)

    def _longest_first(self, data: bytes) -> list[int]:
        """Greedy longest-match tokens, for a text such as the name of a special token, which the tokenizer misreads."""
        tokens, place = [], 0
        while place < len(data):
            ends = range(min(len(data), place + self._longest), place, -1)
            end = next((end for end in ends if data[place:end] in self._ids), None)
            if end is None:
                return []
            tokens.append(self._ids[data[place:end]])
            place = end
        return tokens
