"""Protocols of structured outputs. Backends implement Grammar and Matcher; the scheduler uses Constraints."""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np

from quire.core.request import Request


class Verdict(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What is certain about the tokens that may follow.

    forced: the next tokens, in the tokenizer's spelling, if the grammar allows only one text; the matcher has consumed
    them already. is_over: after the forced tokens only an end token is allowed. error: the reason why no token is
    allowed, not even an end token; the tokens so far are valid.
    """

    forced: list[int] = []
    is_over: bool = False
    error: str = ""


EMPTY_VERDICT = Verdict()


class AllowedDrafts(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Drafts that a constraint allows, with the tokens that it forces behind them."""

    tokens: list[int] = []
    forced: list[int] = []  # indices of the forced ones


NO_DRAFTS = AllowedDrafts()


def allowed_drafts(advance: Callable[[int], Verdict], drafts: Sequence[int], most: int) -> AllowedDrafts:
    """The leading drafts that a constraint allows, up to `most` tokens with the forced ones.

    advance: consumes one draft in a copy of the matcher. A draft is left out if the output may not continue behind it,
    and if the tokens forced behind it do not all fit: no token can be sampled between them.
    """
    tokens: list[int] = []
    forced: list[int] = []
    place = 0
    while place < len(drafts) and len(tokens) < most:
        verdict = advance(drafts[place])
        place += 1
        if verdict.error or verdict.is_over or len(tokens) + 1 + len(verdict.forced) > most:
            break
        tokens.append(drafts[place - 1])
        forced += range(len(tokens), len(tokens) + len(verdict.forced))
        tokens += verdict.forced
        if list(drafts[place : place + len(verdict.forced)]) != verdict.forced:
            break  # what was drafted behind the forced tokens is not known
        place += len(verdict.forced)
    return AllowedDrafts(tokens, forced)


class Matcher(Protocol):
    """The state of one sequence in a grammar. No method raises: a failure is a Verdict or an empty mask."""

    def advance(self, tokens: Sequence[int]) -> Verdict:
        """Consume new tokens (none at the begin) and, with `fast_forward`, the forced tokens behind them."""

    def fill_bitmask(self, bitmask: np.ndarray) -> None:
        """Write the mask of allowed tokens to `bitmask`, uint32 (ceil(vocab_size / 32),).

        Bit t%32 of word t//32 is token t. End tokens are allowed where the output may end. The mask is all zeros if no
        token is allowed, or if the mask exceeds the limits of the backend.
        """

    def fork(self) -> "Matcher":
        """A copy that consumes tokens of its own."""


class Grammar(Protocol):
    """A constraint compiled for one vocabulary. Thread-safe."""

    def new_matcher(self, *, fast_forward: bool) -> Matcher:
        """A matcher for a new sequence. fast_forward: verdicts contain forced tokens."""


class Constraints(Protocol):
    """The matchers of all sequences, as used by the scheduler. The journal records the verdicts as inputs."""

    def begin(self, seq_id: int, request: Request, output_tokens: Sequence[int]) -> Verdict:
        """Start the matcher of a sequence whose grammar is compiled. output_tokens: its output tokens so far."""

    def advance(self, seq_id: int, tokens: Sequence[int]) -> Verdict:
        """Consume sampled tokens of a sequence and return the verdict."""

    def end(self, seq_id: int) -> None:
        """Delete the matcher of a sequence. An unknown id is ignored."""

    def allowed_drafts(self, seq_id: int, drafts: Sequence[int], most: int) -> AllowedDrafts:
        """The drafts of a sequence that its constraint allows, up to `most` tokens with those that it forces."""

    def masks(self, seq_ids: Sequence[int], drafts: Sequence[AllowedDrafts]) -> np.ndarray:
        """The masks of the next tokens of these sequences: see `Matcher.fill_bitmask`.

        drafts: of each sequence. It has a mask before each of its drafts and one behind them; those before forced
        tokens allow everything. uint32 (len(seq_ids) + number of drafts, ceil(vocab_size / 32)).
        """
