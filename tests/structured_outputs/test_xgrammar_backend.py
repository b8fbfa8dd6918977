"""The xgrammar backend, if it is installed."""

import importlib.util
import random

import pytest
from grammar_mask_walks import allowed, encode, text_of, vocabulary, walk
from json_schema_cases import INTEGER, POINT, STRING, by_keyword
from json_schema_oracle import faults

from quire.errors import ConfigError, RequestError
from quire.params import StructuredOutputsParams as Asked
from quire.structured_outputs.backends import check, compile
from quire.structured_outputs.library_matcher import Masks
from quire.structured_outputs.xgrammar import _XgrammarParser

IS_THERE = importlib.util.find_spec("xgrammar") is not None
needs_xgrammar = pytest.mark.skipif(not IS_THERE, reason="xgrammar is an optional extra")


@pytest.mark.skipif(IS_THERE, reason="xgrammar is installed")
def test_without_the_package_its_name_is_in_the_error():
    with pytest.raises(ConfigError, match=r"pip install quire\[xgrammar\]"):
        check(Asked(regex="a"), "xgrammar")


class WithinACharacter:
    """An xgrammar matcher whose forced text is no valid UTF-8."""

    def find_jump_forward_string(self) -> str:
        return b"\xe6".decode()


def test_text_that_xgrammar_cannot_hand_over_is_not_forced():
    parser = _XgrammarParser(WithinACharacter(), vocabulary(), Masks(vocabulary()))
    assert parser.forced_tokens() == []


@needs_xgrammar
def test_every_output_of_xgrammar_fits_the_schemas_that_are_not_refused():
    rng = random.Random(4)
    num_schemas = num_complete = 0
    for _, schema in by_keyword():
        try:
            grammar = compile(Asked(json=schema), vocabulary(), "xgrammar")
        except RequestError:
            continue
        num_schemas += 1
        for turn in range(3):
            tokens, is_complete = walk(grammar, vocabulary(), rng, limit=90, fast_forward=turn > 0)
            if is_complete:
                assert not list(faults(schema, text_of(tokens, vocabulary()))), schema
                num_complete += 1
    assert num_schemas > 80
    assert num_complete > 160


@needs_xgrammar
@pytest.mark.parametrize(
    "asked",
    [
        Asked(json={"not": {}}),
        Asked(json={"type": "string", "pattern": "^a"}),
        Asked(json={"type": "number", "multipleOf": 2}),
        Asked(json={"allOf": [POINT]}),
        Asked(json={"anyOf": [INTEGER, STRING], "minimum": 3}),
        Asked(regex="("),
        Asked(grammar='start: "a"'),
        Asked(structural_tag={"triggers": ["<"], "structures": [{"begin": "<"}]}),
        Asked(json=POINT, whitespace_pattern=" "),
    ],
)
def test_what_xgrammar_does_not_enforce_is_refused(asked):
    with pytest.raises(RequestError):
        check(asked, "xgrammar")


@needs_xgrammar
@pytest.mark.parametrize(
    "asked", [Asked(regex="(ab|cd){2}"), Asked(choice=("one", "two", 'é"\n')), Asked(regex="abc?")]
)
def test_masks_are_those_of_llguidance(asked):
    one, other = (compile(asked, vocabulary(), name) for name in ("xgrammar", "llguidance"))
    for seed in range(4):
        tokens, _ = walk(one, vocabulary(), random.Random(seed), limit=20, fast_forward=False)
        for length in range(len(tokens)):
            left, right = (grammar.new_matcher(fast_forward=False) for grammar in (one, other))
            assert not left.advance(tokens[:length]).error
            if right.advance(tokens[:length]).error:
                break  # llguidance allows only canonical tokens of forced text
            mask = set(allowed(right, vocabulary()))
            assert mask == set(allowed(left, vocabulary())) or (
                len(mask) == 1 and mask <= set(allowed(left, vocabulary()))
            )


@needs_xgrammar
def test_xgrammar_forces_text_as_the_tokenizer_writes_it():
    matcher = compile(Asked(json=POINT, disable_any_whitespace=True), vocabulary(), "xgrammar").new_matcher(
        fast_forward=True
    )
    forced = matcher.advance([]).forced
    assert forced
    assert encode('{"x": 1')[: len(forced)] == forced
    ended = compile(Asked(regex="abc"), vocabulary(), "xgrammar").new_matcher(fast_forward=True)
    assert ended.advance([]) == compile(Asked(regex="abc"), vocabulary()).new_matcher(fast_forward=True).advance([])
