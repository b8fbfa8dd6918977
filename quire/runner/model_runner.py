"""Runner that executes steps with torch in this process: forward passes over the tokens of all chunks, then sampling.

With kernels that read rows on the device, `launch` and `sample` return when the work is queued, and `collect` waits for
the tokens. Until then the tokens are only on the device, where the next step reads them. Other kernels read rows on the
host, and `sample` writes the tokens there.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from quire.config import CacheConfig
from quire.core.capabilities import Capabilities
from quire.core.runner import RowProcessors
from quire.core.step import ChunkOutput, Chunks, Logprobs, Pooling, SamplingMasks, StateChunks, Step, StepResult
from quire.kernels.contract import Kernels
from quire.kv_store.device import DeviceStore
from quire.kv_store.upload import to_device
from quire.lora.loaded import LoadedAdapters
from quire.models.model import Model
from quire.runner.device_inputs import ResidentInputs
from quire.runner.forward import ForwardPasses, Hidden
from quire.runner.inputs import HostInputs, Inputs
from quire.runner.rows import Rows
from quire.sampling.logits_processors import apply_processors
from quire.sampling.logprobs import compute_logprobs


class PromptLogprobPositions(msgspec.Struct, frozen=True, eq=False):
    """Tokens of the step whose logits are needed for prompt logprobs. Chunks are concatenated."""

    tokens: np.ndarray  # int64: indices into all tokens of the step
    next_tokens: np.ndarray  # int32
    num_logprobs: np.ndarray  # int32


class SampledPositions(NamedTuple):
    """Where the tokens of a step are sampled. A chunk with drafts has several entries."""

    tokens: np.ndarray  # int64: indices into all tokens of the step, whose logits are sampled from
    rows: np.ndarray  # int64
    positions: np.ndarray  # int32, of the sampled tokens
    written: (
        np.ndarray | None
    )  # which of them the runner writes into its rows: those of chunks without drafts; None: all


def sampled_positions(chunks: Chunks) -> SampledPositions:
    """The sampled positions of all chunks, in order."""
    counts, rows, positions = chunks.num_samples, chunks.token_rows, chunks.token_positions
    ends = counts.cumsum(dtype=np.int64)
    tokens = np.arange(int(ends[-1]) if len(ends) else 0)
    if len(tokens) != chunks.num_tokens:
        tokens += np.repeat(chunks.ends - ends, counts)
        rows, positions = rows[tokens], positions[tokens]
    written = np.repeat(chunks.num_drafts == 0, counts) if chunks.have_drafts else None
    return SampledPositions(tokens, rows, (positions + 1).astype(np.int32), written)


def prompt_logprob_positions(chunks: Chunks, rows: Rows) -> PromptLogprobPositions:
    """In rows with prompt logprobs: all positions with logits from which nothing is sampled."""
    columns = rows.sampling
    asking = (columns["num_prompt_logprobs"][chunks.rows] >= 0) & (chunks.outputs != ChunkOutput.POOL)
    counts = np.where(asking, chunks.num_logits - chunks.num_samples, 0)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    of_row = np.repeat(chunks.rows, counts)
    return PromptLogprobPositions(
        within + np.repeat(chunks.ends - chunks.num_logits, counts),
        rows.tokens(of_row, within + np.repeat(chunks.stops - chunks.num_logits, counts) + 1),
        columns["num_prompt_logprobs"][of_row],
    )


def pooled_states(
    states: Tensor, chunks: Chunks, rows: Rows, class_logits: Callable[[np.ndarray], Tensor]
) -> np.ndarray | None:
    """One float32 row for each chunk that pools, from the states (num_tokens, hidden_size) of the step.

    A row is the part of its last `num_logits` positions: see Pooling. CLASS: `class_logits` of its last position. None
    if no chunk pools. Raises ValueError for a chunk whose row has no pooling, and for rows of different lengths.
    """
    pooling = np.flatnonzero(chunks.outputs == ChunkOutput.POOL)
    if not len(pooling):
        return None
    kinds, ends = rows.poolings[chunks.rows[pooling]], chunks.ends[pooling]
    if (kinds == Pooling.CLASS).all():
        logits: np.ndarray = class_logits(ends - 1).float().cpu().numpy()
        return logits
    found = []
    for kind, end, stop, length in zip(kinds, ends, chunks.stops[pooling], chunks.num_logits[pooling], strict=True):
        found.append(_pooled_part(Pooling(kind), states[end - length : end], int(stop)).cpu().numpy())
    return np.stack(found)


def _pooled_part(pooling: Pooling, states: Tensor, stop: int) -> Tensor:
    """float32 (hidden_size,): the part of a chunk. states (num_positions, hidden_size): of positions up to `stop`.

    Raises ValueError for a pooling that is none of states.
    """
    if pooling is Pooling.LAST:
        return states[-1].float()
    if pooling is Pooling.CLS:
        return states[0].float()
    if pooling is Pooling.MAX:
        return states.float().max(0).values
    if pooling is Pooling.WEIGHTED_MEAN:
        weights = torch.arange(stop - len(states) + 1, stop + 1, dtype=torch.float32, device=states.device)
        return weights @ states.float()
    if pooling in (Pooling.MEAN, Pooling.MEAN_SQRT_LEN):
        return states.float().sum(0)
    raise ValueError("a chunk is to be pooled, but its sequence has no pooling of states")


class LaunchedStep(msgspec.Struct, frozen=True, eq=False):
    """A step whose forward pass is launched and whose tokens are not sampled yet."""

    step_id: int
    began: float  # seconds, of the runner's clock
    chunks: Chunks
    sampled: SampledPositions
    logits: Tensor  # (tokens to sample, vocab_size)
    prompt_logprobs: Logprobs | None = None
    pooled: np.ndarray | None = None


class SampledStep(msgspec.Struct, frozen=True, eq=False):
    """A step whose tokens are sampled and being copied to the host."""

    launched: LaunchedStep
    tokens: Tensor  # int64 (tokens to sample,), on the host after the event `copy_done`
    copy_done: torch.cuda.Event | None
    logprobs: Logprobs | None
    ended: float | None  # seconds, of the runner's clock; None if the device has not finished


class TorchRunner:
    """A Runner of one model, with the blocks of its KV cache.

    deterministic_kernels: for the same blocks and weights as `kernels`; None if there are none. adapters: those that
    are loaded; None if the model runs without adapters. An exception from any call discards that step and leaves the
    rows undefined: the next step must be a reset step.
    """

    def __init__(  # noqa: PLR0913  # all but the first two are keyword-only
        self,
        model: Model,
        kernels: Kernels,
        *,
        cache: CacheConfig,
        max_num_seqs: int,
        max_model_len: int,
        deterministic_kernels: Kernels | None = None,
        generates: bool = True,
        adapters: LoadedAdapters | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._kernels = kernels
        self._clock = clock
        self._vocab_size = model.vocab_size
        self._device = model.device
        num_slots = 0 if adapters is None else adapters.num_slots
        self._rows = Rows(cache, max_num_seqs, max_model_len, self._vocab_size, num_slots)
        self._store = DeviceStore(kernels, cache, model.device, clock)
        rounds_states = cache.states is not None and cache.states.dtype != "float32"  # wherever a chunk ends
        self.capabilities = Capabilities(
            deterministic=deterministic_kernels is not None and model.batch_invariant and not rounds_states,
            classifies=model.class_head is not None,
            generates=generates,
            adapters=adapters is not None,
        )
        self._adapters = adapters
        self._inputs: Inputs = (
            ResidentInputs(cache, max_num_seqs, max_model_len, model.device)
            if kernels.USES_RESIDENT_TABLES
            else HostInputs(self._rows, model.device)
        )
        self._tokens_arrive_later = kernels.USES_RESIDENT_TABLES  # in the rows on the host: `collect` writes them
        self._forward_passes = ForwardPasses(
            model,
            kernels,
            deterministic_kernels if self.capabilities.deterministic else None,
            self._store,
            max_num_seqs,
            max_model_len,
            self._inputs,
            adapters,
        )
        self._launched: LaunchedStep | None = None
        self._sampled: deque[SampledStep] = deque()
        self._slowed: set[int] = set()  # ids of steps during which a step was captured
        self._ended = 0.0  # when the step before had ended
        self._inference_mode = torch.inference_mode()  # made once: a decorator makes one for each call

    def launch(self, step: Step) -> None:
        """Apply the delta, start the Moves, run the forward passes.

        Raises ValueError for what this runner does not support: adapters without `adapters`, Moves between other tiers
        than device and host, and deterministic sequences without deterministic kernels. Also for a step out of bounds,
        and for adapters that are not in memory.
        """
        began = self._clock()
        self._launched = None
        if step.reset:
            self._sampled.clear()  # steps that failed before they were collected
            self._slowed.clear()
            self._store.wait()
        self.capabilities.check_step(step)
        if self._adapters is not None:
            for slot, digest in step.adapters:
                self._adapters.put(slot, digest)
        self._rows.apply(step)
        self._inputs.apply(step)
        began += self._store.execute(step.id, step.moves)  # swaps are no step time
        with self._inference_mode:
            self._launched = self._forward(step, began)

    def sample(self, step_id: int, masks: SamplingMasks, processors: Sequence[RowProcessors] = ()) -> None:
        """Sample the tokens of the step launched last, and start their copy to the host."""
        launched, self._launched = self._launched, None
        if launched is None or launched.step_id != step_id:
            raise ValueError(f"step {step_id} is not the launched step that is to be sampled")
        with self._inference_mode:
            self._sampled.append(self._sample_tokens(launched, masks, processors))

    def collect(self) -> StepResult:
        """Wait for the tokens of the oldest sampled step and return its result. Raises ValueError if there is none.

        A step without chunks has no tokens: then it waits for all Moves.
        """
        if not self._sampled:
            raise ValueError("there is no sampled step to collect")
        sampled = self._sampled.popleft()
        if sampled.copy_done is not None:
            sampled.copy_done.synchronize()
        launched, tokens = sampled.launched, sampled.tokens.numpy().astype(np.int32)
        ended = self._clock() if sampled.ended is None else sampled.ended
        began = max(launched.began, self._ended)  # the device ran the step before it first
        self._ended = ended
        if self._tokens_arrive_later:
            _, rows, positions, written = launched.sampled
            which = slice(None) if written is None else written
            self._rows.write_pending(rows[which], positions[which], tokens[which])
        # last, because the ids of Moves are returned once
        swaps = self._store.end_swaps(launched.step_id, wait=not len(launched.chunks))
        is_slowed = launched.step_id in self._slowed
        self._slowed.discard(launched.step_id)
        return StepResult(
            launched.step_id,
            ended - began,
            launched.chunks.num_samples,
            tokens,
            sampled.logprobs,
            launched.prompt_logprobs,
            launched.pooled,
            done_moves=swaps.move_ids,
            swap_seconds=(swaps.seconds_out, swaps.seconds_in),
            captured=is_slowed,
        )

    def release_workspace(self) -> None:
        """See Runner."""
        self._kernels.release_workspace()

    def _forward(self, step: Step, began: float) -> LaunchedStep:
        chunks = step.chunks
        if not len(chunks):
            nothing = torch.empty(0, self._vocab_size, device=self._device)
            return LaunchedStep(step.id, began, chunks, sampled_positions(chunks), nothing)
        sampled = sampled_positions(chunks)
        num_captured = self._forward_passes.num_captured
        states = step.states if isinstance(step.states, StateChunks) else None
        logits = self._forward_passes.captured(self._rows, chunks, states, sampled.tokens)
        if logits is not None:
            if self._forward_passes.num_captured > num_captured:
                self._slowed |= {step.id, *(sampled.launched.step_id for sampled in self._sampled)}
            return LaunchedStep(step.id, began, chunks, sampled, logits)
        hidden = self._forward_passes.hidden(self._rows, chunks, states)
        return LaunchedStep(
            step.id,
            began,
            chunks,
            sampled,
            self._forward_passes.logits(hidden, sampled.tokens),
            self._prompt_logprobs(hidden, chunks),
            pooled_states(
                hidden.states, chunks, self._rows, lambda tokens: self._forward_passes.class_logits(hidden, tokens)
            ),
        )

    def _prompt_logprobs(self, hidden: Hidden, chunks: Chunks) -> Logprobs | None:
        """Prompt logprobs of the rows that requested them; None if none did."""
        scored = prompt_logprob_positions(chunks, self._rows)

        def logits_of(some: np.ndarray) -> Tensor:
            return self._forward_passes.logits(hidden, scored.tokens[some])

        return compute_logprobs(self._kernels, logits_of, self._vocab_size, scored.next_tokens, scored.num_logprobs)

    def _sample_tokens(
        self, launched: LaunchedStep, sampling_masks: SamplingMasks, processors: Sequence[RowProcessors]
    ) -> SampledStep:
        logits, (_, rows, positions, written) = launched.logits, launched.sampled
        if not len(rows):
            return self._copy_to_host(launched, torch.zeros(0, dtype=torch.int64), None)
        sampled_from = apply_processors(logits, rows, processors) if processors else logits
        chosen = self._kernels.sample(sampled_from, self._rows.sampling_metadata(rows, positions, sampling_masks))
        logprobs = self._sample_logprobs(rows, chosen, logits)
        if written is not None:
            rows, positions = rows[written], positions[written]
        if len(rows):
            kept = chosen if written is None else chosen[to_device(np.flatnonzero(written), chosen.device)]
            self._inputs.put_sampled(rows, positions, kept)
            if self._tokens_arrive_later:
                self._rows.mark_pending(rows, positions)
        return self._copy_to_host(launched, chosen, logprobs)

    def _sample_logprobs(self, rows: np.ndarray, chosen: Tensor, logits: Tensor) -> Logprobs | None:
        """Logprobs of the sampled tokens in rows that requested them; None if none did. Waits for the tokens."""
        columns = self._rows.sampling
        numbers = columns["num_logprobs"][rows]
        if (numbers < 0).all():
            return None
        return compute_logprobs(
            self._kernels,
            lambda some: logits[to_device(some, logits.device)],
            self._vocab_size,
            chosen.cpu().numpy().astype(np.int32),
            numbers,
            columns.token_lists.logprob_tokens(rows),
        )

    def _copy_to_host(self, launched: LaunchedStep, chosen: Tensor, logprobs: Logprobs | None) -> SampledStep:
        """Start the copy of the tokens to the host, without waiting for it."""
        if launched.logits.device.type == "cpu":
            return SampledStep(launched, chosen, None, logprobs, self._clock())
        host = torch.empty(len(chosen), dtype=chosen.dtype, pin_memory=True)
        host.copy_(chosen, non_blocking=True)
        arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrival.record()
        return SampledStep(launched, host, arrival, logprobs, None)
