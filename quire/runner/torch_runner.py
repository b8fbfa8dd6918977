"""Runs steps with torch in this process: one forward pass over the tokens of all chunks, then sampling.

Steps are synchronous here: when `launch` and `sample` return, their work is done. The order of calls is
that of `quire.core.runner`, so two steps may overlap as they would on a device of its own.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.config import CacheConfig
from quire.core.step import ChunkOutput, Chunks, Late, Step, StepResult
from quire.kernels.contract import Kernels
from quire.layers.attend import PagedAttend
from quire.models.decoder import Decoder
from quire.runner.rows import Rows
from quire.sample.logprobs import report
from quire.store.device import DeviceStore


@dataclass(frozen=True, slots=True, eq=False)
class Launched:
    """A step whose forward pass is done and whose tokens are not chosen."""

    step_id: int
    chunks: Chunks
    logits: Tensor  # (sum of num_logits, vocab_size)
    began: float  # seconds, of the runner's clock


class TorchRunner:
    """A Runner over one model and the blocks of its cache.

    After an exception from `launch` or `sample` that step is forgotten and the rows cannot be relied
    on: the next step should reset them.
    """

    def __init__(
        self,
        model: Decoder,
        kernels: Kernels,
        *,
        cache: CacheConfig,
        max_num_seqs: int,
        max_model_len: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model = model
        self._kernels = kernels
        self._clock = clock
        self._rows = Rows(cache, max_num_seqs, max_model_len)
        self._store = DeviceStore(kernels, cache, model.device)
        self._attend = PagedAttend(kernels, self._store.storages, model.config.scale)
        self._launched: Launched | None = None
        self._sampled: deque[StepResult] = deque()

    def launch(self, step: Step) -> None:
        """Apply the delta, do the moves, run the forward pass.

        Raises ValueError for what this runner cannot do: drafts, pooling, moves to or from other tiers.
        """
        began = self._clock()
        self._launched = None
        if step.reset:
            self._sampled.clear()  # of steps that failed on their way back
        _refuse(step.chunks)
        self._rows.apply(step)
        self._store.execute(step.moves)
        self._launched = Launched(step.id, step.chunks, self._forward(step.chunks), began)

    def sample(self, step_id: int, late: Late) -> None:
        """Choose the tokens of the step launched last, and write them behind their chunks."""
        launched, self._launched = self._launched, None
        if launched is None or launched.step_id != step_id:
            raise ValueError(f"step {step_id} is not the one that waits to be sampled")
        self._sampled.append(self._choose_tokens(launched, late))

    def collect(self) -> StepResult:
        """The result of the oldest sampled step. Raises ValueError when there is none."""
        if not self._sampled:
            raise ValueError("no step was sampled and not collected")
        return self._sampled.popleft()

    @torch.inference_mode()
    def _forward(self, chunks: Chunks) -> Tensor:
        """Logits at the last `num_logits` positions of each chunk, chunk after chunk."""
        device = self._model.device
        if not len(chunks):
            return torch.empty(0, self._model.config.vocab_size, device=device)
        token_ids, positions = (torch.from_numpy(array).to(device) for array in self._rows.inputs(chunks))
        self._attend.plan(self._rows.batches(chunks))
        hidden = self._model(token_ids, positions, self._attend)
        wanted = torch.from_numpy(_last_positions(chunks)).to(device)
        return self._model.logits(hidden[wanted])

    @torch.inference_mode()
    def _choose_tokens(self, launched: Launched, late: Late) -> StepResult:
        chunks = launched.chunks
        sampling = np.flatnonzero(chunks.outputs == ChunkOutput.SAMPLE)
        rows, stops = chunks.rows[sampling], chunks.stops[sampling]
        counts = np.zeros(len(chunks), np.int32)
        counts[sampling] = 1
        tokens, logprobs = np.zeros(0, np.int32), None
        if len(sampling):
            last = np.cumsum(chunks.num_logits)[sampling] - 1
            logits = launched.logits[torch.from_numpy(last).to(launched.logits.device)]
            chosen = self._kernels.sample(logits, self._rows.sampling.draws(rows, stops, late))
            tokens = chosen.cpu().numpy().astype(np.int32)
            logprobs = report(logits, chosen, self._rows.sampling.num_logprobs[rows])
            self._rows.append(rows, stops, tokens)
        return StepResult(launched.step_id, self._clock() - launched.began, counts, tokens, logprobs)


def _refuse(chunks: Chunks) -> None:
    """Raise ValueError for chunks that this runner cannot run."""
    if chunks.num_drafts.any():
        raise ValueError("this runner cannot verify drafts")
    if (chunks.outputs == ChunkOutput.POOL).any():
        raise ValueError("this runner cannot pool hidden states")
    lengths = chunks.stops - chunks.starts
    if (lengths < 1).any() or (chunks.num_logits > lengths).any():
        raise ValueError("each chunk needs at least one position, and one for each of its logits")
    if (chunks.num_logits[chunks.outputs == ChunkOutput.SAMPLE] < 1).any():
        raise ValueError("a chunk that samples needs logits at its last position")


def _last_positions(chunks: Chunks) -> np.ndarray:
    """Indices, among the tokens of all chunks, of the last `num_logits` of each chunk."""
    counts = chunks.num_logits.astype(np.int64)
    ends = np.cumsum(chunks.stops - chunks.starts, dtype=np.int64)
    return np.arange(counts.sum()) + np.repeat(ends - np.cumsum(counts), counts)
