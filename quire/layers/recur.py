"""Recurrence interface of models: inputs of tokens to outputs. The state blocks are behind it."""

from typing import Protocol

from torch import Tensor

from quire.kernels.contract import Kernels, Plan
from quire.kernels.state_contract import RecurrenceWeights, StateBatch, StateStorage


class Recur(Protocol):
    """The recurrence that a model gets as an argument."""

    def __call__(self, layer: int, inputs: Tensor, weights: RecurrenceWeights) -> Tensor:
        """Apply inputs (num_tokens, width) to the states of their sequences. Returns (num_tokens, num_values).

        layer: number of the layer among those with a state.
        """


class BlockStates:
    """The recurrence over state blocks. One instance serves all steps; `plan` prepares the next one."""

    def __init__(self, kernels: Kernels, storage: StateStorage) -> None:
        self._kernels = kernels
        self._storage = storage
        self._plan: Plan = None

    def plan(self, batch: StateBatch) -> None:
        """Prepare the next step."""
        self.set_plan(self._kernels.plan_states(batch, self._storage))

    def set_plan(self, plan: Plan) -> None:
        """Use a given kernel plan for the next step."""
        self._plan = plan

    def __call__(self, layer: int, inputs: Tensor, weights: RecurrenceWeights) -> Tensor:
        """See Recur."""
        return self._kernels.recur(self._storage, layer, inputs, weights, self._plan)
