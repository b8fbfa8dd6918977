"""Token masks of automata: against trying every token, and against llguidance's; forced tokens."""

import random
import re

import llguidance
import numpy as np
import pytest
from fsm_oracles import allowed, demo_vocabulary, patterns, samples, small_vocabulary
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.constraint import Verdict
from quire.errors import RequestError
from quire.params import StructuredOutputsParams
from quire.structured_outputs.forced_tokens import forced_tokens
from quire.structured_outputs.fsm import token_masks as token_automata
from quire.structured_outputs.fsm.backend import FsmBackend, FsmGrammar, FsmMatcher
from quire.structured_outputs.fsm.construct import regex_to_dfa
from quire.structured_outputs.fsm.dfa import DEAD, Dfa
from quire.structured_outputs.fsm.token_masks import LruCache, TokenFsm, TokenTrie
from quire.structured_outputs.vocabulary import Vocabulary

RECORD = r'\{"name": "(Ann|Bob|Wilhelmina)", "likes": \["[a-z]{1,5}"(, "[a-z]{1,5}")*\], "text": "[^"\\]*"\}'
BACKEND = FsmBackend()


def grammar(pattern: str, vocabulary: Vocabulary) -> FsmGrammar:
    return BACKEND.compile(StructuredOutputsParams(regex=pattern or "()"), vocabulary)


def mask(matcher: FsmMatcher, vocabulary: Vocabulary) -> set[int]:
    words = np.full(vocabulary.num_words, 7, np.uint32)
    matcher.fill_bitmask(words)
    return allowed(words)


def by_trying(dfa: Dfa, prefix: bytes, vocabulary: Vocabulary) -> set[int]:
    """Each token alone: whether the text with the token is a prefix of the language."""
    fits = {t for t, text in enumerate(vocabulary.tokens) if text and dfa.walk(0, prefix + text) != DEAD}
    return (fits - vocabulary.special_ids) | (set(vocabulary.end_ids) if dfa.matches(prefix) else set())


@settings(max_examples=20)
@given(st.one_of(patterns(), st.just(RECORD)), st.randoms(use_true_random=False))
def test_a_mask_has_the_tokens_that_fit(pattern, chance):
    vocabulary = demo_vocabulary()
    try:
        dfa = regex_to_dfa(pattern)
    except RequestError:
        return
    matcher = grammar(pattern, vocabulary).new_matcher(fast_forward=False)
    matcher.advance([])
    prefix = b""
    for _ in range(8):
        fits = mask(matcher, vocabulary)
        assert fits == by_trying(dfa, prefix, vocabulary)
        text = sorted(fits - set(vocabulary.end_ids))
        if not text:
            break
        token = chance.choice(text)
        verdict = matcher.advance([token])
        prefix += vocabulary.tokens[token]
        assert not verdict.error and not verdict.forced
        assert verdict.is_over == (dfa.matches(prefix) and (dfa.by_byte[dfa.walk(0, prefix)] == DEAD).all())


@settings(max_examples=40)
@given(
    st.lists(st.binary(min_size=1, max_size=5), min_size=1, max_size=60),
    st.integers(1, 12),
    st.randoms(use_true_random=False),
)
def test_all_tokens_walk_as_each_would(texts, num_states, chance):
    vocabulary = small_vocabulary(*texts, b"", b"\xff" * 40)
    table = np.array([[chance.randrange(-1, num_states) for _ in range(7)] for _ in range(num_states)] + [[DEAD] * 7])
    classes = np.array([chance.randrange(7) for _ in range(256)], np.uint8)
    dfa = Dfa(table.astype(np.int32), classes, np.ones(num_states, bool))
    trie = TokenTrie(vocabulary)
    for state in range(num_states):
        expected = [dfa.walk(state, text) if text else DEAD for text in vocabulary.tokens]
        assert trie.next_states(dfa, state).tolist() == expected


@pytest.mark.parametrize(
    "pattern",
    [r"[\s\S]*", ".*", r'"[^"\\]*"', "[ -~]*", "[^é]*", "[a-z ]*", "[\x00-\U0010fffe]*x", "(é|[^x])*", "[^\ud7ff]*"],
)
def test_a_state_that_text_leads_back_to_is_walked_as_others(pattern):
    vocabulary = demo_vocabulary()
    dfa, trie = regex_to_dfa(pattern), TokenTrie(vocabulary)
    for state in range(dfa.num_states):
        expected = [dfa.walk(state, text) if text else DEAD for text in vocabulary.tokens]
        assert trie.next_states(dfa, state).tolist() == expected


@pytest.mark.parametrize(
    "pattern",
    [
        *(
            "(abc|a[b-z]{3}|é+)*",
            RECORD,
            r"-?(0|[1-9][0-9]*)(\.[0-9]+)?",
            "[^a]{1,9}",
            "(yes|no|maybe)",
            "[\u4e00-\u9fff]+",
        ),
        *("(the |a |lamp |cost[s]? )+", ".{3,20}", r"\x7b[\s\S]*\x7d", "[^\u0800-\uffff]*x"),
    ],
)
def test_masks_are_those_of_llguidance(pattern):
    vocabulary = demo_vocabulary()
    tokenizer = llguidance.LLTokenizer(vocabulary_wrapper(vocabulary), eos_token=list(vocabulary.end_ids))
    num_compared = 0
    for seed in range(3):
        chance = random.Random(seed)
        theirs = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_regex(pattern))
        ours = grammar(pattern, vocabulary).new_matcher(fast_forward=False)
        ours.advance([])
        for _ in range(12):
            fits = mask(ours, vocabulary)
            words = np.zeros(vocabulary.num_words, np.uint32)
            theirs.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if theirs.compute_ff_tokens():  # they allow only the canonical tokens of forced text
                assert allowed(words) <= fits
            else:
                num_compared += 1
                assert fits == allowed(words)
            text = sorted(fits - set(vocabulary.end_ids))
            if not text:
                break
            token = chance.choice(text)
            assert theirs.consume_token(token)
            if ours.advance([token]).is_over:
                break
    assert num_compared > 2


def vocabulary_wrapper(vocabulary: Vocabulary) -> llguidance.TokenizerWrapper:
    """The vocabulary as a tokenizer of llguidance."""

    class Tokenizer:
        def __init__(self):
            self.tokens = list(vocabulary.tokens)
            self.special_token_ids = sorted(vocabulary.special_ids)
            self.eos_token_id, self.bos_token_id = vocabulary.end_ids[0], None

        def __call__(self, text):
            return vocabulary.encode(text)

    return llguidance.TokenizerWrapper(Tokenizer())


def test_choices_are_what_may_come():
    vocabulary = demo_vocabulary()
    asked = StructuredOutputsParams(choice=("positive", "negative", "a|b.", "neg"))
    matcher = BACKEND.compile(asked, vocabulary).new_matcher(fast_forward=False)
    matcher.advance([])
    assert {vocabulary.tokens[t][:1] for t in mask(matcher, vocabulary)} == {b"p", b"n", b"a"}
    verdict = matcher.advance(vocabulary.encode("neg"))
    assert verdict == Verdict() and {0, 2} < mask(matcher, vocabulary)
    assert matcher.advance(vocabulary.encode("ative")) == Verdict(is_over=True)
    assert mask(matcher, vocabulary) == {0, 2}


def run(pattern: str, text: bytes, *, fast_forward: bool) -> tuple[list[int], list[bool]]:
    """A model that writes this text in canonical tokens. Returns all tokens, and which of them were forced."""
    vocabulary = demo_vocabulary()
    wanted = vocabulary.encode(text.decode())
    matcher = grammar(pattern, vocabulary).new_matcher(fast_forward=fast_forward)
    verdict = matcher.advance([])
    tokens, forced = list(verdict.forced), [True] * len(verdict.forced)
    while not verdict.is_over:
        assert tokens == wanted[: len(tokens)]
        fits = mask(matcher, vocabulary)
        if len(tokens) == len(wanted):
            assert fits >= set(vocabulary.end_ids)
            break
        assert wanted[len(tokens)] in fits
        verdict = matcher.advance(wanted[len(tokens) : len(tokens) + 1])
        assert not verdict.error
        tokens += [wanted[len(tokens)], *verdict.forced]
        forced += [False, *([True] * len(verdict.forced))]
    return tokens, forced


@pytest.mark.parametrize(
    ("pattern", "share"),
    [
        (RECORD, 0.08),
        (r'\{"name": "(Ann|Bob)", "age": [0-9]{1,2}\}', 0.5),
        ("(The lamp costs|The lantern costs) [0-9]{2} (coins|silver pieces), and not one more\\.", 0.4),
        ('(\\{"station": "[A-D]", "platform": [0-9]\\}\n){2,3}', 0.5),
        ("é{3}(ü|ß)é{3}", 0.0),
        ("  [ab]   \n\n[ab]    x", 0.0),
    ],
)
def test_fast_forward_writes_what_the_tokenizer_would(pattern, share):
    """The text in canonical tokens, with and without fast-forward, and the least share of forced tokens."""
    num_tokens = num_forced = 0
    for text in samples(regex_to_dfa(pattern), 12):
        tokens, forced = run(pattern, text, fast_forward=True)
        assert tokens == demo_vocabulary().encode(text.decode())
        assert run(pattern, text, fast_forward=False) == (tokens, [False] * len(tokens))
        num_tokens, num_forced = num_tokens + len(tokens), num_forced + sum(forced)
    assert num_forced >= share * num_tokens


@settings(max_examples=100)
@given(st.data())
def test_no_continuation_changes_forced_tokens(data):
    vocabulary = demo_vocabulary()
    words = [token for token in vocabulary.tokens if token]
    piece = st.sampled_from(words).map(lambda text: text.decode(errors="ignore"))
    text = "".join(data.draw(st.lists(piece, min_size=1, max_size=12)))
    more = "".join(data.draw(st.lists(piece, max_size=4)))
    cut = data.draw(st.integers(0, 2))
    known = text.encode()
    known = known[: len(known) - cut] if cut < len(known) else known
    tokens = forced_tokens(known, vocabulary)
    canonical = vocabulary.encode(text + more)
    assert tokens == canonical[: len(tokens)]
    assert (
        b"".join(vocabulary.tokens[token] for token in tokens)
        == known[: sum(len(vocabulary.tokens[t]) for t in tokens)]
    )


def test_text_behind_which_nothing_comes_is_forced_to_its_end():
    vocabulary = demo_vocabulary()
    assert forced_tokens(b'{"name": "', vocabulary, closed=True) == vocabulary.encode('{"name": "')
    assert len(forced_tokens(b'{"name": "', vocabulary)) < len(vocabulary.encode('{"name": "'))
    matcher = grammar("(no|yes, and that is all there is to say)", vocabulary).new_matcher(fast_forward=True)
    assert matcher.advance([]) == Verdict()
    verdict = matcher.advance(vocabulary.encode("yes"))
    text = b"".join(vocabulary.tokens[token] for token in verdict.forced)
    assert text == b", and that is all there is to say" and verdict.is_over


def test_a_long_text_is_forced_in_pieces():
    vocabulary = demo_vocabulary()
    text = "The lamp costs 12 coins. " * 160
    asked = StructuredOutputsParams(choice=(text, "no"))
    matcher = BACKEND.compile(asked, vocabulary).new_matcher(fast_forward=True)
    tokens, wanted, num_steps = list(matcher.advance([]).forced), vocabulary.encode(text), 0
    while len(tokens) < len(wanted):
        num_steps += 1
        token = wanted[len(tokens)]
        tokens += [token, *matcher.advance([token]).forced]
    assert tokens == wanted and num_steps < 10


def test_bytes_that_begin_within_a_character_are_not_forced():
    for closed in (True, False):
        assert forced_tokens("日本".encode()[1:], demo_vocabulary(), closed=closed) == []


@pytest.mark.parametrize("pattern", ["(é|ü|日本){1,4}naïve [x-z]", "(日本|日x)", "[é日]{2}"])
def test_forced_text_keeps_to_a_pattern_whose_characters_are_several_tokens(pattern):
    vocabulary = demo_vocabulary()
    for seed in range(12):
        chance = random.Random(seed)
        matcher = grammar(pattern, vocabulary).new_matcher(fast_forward=True)
        verdict = matcher.advance([])
        tokens = list(verdict.forced)
        while not verdict.is_over:
            assert not verdict.error
            tokens.append(chance.choice(sorted(mask(matcher, vocabulary) - set(vocabulary.end_ids))))
            verdict = matcher.advance(tokens[-1:])
            tokens += verdict.forced
        assert re.fullmatch(pattern, b"".join(vocabulary.tokens[token] for token in tokens).decode())


def test_forced_tokens_that_do_not_fit_are_an_error(monkeypatch):
    vocabulary = demo_vocabulary()
    wrong = vocabulary.encode("x")
    monkeypatch.setattr(token_automata, "forced_tokens", lambda data, vocabulary, closed: wrong)
    matcher = grammar("abc", vocabulary).new_matcher(fast_forward=True)
    verdict = matcher.advance([])
    assert verdict.error and not verdict.forced and not mask(matcher, vocabulary)


def test_a_tokenizer_that_adds_a_space_in_front_is_asked_within_a_text():
    tokens = [b" ", b"\x02", b"ab", b"a", b"b", b" ab", b"abc"]
    inner = small_vocabulary(*tokens)
    vocabulary = Vocabulary(inner.tokens, inner.end_ids, inner.special_ids, lambda text: inner.encode(" " + text))
    assert vocabulary.encode("ab") == [5]
    assert forced_tokens(b"abb", vocabulary, closed=True) == [2, 4]
    assert forced_tokens(b"abab", vocabulary) == [2]  # the last three bytes may become b"abc"
    assert forced_tokens("ab\N{SNOWMAN}".encode(), vocabulary, closed=True) == []


def test_text_that_the_tokenizer_reads_as_a_special_token_is_not_forced():
    vocabulary = demo_vocabulary()
    assert forced_tokens(b"x<|im_end|>y", vocabulary, closed=True) == []
    matcher = grammar(r"x<\|im_end\|>y", vocabulary).new_matcher(fast_forward=True)
    verdict = matcher.advance([])
    assert not verdict.error and not verdict.forced
    assert all(vocabulary.tokens[token][:1] == b"x" for token in mask(matcher, vocabulary))


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.booleans())
def test_verdicts_do_not_depend_on_how_tokens_are_grouped_into_calls(seed, fast_forward):
    vocabulary = demo_vocabulary()
    compiled = grammar(RECORD, vocabulary)
    chance = random.Random(seed)
    undisturbed = compiled.new_matcher(fast_forward=fast_forward)
    verdict = undisturbed.advance([])
    tokens, verdicts = list(verdict.forced), {0: verdict}
    for _ in range(12):
        text = sorted(mask(undisturbed, vocabulary) - set(vocabulary.end_ids))
        if not text:
            break
        token = chance.choice(text)
        verdict = undisturbed.advance([token])
        verdicts[len(tokens) + 1] = verdict
        tokens += [token, *verdict.forced]
    for begin, verdict in verdicts.items():
        for stop in range(begin, begin + len(verdict.forced) + 1):  # resumed before, within and after forced tokens
            resumed = compiled.new_matcher(fast_forward=fast_forward)
            again = resumed.advance(tokens[:stop])
            assert again.forced == verdict.forced[stop - begin :]
            assert (again.is_over, again.error) == (verdict.is_over, verdict.error)
    assert mask(resumed, vocabulary) == mask(undisturbed, vocabulary)


def test_a_token_that_does_not_fit_is_an_error_that_stays():
    vocabulary = demo_vocabulary()
    for token in (vocabulary.encode("x")[0], 0, 1, 2, 2048, -1, 10**6):
        matcher = grammar("[ab]+!", vocabulary).new_matcher(fast_forward=True)
        verdict = matcher.advance([*vocabulary.encode("a"), token])
        assert str(token) in verdict.error and not verdict.is_over
        assert matcher.advance(vocabulary.encode("a")).error == verdict.error
        assert mask(matcher, vocabulary) == set()


def test_behind_an_end_there_are_only_ends():
    vocabulary = demo_vocabulary()
    matcher = grammar("a*", vocabulary).new_matcher(fast_forward=True)
    assert matcher.advance([*vocabulary.encode("a"), 2]) == Verdict(is_over=True)
    assert mask(matcher, vocabulary) == {0, 2}
    assert matcher.advance([0]) == Verdict(is_over=True)
    assert matcher.advance(vocabulary.encode("a")).error


def test_masks_exclude_tokens_that_the_vocabulary_cannot_continue():
    vocabulary = small_vocabulary(b"a", b"b", b"ab", b"xc", b"\xc3")
    matcher = grammar("a(bc|é|b?x?)|b*", vocabulary).new_matcher(fast_forward=False)
    assert matcher.advance([]) == Verdict()
    assert mask(matcher, vocabulary) == {0, 1, 2, 5}
    assert matcher.advance([0]) == Verdict()
    assert mask(matcher, vocabulary) == {1, 5}  # not b"\xc3": no token continues it
    assert matcher.advance([1]) == Verdict()
    assert mask(matcher, vocabulary) == {5}


@pytest.mark.parametrize("most", [0, 10**9])
def test_a_dead_end_of_the_vocabulary_is_an_error(most, monkeypatch):
    monkeypatch.setattr(token_automata, "_MAX_WALKS", most)
    vocabulary = small_vocabulary(b"a", b"b")
    matcher = grammar("a[bc]c", vocabulary).new_matcher(fast_forward=False)
    if most:
        assert "no token" in matcher.advance([]).error
    else:  # found only when it is reached
        assert matcher.advance([0]) == Verdict()
        assert "no token" in matcher.advance([1]).error
    assert mask(matcher, vocabulary) == set()


def test_masks_are_remembered_within_bounds(monkeypatch):
    vocabulary = demo_vocabulary()
    monkeypatch.setattr(token_automata, "MAX_MASK_BYTES", 3 * 4 * vocabulary.num_words)
    fsm = TokenFsm(regex_to_dfa("[ab]{40}"), TokenTrie(vocabulary), vocabulary)
    first = [fsm.mask(state).copy() for state in range(40)]
    assert all((fsm.mask(state) == first[state]).all() for state in reversed(range(40)))
    assert fsm.mask(5) is fsm.mask(5)
    made = []
    squares = LruCache(lambda key: made.append(key) or key * key, 2)
    assert [squares(key) for key in (1, 2, 1, 3, 1, 2)] == [1, 4, 1, 9, 1, 4]
    assert made == [1, 2, 3, 2]


def test_kinds_that_are_not_regular_are_refused():
    for asked in (StructuredOutputsParams(grammar="start: /a/"), StructuredOutputsParams(structural_tag="{}")):
        for attempt in (BACKEND.check, lambda asked: BACKEND.compile(asked, demo_vocabulary())):
            with pytest.raises(RequestError, match="use the llguidance backend") as caught:
                attempt(asked)
            assert caught.value.param == asked.kind


def test_check_refuses_what_compile_would():
    for pattern in ("(a", "(?=a)", "a{99999}", "(a{1,1000}){1,1000}", "[ab]*a[ab]{14}", "(.*a.{24})"):
        with pytest.raises(RequestError):
            BACKEND.check(StructuredOutputsParams(regex=pattern))
    BACKEND.check(StructuredOutputsParams(regex=RECORD))
    BACKEND.check(StructuredOutputsParams(choice=("a", "b")))
