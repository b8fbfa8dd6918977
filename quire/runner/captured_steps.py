"""Captured steps: decode steps and other small steps, captured by number of tokens and replayed.

The first step of a size is captured while it runs. Later steps refill its inputs and replay it, so that the time on
the host does not grow with the number of layers.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from quire.core.step import Chunks
from quire.kernels.contract import Kernels, NotCapturable, Plan, StepCapture, Storage
from quire.layers.attend import PagedAttend
from quire.layers.context import ForwardContext
from quire.models.model import Model
from quire.runner.inputs import CapturedInputs, Inputs

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _CapturedStep:
    """A captured step: its inputs and outputs, which keep their addresses, and the call that replays it."""

    inputs: CapturedInputs
    plans: list[Plan]
    logits: Tensor  # (num_tokens, vocab_size)
    replay: Callable[[], None]


class CapturedSteps:
    """Captured steps of one model on one set of blocks, by their number of tokens."""

    def __init__(
        self,
        model: Model,
        kernels: Kernels,
        storages: Sequence[Storage],
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        self._model = model
        self._kernels = kernels
        self._storages = storages
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._attend = PagedAttend(kernels, storages, model.score_scaling)
        self._recorder = kernels.new_step_capture()
        self._captured: dict[int, _CapturedStep] = {}

    def __len__(self) -> int:
        """Number of captured steps."""
        return len(self._captured)

    def logits(self, inputs: Inputs, chunks: Chunks) -> Tensor | None:
        """Logits (num_tokens, vocab_size) at all positions of a step, valid until the next step.

        None if such a step is not captured.
        """
        number = chunks.num_tokens
        size = None if self._recorder is None else self._recorder.capture_size(number, self._max_num_seqs)
        if self._recorder is None or size is None:
            return None
        captured_step = self._captured.get(size)
        if captured_step is None:
            captured_step = self._capture(self._recorder, inputs.captured_inputs(size), chunks)
            return None if captured_step is None else captured_step.logits[:number]
        batches = captured_step.inputs.refill(chunks)
        for plan, batch in zip(captured_step.plans, batches, strict=True):
            self._recorder.refill(plan, batch)
        captured_step.replay()
        return captured_step.logits[:number]

    def _capture(self, recorder: StepCapture, inputs: CapturedInputs, chunks: Chunks) -> _CapturedStep | None:
        """Capture a step, which also runs it. None if the kernels cannot capture it."""
        plans = [
            recorder.plan(batch, storage, -(-self._max_model_len // storage.block_size))
            for batch, storage in zip(inputs.refill(chunks), self._storages, strict=True)
        ]
        self._attend.set_plans(plans)

        def compute() -> Tensor:
            for plan in plans:
                recorder.prepare(plan)
            context = ForwardContext(self._kernels, self._attend, inputs.positions)
            return self._model.logits(self._model.forward(inputs.token_ids(), context), context)

        try:
            logits, replay = recorder.capture(compute)
        except NotCapturable as error:
            log.info("decode steps are not captured: %s", error)
            self._recorder = None  # no other step can be captured either
            self._captured.clear()
            return None
        captured_step = _CapturedStep(inputs, plans, logits, replay)
        self._captured[len(inputs.positions)] = captured_step
        return captured_step
