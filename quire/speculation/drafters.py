"""Drafters of one sequence. Each proposes the tokens that may follow, from tokens alone."""

from collections.abc import Sequence
from typing import NamedTuple

from quire.config import Drafter
from quire.speculation.suffix_index import MAX_INDEXED, SuffixIndex

class Proposal(NamedTuple):
    """A chain of draft tokens."""

    drafter: Drafter
    tokens: Sequence[int]
    match_length: int  # tokens before the chain that equal those before its source
    forced: Sequence[int] = ()  # indices of tokens that the constraint forces if those before them are right


class SuffixDrafter:
    """Proposes what followed the longest earlier occurrence of the last tokens in the sequence itself."""

    __slots__ = ("_index", "_tokens")

    def __init__(self, tokens: list[int]) -> None:
        """tokens: those of the sequence, a list that grows with it."""
        self._tokens = tokens
        self._index = SuffixIndex(tokens, max(0, len(tokens) - MAX_INDEXED // 2))

    @property
    def num_indexed(self) -> int:
        """Number of indexed tokens, each of which takes memory."""
        return self._index.num_indexed

    def extend(self, most: int) -> int:
        """Index up to `most` more tokens. Returns their number."""
        return self._index.extend(len(self._tokens) - 1, most)

    def propose(self, most: int) -> Proposal | None:
        """Up to `most` tokens; None if the last two tokens have not occurred before.

        If the occurrence overlaps the end, the text repeats itself, and so does the chain.
        """
        tokens, length = self._tokens, len(self._tokens)
        found = self._index.find(tokens, length)
        if found is None:
            return None
        chain = tokens[found.stop : found.stop + most]
        period = length - found.stop
        if len(chain) < most:
            chain = [chain[i % period] for i in range(most)]
        return Proposal("suffix", chain, found.length)


class PredictionDrafter:
    """Proposes the rest of a predicted output. After a difference, it continues where the output meets it again."""

    __slots__ = ("_index", "_match_length", "_num_seen", "_place", "_prediction", "_tokens")

    def __init__(self, prediction: Sequence[int], tokens: list[int], num_prompt_tokens: int) -> None:
        """tokens: those of the sequence, a list that grows with it. prediction: of its output."""
        self._prediction = prediction
        self._tokens = tokens
        self._index = SuffixIndex(prediction)
        self._index.extend(len(prediction), len(prediction))
        self._place: int | None = 0  # of the next token in the prediction; None after a difference
        self._match_length = 0  # tokens before it that agree with the output
        self._num_seen = num_prompt_tokens  # tokens of the sequence that are compared

    def propose(self, most: int) -> Proposal | None:
        """Up to `most` tokens of the prediction; None if it does not continue the output, or has ended."""
        self._align()
        if self._place is None or self._place >= len(self._prediction):
            return None
        return Proposal("prediction", self._prediction[self._place : self._place + most], self._match_length)

    def _align(self) -> None:
        """Compare the new tokens of the sequence with the prediction."""
        tokens, prediction, place = self._tokens, self._prediction, self._place
        for token in tokens[self._num_seen :]:
            if place is not None and place < len(prediction) and prediction[place] == token:
                place += 1
                self._match_length += 1
            else:
                place = None
        self._num_seen = len(tokens)
        if place is None and (found := self._index.find(tokens, len(tokens))) is not None:
            place, self._match_length = found
        self._place = place
