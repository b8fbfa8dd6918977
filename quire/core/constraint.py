"""Protocols of structured outputs. Backends implement Grammar and Matcher; the scheduler uses Constraints."""

from collections.abc import Sequence
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


class Matcher(Protocol):
    """The state of one sequence in a grammar. No method raises: a failure is a Verdict or an empty mask."""

    def advance(self, tokens: Sequence[int]) -> Verdict:
        """Consume new tokens (none at the begin) and, with `fast_forward`, the forced tokens behind them."""

    def fill_bitmask(self, bitmask: np.ndarray) -> None:
        """Write the mask of allowed tokens to `bitmask`, uint32 (ceil(vocab_size / 32),).

        Bit t%32 of word t//32 is token t. End tokens are allowed where the output may end. The mask is all zeros if no
        token is allowed, or if the mask exceeds the limits of the backend.
        """


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

    def masks(self, seq_ids: Sequence[int]) -> np.ndarray:
        """The masks of these sequences, uint32 (len(seq_ids), ceil(vocab_size / 32)): see `Matcher.fill_bitmask`."""
