"""Follower: a Matcher over a parser of a library. It knows when an output ends, and what was forced and came."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from quire.core.constraint import Verdict
from quire.structured_outputs.limits import MAX_FORCED, num_common, packed
from quire.structured_outputs.vocabulary import Vocabulary


class Parser(Protocol):
    """One sequence, as a library follows it. End tokens are not its business."""

    def take(self, tokens: Sequence[int]) -> str:
        """These tokens came. What is wrong with them, "" where they fit."""

    def span(self) -> list[int]:
        """The tokens that have to come now, the first MAX_FORCED at least. They are not taken."""

    def may_end(self) -> bool:
        """Whether the text so far is complete."""

    def is_over(self) -> bool:
        """Whether the text so far is complete, and nothing can follow it."""

    def fill(self, words: np.ndarray) -> None:
        """See Matcher; bits of ids that are no text may be set."""


class Masks:
    """The masks of a vocabulary that every constraint needs: of its text with its end tokens, and of those alone."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.end_ids = frozenset(vocabulary.end_ids)
        ends = np.array([token in self.end_ids for token in range(vocabulary.size)], bool)
        text = [bool(data) and token not in vocabulary.special_ids for token, data in enumerate(vocabulary.tokens)]
        self.allowed = packed(ends | np.array(text, bool))
        self.ends = packed(ends)


class Follower:
    """See Matcher. What it says is a function of the tokens so far, however they are cut into calls."""

    def __init__(self, parser: Parser, masks: Masks, *, fast_forward: bool) -> None:
        self._parser = parser
        self._masks = masks
        self._fast_forward = fast_forward
        self._has_begun = False
        self._has_ended = False  # an end token came
        self._error = ""

    def advance(self, tokens: Sequence[int]) -> Verdict:
        """See Matcher. Among several tokens are those that were forced, as far as they came."""
        span = [] if self._has_begun else self._span()
        self._has_begun = True
        rest = list(tokens)
        while rest:
            same = num_common(span, rest)
            if same == len(rest):
                break
            came = rest[: same + 1] if self._fast_forward else rest
            self._take(came)
            rest, span = rest[len(came) :], self._span()
        self._take(span)
        if self._error:
            return Verdict(error=self._error)
        return Verdict(forced=span[len(rest) :], is_over=self._has_ended or self._parser.is_over())

    def fill(self, words: np.ndarray) -> None:
        """See Matcher."""
        if self._error:
            words[:] = 0
        elif self._has_ended:
            words[:] = self._masks.ends
        else:
            self._parser.fill(words)
            words &= self._masks.allowed

    def _span(self) -> list[int]:
        """Of a longer one the rest is the next verdict's, behind the one token that the mask then allows."""
        if not self._fast_forward or self._error or self._has_ended:
            return []
        return self._parser.span()[:MAX_FORCED]

    def _take(self, tokens: Sequence[int]) -> None:
        if self._error or self._has_ended or not tokens:
            return
        end_ids = self._masks.end_ids
        text = [token for token in tokens if token not in end_ids]
        if len(text) < len(tokens):
            text = list(tokens[: next(place for place, token in enumerate(tokens) if token in end_ids)])
        self._error = self._parser.take(text)
        if not self._error and len(text) < len(tokens):
            self._has_ended = self._parser.may_end()
            self._error = "" if self._has_ended else "the output ended before it was complete"
