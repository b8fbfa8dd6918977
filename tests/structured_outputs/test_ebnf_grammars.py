"""Grammars in EBNF, and the formats of strings."""

import random

import pytest
from grammar_mask_walks import allowed, text_of, vocabulary, walk

from quire.params import StructuredOutputsParams as Asked
from quire.structured_outputs.backends import compile
from quire.structured_outputs.ebnf import ebnf_to_lark, is_ebnf
from quire.structured_outputs.json_schema.values import FORMATS
from quire.structured_outputs.vocabulary import Vocabulary

BYTES = Vocabulary([bytes([i]) for i in range(256)] + [b""], (256,), frozenset({256}), lambda text: list(text.encode()))
ARITHMETIC = r"""
# sums, as a tutorial writes them
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""


def matches(asked: Asked, text: str) -> bool:
    matcher = compile(asked, BYTES).new_matcher(fast_forward=False)
    return not matcher.advance(list(text.encode())).error and 256 in allowed(matcher, BYTES)


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('root ::= "a" | "b" "c"', ["a", "bc"], ["b", "ac"]),
        ('root ::= ("a" | "b")+ "c"? "d"*', ["a", "abcdd"], ["", "c"]),
        ("root ::= [a-c-]{2} [^a-c\\]]", ["a-x", "--é", "ab\n"], ["a", "aba", "ab]"]),
        ('root ::= "\\x41\\u00e9\\U0001F600\\"\\\\\\n"', ['Aé😀"\\\n'], ["A"]),
        ('root ::= "x"{2,3} "y"{2} "z"{1,}', ["xxyyz", "xxxyyzz"], ["xyyz", "xxyz", "xxyy"]),
        ("root ::= .", ["a", "\n", "é"], ["", "ab"]),
        ('root ::= a-b | c.d\na-b ::= "1"\nc.d ::=\n  "2" |\n  "3"', ["1", "2", "3"], ["4"]),
        ('root ::= "" "a" | ""', ["", "a"], ["b"]),
        ('root ::= "(" root? ")"', ["()", "((()))"], ["(", "(()"]),
        ('root ::= [a-z]+ "x"', ["abx", "xx"], ["ab"]),
        (ARITHMETIC, ["a=1\n", "(b +2) *c1 = 3\n4=5\n"], ["a=1", "=1\n"]),
        ('root ::= w | "(" root ")"\nw ::= ("a" | "ab") "bc"? "b"?', ["ab", "abc", "abbcb", "(ab)"], ["(a", "c"]),
        (
            'root ::= key | word | root "," root\nkey ::= "let"\nword ::= [a-z]+',
            ["let", "le", "lex", "a,let,b"],
            [",", "a,"],
        ),
        ('root ::= (a | b) root? "!"\na ::= [a-z] "1"\nb ::= [aeiou] "2"', ["e1!", "e2!", "x1e2!!"], ["x2!", "e1"]),
        (JSON, ['{"a": [1, -2.5e3, "x\\n"], "b": {}}', "{}"], ["[1]", '{"a" 1}']),
    ],
)
def test_an_ebnf_grammar_accepts_its_texts_and_no_others(grammar, good, bad):
    assert is_ebnf(grammar)
    for text in good:
        assert matches(Asked(grammar=grammar), text), text
    for text in bad:
        assert not matches(Asked(grammar=grammar), text), text


@pytest.mark.parametrize("grammar", [ARITHMETIC, JSON])
def test_walks_through_a_grammar_meet_no_dead_end(grammar):
    compiled = compile(Asked(grammar=grammar), vocabulary())
    for seed in range(6):
        tokens, _ = walk(compiled, vocabulary(), random.Random(seed), limit=60)
        assert text_of(tokens, vocabulary())


def test_lark_is_not_taken_for_ebnf():
    assert not is_ebnf('start: "a ::= b"\n')
    assert not is_ebnf("start: /x ::= y/")
    assert is_ebnf('# a comment\nroot ::= "a"')
    assert ebnf_to_lark('root ::= "a" b\nb ::= [c]') == 'start: T0\nT0: "a" T1\nT1: /[\\u{63}-\\u{63}]/\n'


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("date", ["2024-02-29", "2000-02-29", "1999-12-31"], ["2023-02-29", "1900-02-29", "0000-01-01", "2024-04-31"]),
        ("time", ["23:59:59Z", "00:00:00.5+01:30"], ["24:00:00Z", "12:00:00", "23:59:60Z"]),
        (
            "date-time",
            ["2024-02-29T12:00:00Z", "2024-01-01T00:00:00.123-08:00"],
            ["2024-01-01 00:00:00Z", "2024-01-01"],
        ),
        ("duration", ["P1Y", "PT5M", "P1DT12H", "P2W", "P1Y2M3DT4H5M6S"], ["P", "PT", "P1YT", "1Y", "P1W2D", "P1Y2D"]),
        ("email", ["a@b.com", "first.last+tag@x-y.example.org"], ["a", "a@", ".a@b.c", "a..b@c.de", "a b@c.de"]),
        ("hostname", ["localhost", "a.b.c.d.example.com", "x-1.org"], ["-a.com", "a..b", "a_b.com", "a.com."]),
        ("ipv4", ["0.0.0.0", "255.255.255.255", "10.1.2.3"], ["256.1.1.1", "1.2.3", "01.2.3.4"]),
        (
            "ipv6",
            ["::", "::1", "1::", "fe80::1:2", "1:2:3:4:5:6:7:8", "1:2::7:8"],
            [":", "1::2::3", "1:2:3", "12345::"],
        ),
        ("uuid", ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000", "x"]),
        (
            "uri",
            ["http://a.test/x?y=1#z", "mailto:a@b.c", "urn:isbn:1", "http://[::1]:80/"],
            ["//a", "a b:c", "http://%zz"],
        ),
    ],
)
def test_formats_take_what_their_standards_do(name, good, bad):
    assert name in FORMATS
    asked = Asked(json={"type": "string", "format": name})
    for text in good:
        assert matches(asked, f'"{text}"'), text
    for text in bad:
        assert not matches(asked, f'"{text}"'), text
