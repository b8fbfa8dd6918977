"""What a constraint is to those who use it. Backends implement Grammar and Matcher; the scheduler knows Constraints."""

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

from quire.core.request import Request


class Verdict(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What may follow the tokens so far, where that is certain.

    forced: tokens that come next whatever the model says: text that has to come, as the tokenizer writes it. They are
    consumed already. is_over: after them nothing may come but the end. error: why nothing can come, not even the end;
    the tokens up to here are all right.
    """

    forced: list[int] = []
    is_over: bool = False
    error: str = ""


OPEN = Verdict()


class Matcher(Protocol):
    """One sequence on its way through a grammar. Nothing raises; what is wrong is a Verdict, or an empty mask."""

    def advance(self, tokens: Sequence[int]) -> Verdict:
        """These tokens came (none: at the beginning). What is forced behind them is consumed, too, if it is wanted."""

    def fill(self, words: np.ndarray) -> None:
        """Which tokens may come: bit t%32 of word t//32, uint32 (ceil(vocab_size / 32),). End tokens where it may end.

        All zeros where nothing may come, or it cannot be told within bounds.
        """


class Grammar(Protocol):
    """A constraint, compiled for one vocabulary. May be used by several threads at once."""

    def start(self, *, fast_forward: bool) -> Matcher:
        """A new sequence. fast_forward: whether verdicts have forced tokens."""


class Constraints(Protocol):
    """The constraints of all sequences, as the scheduler sees them. What it answers is an input of the journal."""

    def begin(self, seq_id: int, request: Request, known: Sequence[int]) -> Verdict:
        """A sequence of a request whose constraint is compiled begins, or goes on behind known output tokens."""

    def advance(self, seq_id: int, tokens: Sequence[int]) -> Verdict:
        """These tokens were sampled."""

    def end(self, seq_id: int) -> None:
        """The sequence is over; an unknown one is ignored."""

    def masks(self, seq_ids: Sequence[int]) -> np.ndarray:
        """uint32 (len(seq_ids), ceil(vocab_size / 32)), as `Matcher.fill` says."""
