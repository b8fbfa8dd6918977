"""Captured steps on GPUs: CUDA graphs, captured once per number of tokens, with adapters and without."""

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quire.kernels.contract import Batch, CaptureMemory, NotCapturable, Storage
from quire.kernels.state_contract import StateBatch, StateStorage
from quire.kernels.triton import plan as planning
from quire.kernels.triton import state_plan
from quire.kernels.triton.launch import pow2
from quire.kernels.triton.plan import TritonPlan
from quire.kernels.triton.state_plan import StatePlan

CAPTURE_SIZES = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
GRAPH_BYTES = 2**24  # driver memory per graph: an estimate, not measured
LIBRARY_BYTES = 3 * 2**26  # library workspaces, one per stream: of other steps, warm-ups, graphs
_MEMORY_FACTOR = 2  # estimated memory of graphs of all sizes, relative to the largest graph
_LEAST_TOKENS = 16  # of the largest graph
_WARM_UPS = 2  # runs before a capture, in which kernels are compiled and libraries allocate their workspaces


def _sizes(max_num_seqs: int) -> tuple[int, ...]:
    """The numbers of tokens of the graphs of an engine."""
    return CAPTURE_SIZES[: bisect_left(CAPTURE_SIZES, max(max_num_seqs, _LEAST_TOKENS)) + 1]


class CudaGraphCapture:
    """Captured CUDA graphs of one model and one set of storages. They share memory, since only one runs at a time."""

    def __init__(self) -> None:
        self._pool: Any = None  # handle of torch's graph memory pool
        self._stream: torch.cuda.Stream | None = None  # one for all warm-ups: libraries allocate per stream
        self._results: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def capture_size(self, num_tokens: int, max_num_seqs: int) -> int | None:
        """See StepCapture. There is memory for steps of as many tokens as sequences, and for drafts of a few."""
        return next((size for size in _sizes(max_num_seqs) if size >= num_tokens), None)

    def capture_memory(
        self, max_num_seqs: int, token_bytes: int, logit_bytes: int, scratch_bytes: int, variants: int = 1
    ) -> CaptureMemory:
        """See StepCapture."""
        sizes = _sizes(max_num_seqs)
        number, largest = len(sizes) * variants, sizes[-1]
        computed = _MEMORY_FACTOR * (largest * (token_bytes + logit_bytes) + scratch_bytes)
        kept = 2 * pow2(largest) * logit_bytes  # results of this size, half of it, a quarter, ...
        why = (
            f"{number} graphs of up to {largest} tokens x {GRAPH_BYTES >> 20} MiB, {computed >> 20} MiB of "
            f"working memory, {kept >> 20} MiB of logits, {LIBRARY_BYTES >> 20} MiB of libraries; estimated"
        )
        return CaptureMemory(number * GRAPH_BYTES + computed + kept + LIBRARY_BYTES, why)

    def plan(self, batch: Batch, storage: Storage, width: int) -> TritonPlan:
        """See StepCapture."""
        return planning.plan(batch, storage, width=width)

    def refill(self, plan: TritonPlan, batch: Batch) -> None:
        """See StepCapture."""
        planning.refill(plan, batch)

    def plan_states(self, batch: StateBatch, storage: StateStorage) -> StatePlan:
        """See StepCapture."""
        return state_plan.plan_states(batch, storage, refilled=True)

    def refill_states(self, plan: StatePlan, batch: StateBatch) -> None:
        """See StepCapture."""
        state_plan.refill_states(plan, batch)

    def prepare(self, plan: TritonPlan) -> None:
        """See StepCapture."""

    def capture(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """See StepCapture."""
        usual = torch.cuda.current_stream()
        stream = self._stream = self._stream or torch.cuda.Stream()
        stream.wait_stream(usual)
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                warm = compute()
        usual.wait_stream(stream)
        result = self.result_buffer(warm)
        del warm
        graph = torch.cuda.CUDAGraph()
        try:
            # "thread_local": others may copy to the device meanwhile, for example the one that loads adapters
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result.copy_(compute())
        except RuntimeError as error:  # for example, an operation waited for the device
            torch.cuda.set_stream(usual)  # torch does not leave the stream of the capture
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise NotCapturable(str(error)) from error
        self._pool = graph.pool()
        graph.replay()
        return result, graph.replay

    def result_buffer(self, computed: Tensor) -> Tensor:
        """The tensor (rows, columns) for a graph's result. Sizes with the same next power of two share its memory.

        It is outside of the graphs' pool, because memory of the pool that is still referenced is not reused.
        """
        rows, columns = computed.shape
        key = (pow2(rows), columns, computed.dtype)
        if key not in self._results:
            self._results[key] = torch.empty(key[:2], dtype=computed.dtype, device=computed.device)
        return self._results[key][:rows]
