"""Shared parts of tests of the fsm backend: the demo model's vocabulary, random patterns, slow oracles."""

import random
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import tokenizers
from hypothesis import strategies as st

import quire
from quire.structured_outputs.fsm.dfa import DEAD, Dfa
from quire.structured_outputs.vocabulary import Vocabulary
from quire.tokenizer.tokenizer import TokenBytes

DEMO = Path(quire.__file__).parent / "assets" / "demo_model" / "tokenizer.json"
CHARACTERS = "ab\n é€\U0001f600-9_"


@lru_cache
def demo_vocabulary() -> Vocabulary:
    """2,048 tokens; ids 0 to 2 are special, and 0 and 2 are end tokens."""
    core = tokenizers.Tokenizer.from_file(str(DEMO))
    text = TokenBytes(core)
    special = frozenset(token for token, added in core.get_added_tokens_decoder().items() if added.special)
    tokens = [b"" if token in special else text.inside(token) for token in range(core.get_vocab_size())]
    return Vocabulary(tokens, (0, 2), special, lambda text: core.encode(text, add_special_tokens=False).ids)


def small_vocabulary(*texts: bytes) -> Vocabulary:
    """A vocabulary of these tokens and one end token. It encodes the longest token first and drops unknown bytes."""
    longest_first = sorted(range(len(texts)), key=lambda token: -len(texts[token]))

    def encode(text: str) -> list[int]:
        data, tokens = text.encode(), []
        while data:
            token = next((token for token in longest_first if data.startswith(texts[token])), None)
            if token is not None:
                tokens.append(token)
            data = data[1 if token is None else len(texts[token]) :]
        return tokens

    return Vocabulary((*texts, b""), (len(texts),), frozenset([len(texts)]), encode)


def _atoms() -> st.SearchStrategy[str]:
    literals = st.sampled_from([r"a", r"b", r"\n", r"\-", "é", "€", "\U0001f600", r"\x61", r"\u20ac", r"\.", " "])
    plain = [".", r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", "[ab]", "[^a]", "[^ab\\n]", "[a-é]", r"[\d_]", r"[^\W9]"]
    wide = ["[é-€]", "[^\u0800-\U0001f600]", r"[\s\S]", "[]a-]", "[^]]"]
    classes = st.sampled_from([*plain, *wide])
    return st.one_of(literals, classes)


def patterns() -> st.SearchStrategy[str]:
    """Random patterns of everything that the backend supports, small enough for `re`."""

    def larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        counts = ["*", "+", "?", "{2}", "{1,3}", "{,2}", "{1,}", "*?", "+?", "??", "{0,2}?"]
        return st.one_of(
            st.lists(inner, max_size=4).map("".join),
            st.lists(inner, min_size=1, max_size=3).map(lambda options: f"({'|'.join(options)})"),
            st.builds(lambda one, count: f"(?:{one}){count}", inner, st.sampled_from(counts)),
        )

    return st.recursive(_atoms(), larger, max_leaves=8)


def texts() -> st.SearchStrategy[str]:
    """Short texts of the characters that occur in patterns."""
    return st.text(st.sampled_from(CHARACTERS), max_size=6)


def walk(dfa: Dfa, seed: int, most: int = 400) -> bytes | None:
    """A random text of the language; None if the walk did not end in time."""
    chance = random.Random(seed)
    table = dfa.by_byte
    state, data = 0, bytearray()
    while len(data) < most:
        ways = np.flatnonzero(table[state] != DEAD)
        if dfa.accepts[state] and (not len(ways) or chance.random() < 0.2):
            return bytes(data)
        byte = int(chance.choice(ways))
        data.append(byte)
        state = int(table[state, byte])
    return None


def samples(dfa: Dfa, count: int) -> Iterator[bytes]:
    """Random texts of the language."""
    found = (walk(dfa, seed) for seed in range(count))
    return (data for data in found if data is not None)


def allowed(words: np.ndarray) -> set[int]:
    """The tokens that a mask allows."""
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())
