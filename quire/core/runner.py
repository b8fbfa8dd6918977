"""The protocol of a runner, which executes Steps."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from quire.core.capabilities import Capabilities
from quire.core.step import SamplingMasks, Step, StepResult

# Of a step that is replayed from a capture: its head computes logits at all positions. Other steps are not captured.
MAX_UNUSED_LOGITS = 16

LogitsProcessor = Callable[..., Any]  # ([prompt,] output, logits) -> logits


class RowProcessors(NamedTuple):
    """The logits processors of a row that samples one token, with the known tokens of its sequence."""

    row: int
    processors: Sequence[LogitsProcessor]
    prompt: Sequence[int]
    output: Sequence[int]


class Runner(Protocol):
    """Executes Steps. Calls per step in this order: launch, sample, collect.

    With two steps in flight: launch(n+1), collect() -> n, sample(n+1). With one: launch, sample, collect. With more,
    several steps may be sampled and not collected; docs/step.md has the order.
    """

    @property
    def capabilities(self) -> Capabilities:
        """What it can execute."""

    def launch(self, step: Step) -> None:
        """Apply the Step to the rows, make its Moves, start the forward pass."""

    def sample(self, step_id: int, masks: SamplingMasks, processors: Sequence[RowProcessors] = ()) -> None:
        """Sample the tokens of the step launched last. Steps launched after this call may continue from them.

        processors: of the rows whose logits are changed before they are sampled from.
        """

    def collect(self) -> StepResult:
        """Wait for the oldest step that was sampled and not collected, and return its result."""

    def release_workspace(self) -> None:
        """Release memory that is only kept for the next step. Called when no step is in flight and nothing is to do."""
