"""The automaton of a pattern has the language of `re.fullmatch`, and is minimal."""

import random
import re

import numpy as np
import pytest
from example_budget import examples
from fsm_oracles import patterns, samples, texts
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import RequestError
from quire.structured_outputs.fsm.construct import minimize, node_to_dfa, regex_to_dfa, words_to_dfa
from quire.structured_outputs.fsm.dfa import DEAD, Dfa, compress
from quire.structured_outputs.fsm.nfa import byte_ranges
from quire.structured_outputs.fsm.nodes import ALL, Chars, intersection, negation, union


def oracle(pattern: str, text: str) -> bool:
    return re.fullmatch(pattern, text, re.ASCII) is not None


def automaton(pattern: str) -> Dfa | None:
    try:
        return regex_to_dfa(pattern)
    except RequestError as error:
        assert "no text matches" in str(error)
        return None


@settings(max_examples=examples(150))
@given(patterns(), st.lists(texts(), max_size=25))
def test_a_pattern_matches_what_re_matches(pattern, some):
    dfa = automaton(pattern)
    for text in some:
        assert (dfa is not None and dfa.matches(text.encode())) == oracle(pattern, text), text
    for data in samples(dfa, 15) if dfa else ():
        assert oracle(pattern, data.decode())


@pytest.mark.parametrize(
    "pattern",
    [
        *("", "a|", "|a", "()", "(a|)b", "a{2}", "a{,2}", "a{1,}", "a{,}", "a{", "a{}", "a{x}", "a{1", "{a", "a{1,2"),
        *("^ab$", r"\Aab\Z", "^a|b$", "(^a|b)a", "a(b|a$)", "(^|a)b", "()^a", "a$()", "(a$)?", "(?P<name>a)b", "}"),
        *("[]]", "[^]]", "[a-]", "[-a]", r"[\]]", r"[\-a]", "[a^]", r"[\b]", r"[a\n-\r]", r"[\101-\103]", r"\0", "]"),
        *(
            r"\141",
            r"\x41\x62",
            r"\u0041",
            r"\U0001F600",
            r"\t\n\r\f\v\a",
            r"\.\*\\\é",
            "[é-ü]+",
            "[^\x00-\x7f]",
            "a-b",
        ),
        *("(?:ab)*?", "(a*)*", "(a+|b*)*", "((a|b)?){3}", "(a{2}){2}", "(|a){3}", "(a?b??){2,}", "a{0}", "(a{0,0}b)*"),
    ],
)
def test_syntax_means_what_it_means_to_re(pattern):
    dfa = regex_to_dfa(pattern)
    chance = random.Random(pattern)
    texts = ["".join(chance.choices("aAbB-]^{}12,\\.*\n\x08\t\0é😀\x7f", k=chance.randint(0, 5))) for _ in range(300)]
    for text in [*texts, "{", "a{", "a{}", "a{x}", "a{1", "{a", "a{1,2", r".*\é", "\t\n\r\f\v\a", "a-b", "ABC"]:
        assert dfa.matches(text.encode()) == oracle(pattern, text), text
    for data in samples(dfa, 20):
        assert oracle(pattern, data.decode()), data


def test_every_code_point_is_in_the_classes_that_re_says():
    characters = [chr(code) for low, high in ALL for code in range(low, high + 1)]
    for pattern in (r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", ".", "[^a-zé-\u9999]"):
        found, compiled = regex_to_dfa(pattern), re.compile(pattern, re.ASCII)
        chosen = characters[:3000] + characters[3000::97]
        assert [found.matches(c.encode()) for c in chosen] == [bool(compiled.fullmatch(c)) for c in chosen]


@pytest.mark.parametrize(
    ("pattern", "what", "place"),
    [
        *(("a(?=b)", "look-ahead", 1), ("(?!b)", "look-ahead", 0), ("(?<=b)", "look-behind", 0)),
        *(("(?<!b)", "look-behind", 0), (r"(a)\1", "backreference", 3), ("(?P<n>a)(?P=n)", "backreference", 8)),
        *((r"a\b", "word boundary", 1), (r"\Ba", "word boundary", 0), ("(?i)a", "flag", 0), ("a(?i:b)", "flag", 1)),
        *(("(?>a)", "atomic", 0), ("a*+", "possessive", 1), ("(a)?(?(1)b)", "condition", 4), (r"\pL", "escape", 0)),
        *((r"\N{DIGIT ONE}", "escape", 0), ("a^b", "beginning", 1), ("a$b", "end", 1), ("(^a)+", "beginning", 1)),
        *(("(a$|b)c", "end", 2), ("(?#x)", "flag", 0)),
    ],
)
def test_irregular_pattern_syntax_is_rejected_by_name_and_position(pattern, what, place):
    with pytest.raises(RequestError, match=rf"{what}.* at position {place}\b") as caught:
        regex_to_dfa(pattern)
    assert caught.value.param == "regex"


@pytest.mark.parametrize(
    "pattern",
    [
        *("a**", "a{2}{3}", "*a", "+", "(?", "(a", "a)", "[a", "[", "\\", "[b-a]", r"[a-\d]", r"[\d-z]", "a{3,2}"),
        *("a|*", "(*a)", "^*", r"\xg1", r"\u12", r"\U00110000", r"[\8]", "(?P<1>a)", "(?P<n", "[]", "[^]", "{2}"),
    ],
)
def test_a_pattern_that_re_rejects_is_an_error_with_a_position(pattern):
    with pytest.raises(re.error):
        re.compile(pattern)
    with pytest.raises(RequestError, match=r"position \d+|ends in a backslash"):
        regex_to_dfa(pattern)


@pytest.mark.parametrize("pattern", [r"[^\s\S]", "a[^\\s\\S]b", "\ud800", r"\ud800"])
def test_a_pattern_that_no_text_matches_is_refused(pattern):
    with pytest.raises(RequestError):
        regex_to_dfa(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        *("(.*a.{12})", "(.*a.{24})", "((a?){100}){100}", "(a{1,1000}){1,1000}", "(..|...|....){200}", ".{1000000}"),
        *(
            "(.{1,50}x){1,20}",
            r"[\s\S]{1,200}b[\s\S]{1,50}",
            "a{99999999}",
            "(" * 65 + ")" * 65,
            "(a|b|ab|ba){500}" * 9,
        ),
        *("[" + "".join(chr(2 * i) for i in range(0x800, 0x1900)) + "]", "a?" * 4000),
    ],
)
def test_a_pattern_that_explodes_is_refused(pattern):
    with pytest.raises(RequestError, match="too complex"):
        regex_to_dfa(pattern)


@pytest.mark.parametrize(
    "pattern", ["(x+x+)+y", "(a|aa)*b", "(a*)*b", "(.*,){11}P", "([a-zA-Z]+)*", r"(\w+\s?)*!", "(){99999}"]
)
def test_patterns_that_are_slow_elsewhere_are_small_here(pattern):
    assert regex_to_dfa(pattern).num_states < 100


def brute_force_size(dfa: Dfa) -> int:
    """Number of distinguishable states, by Moore's partition over all states."""
    table = np.vstack([dfa.by_byte, np.full((1, 256), dfa.num_states)])
    table[table == DEAD] = dfa.num_states
    blocks = np.append(dfa.accepts, False).astype(int)
    while True:
        rows = np.column_stack([blocks, blocks[table]])
        refined = np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)
        if refined.max() == blocks.max():
            return len(set(refined[:-1].tolist()))
        blocks = refined


@settings(max_examples=40)
@given(patterns())
def test_no_two_states_are_alike_and_all_reach_an_end(pattern):
    dfa = automaton(pattern)
    if dfa is not None:
        assert brute_force_size(dfa) == dfa.num_states
        live = dfa.accepts.copy()
        for _ in range(dfa.num_states):
            live |= np.append(live, False)[dfa.by_byte].any(axis=1)
        assert live.all()


@settings(max_examples=40)
@given(st.integers(1, 40), st.integers(1, 3), st.randoms(use_true_random=False))
def test_any_automaton_becomes_the_smallest_with_its_language(num_states, num_classes, chance):
    rows = [[chance.randrange(-1, num_states) for _ in range(num_classes)] for _ in range(num_states)]
    accepts = [chance.random() < 0.3 for _ in range(num_states)]
    classes = np.array([byte % num_classes for byte in range(256)], np.uint8)
    dfa = minimize(rows, accepts, classes)
    for _ in range(60):
        text = bytes(chance.randrange(num_classes) for _ in range(chance.randrange(12)))
        state = 0
        for byte in text:
            state = rows[state][byte] if state != DEAD else DEAD
        assert (dfa is not None and dfa.matches(text)) == (state != DEAD and accepts[state])
    if dfa is not None:
        assert brute_force_size(dfa) == dfa.num_states


@settings(max_examples=40)
@given(patterns(), st.lists(texts(), max_size=10))
def test_the_compressed_automaton_has_the_same_language(pattern, some):
    dfa = automaton(pattern)
    if dfa is not None:
        compressed = compress(dfa)
        for data in [*samples(dfa, 5), *(text.encode() for text in some)]:
            assert compressed.matches(data) == dfa.matches(data)


def test_compression_merges_all_that_has_to_come():
    fsm = compress(regex_to_dfa(r'\{"name": "(Ann|Bob)", "age": [0-9]{1,2}\}'))
    assert fsm.forced_bytes(0) == (b'{"name": "', fsm.states()[1])
    labels = [(edge.first, edge.rest) for state in fsm.states() for edge in fsm.edges(state)]
    assert labels == [
        (b"{", b'"name": "'),
        (b"A", b'nn", "age": '),
        (b"B", b'ob", "age": '),
        (b"0123456789", b""),
        (b"0123456789", b"}"),
        (b"}", b""),
    ]


@settings(max_examples=40)
@given(st.lists(st.text(st.sampled_from("abé\U0001f600"), max_size=5), min_size=1, max_size=30).filter(any))
def test_words_are_the_smallest_automaton_of_their_choice(words):
    dfa = words_to_dfa(words)
    assert dfa.num_states == regex_to_dfa("|".join(words)).num_states == brute_force_size(dfa)
    for word in words:
        for text in (word, word[:-1], word + "a", word[1:]):
            assert dfa.matches(text.encode()) == (text in words)


def test_thousands_of_words_are_one_automaton():
    chance = random.Random(4)
    words = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz é", k=28)) for _ in range(2048)]
    dfa = words_to_dfa(words)
    assert all(dfa.matches(word.encode()) for word in words)
    assert not any(dfa.matches(word.encode() + b"x") or dfa.matches(word.encode()[:-1]) for word in words)


@given(st.lists(st.tuples(st.integers(0, 0x10FFFF), st.integers(0, 3000)), max_size=6))
def test_sets_of_characters_are_sets(pairs):
    ranges = union((low, min(low + more, 0x10FFFF)) for low, more in pairs)
    edges = {edge + step for low, high in ranges for edge in (low, high) for step in (-1, 0, 1)} | {0, 0xD800, 0x10FFFF}
    for code in (edge for edge in edges if 0 <= edge < 0x110000):
        is_text = not 0xD800 <= code <= 0xDFFF
        inside = is_text and any(low <= code <= min(low + more, 0x10FFFF) for low, more in pairs)
        assert any(low <= code <= high for low, high in ranges) == inside
        assert any(low <= code <= high for low, high in negation(ranges)) == (is_text and not inside)
    assert intersection(ranges, negation(ranges)) == ()
    assert union([*ranges, *negation(ranges)]) == ALL


@given(st.integers(0, 0x10FFFF), st.integers(0, 0x10FFFF))
def test_byte_ranges_are_the_bytes_of_all_characters_between(one, other):
    ranges = union([(min(one, other), max(one, other))])
    spans = [span for low, high in ranges for span in byte_ranges(low, high)]
    num_characters = sum(int(np.prod([last - first + 1 for first, last in span])) for span in spans)
    assert num_characters == sum(high - low + 1 for low, high in ranges)
    for low, high in ranges:
        for code in {low, high, (low + high) // 2}:
            data = chr(code).encode()
            assert any(
                len(data) == len(s) and all(a <= x <= b for x, (a, b) in zip(data, s, strict=True)) for s in spans
            )


def test_equal_patterns_compile_to_equal_tables():
    one, other = (regex_to_dfa("([ab]{3,40}|é+)*[^a]") for _ in range(2))
    assert (one.table == other.table).all() and (one.classes == other.classes).all()
    assert node_to_dfa(Chars(ALL), "regex").num_states == regex_to_dfa(r"[\s\S]").num_states
