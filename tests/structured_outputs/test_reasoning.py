"""Reasoning before a constrained answer: which tokens may follow, compared with a slow rule over whole outputs."""

import numpy as np
import pytest
from fsm_oracles import allowed
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.constraint import allowed_drafts
from quire.errors import RequestError
from quire.params import Constraint, ReasoningParams, SamplingParams, StructuredOutputsParams
from quire.structured_outputs.backends import compile
from quire.structured_outputs.reasoning import MAX_SPACE, ReasoningCompiler
from quire.structured_outputs.vocabulary import Vocabulary

TEXTS = [b"<", b"t", b">", b"/", b"a", b"b", b" ", b"\n", b"</", b"<t", b"t>", b"<t>", b"</t>", b"</t>\n", b"</t>a"]
TEXTS += [b">\n", b"> a", b"ab", b" a", b"\n\n", b"<t>a", b"<t></t>", b"<t></t>b", b"<</", b"a</t", b" <t>\n\n", b">/"]
END = len(TEXTS)
BEGIN_ID, END_ID, OTHER_ID = END + 1, END + 2, END + 3  # special tokens
SPECIAL = {BEGIN_ID: b"<t>", END_ID: b"</t>", OTHER_ID: b"<|x|>"}


def vocabulary(*, special: bool) -> Vocabulary:
    """special: whether the tokenizer writes the tags as special tokens."""
    longest_first = sorted(range(len(TEXTS)), key=lambda token: -len(TEXTS[token]))

    def encode(text: str) -> list[int]:
        data, tokens = text.encode(), []
        while data:
            tags = [token for token, tag in SPECIAL.items() if data.startswith(tag)] if special else []
            found = tags or [token for token in longest_first if data.startswith(TEXTS[token])]
            tokens += found[:1]
            data = data[len({**SPECIAL, **dict(enumerate(TEXTS))}[found[0]]) if found else 1 :]
        return tokens

    ids = frozenset([END, *SPECIAL])
    return Vocabulary([*TEXTS, b"", b"", b"", b""], (END,), ids, encode, SPECIAL if special else {})


class Rule:
    """What may follow an output, by trial of every token. words: the answers."""

    def __init__(self, params: ReasoningParams, words: list[bytes] | None, known: Vocabulary) -> None:
        self.params, self.words, self.known = params, words, known
        self.begin, self.end = params.begin.encode(), params.end.encode()

    def text(self, tokens: list[int]) -> bytes:
        return b"".join(self.known.special_texts.get(token, self.known.tokens[token]) for token in tokens)

    def next_tokens(self, tokens: list[int]) -> set[int]:
        forced = self.forced(tokens)
        if forced:
            return set(forced[:1])
        return {token for token in range(self.known.size) if self.is_valid([*tokens, token])}

    def forced(self, tokens: list[int]) -> list[int]:
        """The tokens of the end tag that have to follow these ones, of which all are valid."""
        inside = self.reasoning(tokens)
        if inside is None or self.params.budget is None:
            return []
        start, rest = inside
        before = tokens[: start + self.params.budget]
        if len(tokens) < len(before) or len(tokens) < start + self.params.budget:
            return []
        text = rest + self.text(before[start:])
        if self.end in text:
            return []
        kept = max(size for size in range(len(self.end)) if text.endswith(self.end[:size]))
        span = self.known.encode(self.end[kept:].decode())
        return span[len(tokens) - len(before) :]

    def reasoning(self, tokens: list[int]) -> tuple[int, bytes] | None:
        """(number of tokens with the begin tag, text of the reasoning in the last of them); None without reasoning."""
        if self.params.begun:
            return 0, b""
        for count in range(1, len(tokens) + 1):
            text = self.text(tokens[:count]).lstrip()
            if text.startswith(self.begin) and self.num_spaces(tokens) <= MAX_SPACE:
                return count, text.removeprefix(self.begin)
        return None

    def num_spaces(self, tokens: list[int]) -> int:
        return len(self.text(tokens)) - len(self.text(tokens).lstrip())

    def is_valid(self, tokens: list[int]) -> bool:
        if self.words is None:
            return True
        inside = self.reasoning(tokens)
        if inside is None:
            text = self.text(tokens)
            may_begin = self.begin.startswith(text.lstrip()) and self.num_spaces(tokens) <= MAX_SPACE
            return (may_begin and self.is_text(tokens)) or self.is_answer(tokens)
        start, rest = inside
        for count in range(start, len(tokens) + 1):
            _, found, behind = (rest + self.text(tokens[start:count])).partition(self.end)
            if found:
                return self.is_reasoning(tokens[:count], start) and self.is_behind(behind, tokens[count:])
        return self.is_reasoning(tokens, start)

    def is_reasoning(self, tokens: list[int], start: int) -> bool:
        """Whether reasoning may have these tokens from `start` on."""
        if self.params.may_end:
            return self.is_text(tokens[:start]) and END not in tokens[:-1]
        return self.is_text(tokens)

    def is_text(self, tokens: list[int]) -> bool:
        return all(self.text([token]) for token in tokens) and END not in tokens

    def is_behind(self, space: bytes, tokens: list[int]) -> bool:
        """Whether white space and tokens may stand behind the end tag."""
        if space.strip() or len(space) > MAX_SPACE:
            return False
        if not tokens or self.is_answer(tokens[:1]):
            return self.is_answer(tokens)
        return self.is_text(tokens[:1]) and self.is_behind(space + self.text(tokens[:1]), tokens[1:])

    def is_answer(self, tokens: list[int]) -> bool:
        """Whether an answer may begin with these tokens."""
        text = self.text(tokens)
        if END in tokens:
            return tokens.index(END) == len(tokens) - 1 and text in self.words
        is_text = not any(token in self.known.special_ids for token in tokens)
        return is_text and any(word.startswith(text) for word in self.words)


def asks():
    tags = st.sampled_from([("<t>", "</t>"), ("<t>", "</t>\n"), ("t", "aab"), ("<", ">")])
    both = {"begun": st.booleans(), "budget": st.none() | st.integers(0, 4), "may_end": st.booleans()}
    return tags.flatmap(lambda tag: st.builds(ReasoningParams, begin=st.just(tag[0]), end=st.just(tag[1]), **both))


ANSWERS = st.sampled_from(
    [
        None,
        [b"ab", b"b"],
        [b" a", b"\n\nb", b"a"],
        [b"<ta", b"<t>b", b"<a", b"/t"],
        [b"", b"aa"],
        [b"</t>a", b" <t>"],
    ]
)


def matcher_of(params, words, known, *, fast_forward=False):
    answer = None
    if words is not None:
        pattern = "(" + "|".join(word.decode().replace("\n", "\\n") for word in words) + ")"
        answer = compile(StructuredOutputsParams(regex=pattern), known, "fsm")
    return ReasoningCompiler(known).compile(params, answer).new_matcher(fast_forward=fast_forward)


def mask_of(matcher, known):
    words = np.zeros(known.num_words, np.uint32)
    matcher.fill_bitmask(words)
    return {token for token in allowed(words) if token < known.size}


@settings(max_examples=120, deadline=None)
@given(st.data(), asks(), ANSWERS, st.booleans())
def test_the_tokens_that_may_follow_are_those_of_the_rule(data, params, words, special):
    known = vocabulary(special=special)
    rule, matcher = Rule(params, words, known), matcher_of(params, words, known)
    tokens = []
    assert matcher.advance([]).forced == []
    for _ in range(14):
        options = rule.next_tokens(tokens)
        assert mask_of(matcher, known) == options, rule.text(tokens)
        for token in {BEGIN_ID, END_ID, 4, 13} | {END}:
            if words is not None or rule.forced(tokens):
                assert bool(matcher.fork().advance([token]).error) == (token not in options)
        if not options - {END}:
            break
        tokens.append(data.draw(st.sampled_from(sorted(options - {END}))))
        assert not matcher.advance(tokens[-1:]).error
        again = matcher_of(params, words, known)
        assert again.advance(tokens) == again.advance([]) and mask_of(again, known) == mask_of(matcher, known)


@settings(max_examples=60, deadline=None)
@given(st.data(), asks(), ANSWERS, st.booleans())
def test_the_end_of_the_reasoning_is_forced_at_its_budget(data, params, words, special):
    known = vocabulary(special=special)
    rule, matcher = Rule(params, words, known), matcher_of(params, words, known, fast_forward=True)
    tokens = []
    verdict = matcher.advance([])
    for _ in range(12):
        span = rule.forced(tokens)
        assert verdict.forced[: len(span)] == span and not verdict.error
        ahead = data.draw(st.integers(0, len(verdict.forced)))  # a sequence may be resumed within forced tokens
        resumed = matcher_of(params, words, known, fast_forward=True)
        assert resumed.advance([*tokens, *verdict.forced[:ahead]]).forced == verdict.forced[ahead:]
        for token in verdict.forced:
            assert token in rule.next_tokens(tokens)
            tokens.append(token)
        assert mask_of(resumed, known) == mask_of(matcher, known)
        options = rule.next_tokens(tokens)
        drafts = [data.draw(st.sampled_from(range(END))) for _ in range(3)]
        copy = matcher.fork()
        kept = allowed_drafts(lambda token, fork=copy: fork.advance([token]), drafts, 8)
        assert all(rule.is_valid([*tokens, *kept.tokens[:count]]) for count in range(len(kept.tokens) + 1))
        if not options - {END} or verdict.is_over:
            break
        token = data.draw(st.sampled_from(sorted(options - {END})))
        tokens.append(token)
        verdict = matcher.advance([token])


def test_a_partly_written_end_tag_is_completed_and_a_part_of_a_character_is_not():
    known = vocabulary(special=False)
    matcher = matcher_of(ReasoningParams(begin="", end="</t>", begun=True, budget=2), None, known, fast_forward=True)
    assert matcher.advance([]).forced == []
    assert matcher.advance([known.encode("a")[0]]).forced == []
    assert matcher.advance([known.encode("</")[0]]).forced == known.encode("t>")
    assert mask_of(matcher, known) == set(range(known.size)), "behind the reasoning anything may follow"
    texts = [bytes([byte]) for byte in range(256)]
    letters = Vocabulary([*texts, b""], (256,), frozenset({256}), lambda text: list(text.encode()))
    matcher = matcher_of(ReasoningParams(begin="", end="◁/t▷", begun=True, budget=1), None, letters, fast_forward=True)
    assert matcher.advance([]).forced == []
    assert matcher.advance(["◁".encode()[0]]).forced == list("◁/t▷".encode())


@pytest.mark.parametrize("before", ["", "<t></t>"])
def test_white_space_around_the_reasoning_is_bounded(before):
    known = vocabulary(special=False)
    matcher = matcher_of(ReasoningParams(begin="<t>", end="</t>"), [b"a"], known)
    matcher.advance(known.encode(before))
    space, answer = known.encode(" ")[0], known.encode("a")[0]
    for _ in range(MAX_SPACE):
        assert {space, answer} <= mask_of(matcher, known) or not before
        assert not matcher.advance([space]).error
    assert space not in mask_of(matcher, known)
    assert matcher.fork().advance([space]).error


HEADER = {"begin": "<t>", "end": "</t>", "answer_begin": "<a"}


@pytest.mark.parametrize("before", ["", "<t>", "<t>ab</t>"])
@pytest.mark.parametrize("fast_forward", [False, True])
def test_the_text_before_the_answer_is_forced(before, fast_forward):
    known = vocabulary(special=False)
    less, a = known.encode("<")[0], known.encode("a")[0]
    matcher = matcher_of(ReasoningParams(**HEADER), [b"ab"], known, fast_forward=fast_forward)
    matcher.advance([])
    matcher.advance(known.encode(before))
    if before == "<t>":
        matcher.advance(known.encode("</t>"))
    assert a not in mask_of(matcher, known)
    assert less in mask_of(matcher, known)
    assert matcher.fork().advance([a]).error
    forced = matcher.advance([less]).forced
    if not forced:
        assert mask_of(matcher, known) == ({a} if before else {a, *(known.encode(text)[0] for text in ("t", "t>"))})
        forced = [a, *matcher.advance([a]).forced]
    rest = known.encode("ab") if len(forced) == 1 else []
    assert not matcher.advance(rest).error
    assert known.encode("<a") == [less, forced[0]]
    assert END in mask_of(matcher, known)


def test_a_sequence_is_resumed_within_the_text_before_the_answer():
    known = vocabulary(special=False)
    tokens = [*known.encode("<t>b</t>"), *known.encode("<a")]
    for size in range(len(tokens) + 1):
        first = matcher_of(ReasoningParams(**HEADER), [b"ab", b"b"], known)
        assert not first.advance(tokens[:size]).error
        again = matcher_of(ReasoningParams(**HEADER), [b"ab", b"b"], known)
        for token in tokens[:size]:
            again.advance([token])
        assert mask_of(first, known) == mask_of(again, known) == mask_of(first.fork(), known)
    assert mask_of(again, known) == {known.encode(text)[0] for text in ("a", "b", "ab")}


def test_reasoning_without_a_budget_needs_no_matcher_unless_the_answer_is_constrained():
    tags = {"begin": "<t>", "end": "</t>"}
    answer = StructuredOutputsParams(regex="a")
    assert SamplingParams(reasoning=tags).constraint is None
    at_once = ReasoningParams(**tags, budget=0)
    assert SamplingParams(reasoning=at_once).constraint == Constraint(None, at_once)
    assert SamplingParams(regex="a", reasoning=tags).constraint == Constraint(answer, ReasoningParams(**tags))
    assert SamplingParams(regex="a").constraint == Constraint(answer)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"begin": "", "end": "</t>"}, "begin must start with"),
        ({"begin": " <t>", "end": "</t>"}, "begin must start with"),
        ({"begin": "<t>", "end": " \n"}, "end must have characters"),
        ({"begin": "<" * 257, "end": "</t>"}, "at most 256"),
        ({"begin": "<t>", "end": "\ud800"}, "valid Unicode"),
        ({"begin": "<t>", "end": "</t>", "budget": -1}, "budget must be between 0"),
        ({"begin": "<t>", "end": "</t>", "begun": 1}, "begun must be true or false"),
        ({"begin": "<t>", "end": "</t>", "stop": "</t>"}, "unknown parameter 'stop'"),
        ("<t>", "must be ReasoningParams or a mapping"),
    ],
)
def test_invalid_reasoning_is_refused(wrong, message):
    with pytest.raises(RequestError, match=message):
        SamplingParams(reasoning=wrong)


def test_a_tag_that_the_tokenizer_cannot_write_is_refused():
    letters = Vocabulary([b"a", b""], (1,), frozenset({1}), lambda text: [0] * text.count("a"))
    with pytest.raises(RequestError, match="cannot write '</t>'"):
        ReasoningCompiler(letters).compile(ReasoningParams(begin="a", end="</t>"), None)
