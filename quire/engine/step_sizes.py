"""StepSizes: how many tokens each step computed, as a histogram that can be read at any time."""

from bisect import bisect_left

BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # tokens; vLLM's


class StepSizes:
    """Counts of steps, by the smallest of BOUNDS that is not below their tokens; the last one is of larger steps."""

    def __init__(self) -> None:
        self.num_tokens = 0  # of all steps
        self._counts = [0] * (len(BOUNDS) + 1)

    @property
    def counts(self) -> tuple[int, ...]:
        """(len(BOUNDS) + 1,): each step is in one of them."""
        return tuple(self._counts)

    def add(self, num_tokens: int) -> None:
        """A step computes so many tokens."""
        self.num_tokens += num_tokens
        self._counts[bisect_left(BOUNDS, num_tokens)] += 1
