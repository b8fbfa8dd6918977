"""Incremental detokenization against decoding the whole, for every kind of tokenizer."""

import re
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import KINDS
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Core
from transformers import PreTrainedTokenizerFast

from quire.tokenizer.detokenizer import Detokenizer
from quire.tokenizer.tokenizer import Tokenizer

MARK = "<think>"  # an added token of the SentencePiece kinds; it represents an invalid byte in the oracle
ODD = [
    "e\u0301",
    "👩‍👩‍👧",
    "🇩🇪",
    "\u200d",
    "\ufeff",
    "\ufffd",
    "\0",
    "\x7f",
    "नमस्ते",
    "茶壶",
    "ﬁ",
    "</s>",
    "  ",
    "\r\n",
    "▁",
    "Ġ",
]
TEXTS = st.lists(st.sampled_from(ODD) | st.sampled_from("ab 1\n") | st.characters(exclude_categories=["Cs"])).map(
    "".join
)
every_kind = pytest.mark.parametrize("kind", KINDS)


@cache
def made(kind: str) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    core = KINDS[kind]()
    return Tokenizer(core), PreTrainedTokenizerFast(tokenizer_object=core)


@cache
def byte_values(kind: str) -> dict[int, int]:
    """Tokens of single bytes: id -> byte."""
    vocab = made(kind)[1].get_vocab()
    return {i: int(piece[3:5], 16) for piece, i in vocab.items() if re.fullmatch("<0x..>", piece)}


def decoded(kind: str, ids: list[int], *, skip: bool) -> str:
    """The text that transformers decodes, except that in a run of byte tokens only the invalid bytes are replaced."""
    reference, values = made(kind)[1], byte_values(kind)
    skipped = made(kind)[0].special_ids if skip else ()
    ids = [i for i in ids if i not in skipped and reference.convert_ids_to_tokens(i) is not None]
    if not values:
        return reference.decode(ids)
    mark, marked, run = reference.convert_tokens_to_ids(MARK), [], []
    for i in [*ids, None]:
        if i in values:
            run.append(i)
            continue
        for char in bytes(values[b] for b in run).decode(errors="surrogateescape"):
            size = len(char.encode(errors="surrogateescape"))
            marked += [mark] if "\udc80" <= char <= "\udcff" else run[:size]
            run = run[size:]
        marked += [] if i is None else [i]
    return reference.decode(marked).replace(MARK, "\ufffd")


def pieces(tokenizer, ids, prompt=(), **options):
    detokenizer = Detokenizer(tokenizer, prompt, **options)
    return [*(detokenizer.append_token(token) for token in ids), detokenizer.flush()]


def after(full: str, prompt: str) -> str:
    """`full` from the first character that differs from `prompt`."""
    shared = next(
        (i for i, (a, b) in enumerate(zip(full, prompt, strict=False)) if a != b), min(len(full), len(prompt))
    )
    return full[shared:]


def any_ids(kind: str) -> st.SearchStrategy[list[int]]:
    """Lists of tokens, bytes above ASCII, ids without a token."""
    tokenizer, reference = made(kind)
    mark = reference.convert_tokens_to_ids(MARK)
    high = [i for i, value in byte_values(kind).items() if value > 127]
    each = st.integers(0, tokenizer.vocab_size + 3).filter(lambda i: i != mark)
    return st.lists(each | st.sampled_from(high) if high else each, max_size=24)


@every_kind
@given(data=st.data(), text=TEXTS, skip=st.booleans())
def test_any_split_of_any_text_adds_up(kind, data, text, skip):
    tokenizer, reference = made(kind)
    ids = tokenizer.encode(text)
    cut = data.draw(st.integers(0, len(ids)))
    full = reference.decode(ids, skip_special_tokens=skip)
    expected = after(full, decoded(kind, ids[:cut], skip=skip))
    came = pieces(tokenizer, ids[cut:], ids[:cut], skip_special_tokens=skip)
    assert "".join(came) == expected
    assert "".join(came).count("\ufffd") <= full.count("\ufffd")


@every_kind
@given(data=st.data(), skip=st.booleans())
def test_any_tokens_add_up_and_come_at_once(kind, data, skip):
    tokenizer = made(kind)[0]
    prompt, ids = data.draw(any_ids(kind)), data.draw(any_ids(kind))
    before = decoded(kind, prompt, skip=skip)
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    shown = ""
    for count, token in enumerate(ids, 1):
        shown += detokenizer.append_token(token)
        so_far = after(decoded(kind, prompt + ids[:count], skip=skip), before)
        assert so_far.startswith(shown)
        assert so_far[len(shown) :] in ("", "\ufffd", "\ufffd\ufffd", "\ufffd\ufffd\ufffd")  # an incomplete character
    assert shown + detokenizer.flush() == after(decoded(kind, prompt + ids, skip=skip), before)


@every_kind
@given(text=TEXTS, tail=st.binary(min_size=1, max_size=3))
def test_an_invalid_tail_is_what_transformers_decode(kind, text, tail):
    tokenizer, reference = made(kind)
    tokens = {value: i for i, value in byte_values(kind).items()}
    ids = [*tokenizer.encode(text), reference.convert_tokens_to_ids("a")]  # it ends any run of bytes before
    if not tokens or tail.decode(errors="replace").strip("\ufffd"):
        return  # with ASCII in such a run, quire and transformers differ
    ids += [tokens[byte] for byte in tail]
    assert "".join(pieces(tokenizer, ids)) == reference.decode(ids, skip_special_tokens=True)


@every_kind
@given(data=st.data())
def test_bytes_of_tokens_add_up_to_the_text(kind, data):
    tokenizer, _ = made(kind)
    ids = [i for i in data.draw(any_ids(kind)) if tokenizer.token_bytes(i)]
    joined = b"".join(tokenizer.token_bytes(i, first=n == 0) for n, i in enumerate(ids))
    text = re.sub("[\udc80-\udcff]", "\ufffd", joined.decode(errors=tokenizer.byte_errors))
    assert text == decoded(kind, ids, skip=False)


@pytest.mark.parametrize(
    ("kind", "token", "inside", "first"),
    [
        ("gpt2", "Ġkettle", b" kettle", b" kettle"),
        ("gpt2", "ð", b"\xf0", b"\xf0"),
        ("gpt2", "<|im_end|>", b"<|im_end|>", b"<|im_end|>"),
        ("prepend", "▁kettle", b" kettle", b"kettle"),
        ("metaspace", "▁kettle", b" kettle", b"kettle"),
        ("gemma", "▁kettle", b" kettle", b" kettle"),
        ("prepend", "▁", b" ", b""),
        ("prepend", "<0xE2>", b"\xe2", b"\xe2"),
        ("prepend", "<0x20>", b" ", b""),
        ("unigram", "<0x20>", b" ", b" "),
        ("unigram", "▁", b" ", b""),
        ("unigram_unk", "</s>", b"</s>", b"</s>"),
        ("unigram", "[TOOL]", b"[TOOL]", b"[TOOL]"),
    ],
)
def test_bytes_of_one_token(kind, token, inside, first):
    tokenizer, _ = made(kind)
    found = tokenizer.convert_tokens_to_ids(token)
    assert tokenizer.convert_ids_to_tokens(found) == token
    assert tokenizer.token_bytes(found) == inside
    assert tokenizer.token_bytes(found, first=True) == first
    assert tokenizer.token_text(found) == inside.decode(errors="replace")


def test_byte_tokens_are_text_where_the_decoder_knows_none():
    core = KINDS["unigram_unk"]()
    core.add_tokens(["<0x41>"])
    assert Tokenizer(core).token_bytes(core.token_to_id("<0x41>")) == b"<0x41>"


def test_an_id_without_a_token_is_nothing():
    tokenizer, _ = made("gpt2")
    assert tokenizer.token_bytes(10**6) == b""
    assert tokenizer.convert_ids_to_tokens([0, 10**6]) == ["<|im_start|>", None]
    assert "".join(pieces(tokenizer, [10**6])) == ""


@pytest.mark.parametrize("kind", ["prepend", "metaspace", "unigram"])
def test_the_space_after_a_prompt_is_kept(kind):
    tokenizer, _ = made(kind)
    kettle = tokenizer.encode("kettle", add_special_tokens=False)
    special = tokenizer.convert_tokens_to_ids("[TOOL]")
    assert "".join(pieces(tokenizer, kettle)) == "kettle"
    assert "".join(pieces(tokenizer, kettle, kettle)) == " kettle"
    assert "".join(pieces(tokenizer, kettle, [*kettle, *[special] * 9])) == " kettle"
    assert "".join(pieces(tokenizer, kettle, [special] * 9)) == "kettle"


@every_kind
def test_a_character_that_the_prompt_begins_comes_out_whole(kind):
    tokenizer, _ = made(kind)
    ids = tokenizer.encode("a😁z", add_special_tokens=False)
    begun = next((n for n in range(len(ids)) if decoded(kind, ids[:n], skip=True).endswith("\ufffd")), None)
    if begun is not None:
        assert "".join(pieces(tokenizer, ids[begun:], ids[:begun])) == "😁z"
    assert (begun is None) == (kind == "unigram_unk")


def test_a_character_that_the_prompt_begins_in_vain(tokenizer):
    begun = tokenizer.encode("😀")[:1]
    assert tokenizer.decode(begun) == "\ufffd"
    assert "".join(pieces(tokenizer, tokenizer.encode("ab"), begun)) == "ab"
    assert "".join(pieces(tokenizer, [], begun)) == ""


@every_kind
@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens(kind, skip):
    tokenizer, reference = made(kind)
    special = min(tokenizer.special_ids)
    ids = [*tokenizer.encode("kettle", add_special_tokens=False), special, special, tokenizer.encode("tent")[-1]]
    text = "".join(pieces(tokenizer, ids, skip_special_tokens=skip))
    assert text == reference.decode(ids, skip_special_tokens=skip)
    assert (text.count(tokenizer.token_text(special)) == 2) is not skip


def test_spaces_between_special_tokens():
    """Only a tokenizer without a decoder adds them."""
    core = Core(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    core.add_tokens([AddedToken("<x>", special=True), AddedToken("<y>")])
    tokenizer, ids = Tokenizer(core), [0, 2, 3, 2, 1]
    assert tokenizer.decode(ids) == "a <x> <y> <x> b"
    assert "".join(pieces(tokenizer, ids, skip_special_tokens=False)) == "a <x> <y> <x> b"
    joined = pieces(tokenizer, ids, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert "".join(joined) == "a <x><y><x> b"


@every_kind
def test_the_work_per_token_does_not_grow(kind):
    """With a long text or with bytes that never form a character. The prompt is decoded from its end."""
    tokenizer = made(kind)[0]

    class Counting:
        special_ids, added_ids, byte_errors = tokenizer.special_ids, tokenizer.added_ids, tokenizer.byte_errors
        count = 0

        def token_bytes(self, token, *, first=False):
            self.count += 1
            return tokenizer.token_bytes(token, first=first)

    lone = tokenizer.encode("😁")[-1]
    for ids in (tokenizer.encode("a kettle " * 200), [lone] * 1000):
        counting = Counting()
        text = "".join(pieces(counting, ids, prompt=ids))
        assert counting.count <= len(ids) + 8
        assert bool(text) == bool(tokenizer.decode(ids, skip_special_tokens=True))


def test_text_is_let_out_at_once(tokenizer):
    ids = tokenizer.encode("One kettle, please")
    assert all(pieces(tokenizer, ids)[:-1])
