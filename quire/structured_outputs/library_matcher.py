"""Matcher over the parser of a grammar library."""

from collections.abc import Collection, Sequence
from copy import copy
from typing import Protocol

import numpy as np

from quire.core.common_prefix import common_prefix_len
from quire.core.constraint import Verdict
from quire.structured_outputs.limits import MAX_FORCED, pack_bitmask
from quire.structured_outputs.vocabulary import Vocabulary


class Parser(Protocol):
    """The parser state of one sequence in a library. It gets no end tokens."""

    def accept_tokens(self, tokens: Sequence[int]) -> str:
        """Consume tokens. Returns an error message, "" if the tokens match the grammar."""

    def forced_tokens(self) -> list[int]:
        """The forced tokens of this state, the first MAX_FORCED at least. They are not consumed."""

    def may_end(self) -> bool:
        """Whether the text so far is complete."""

    def is_over(self) -> bool:
        """Whether the text so far is complete and no text can follow it."""

    def fill_bitmask(self, words: np.ndarray) -> None:
        """See Matcher. Bits of ids that are no text may be set."""

    def failure(self) -> str:
        """Why no mask could be computed and no tokens can be consumed; "" if nothing has failed."""

    def fork(self) -> "Parser":
        """A copy that consumes tokens of its own."""


class Masks:
    """Masks of a vocabulary. allowed: text and end tokens; ends: end tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.end_ids = frozenset(vocabulary.end_ids)
        ends = np.array([token in self.end_ids for token in range(vocabulary.size)], bool)
        text = [bool(data) and token not in vocabulary.special_ids for token, data in enumerate(vocabulary.tokens)]
        self.allowed = pack_bitmask(ends | np.array(text, bool))
        self.ends = pack_bitmask(ends)

    def allowing(self, special_ids: Collection[int]) -> "Masks":
        """Masks of the same vocabulary that allow these special tokens as well."""
        masks = copy(self)
        masks.allowed = self.allowed.copy()
        for token in special_ids:
            masks.allowed[token // 32] |= np.uint32(1 << token % 32)
        masks.allowed.flags.writeable = False
        return masks


class LibraryMatcher:
    """See Matcher. Verdicts depend on the tokens so far, not on how they are divided into calls."""

    def __init__(self, parser: Parser, masks: Masks, *, fast_forward: bool) -> None:
        self._parser = parser
        self._masks = masks
        self._fast_forward = fast_forward
        self._has_begun = False
        self._has_ended = False  # an end token was consumed
        self._error = ""

    def advance(self, tokens: Sequence[int]) -> Verdict:
        """See Matcher. When a sequence is resumed, `tokens` has the forced tokens that were appended before, too."""
        span = [] if self._has_begun else self._forced_tokens()
        self._has_begun = True
        rest = list(tokens)
        while rest:
            same = common_prefix_len(span, rest)
            if same == len(rest):
                break
            came = rest[: same + 1] if self._fast_forward else rest
            self._accept_tokens(came)
            rest, span = rest[len(came) :], self._forced_tokens()
        self._accept_tokens(span)
        if self._error:
            return Verdict(error=self._error)
        return Verdict(forced=span[len(rest) :], is_over=self._has_ended or self._parser.is_over())

    def fill_bitmask(self, words: np.ndarray) -> None:
        """See Matcher."""
        if self._error:
            words[:] = 0
        elif self._has_ended:
            words[:] = self._masks.ends
        else:
            self._parser.fill_bitmask(words)
            self._error = self._parser.failure()
            words &= self._masks.allowed

    def fork(self) -> "LibraryMatcher":
        """See Matcher."""
        fork = copy(self)
        fork._parser = self._parser.fork()
        return fork

    def _forced_tokens(self) -> list[int]:
        """At most MAX_FORCED forced tokens. The mask then allows only the next token; the next verdict has the rest."""
        if not self._fast_forward or self._error or self._has_ended:
            return []
        return self._parser.forced_tokens()[:MAX_FORCED]

    def _accept_tokens(self, tokens: Sequence[int]) -> None:
        if self._error or self._has_ended or not tokens:
            return
        end_ids = self._masks.end_ids
        text = [token for token in tokens if token not in end_ids]
        if len(text) < len(tokens):
            text = list(tokens[: next(place for place, token in enumerate(tokens) if token in end_ids)])
        self._error = self._parser.accept_tokens(text)
        if not self._error and len(text) < len(tokens):
            self._has_ended = self._parser.may_end()
            self._error = "" if self._has_ended else "the output ended before the constraint was complete"
