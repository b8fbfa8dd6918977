"""Detokenising token by token beside decoding all at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, normalizers

from quire.engine.detokenizer import Detokenizer
from quire.engine.tokenizer import Tokenizer


def sentencepiece_like() -> Tokenizer:
    """As Llama 2's: a byte for what is not in the vocabulary, and a leading space that decoding drops."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghij", "▁a", "bc", "▁a" + "bc"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    core = Core(models.BPE(vocab, [("▁", "a"), ("b", "c"), ("▁a", "bc")], byte_fallback=True, unk_token="<unk>"))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(core)


LLAMA_LIKE = sentencepiece_like()
TEXTS = st.text(
    alphabet=st.sampled_from("ab ci\n") | st.sampled_from("é€😀\ufffd") | st.characters(exclude_categories=["Cs"])
)


def pieces(tokenizer, ids, prompt=()):
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*(detokenizer.add(token) for token in ids), detokenizer.close()]


@given(ids=st.lists(st.integers(0, 2047), max_size=60))
def test_any_tokens_add_up_to_the_batch(tokenizer, ids):
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@given(text=TEXTS)
def test_no_half_characters_come_out(tokenizer, text):
    ids = tokenizer.encode(text)
    for piece in pieces(tokenizer, ids)[:-1]:
        assert piece.count("\ufffd") <= text.count("\ufffd")
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@given(text=TEXTS)
def test_byte_tokens_and_dropped_spaces(text):
    ids = LLAMA_LIKE.encode(text)
    came = pieces(LLAMA_LIKE, ids)
    assert "".join(came) == LLAMA_LIKE.decode(ids)
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(came)


def test_the_space_after_a_prompt_is_kept():
    prompt, ids = LLAMA_LIKE.encode("ab"), LLAMA_LIKE.encode("abc")
    assert LLAMA_LIKE.decode(ids) == "abc"
    assert "".join(pieces(LLAMA_LIKE, ids, prompt)) == " abc"


def test_a_prompt_that_ends_within_a_character(tokenizer):
    ids = tokenizer.encode("😀x")
    assert "".join(pieces(tokenizer, ids[2:], ids[:2])) == tokenizer.decode(ids[2:])


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens(tokenizer, skip):
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    assert detokenizer.add(67) + detokenizer.add(1) + detokenizer.add(67) == ("aa" if skip else "a<|im_start|>a")


def test_the_work_per_token_does_not_grow(tokenizer):
    """Neither on a long text nor on bytes that never become a character."""

    class Counting:
        special_ids = tokenizer.special_ids
        longest = 0

        def decode(self, ids):
            self.longest = max(self.longest, len(ids))
            return tokenizer.decode(ids)

    lone_byte = tokenizer.encode("😀")[1]
    for ids in (tokenizer.encode("a kettle " * 500), [lone_byte] * 1000):
        counting = Counting()
        text = "".join(pieces(counting, ids))
        assert counting.longest <= 70
        assert text == tokenizer.decode(ids)


def test_text_is_let_out_at_once(tokenizer):
    ids = tokenizer.encode("One kettle, please")
    assert all(pieces(tokenizer, ids)[:-1])
