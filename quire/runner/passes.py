"""Forward passes of a step: the chunks of deterministic sequences go through the model apart from all others.

A sequence that asks for it gets kernels whose results depend on nothing but the sequence itself. A step
without one is a single pass, and one with nothing but such sequences is too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.core.step import Chunks
from quire.kernels.contract import Kernels, Storage
from quire.layers.attend import PagedAttend, Scores
from quire.models.model import Model
from quire.runner.rows import Rows


@dataclass(frozen=True, slots=True, eq=False)
class Hidden:
    """Hidden states of all tokens of a step, chunk after chunk."""

    states: Tensor  # (num_tokens, hidden_size)
    deterministic: np.ndarray  # bool (num_tokens,)


class Passes:
    """A model, with kernels for ordinary sequences and perhaps with others for deterministic ones."""

    def __init__(
        self,
        model: Model,
        kernels: Kernels,
        invariant: Kernels | None,
        storages: Sequence[Storage],
        scores: Sequence[Scores],
    ) -> None:
        self._model = model
        self._kernels = [kernels] if invariant is None else [kernels, invariant]
        self._attends = [PagedAttend(one, storages, scores) for one in self._kernels]

    def hidden(self, rows: Rows, chunks: Chunks) -> Hidden:
        """Compute all chunks, at least one.

        Raises ValueError for a deterministic sequence when there are no kernels for it.
        """
        strict = rows.deterministic[chunks.rows]
        of_tokens = np.repeat(strict, chunks.stops - chunks.starts)
        if strict.any() and len(self._kernels) == 1:
            raise ValueError("this runner has no kernels for deterministic sequences")
        if strict.all() or not strict.any():
            return Hidden(self._pass(int(strict[0]), rows, chunks), of_tokens)
        return Hidden(
            _merge(of_tokens, [self._pass(way, rows, _some(chunks, strict == way)) for way in (0, 1)]), of_tokens
        )

    def logits(self, hidden: Hidden, tokens: np.ndarray) -> Tensor:
        """Logits (len(tokens), vocab_size) behind some tokens of the step, by the kernels that computed them."""
        strict = hidden.deterministic[tokens]
        states = hidden.states[torch.from_numpy(tokens).to(hidden.states.device)]
        if strict.all() or not strict.any():
            return self._model.logits(states, self._kernels[int(strict.any())])
        parts = [
            self._model.logits(states[torch.from_numpy(strict == way).to(states.device)], kernels)
            for way, kernels in enumerate(self._kernels)
        ]
        return _merge(strict, parts)

    def _pass(self, way: int, rows: Rows, chunks: Chunks) -> Tensor:
        device = self._model.device
        token_ids, positions = (torch.from_numpy(array).to(device) for array in rows.inputs(chunks))
        self._attends[way].plan(rows.batches(chunks))
        return self._model.forward(token_ids, positions, self._attends[way], self._kernels[way])


def _some(chunks: Chunks, which: np.ndarray) -> Chunks:
    return Chunks(*(getattr(chunks, name)[which] for name in chunks.__struct_fields__))


def _merge(second: np.ndarray, parts: Sequence[Tensor]) -> Tensor:
    """Rows of two tensors in one: in turn from the second where `second` is true, else from the first."""
    places = np.concatenate((np.flatnonzero(~second), np.flatnonzero(second)))
    return torch.cat(tuple(parts))[torch.from_numpy(np.argsort(places)).to(parts[0].device)]
