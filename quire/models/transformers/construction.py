"""Construction of transformers models from a Checkpoint, by `from_pretrained` with quire's tensors.

transformers has, per architecture, which tensors of a checkpoint are renamed, fused (the experts of most MoE models)
or derived, which stay float32, and how missing buffers are computed. `from_pretrained` does all of that, so no table
here has to repeat it. It gets no file, only a dict of names: only the Checkpoint's files are opened, nothing is
downloaded, and only transformers' code runs. The same call with shapes in place of tensors checks a checkpoint before
weights are read.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from logging import CRITICAL
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from quire.errors import ModelError
from quire.kernels.contract import DTYPES
from quire.models.model import Progress
from quire.weights.checkpoint import Checkpoint, StoredTensor


class MetaTensor:
    """A tensor without data, in a state dict for `from_pretrained`, which calls `entry[...].to(...)`."""

    def __init__(self, stored: StoredTensor) -> None:
        self._shape = stored.shape

    def __getitem__(self, place: Any) -> "MetaTensor":  # noqa: ANN401  (it is always [...])
        return self

    def to(self, *, device: object, dtype: torch.dtype) -> Tensor:
        """An empty tensor of this dtype, on the meta device whatever `device` is."""
        del device
        return torch.empty(self._shape, dtype=dtype, device="meta")


class TensorReader:
    """Reads tensors on demand, one at a time, although transformers requests them from several threads."""

    def __init__(self, checkpoint: Checkpoint, progress: Progress) -> None:
        self._checkpoint = checkpoint
        self._progress = progress
        self._lock = threading.Lock()
        self._done = 0
        self._total = sum(stored.num_bytes for stored in checkpoint.tensors.values())
        self.error: ModelError | None = None  # the first error, as transformers wraps errors
        progress(0, self._total)

    def read(self, name: str) -> Tensor:
        """A tensor as `Checkpoint.read` yields it. Raises ModelError."""
        with self._lock:
            try:
                ((_, tensor),) = self._checkpoint.read([name])
            except ModelError as error:
                self.error = self.error or error
                raise
            self._done += self._checkpoint.tensors[name].num_bytes
            self._progress(self._done, self._total)
        return tensor


class LazyTensor:
    """A tensor that is read on demand, in a state dict for `from_pretrained`."""

    def __init__(self, reading: TensorReader, name: str) -> None:
        self._reading = reading
        self._name = name

    def __getitem__(self, place: Any) -> Tensor:  # noqa: ANN401  (it is always [...])
        return self._reading.read(self._name)


def construct(
    kind: type[PreTrainedModel],
    config: PreTrainedConfig,
    tensors: Mapping[str, MetaTensor] | Mapping[str, LazyTensor],
    checkpoint: Checkpoint,
    *,
    dtype: str,
    device: str,
    attention: str,
    experts: str | None = None,
) -> PreTrainedModel:
    """A model of class `kind` with these tensors, which have the checkpoint's names and shapes.

    attention, experts: transformers' names of implementations.
    Raises ModelError if tensors are missing, unexpected or of another shape.
    """
    build: Any = kind.from_pretrained  # its return type is not annotated
    try:
        with quiet():
            model, found = build(
                None,
                config=config,
                state_dict=dict(tensors),
                dtype=DTYPES[dtype],
                attn_implementation=attention,
                **({} if experts is None else {"experts_implementation": experts}),
                local_files_only=True,
                ignore_mismatched_sizes=True,  # they are in the loading info
                output_loading_info=True,
            )
    except Exception as error:  # a model's code may raise any exception
        raise ModelError(f"{checkpoint.path}: transformers cannot build its {kind.__name__}: {error!s:.300}") from error
    _check(found, kind.__name__, checkpoint)
    module: nn.Module = model
    module.to(device).requires_grad_(requires_grad=False).eval()
    built: PreTrainedModel = model
    return built


def _check(found: Mapping[str, Any], architecture: str, checkpoint: Checkpoint) -> None:
    """Raise ModelError if `found` lists mismatched, missing or unexpected tensors."""
    place = checkpoint.path
    if found["mismatched_keys"]:
        name, shape, expected = min(found["mismatched_keys"])
        raise ModelError(f"{place}: {name}: expected shape {tuple(expected)}, found {tuple(shape)}")
    if found["missing_keys"]:
        some = sorted(found["missing_keys"])
        raise ModelError(f"{place} lacks {len(some)} tensors of its {architecture}: expected {some[0]}, found nothing")
    if found["unexpected_keys"]:
        some = sorted(found["unexpected_keys"])
        raise ModelError(
            f"{place} has {len(some)} tensors that its {architecture} does not have: found {some[0]}, expected nothing"
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Context manager without transformers' log messages and progress bars; quire reports errors and progress."""
    prints: Any = logging  # it has no types
    verbosity, has_bar = prints.get_verbosity(), prints.is_progress_bar_enabled()
    prints.set_verbosity(CRITICAL)
    prints.disable_progress_bar()
    try:
        yield
    finally:
        prints.set_verbosity(verbosity)
        if has_bar:
            prints.enable_progress_bar()
