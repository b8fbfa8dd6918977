"""The body as the engine sees it: anything that does what a Step says."""

from typing import Protocol

from quire.core.step import Late, Step, StepResult


class Runner(Protocol):
    """Calls come in this order for each step: launch, sample, collect; at most two steps overlap.

    With two steps in flight: launch(n+1), collect() -> n, sample(n+1). With one: launch, sample, collect.
    """

    def launch(self, step: Step) -> None:
        """Apply the delta, do the moves, start the forward pass."""

    def sample(self, step_id: int, late: Late) -> None:
        """Choose the tokens of the step that was launched last: what is launched from now on may continue them."""

    def collect(self) -> StepResult:
        """Wait for the oldest step that was sampled and not collected."""

    def rest(self) -> None:
        """Nothing is left to do, and no step in flight: memory that is only kept for the next step may go."""
