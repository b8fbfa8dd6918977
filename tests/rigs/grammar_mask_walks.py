"""Random walks through grammars by their masks, with the embedded model's vocabulary."""

import random
from functools import lru_cache
from pathlib import Path

import numpy as np
import tokenizers

from quire.core.constraint import Grammar, Matcher
from quire.params import StructuredOutputsParams
from quire.structured_outputs.backends import compile
from quire.structured_outputs.vocabulary import Vocabulary
from quire.tokenizer.tokenizer import TokenBytes

_FILE = Path(__file__).resolve().parents[2] / "quire" / "assets" / "demo_model" / "tokenizer.json"
_CLOSING = (b'"', b"}", b"]", b'"}', b'"]', b"}}", b"}]")


@lru_cache
def core() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(_FILE))


@lru_cache
def vocabulary(size: int = 2048, end_ids: tuple[int, ...] = (0, 2)) -> Vocabulary:
    """size: number of logits of the model; ids beyond the tokenizer's vocabulary are unused."""
    special = frozenset(id for id, token in core().get_added_tokens_decoder().items() if token.special)
    known = TokenBytes(core())
    tokens = [b"" if id in special or id >= 2048 else known.inside(id) for id in range(size)]
    return Vocabulary(tokens, end_ids, special, encode)


def encode(text: str) -> list[int]:
    return list(core().encode(text, add_special_tokens=False).ids)


def allowed(matcher: Matcher, vocabulary: Vocabulary) -> list[int]:
    """The tokens that a mask allows."""
    words = np.full(vocabulary.num_words, 0xDEADBEEF, np.uint32)
    matcher.fill_bitmask(words)
    return np.flatnonzero(np.unpackbits(words.astype("<u4").view(np.uint8), bitorder="little")).tolist()


def text_of(tokens: list[int], vocabulary: Vocabulary) -> bytes:
    return b"".join(vocabulary.tokens[token] for token in tokens if token not in vocabulary.end_ids)


END = 256
BYTES = Vocabulary([bytes([i]) for i in range(256)] + [b""], (END,), frozenset({END}), lambda text: list(text.encode()))


def matches(asked: StructuredOutputsParams, text: str, backend: str = "auto") -> bool:
    """Whether a text, byte by byte, is a complete output."""
    matcher = compile(asked, BYTES, backend).new_matcher(fast_forward=False)
    verdict = matcher.advance(list(text.encode()))
    return not verdict.error and END in allowed(matcher, BYTES)


def walk(
    grammar: Grammar, vocabulary: Vocabulary, rng: random.Random, *, limit: int, fast_forward: bool = True
) -> tuple[list[int], bool]:
    """Random tokens that the masks allow, and whether an end token came within `limit` tokens.

    After a third of them closing tokens are preferred, so that most walks end. Raises AssertionError at a dead end.
    """
    matcher = grammar.new_matcher(fast_forward=fast_forward)
    closing = [token for token, data in enumerate(vocabulary.tokens) if data in _CLOSING]
    verdict = matcher.advance([])
    tokens = list(verdict.forced)
    while len(tokens) < limit:
        assert not verdict.error, (verdict.error, text_of(tokens, vocabulary))
        options = allowed(matcher, vocabulary)
        assert options, f"a dead end behind {text_of(tokens, vocabulary)!r}"
        ends = [token for token in options if token in vocabulary.end_ids]
        assert not verdict.is_over or ends == options
        if len(tokens) > limit // 3:
            options = ends or [token for token in closing if token in set(options)] or options
        token = rng.choice(options)
        tokens.append(token)
        if token in vocabulary.end_ids:
            return tokens, True
        verdict = matcher.advance([token])
        tokens += verdict.forced
    return tokens, False
