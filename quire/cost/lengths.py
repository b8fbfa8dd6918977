"""Lengths: how many tokens sequences put out that may end early. Only counts."""

_FORGET = 0.98  # weight that a sequence keeps when the next one ends


class Lengths:
    """The mean over sequences that ended lately."""

    __slots__ = ("_tokens", "_weight")

    def __init__(self) -> None:
        self._weight = self._tokens = 0.0

    def ended(self, num_tokens: int) -> None:
        """One that an end token or a stop string could end has ended with so many output tokens."""
        self._weight = self._weight * _FORGET + 1
        self._tokens = self._tokens * _FORGET + num_tokens

    @property
    def mean(self) -> float | None:
        """Output tokens; None where nothing is known yet."""
        return self._tokens / self._weight if self._weight else None
