"""Steps in which every sequence computes one token, run from recordings: one for each number of sequences.

The first step of a size runs as always and is recorded. Later ones refill its inputs and play it, which takes no
time that depends on the number of layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels.contract import Batch, Kernels, NotRecordable, Plan, Recorder, Storage
from quire.layers.attend import PagedAttend
from quire.models.model import Model

MAX_SEQUENCES = 64  # in a recorded step; in larger ones what Python takes hardly counts


@dataclass(frozen=True, slots=True, eq=False)
class _Recording:
    """The inputs and outputs of a step, which stay where they are, and what computes one from the other."""

    token_ids: Tensor  # int64 (num_tokens,)
    positions: Tensor  # int64 (num_tokens,)
    plans: list[Plan]
    logits: Tensor  # (num_tokens, vocab_size)
    play: Any


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

    def logits(self, token_ids: np.ndarray, positions: np.ndarray, batches: Sequence[Batch]) -> Tensor | None:
        """Logits (num_tokens, vocab_size) of a step whose chunks have one token each, int64 (num_tokens,).

        They are valid until the next step. None where such steps cannot be recorded.
        """
        if self._recorder is None or len(token_ids) > MAX_SEQUENCES:
            return None
        recording = self._recordings.get(len(token_ids))
        if recording is None:
            return self._record(self._recorder, token_ids, positions, batches)
        recording.token_ids.numpy()[:] = token_ids
        recording.positions.numpy()[:] = positions
        for plan, batch in zip(recording.plans, batches, strict=True):
            self._recorder.refill(plan, batch)
        recording.play()
        return recording.logits

    def _record(
        self, recorder: Recorder, token_ids: np.ndarray, positions: np.ndarray, batches: Sequence[Batch]
    ) -> Tensor | None:
        ids, places = torch.from_numpy(token_ids.copy()), torch.from_numpy(positions.copy())
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
        except NotRecordable:
            self._recorder = None  # nor will any other step be
            return None
        self._recordings[len(ids)] = _Recording(ids, places, plans, logits, play)
        return logits
