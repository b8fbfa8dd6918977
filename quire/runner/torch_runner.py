"""Runs steps with torch in this process: forward passes over the tokens of all chunks, then sampling.

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
from quire.core.step import ChunkOutput, Chunks, Late, Logprobs, Step, StepResult
from quire.kernels.contract import Kernels
from quire.models.model import Model
from quire.runner import wanted
from quire.runner.passes import Hidden, Passes
from quire.runner.rows import Rows
from quire.sample.logprobs import report
from quire.store.device import DeviceStore


@dataclass(frozen=True, slots=True, eq=False)
class Launched:
    """A step whose forward pass is done and whose tokens are not chosen."""

    step_id: int
    began: float  # seconds, of the runner's clock
    chunks: Chunks
    logits: Tensor  # (chunks that sample, vocab_size)
    prompt_logprobs: Logprobs | None
    pooled: np.ndarray | None


class TorchRunner:
    """A Runner over one model and the blocks of its cache.

    strict: kernels for deterministic sequences, over the same blocks and weights as `kernels`; None where there
    are none. After an exception from `launch` or `sample` that step is forgotten and the rows cannot be
    relied on: the next step should reset them.
    """

    def __init__(
        self,
        model: Model,
        kernels: Kernels,
        *,
        cache: CacheConfig,
        max_num_seqs: int,
        max_model_len: int,
        strict: Kernels | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._kernels = kernels
        self._clock = clock
        self._vocab_size = model.vocab_size
        self._rows = Rows(cache, max_num_seqs, max_model_len, self._vocab_size)
        self._store = DeviceStore(kernels, cache, model.device)
        self.deterministic = strict is not None and model.row_invariant  # whether it can run such sequences
        self._passes = Passes(
            model, kernels, strict if self.deterministic else None, self._store.storages, max_model_len
        )
        self._launched: Launched | None = None
        self._sampled: deque[StepResult] = deque()

    def launch(self, step: Step) -> None:
        """Apply the delta, do the moves, run the forward passes.

        Raises ValueError for what this runner cannot do: drafts, moves to or from other tiers, deterministic
        sequences without kernels for them.
        """
        began = self._clock()
        self._launched = None
        if step.reset:
            self._sampled.clear()  # of steps that failed on their way back
        wanted.check(step.chunks)
        self._rows.apply(step)
        self._store.execute(step.moves)
        self._launched = self._forward(step, began)

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
    def _forward(self, step: Step, began: float) -> Launched:
        chunks = step.chunks
        if not len(chunks):
            return Launched(step.id, began, chunks, torch.empty(0, self._vocab_size), None, None)
        logits = self._passes.decode(self._rows, chunks)
        if logits is not None:
            return Launched(step.id, began, chunks, logits, None, None)
        hidden = self._passes.hidden(self._rows, chunks)
        last = wanted.ends(chunks)[chunks.outputs == ChunkOutput.SAMPLE] - 1
        return Launched(
            step.id,
            began,
            chunks,
            self._passes.logits(hidden, last),
            self._score(hidden, chunks),
            wanted.pooled(hidden.states, chunks, self._rows),
        )

    def _score(self, hidden: Hidden, chunks: Chunks) -> Logprobs | None:
        """How likely the next tokens of prompts were, where that was asked."""
        scored = wanted.scored(chunks, self._rows)

        def logits_of(some: np.ndarray) -> Tensor:
            return self._passes.logits(hidden, scored.tokens[some])

        return report(self._kernels, logits_of, self._vocab_size, scored.next_tokens, scored.num_logprobs)

    @torch.inference_mode()
    def _choose_tokens(self, launched: Launched, late: Late) -> StepResult:
        chunks, logits = launched.chunks, launched.logits
        sampling = chunks.outputs == ChunkOutput.SAMPLE
        rows, stops = chunks.rows[sampling], chunks.stops[sampling]
        tokens, logprobs = np.zeros(0, np.int32), None
        if len(rows):
            chosen = self._kernels.sample(logits, self._rows.draws(rows, stops, late))
            tokens = chosen.cpu().numpy().astype(np.int32)
            columns = self._rows.sampling
            logprobs = report(
                self._kernels,
                lambda some: logits[torch.from_numpy(some).to(logits.device)],
                self._vocab_size,
                tokens,
                columns["num_logprobs"][rows],
                columns.lists.reported(rows),
            )
            self._rows.append(rows, stops, tokens)
        return StepResult(
            launched.step_id,
            self._clock() - launched.began,
            sampling.astype(np.int32),
            tokens,
            logprobs,
            launched.prompt_logprobs,
            launched.pooled,
        )
