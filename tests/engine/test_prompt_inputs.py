"""Conversion of prompts to engine requests: truncation, and tokens of bad words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import KINDS

from quire.engine.inputs import TokenizedPrompt, prepare_generations
from quire.errors import ContextLengthExceeded, RequestError
from quire.params import SamplingParams
from quire.tokenizer.tokenizer import Tokenizer, bad_word_tokens


def contains(ids, part):
    return any(ids[i : i + len(part)] == part for i in range(len(ids)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["kettle stands", "the kettle stands", "the\nkettle stands"])
def test_a_bad_word_is_found_wherever_a_text_holds_it(kind, text):
    tokenizer = Tokenizer(KINDS[kind]())
    sequences = bad_word_tokens(["kettle"], tokenizer)
    assert any(contains(tokenizer.encode(text, add_special_tokens=False), word) for word in sequences)
    assert not any(contains(tokenizer.encode("the tent", add_special_tokens=False), word) for word in sequences)


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_of_bad_words_hold_nothing_twice_and_nothing_else(kind):
    tokenizer = Tokenizer(KINDS[kind]())
    words = ["kettle", " kettle", "shelf"]
    sequences = bad_word_tokens(words, tokenizer)
    assert len({tuple(sequence) for sequence in sequences}) == len(sequences)
    assert {tokenizer.decode(sequence).strip() for sequence in sequences} == {"kettle", "shelf"}
    assert sequences == bad_word_tokens(words[::2], tokenizer)
    assert not any(token in tokenizer.special_ids for sequence in sequences for token in sequence)
    assert bad_word_tokens([], tokenizer) == []
    assert bad_word_tokens(["  "], tokenizer)


def test_bad_words_of_a_batch_are_tokenized_once(tokenizer):
    params = SamplingParams(bad_words=("kettle",))
    other = SamplingParams(bad_words=("tent",))
    prompts = [TokenizedPrompt(None, [67])] * 3
    first, second, third = prepare_generations(prompts, [params, params, other], tokenizer, 100)
    assert first.bad_words is second.bad_words
    assert third.bad_words == bad_word_tokens(["tent"], tokenizer) != first.bad_words


@given(
    length=st.integers(1, 60),
    keep=st.one_of(st.none(), st.just(-1), st.integers(1, 60)),
    max_tokens=st.one_of(st.none(), st.integers(0, 60)),
    side=st.sampled_from(["left", "right"]),
)
def test_prompts_are_cut_to_the_end_that_is_kept(tokenizer, length, keep, max_tokens, side):
    limit = 40
    ids = list(range(67, 67 + length))
    room = limit - (1 if max_tokens is None else max_tokens)
    kept = length if keep is None else min(length, room if keep == -1 else keep)
    params = SamplingParams(truncate_prompt_tokens=keep, truncation_side=side, max_tokens=max_tokens)
    prompt = TokenizedPrompt(tokenizer.decode(ids), ids)
    if keep == -1 and room < 1:
        with pytest.raises(RequestError, match=r"max_tokens .* leaves none") as refused:
            prepare_generations([prompt], [params], tokenizer, limit)
        assert refused.value.param == "max_tokens"
        return
    if kept > limit - (max_tokens != 0):
        with pytest.raises(ContextLengthExceeded, match=f"{kept} tokens") as caught:
            prepare_generations([prompt], [params], tokenizer, limit)
        assert caught.value.param == "prompt"
        return
    (generation,) = prepare_generations([prompt], [params], tokenizer, limit)
    expected = ids[:kept] if side == "right" else ids[length - kept :]
    assert generation.prompt.ids == expected
    assert generation.prompt.text == tokenizer.decode(expected)
    request = generation.request("r")
    assert (request.id, request.prompt, request.params) == ("r", generation.prompt.ids, params)


def test_a_prompt_of_ids_has_no_text(tokenizer):
    params = SamplingParams(truncate_prompt_tokens=2)
    (generation,) = prepare_generations([TokenizedPrompt(None, [67, 68, 69])], [params], tokenizer, 40)
    assert generation.prompt == (None, [68, 69])


def test_a_prompt_that_is_too_long_is_a_request_error():
    assert issubclass(ContextLengthExceeded, RequestError)
