"""A sequence that reaches a limit of llguidance, or in which it panics, fails alone. Its grammar can be used again."""

import json

import llguidance
import numpy as np

from quire.params import StructuredOutputsParams
from quire.structured_outputs import llguidance_backend
from quire.structured_outputs.llguidance_backend import GuidanceBackend
from quire.structured_outputs.vocabulary import Vocabulary

BYTES = Vocabulary(
    tokens=[bytes([i]) if i else b"" for i in range(256)],
    end_ids=(0,),
    special_ids=frozenset({0}),
    encode=lambda text: list(text.encode()),
)
LONG_STRING = StructuredOutputsParams(json=json.dumps({"type": "string", "maxLength": 60_000}))


class Writer:
    """Writes a text as a model would: letters, and otherwise the first byte that the mask allows."""

    def __init__(self, grammar):
        self.matcher = grammar.new_matcher(fast_forward=True)
        self.verdict = self.matcher.advance([])
        self.num_letters = 0

    def write(self, num_letters):
        """Write until this many letters, or the end (True). False if the grammar allows nothing any more."""
        while self.num_letters < num_letters:
            mask = np.zeros(8, np.uint32)
            self.matcher.fill_bitmask(mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if self.verdict.error or not len(allowed):
                return False
            letter = ord("a") + self.num_letters % 26
            self.num_letters += letter in allowed
            self.verdict = self.matcher.advance([letter if letter in allowed else int(allowed[0])])
        return True


def test_a_text_that_needs_more_states_than_a_lexer_may_have_gets_further_lexers(monkeypatch, caplog):
    monkeypatch.setattr(llguidance_backend, "MAX_LEXER_STATES", 3_000)
    writer = Writer(GuidanceBackend().compile(LONG_STRING, BYTES))
    assert writer.write(3_000), "each letter takes about nine states"
    assert writer.matcher.advance([ord('"')]).is_over
    assert caplog.text.count("gets a new lexer") == 1, "of the lexers of one sequence only the first is shared"


def test_tokens_that_come_together_get_another_lexer_where_the_first_has_no_more_states(monkeypatch):
    """llguidance stops at such a token without an error, as at one that the grammar does not allow."""
    monkeypatch.setattr(llguidance_backend, "MAX_LEXER_STATES", 500)
    matcher = GuidanceBackend().compile(LONG_STRING, BYTES).new_matcher(fast_forward=False)
    for tokens in (b'"', *[b"some letters"] * 50):
        assert not matcher.advance(list(tokens)).error
    assert "does not fit" in matcher.advance(list(b'"more')).error


def test_other_sequences_go_on_where_one_reaches_a_limit(monkeypatch, caplog):
    monkeypatch.setattr(llguidance_backend, "MAX_LEXER_STATES", 500)
    grammar = GuidanceBackend().compile(LONG_STRING, BYTES)
    sibling = Writer(grammar)
    assert sibling.write(5)
    victim = Writer(grammar)
    assert not victim.write(1_000), "otherwise no limit is reached"
    assert "the text is too long for the lengths" in victim.matcher.advance([]).error
    assert "too many" in caplog.text, "the log has the reason"
    assert sibling.write(20)
    assert all(Writer(grammar).write(20) for _ in range(3))
    assert caplog.text.count("too many states") == 1


def test_sequences_after_one_that_reached_a_limit_share_one_new_lexer(monkeypatch):
    monkeypatch.setattr(llguidance_backend, "MAX_LEXER_STATES", 3_000)
    grammar, built, matcher = GuidanceBackend().compile(LONG_STRING, BYTES), [], llguidance.LLMatcher

    def counted(*arguments, **options):
        built.append(arguments)
        return matcher(*arguments, **options)

    monkeypatch.setattr(llguidance, "LLMatcher", counted)
    assert Writer(grammar).write(600)
    assert built
    built.clear()
    assert all(Writer(grammar).write(20) for _ in range(3))
    assert not built, "each of them has built a lexer"


def test_a_panic_of_llguidance_affects_neither_other_matchers_nor_the_grammar(caplog):
    """The tokenizer fails within the library, which panics and has an error from then on."""
    is_broken = False

    def encode(text):
        if is_broken:
            raise ValueError("no tokens today")
        return list(text.encode())

    grammar = GuidanceBackend().compile(
        StructuredOutputsParams(regex="[ab]cdefgh[ij]"), Vocabulary(BYTES.tokens, (0,), frozenset({0}), encode)
    )
    victim, sibling = (grammar.new_matcher(fast_forward=True) for _ in range(2))
    assert not victim.advance([]).error and not sibling.advance([]).error
    is_broken = True
    errors = [victim.advance([token]).error for token in b"ac"]
    assert errors[-1] == "the matcher of the constraint failed: the backend failed"
    assert caplog.text.count("no tokens today") == 1, "the log has the reason once"
    is_broken = False
    for matcher in (sibling, grammar.new_matcher(fast_forward=True)):
        assert bytes(matcher.advance([ord("a")]).forced) == b"cdefgh"
        assert matcher.advance([ord("i")]).is_over


def test_a_resumed_sequence_consumes_thousands_of_known_tokens():
    """Only masks grant lexer fuel. A restarted engine gets all known tokens at once, with a new lexer."""
    known = [ord('"'), *(ord("a") + i % 26 for i in range(20_000))]
    for fast_forward in (True, False):
        matcher = GuidanceBackend().compile(LONG_STRING, BYTES).new_matcher(fast_forward=fast_forward)
        assert matcher.advance(known).error == ""
        assert matcher.advance([ord('"')]).is_over
