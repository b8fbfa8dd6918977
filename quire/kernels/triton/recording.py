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
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                result = compute()
        except RuntimeError as error:  # something waited for the device, say
            raise NotRecordable(str(error)) from error
        self._pool = graph.pool()
        graph.replay()
        return result, graph.replay
