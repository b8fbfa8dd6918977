"""Captured steps: decode steps and other small steps, captured by number of tokens and replayed.

The first step of a size is captured while it runs. Later steps refill its inputs and replay it, so that the time on
the host does not grow with the number of layers.

Steps without adapters are captured apart from those with adapters, so that they make no call for them. A step whose
adapters are wider than those of the captured one replaces it: so no size takes memory more than twice.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.core.step import Chunks, StateChunks
from quire.kernels.contract import Kernels, NotCapturable, Plan, StepCapture, Storage
from quire.kernels.state_contract import StateStorage
from quire.kv_store.upload import copy_to_device
from quire.layers.attend import PagedAttend
from quire.layers.context import AdapterRows, ForwardContext
from quire.layers.recur import BlockStates
from quire.models.model import Model
from quire.runner.inputs import CapturedInputs, Inputs
from quire.runner.state_batches import captured_batch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _CapturedStep:
    """A captured step: its inputs and outputs, which keep their addresses, and the call that replays it."""

    inputs: CapturedInputs
    adapters: AdapterRows | None
    plans: list[Plan]
    state_plan: Plan  # None without recurrent states
    logits: Tensor  # (num_tokens, vocab_size)
    replay: Callable[[], None]


class StepAdapters(NamedTuple):
    """The adapters of a step."""

    slots: np.ndarray  # int32 (num_tokens,), 0: none
    width: int  # see Kernels.low_rank


class CapturedSteps:
    """Captured steps of one model on one set of blocks, by their number of tokens and whether they have adapters."""

    def __init__(
        self,
        model: Model,
        kernels: Kernels,
        storages: Sequence[Storage],
        states: StateStorage | None,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        self._model = model
        self._kernels = kernels
        self._storages = storages
        self._states = states
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._attend = PagedAttend(kernels, storages, model.score_scaling)
        self._recur = None if states is None else BlockStates(kernels, states)
        self._recorder = kernels.new_step_capture()
        self._captured: dict[tuple[int, bool], _CapturedStep] = {}
        self.num_captured = 0  # so far, replaced ones included

    def logits(
        self, inputs: Inputs, chunks: Chunks, states: StateChunks | None, adapters: StepAdapters | None
    ) -> Tensor | None:
        """Logits (num_tokens, vocab_size) at all positions of a step, valid until the next step.

        adapters: None if no token has one. None if such a step is not captured.
        """
        number = chunks.num_tokens
        size = None if self._recorder is None else self._recorder.capture_size(number, self._max_num_seqs)
        if self._recorder is None or size is None:
            return None
        captured_step = self._captured.get((size, adapters is not None))
        if captured_step is None or _is_wider(adapters, captured_step.adapters):
            captured_step = self._capture(self._recorder, inputs.captured_inputs(size), chunks, states, adapters)
            return None if captured_step is None else captured_step.logits[:number]
        _refill(captured_step.adapters, adapters)
        batches = captured_step.inputs.refill(chunks)
        for plan, batch in zip(captured_step.plans, batches, strict=True):
            self._recorder.refill(plan, batch)
        if states is not None:
            self._recorder.refill_states(captured_step.state_plan, captured_batch(chunks, states, size))
        captured_step.replay()
        return captured_step.logits[:number]

    def _capture(
        self,
        recorder: StepCapture,
        inputs: CapturedInputs,
        chunks: Chunks,
        states: StateChunks | None,
        adapters: StepAdapters | None,
    ) -> _CapturedStep | None:
        """Capture a step, which also runs it. None if the kernels cannot capture it."""
        size, rows = len(inputs.positions), None
        if adapters is not None:
            slots = torch.zeros(size, dtype=torch.int32, device=inputs.positions.device)
            rows = AdapterRows(slots, adapters.width)
            _refill(rows, adapters)
        plans = [
            recorder.plan(batch, storage, -(-self._max_model_len // storage.block_size))
            for batch, storage in zip(inputs.refill(chunks), self._storages, strict=True)
        ]
        self._attend.set_plans(plans)
        state_plan: Plan = None
        if self._recur is not None and self._states is not None and states is not None:
            state_plan = recorder.plan_states(captured_batch(chunks, states, size), self._states)
            self._recur.set_plan(state_plan)

        def compute() -> Tensor:
            for plan in plans:
                recorder.prepare(plan)
            context = ForwardContext(self._kernels, self._attend, inputs.positions, rows, self._recur)
            return self._model.logits(self._model.forward(inputs.token_ids(), context), context)

        try:
            logits, replay = recorder.capture(compute)
        except NotCapturable as error:
            log.info("decode steps are not captured: %s", error)
            self._recorder = None  # no other step can be captured either
            self._captured.clear()
            return None
        captured_step = _CapturedStep(inputs, rows, plans, state_plan, logits, replay)
        self._captured[size, rows is not None] = captured_step
        self.num_captured += 1
        return captured_step


def _is_wider(adapters: StepAdapters | None, rows: AdapterRows | None) -> bool:
    """Whether adapters do not fit into the rows of a captured step."""
    return adapters is not None and rows is not None and adapters.width > rows.width


def _refill(rows: AdapterRows | None, adapters: StepAdapters | None) -> None:
    """Replace the slots by those of another step; padding has none."""
    if rows is not None and adapters is not None:
        copy_to_device(rows.slots, np.pad(adapters.slots, (0, len(rows.slots) - len(adapters.slots))))
