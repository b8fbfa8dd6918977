"""Steps in which every sequence computes one token, run from recordings: one for each number of sequences.

The first step of a size runs as always and is recorded. Later ones refill its inputs and play it, which takes no
time that depends on the number of layers.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from quire.kernels.contract import Batch, Kernels, NotRecordable, Plan, Recorder, Storage
from quire.layers.attend import PagedAttend
from quire.models.model import Model
from quire.store.upload import uploaded

log = logging.getLogger(__name__)

Fill = Callable[[Tensor], None]  # writes those token ids that only the device knows


@dataclass(frozen=True, slots=True, eq=False)
class _Recording:
    """The inputs and outputs of a step, which stay where they are, and what computes one from the other."""

    token_ids: Tensor  # int64 (num_tokens,)
    positions: Tensor  # int64 (num_tokens,)
    plans: list[Plan]
    logits: Tensor  # (num_tokens, vocab_size)
    play: Callable[[], None]


class Recordings:
    """Recorded steps of one model on one set of blocks."""

    def __init__(self, model: Model, kernels: Kernels, storages: Sequence[Storage], max_model_len: int) -> None:
        self._model = model
        self._kernels = kernels
        self._storages = storages
        self._max_model_len = max_model_len
        self._attend = PagedAttend(kernels, storages, model.scores)
        self._recorder = kernels.recorder
        self._recordings: dict[int, _Recording] = {}

    def logits(
        self, token_ids: np.ndarray, positions: np.ndarray, batches: Sequence[Batch], fill: Fill
    ) -> Tensor | None:
        """Logits (num_tokens, vocab_size) of a step whose chunks have one token each, int64 (num_tokens,).

        They are valid until the next step. None where such steps cannot be recorded.
        """
        number = len(token_ids)
        size = None if self._recorder is None else self._recorder.size(number)
        if self._recorder is None or size is None:
            return None
        if size > number:
            token_ids, positions = (np.pad(column, (0, size - number)) for column in (token_ids, positions))
            batches = [_padded(batch, size) for batch in batches]
        recording = self._recordings.get(size)
        if recording is None:
            return self._record(self._recorder, token_ids, positions, batches, fill, number)
        recording.token_ids.copy_(uploaded(token_ids, self._model.device))
        recording.positions.copy_(uploaded(positions, self._model.device))
        fill(recording.token_ids)
        for plan, batch in zip(recording.plans, batches, strict=True):
            self._recorder.refill(plan, batch)
        recording.play()
        return recording.logits[:number]

    def _record(
        self,
        recorder: Recorder,
        token_ids: np.ndarray,
        positions: np.ndarray,
        batches: Sequence[Batch],
        fill: Fill,
        number: int,
    ) -> Tensor | None:
        ids, places = (uploaded(column.copy(), self._model.device) for column in (token_ids, positions))
        fill(ids)
        plans = [
            recorder.plan(batch, storage, -(-self._max_model_len // storage.block_size))
            for batch, storage in zip(batches, self._storages, strict=True)
        ]
        self._attend.use(plans)

        def compute() -> Tensor:
            hidden = self._model.forward(ids, places, self._attend, self._kernels)
            return self._model.logits(hidden, self._kernels)

        try:
            logits, play = recorder.record(compute)
        except NotRecordable as error:
            log.info("decode steps are not recorded: %s", error)
            self._recorder = None  # nor will any other step be
            self._recordings.clear()
            return None
        self._recordings[len(ids)] = _Recording(ids, places, plans, logits, play)
        return logits[:number]


def _padded(batch: Batch, size: int) -> Batch:
    """With chunks of one token that have no block: what they compute is written nowhere, and nobody reads it."""
    more = size - len(batch.starts)
    return Batch(
        np.pad(batch.starts, (0, more)),
        np.pad(batch.stops, (0, more), constant_values=1),
        np.pad(batch.tables, ((0, more), (0, 0)), constant_values=-1),
    )
