"""The llguidance backend: masks, forced tokens, verdicts, kinds and limits."""

import itertools
import json
import random
import re
import threading

import pytest
from grammar_mask_walks import BYTES, END, allowed, encode, matches, text_of, vocabulary, walk
from hypothesis import given, settings
from hypothesis import strategies as st
from json_schema_cases import at_random

from quire.errors import ConfigError, RequestError
from quire.params import StructuredOutputsParams as Asked
from quire.structured_outputs.backends import check, compile
from quire.structured_outputs.limits import MAX_FORCED
from quire.structured_outputs.vocabulary import Vocabulary

RECORD = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array"}},
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TAG = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<tool_call>f(", "schema": {"const": [1]}, "end": ")</tool_call>"},
        {"begin": "<tool_call>g(", "schema": {"enum": ["x", "y"]}, "end": ")</tool_call>"},
    ],
    "triggers": ["<tool_call>"],
}
ANYTHING = [
    Asked(json=RECORD),
    Asked(json=RECORD, disable_any_whitespace=True),
    Asked(json_object=True),
    Asked(regex=r"(ab|c\d){2,4}é?"),
    Asked(choice=("yes", "no way", 'né"\n\\', "yes please")),
    Asked(grammar='root ::= "(" root? ")" | [a-c]+'),
    Asked(grammar='start: "let " NAME " = " %json {"type": "integer"}\nNAME: /[a-z]{1,9}/'),
    Asked(structural_tag=TAG),
]


@pytest.mark.parametrize("asked", ANYTHING, ids=lambda asked: asked.kind)
def test_a_mask_has_just_the_tokens_that_a_matcher_takes(asked):
    rng = random.Random(3)
    known = vocabulary()
    grammar = compile(asked, known)
    tokens, _ = walk(grammar, known, rng, limit=12)
    for length in range(len(tokens)):
        matcher = grammar.new_matcher(fast_forward=False)
        assert not matcher.advance(tokens[:length]).error
        options = set(allowed(matcher, known))
        single = len(options) == 1  # forced text allows only canonical tokens
        for token in rng.sample(range(known.size), 60) + sorted(options)[:20]:
            other = grammar.new_matcher(fast_forward=False)
            fits = not other.advance([*tokens[:length], token]).error
            assert fits == (token in options) or (single and fits)


@pytest.mark.parametrize("size", [2048, 2049, 2079, 2080])
@pytest.mark.parametrize("end_ids", [(2,), (0, 2), (100, 2, 0)])
def test_masks_end_with_the_vocabulary_and_have_every_end_token_where_an_output_may_end(size, end_ids):
    known = vocabulary(size, end_ids)
    matcher = compile(Asked(regex="a{2,3}"), known).new_matcher(fast_forward=False)
    matcher.advance(encode("a"))
    assert not set(allowed(matcher, known)) & set(end_ids)
    matcher.advance(encode("a"))
    assert {token for token in allowed(matcher, known) if token not in encode("a")} == set(end_ids)
    verdict = matcher.advance(encode("a"))
    assert verdict.is_over
    assert set(allowed(matcher, known)) == set(end_ids)
    assert not matcher.advance([end_ids[-1]]).error
    assert set(allowed(matcher, known)) == set(end_ids)


def test_special_tokens_and_holes_never_come():
    known = vocabulary(2100)
    matcher = compile(Asked(regex="(?s:.*)"), known).new_matcher(fast_forward=True)
    matcher.advance([])
    options = set(allowed(matcher, known))
    assert options & known.special_ids == set(known.end_ids) & known.special_ids
    assert max(options) < 2048
    assert {2042, 2044} <= options, "tokens such as <tool_call> are text"


def test_two_tokens_of_the_same_text_may_both_come():
    twins = Vocabulary([b"a", b"b", b"a", b""], (3,), frozenset({3}), lambda text: [0 if c == "a" else 1 for c in text])
    matcher = compile(Asked(regex="a|bb"), twins).new_matcher(fast_forward=False)
    matcher.advance([])
    assert allowed(matcher, twins) == [0, 1, 2]


@pytest.mark.parametrize("asked", ANYTHING, ids=lambda asked: asked.kind)
def test_an_output_is_the_same_whether_it_is_fast_forwarded_or_not(asked):
    known = vocabulary()
    grammar = compile(asked, known)
    for seed in range(8):
        tokens, _ = walk(grammar, known, random.Random(seed), limit=60, fast_forward=True)
        matcher = grammar.new_matcher(fast_forward=False)
        for place, token in enumerate(tokens):
            verdict = matcher.advance(tokens[max(0, place - 1) : place])
            assert not verdict.forced
            assert not verdict.error
            assert token in allowed(matcher, known)


def spans(asked: Asked, rng: random.Random) -> list[tuple[int, list[int]]]:
    """A random walk: positions of the verdicts, and the tokens that they forced."""
    known = vocabulary()
    matcher = compile(asked, known).new_matcher(fast_forward=True)
    verdict = matcher.advance([])
    found, tokens = [(0, verdict.forced)], list(verdict.forced)
    while len(tokens) < 50 and not verdict.is_over:
        tokens.append(rng.choice(allowed(matcher, known)))
        if tokens[-1] in known.end_ids:
            break
        verdict = matcher.advance(tokens[-1:])
        found.append((len(tokens), verdict.forced))
        tokens += verdict.forced
    return [*found, (len(tokens), tokens)]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_forced_tokens_are_those_that_the_tokenizer_writes(seed):
    rng = random.Random(seed)
    try:
        *found, (_, tokens) = spans(Asked(json=at_random(rng), disable_any_whitespace=True), rng)
    except RequestError:
        return
    for start, forced in found:
        text = text_of(tokens[start:], vocabulary())
        begins_within_a_character = text[:1] and 0x80 <= text[0] < 0xC0  # no text to compare with
        if forced and len(tokens) > start + len(forced) and not begins_within_a_character:
            assert encode(text.decode(errors="ignore"))[: len(forced)] == forced


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_a_matcher_with_known_tokens_gives_the_verdict_of_an_undisturbed_one(seed):
    rng = random.Random(seed)
    asked = rng.choice(ANYTHING)
    *found, (_, tokens) = spans(asked, rng)
    grammar = compile(asked, vocabulary())
    for start, forced in found:
        for length in range(start, start + len(forced) + 1):
            again = grammar.new_matcher(fast_forward=True)
            verdict = again.advance(tokens[:length])
            assert verdict.forced == tokens[length : start + len(forced)]
            assert allowed(again, vocabulary())


def test_advancing_in_pieces_is_advancing_at_once():
    asked = Asked(regex="[ab]{3}(one|two)")
    tokens = [encode(character)[0] for character in "abatwo"]
    for cut in itertools.combinations(range(1, 6), 2):
        matcher = compile(asked, vocabulary()).new_matcher(fast_forward=False)
        parts = [tokens[: cut[0]], tokens[cut[0] : cut[1]], tokens[cut[1] :]]
        verdicts = [matcher.advance(part) for part in parts]
        assert verdicts[-1] == compile(asked, vocabulary()).new_matcher(fast_forward=False).advance(tokens)


def test_a_token_that_does_not_fit_is_an_error_of_this_sequence_alone():
    grammar = compile(Asked(regex="abc"), vocabulary())
    good, bad = grammar.new_matcher(fast_forward=False), grammar.new_matcher(fast_forward=False)
    verdict = bad.advance(encode("x"))
    assert verdict.error == f"token {encode('x')[0]} does not fit the constraint"
    assert bad.advance(encode("a")).error == verdict.error
    assert allowed(bad, vocabulary()) == []
    assert not good.advance(encode("a")).error
    assert allowed(good, vocabulary())
    early = grammar.new_matcher(fast_forward=False)
    assert early.advance([*encode("a"), 2]).error == "the output ended before the constraint was complete"


def test_a_pattern_that_exceeds_a_limit_behind_few_tokens_is_refused():
    with pytest.raises(RequestError, match="too complex together; use a simpler pattern") as caught:
        compile(Asked(regex="((a{0,100}){0,100}b?){0,100}"), vocabulary())
    assert caught.value.param == "regex"


def test_a_limit_met_on_the_way_is_an_error_of_this_sequence_alone():
    grammar = compile(Asked(regex="((a{0,30}){0,30}b?){0,30}"), vocabulary())
    matcher = grammar.new_matcher(fast_forward=False)
    token = encode("a")
    for _ in range(2000):
        verdict = matcher.advance(token)
        if verdict.error or not allowed(matcher, vocabulary()):
            break
    verdict = matcher.advance([])
    assert "the matcher of the constraint failed: patterns, formats and lengths" in verdict.error
    assert "\n" not in verdict.error
    assert allowed(matcher, vocabulary()) == []


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        (Asked(regex="^a/b$"), ["a/b"], ["a/", "xa/b"]),
        (Asked(regex="^a|b$"), ["a", "b"], ["ax", "xb"]),
        (Asked(choice=("a", 'q"\\', "né\n", "😀")), ["a", 'q"\\', "né\n", "😀"], ["b", "aa", ""]),
        (Asked(grammar='start: "a"+ // "b"\n'), ["a", "aa"], ["b", ""]),
        (Asked(grammar='start: %json {"const": "x", "title": "t"} "!"'), ['"x"!'], ['"y"!', '"x"']),
        (Asked(json={"type": "array"}, whitespace_pattern=r"[\s]{0,2}"), ["[]", "[\n\t]"], ["[   ]"]),
        (Asked(json={"type": "array"}, whitespace_pattern=r"\s?"), ["[]", "[ ]", "[1, 2]"], ["[  ]", "[\x0b]"]),
        (
            Asked(json={"type": "array"}, disable_any_whitespace=True),
            ["[1, 2]", '[{"a": 1}]'],
            ["[1,2]", "[1,  2]", "[ ]"],
        ),
        (Asked(json={"type": "array"}), ["[1, 2]", '[{"a": 1}]'], ["[1,2]", "[1,\n2]", "[ ]"]),
        (
            Asked(json={"type": "array"}, disable_any_whitespace=False),
            ["[1 ,\n2]", "[\n" + " " * 32 + "]", "[\n\t\t1, 2\n]", json.dumps([[{"a": [1]}]], indent=4)],
            ["[  ]", "[\n\n]", "[\n" + " " * 33 + "]", " []", "[] "],
        ),
        (
            Asked(json={"properties": {"a": True}, "type": "object"}, disable_additional_properties=True),
            ["{}", '{"a": 1}'],
            ['{"b": 1}'],
        ),
        (Asked(json={"type": "object", "properties": {"a": {"type": "null"}}}), ['{"b": 1}'], [r'{"\u0061": 1}']),
        (Asked(json_object=True), ['{"b": 1}', '{"b":1}', '{\n  "b": [1,\n2]}'], ["[1]"]),
        (Asked(grammar='start: %json {"type": "array"}'), ["[1, 2]", "[1,2]", "[1,\n2]"], ["[  ]"]),
        (Asked(json={"type": "string", "pattern": '^[^"]$'}), [r'"\n"', '"a"'], [r'"\""']),
        (
            Asked(structural_tag=TAG),
            ["", "hello", "<tool_call>f([1])</tool_call>", 'a <tool_call>g("x")</tool_call> b'],
            ["<tool_call>", "<tool_call>h(", "<tool_call>f([1])", "<tool_call>f([1])</tool_call><tool_call>"],
        ),
    ],
)
def test_a_constraint_accepts_its_texts_and_no_others(asked, good, bad):
    check(asked)
    for text in good:
        assert matches(asked, text), text
    for text in bad:
        assert not matches(asked, text), text


@settings(max_examples=60, deadline=None)
@given(st.text("ab|()*?", min_size=1, max_size=8), st.text("ab", max_size=6))
def test_a_pattern_matches_what_pythons_does(pattern, text):
    try:
        expected = re.fullmatch(pattern, text) is not None
        asked = Asked(regex=pattern)
        check(asked)
    except (re.error, RequestError):
        return
    assert matches(asked, text) == expected


def test_tokenizers_that_write_a_text_differently_at_its_beginning_are_no_trouble():
    def with_space(text: str) -> list[int]:
        return list((" " + text).encode())

    odd = Vocabulary(BYTES.tokens, (END,), frozenset({END}), with_space)
    matcher = compile(Asked(regex="hello (you|me)"), odd).new_matcher(fast_forward=True)
    assert bytes(matcher.advance([]).forced) == b"hello "


@pytest.mark.parametrize("backend", ["llguidance", "fsm"])
def test_a_tokenizer_may_have_more_tokens_than_the_model(backend):
    small = vocabulary(1000)
    text = "a Tuesday and so on it went"
    assert max(encode(text)) > small.size
    matcher = compile(Asked(choice=(text,)), small, backend).new_matcher(fast_forward=True)
    verdict = matcher.advance([])
    tokens = list(verdict.forced)
    while not verdict.is_over:
        tokens.append(allowed(matcher, small)[-1])
        verdict = matcher.advance(tokens[-1:])
        tokens += verdict.forced
    assert not verdict.error
    assert text_of(tokens, small) == text.encode()


def test_an_internal_error_of_the_backend_is_not_shown_to_clients():
    def broken(text: str) -> list[int]:
        raise OSError("/a/place")

    odd = Vocabulary(BYTES.tokens, (END,), frozenset({END}), broken)
    with pytest.raises(RequestError) as caught:
        compile(Asked(choice=("hello",)), odd)
    assert str(caught.value) == "choice cannot be enforced: the backend failed"


@pytest.mark.parametrize("backend", ["llguidance", "fsm"])
@pytest.mark.parametrize("end_ids", [(), (5000,)])
def test_a_vocabulary_of_text_alone_has_no_end_among_its_tokens(backend, end_ids):
    bare = Vocabulary([bytes([i]) for i in range(256)], end_ids, frozenset(), lambda text: list(text.encode()))
    matcher = compile(Asked(regex=r"[a-c]{1,2}"), bare, backend).new_matcher(fast_forward=True)
    assert not matcher.advance(b"a").error
    assert allowed(matcher, bare) == [*b"abc"]
    assert matcher.advance(b"b").is_over
    assert allowed(matcher, bare) == []
    zeros = compile(Asked(regex=r"\x00+a?"), bare, backend).new_matcher(fast_forward=False)
    assert not zeros.advance([0]).error
    assert allowed(zeros, bare) == [0, *b"a"]


WORDS = "lorem ipsum dolor sit amet " * 150
LONG = [
    Asked(choice=(WORDS,)),
    Asked(json={"prefixItems": [{"const": WORDS}] * 3, "minItems": 3, "type": "array"}, disable_any_whitespace=True),
    Asked(grammar=f'root ::= ("{WORDS}")' + "{3}"),
]


@pytest.mark.parametrize("asked", LONG, ids=lambda asked: asked.kind)
def test_a_verdict_forces_so_much_and_no_more_and_the_rest_comes_one_way(asked):
    known = vocabulary()
    grammar = compile(asked, known)
    matcher, plain = grammar.new_matcher(fast_forward=True), grammar.new_matcher(fast_forward=False)
    verdict, tokens, ends = matcher.advance([]), [], [0]
    plain.advance([])
    while len(ends) < 4:
        assert len(verdict.forced) == MAX_FORCED
        tokens += verdict.forced
        (sampled,) = allowed(matcher, known)
        verdict = matcher.advance([sampled])
        tokens.append(sampled)
        ends.append(len(tokens))
    for place, token in enumerate(tokens[:1100]):
        if place % 40 == 0 or place in range(500, 530):
            assert allowed(plain, known) == [token]
        assert not plain.advance([token]).error
    for place in (0, 1, 511, 512, 513, 514, 1025, 1026, 1027):
        resumed = grammar.new_matcher(fast_forward=True).advance(tokens[:place])
        stop = next(end for end in ends[1:] if end > place) - 1
        assert resumed.forced == tokens[place:stop]


def test_a_vocabulary_and_a_grammar_are_thread_safe():
    known = vocabulary(2060)
    found = []

    def work(seed: int) -> None:
        grammar = compile(Asked(json=RECORD), known)
        tokens, _ = walk(grammar, known, random.Random(seed), limit=30)
        found.append(tokens)

    threads = [threading.Thread(target=work, args=(seed % 2,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len({tuple(tokens) for tokens in found}) == 2


def test_an_unknown_backend_is_named():
    with pytest.raises(ConfigError, match="did you mean 'llguidance'"):
        check(Asked(regex="a"), "llguidence")


def test_a_record_is_forced_up_to_its_values():
    matcher = compile(Asked(json=RECORD, disable_any_whitespace=True), vocabulary()).new_matcher(fast_forward=True)
    forced = matcher.advance([]).forced
    assert text_of(forced, vocabulary()).startswith(b'{"name":')
    for token in encode('{"name": "x"')[len(forced) :]:
        verdict = matcher.advance([token])
    assert not verdict.error
    assert text_of(verdict.forced, vocabulary()).startswith(b', "age')
