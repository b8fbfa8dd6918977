"""Forward passes of a step: one for the chunks of deterministic sequences, one for all others.

Deterministic sequences use deterministic kernels, whose results depend on the sequence alone. A step with only one
of the two kinds is one pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from quire.core.runner import MAX_UNUSED_LOGITS
from quire.core.step import Chunks, StateChunks
from quire.kernels.contract import Batch, Kernels, Storage
from quire.kernels.state_contract import StateBatch, StateStorage
from quire.kv_store.device import DeviceStore
from quire.kv_store.upload import to_device
from quire.layers.attend import PagedAttend
from quire.layers.context import AdapterRows, ForwardContext
from quire.layers.recur import BlockStates
from quire.lora.loaded import LoadedAdapters
from quire.models.model import Model
from quire.runner.captured_steps import CapturedSteps, StepAdapters
from quire.runner.inputs import Inputs
from quire.runner.rows import Rows
from quire.runner.state_batches import select_states, state_batch


@dataclass(frozen=True, slots=True, eq=False)
class Hidden:
    """Hidden states of all tokens of a step. Chunks are concatenated."""

    states: Tensor  # (num_tokens, hidden_size)
    deterministic: np.ndarray  # bool (num_tokens,)
    adapters: StepAdapters | None


class KernelSet:
    """One kernel module, and with it paged attention and, if there are state blocks, the recurrence over them."""

    def __init__(
        self, kernels: Kernels, storages: Sequence[Storage], states: StateStorage | None, model: Model
    ) -> None:
        self._attend = PagedAttend(kernels, storages, model.score_scaling)
        self._recur = None if states is None else BlockStates(kernels, states)
        self.of_heads = ForwardContext(kernels, self._attend, torch.empty(0, dtype=torch.int64, device=model.device))

    def plan(
        self, positions: Tensor, batches: Sequence[Batch], states: StateBatch | None, adapters: AdapterRows | None
    ) -> ForwardContext:
        """Prepare the next pass, and return its context. batches: the chunks of its tokens, one for each KV group."""
        self._attend.plan(batches)
        if self._recur is not None and states is not None:
            self._recur.plan(states)
        return replace(self.of_heads, positions=positions, adapters=adapters, recur=self._recur)


class ForwardPasses:
    """Runs a model. deterministic_kernels: None if there are none. adapters: None if the model has none."""

    def __init__(
        self,
        model: Model,
        kernels: Kernels,
        deterministic_kernels: Kernels | None,
        store: DeviceStore,
        max_num_seqs: int,
        max_model_len: int,
        inputs: Inputs,
        adapters: LoadedAdapters | None = None,
    ) -> None:
        storages, states = store.storages, store.states
        self._model = model
        self._inputs = inputs
        self._adapters = adapters
        self._default = KernelSet(kernels, storages, states, model)
        self._deterministic = (
            None if deterministic_kernels is None else KernelSet(deterministic_kernels, storages, states, model)
        )
        self._captured_steps = CapturedSteps(model, kernels, storages, states, max_num_seqs, max_model_len)

    @property
    def num_captured(self) -> int:
        """Number of steps that were captured so far."""
        return self._captured_steps.num_captured

    def captured(self, rows: Rows, chunks: Chunks, states: StateChunks | None, sampled: np.ndarray) -> Tensor | None:
        """Logits (len(sampled), vocab_size) at the tokens `sampled` of a step, from a captured step.

        They are valid until the next step. A captured step computes the logits at all its positions. So it is None for
        a step with many positions that are not sampled, and for one with deterministic sequences, prompt logprobs,
        pooling or snapshots of states, and if the kernels do not capture it.
        """
        if (
            chunks.num_tokens > len(sampled) + MAX_UNUSED_LOGITS
            or not chunks.only_samples
            or rows.deterministic[chunks.rows].any()
            or (states is not None and len(states.snapshot_chunks))
        ):
            return None
        logits = self._captured_steps.logits(self._inputs, chunks, states, self._step_adapters(rows, chunks))
        if logits is None or chunks.num_tokens == len(sampled):
            return logits
        return logits[to_device(sampled, logits.device)]

    def hidden(self, rows: Rows, chunks: Chunks, states: StateChunks | None) -> Hidden:
        """The hidden states of all chunks, at least one.

        Raises ValueError for a deterministic sequence if there are no deterministic kernels.
        """
        deterministic = rows.deterministic[chunks.rows]
        of_tokens = np.repeat(deterministic, chunks.lengths)
        parts = [
            self._compute(
                kernel_set,
                rows,
                _select_chunks(chunks, which),
                None if states is None else select_states(states, which),
            )
            for kernel_set, which in self._split_by_kernels(deterministic)
        ]
        return Hidden(_merge(of_tokens, parts), of_tokens, self._step_adapters(rows, chunks))

    def logits(self, hidden: Hidden, tokens: np.ndarray) -> Tensor:
        """Logits (len(tokens), vocab_size) after some tokens of the step, by the kernels of their sequences."""
        return self._head_outputs(self._model.logits, hidden, tokens)

    def class_logits(self, hidden: Hidden, tokens: np.ndarray) -> Tensor:
        """The same of the classification head, (len(tokens), number of classes). Raises ValueError if there is none."""
        if self._model.class_head is None:
            raise ValueError("this model has no classification head")
        return self._head_outputs(self._model.class_head, hidden, tokens)

    def _head_outputs(
        self, head: Callable[[Tensor, ForwardContext], Tensor], hidden: Hidden, tokens: np.ndarray
    ) -> Tensor:
        deterministic = hidden.deterministic[tokens]
        parts = [
            self._head_output(head, hidden, tokens[which], kernel_set)
            for kernel_set, which in self._split_by_kernels(deterministic)
        ]
        return _merge(deterministic, parts)

    def _head_output(
        self, head: Callable[[Tensor, ForwardContext], Tensor], hidden: Hidden, tokens: np.ndarray, kernels: KernelSet
    ) -> Tensor:
        adapters, context = hidden.adapters, kernels.of_heads
        if adapters is not None:
            context = replace(context, adapters=self._rows_of(adapters.slots[tokens], adapters.width))
        return head(hidden.states[to_device(tokens, hidden.states.device)], context)

    def _split_by_kernels(self, deterministic: np.ndarray) -> list[tuple[KernelSet, np.ndarray]]:
        """The kernel modules that are used, each with a mask of its entries. One if it has all entries."""
        if not deterministic.any():
            return [(self._default, ~deterministic)]
        if self._deterministic is None:
            raise ValueError("this runner has no kernels for deterministic sequences")
        if deterministic.all():
            return [(self._deterministic, deterministic)]
        return [(self._default, ~deterministic), (self._deterministic, deterministic)]

    def _compute(self, kernel_set: KernelSet, rows: Rows, chunks: Chunks, states: StateChunks | None) -> Tensor:
        token_ids, positions, batches = self._inputs.forward_inputs(chunks)
        adapters = self._step_adapters(rows, chunks)
        of_pass = None if adapters is None else self._rows_of(*adapters)
        of_states = None if states is None else state_batch(chunks, states)
        return self._model.forward(token_ids, kernel_set.plan(positions, batches, of_states, of_pass))

    def _step_adapters(self, rows: Rows, chunks: Chunks) -> StepAdapters | None:
        slots = None if self._adapters is None else rows.adapter_slots(chunks)
        return None if slots is None or self._adapters is None else StepAdapters(slots, self._adapters.width)

    def _rows_of(self, slots: np.ndarray, width: int) -> AdapterRows:
        return AdapterRows(to_device(slots, self._model.device), width)


def _select_chunks(chunks: Chunks, which: np.ndarray) -> Chunks:
    if which.all():
        return chunks
    return Chunks(*(getattr(chunks, name)[which] for name in chunks.__struct_fields__))


def _merge(second: np.ndarray, parts: Sequence[Tensor]) -> Tensor:
    """The rows of one tensor, or of two merged: rows where `second` is true are the second's, in order."""
    if len(parts) == 1:
        return parts[0]
    places = np.concatenate((np.flatnonzero(~second), np.flatnonzero(second)))
    return torch.cat(tuple(parts))[to_device(np.argsort(places), parts[0].device)]
