"""Captured steps on CPUs: a list of kernel calls, which one team of threads replays without Python.

During capture, tensors get memory from an arena that is never freed. A buffer is reused after its tensor is gone, which
is valid in the replay too, because it makes the same calls in the same order. All captured steps share these buffers,
since only one runs at a time. Operations that are not kernels would be missing from the list, so capture allows nothing
else but views and empty tensors.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quire.kernels.contract import Batch, CaptureMemory, NotCapturable, Storage
from quire.kernels.cpu import _C, paged, states
from quire.kernels.cpu.memory import Arena, use_arena
from quire.kernels.state_contract import StateBatch, StateStorage

_VIEWS = frozenset(
    (
        *("view", "_unsafe_view", "as_strided", "slice", "select", "split", "split_with_sizes", "unbind", "t"),
        *("transpose", "permute", "unsqueeze", "squeeze", "expand", "alias", "detach", "tensor_split"),
    )
)
_VIEWS_OR_COPIES = frozenset(("to", "flatten", "reshape", "contiguous"))  # views unless they convert or copy
MAX_TOKENS = 64  # of a captured step; in larger steps the time of Python is negligible
_EMPTY = frozenset(("empty", "new_empty", "empty_like"))


class CallListCapture:
    """Captured lists of kernel calls of one model and one set of storages."""

    def __init__(self) -> None:
        self._arena = Arena(never_free=True)

    def capture_size(self, num_tokens: int, max_num_seqs: int) -> int | None:
        """See StepCapture. Chunks may have any length, because the kernels read it when the calls are replayed."""
        del max_num_seqs
        return num_tokens if num_tokens <= MAX_TOKENS else None

    def capture_memory(
        self, max_num_seqs: int, token_bytes: int, logit_bytes: int, scratch_bytes: int, variants: int = 1
    ) -> CaptureMemory:
        """Counted as 0 bytes: all captured steps share buffers for at most 64 tokens, and other steps need far more."""
        del max_num_seqs, token_bytes, logit_bytes, scratch_bytes, variants
        return CaptureMemory(0, "")

    def plan(self, batch: Batch, storage: Storage, width: int) -> paged.CpuPlan:
        """See StepCapture."""
        return paged.plan(batch, storage, width=width)

    def refill(self, plan: paged.CpuPlan, batch: Batch) -> None:
        """See StepCapture."""
        paged.refill(plan, batch)

    def plan_states(self, batch: StateBatch, storage: StateStorage) -> states.CpuStatePlan:
        """See StepCapture."""
        return states.plan_states(batch, storage)

    def refill_states(self, plan: states.CpuStatePlan, batch: StateBatch) -> None:
        """See StepCapture."""
        states.refill_states(plan, batch)

    def prepare(self, plan: paged.CpuPlan) -> None:
        """See StepCapture."""
        paged.write_slots(plan)

    def capture(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """See StepCapture."""
        watch = _CaptureMode(self._arena)
        _C.record()
        try:
            with use_arena(self._arena), watch:
                result = compute()
        finally:
            calls = _C.stop()
        if watch.unsupported_op is not None:
            raise NotCapturable(f"{watch.unsupported_op} is computed by torch")
        result = self._arena.non_owning_view(result)
        return result, lambda: _C.play(calls)


class _CaptureMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Allocates empty tensors from the arena, and records the first operation that is no kernel in `unsupported_op`."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arena = arena
        self.unsupported_op: str | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # keeps torch from importing its compiler, which costs one second and 70 MB

    def __torch_dispatch__(  # called by torch for every operator
        self,
        func: Any,  # noqa: ANN401
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        del types
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in _EMPTY:
            like = args[0] if name != "empty" else None
            shape = args[1] if name == "new_empty" else args[0] if like is None else like.shape
            dtype = kwargs.get("dtype") or (torch.get_default_dtype() if like is None else like.dtype)
            return self._arena.empty(shape, dtype)
        result = func(*args, **kwargs)
        if name not in _VIEWS and not (name in _VIEWS_OR_COPIES and _same_memory(result, args[0])):
            self.unsupported_op = self.unsupported_op or name
        return result


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
