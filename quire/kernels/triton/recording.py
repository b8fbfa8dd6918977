"""Steps as CUDA graphs: one launch in the place of hundreds, recorded once for each number of sequences."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quire.kernels.contract import Batch, NotRecordable, Recorded, Storage
from quire.kernels.triton import plan as planning
from quire.kernels.triton.launch import pow2
from quire.kernels.triton.plan import TritonPlan

LADDER = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
GRAPH_BYTES = 2**24  # that the driver keeps for each graph: an estimate, not measured
LIBRARY_BYTES = 3 * 2**26  # workspaces of libraries, one for each stream: of other steps, warm-ups, graphs
_SLACK = 2  # how much more memory graphs of many sizes take together than the largest one alone
_WARM_UPS = 2  # before a graph is captured: kernels are compiled then, and libraries take their memory


class Recording:
    """Captures graphs, all of one model on one set of blocks. They share memory, since only one runs at a time."""

    def __init__(self) -> None:
        self._pool: Any = None  # a handle of torch's
        self._stream: torch.cuda.Stream | None = None  # one for all warm-ups: libraries keep memory for each stream
        self._results: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def size(self, num_sequences: int) -> int | None:
        """See Recorder."""
        return next((size for size in LADDER if size >= num_sequences), None)

    def takes(self, num_sequences: int, token_bytes: int, logit_bytes: int, scratch_bytes: int) -> Recorded:
        """See Recorder."""
        largest = self.size(num_sequences) or LADDER[-1]
        number = LADDER.index(largest) + 1
        computed = _SLACK * (largest * (token_bytes + logit_bytes) + scratch_bytes)
        kept = 2 * pow2(largest) * logit_bytes  # results of this size, of half of it, and so on
        why = (
            f"{number} graphs of up to {largest} sequences x {GRAPH_BYTES >> 20} MiB, {computed >> 20} MiB that they "
            f"compute in, {kept >> 20} MiB of logits, {LIBRARY_BYTES >> 20} MiB of libraries; estimated"
        )
        return Recorded(number * GRAPH_BYTES + computed + kept + LIBRARY_BYTES, why)

    def plan(self, batch: Batch, storage: Storage, width: int) -> TritonPlan:
        """See Recorder."""
        return planning.plan(batch, storage, width=width)

    def refill(self, plan: TritonPlan, batch: Batch) -> None:
        """See Recorder."""
        planning.refill(plan, batch)

    def record(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """See Recorder."""
        usual = torch.cuda.current_stream()
        stream = self._stream = self._stream or torch.cuda.Stream()
        stream.wait_stream(usual)
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                warm = compute()
        usual.wait_stream(stream)
        result = self.result_like(warm)
        del warm
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                result.copy_(compute())
        except RuntimeError as error:  # something waited for the device, say
            torch.cuda.set_stream(usual)  # torch stays on the stream of the graph
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise NotRecordable(str(error)) from error
        self._pool = graph.pool()
        graph.replay()
        return result, graph.replay

    def result_like(self, computed: Tensor) -> Tensor:
        """Where a graph leaves its result (rows, columns): sizes with the same next power of two share memory.

        What a graph itself allocates others may write over only where nothing holds it.
        """
        rows, columns = computed.shape
        key = (pow2(rows), columns, computed.dtype)
        if key not in self._results:
            self._results[key] = torch.empty(key[:2], dtype=computed.dtype, device=computed.device)
        return self._results[key][:rows]
