"""Steps as CUDA graphs: one launch in the place of hundreds, recorded once for each number of sequences."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quire.kernels.contract import Batch, NotRecordable, Storage
from quire.kernels.triton import plan as planning
from quire.kernels.triton.plan import TritonPlan

LADDER = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
_WARM_UPS = 2  # before a graph is captured: kernels are compiled then, and libraries take their memory


class Recording:
    """Captures graphs, all of one model on one set of blocks. They share memory, since only one runs at a time."""

    def __init__(self) -> None:
        self._pool: Any = None  # a handle of torch's
        self._stream: torch.cuda.Stream | None = None  # one for all warm-ups: libraries keep memory for each stream

    def size(self, num_sequences: int) -> int | None:
        """See Recorder."""
        return next((size for size in LADDER if size >= num_sequences), None)

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
                compute()
        usual.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                result = compute()
        except RuntimeError as error:  # something waited for the device, say
            torch.cuda.set_stream(usual)  # torch stays on the stream of the graph
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise NotRecordable(str(error)) from error
        self._pool = graph.pool()
        graph.replay()
        return result, graph.replay
