"""transformers' models from a Checkpoint: its own code reads names, converts and ties, quire hands it the tensors.

transformers knows, per architecture, which tensors of a checkpoint are renamed, fused (the experts of most mixtures)
or derived, which stay in float32, and how buffers that no file has are computed. All of that is behind
`from_pretrained`, so it does the loading; a table that repeated it here would be wrong for the next model. It is
given no file, only a table of names: no file but a Checkpoint's is ever opened, nothing is downloaded, and no code
but that of transformers runs. The same call with shapes in place of tensors checks a checkpoint before a weight is
read.
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
from quire.models.checkpoint import Checkpoint, Stored
from quire.models.model import Progress


class Shape:
    """A tensor without numbers, in a table for `from_pretrained`, which asks for `entry[...].to(...)`."""

    def __init__(self, stored: Stored) -> None:
        self._shape = stored.shape

    def __getitem__(self, place: Any) -> "Shape":  # noqa: ANN401  (it is always [...])
        return self

    def to(self, *, device: object, dtype: torch.dtype) -> Tensor:
        """Wherever it should go, it stays on the meta device."""
        del device
        return torch.empty(self._shape, dtype=dtype, device="meta")


class Reading:
    """Reads tensors when they are asked for, one at a time though transformers asks from several threads."""

    def __init__(self, checkpoint: Checkpoint, progress: Progress) -> None:
        self._checkpoint = checkpoint
        self._progress = progress
        self._lock = threading.Lock()
        self._done = 0
        self._total = sum(stored.num_bytes for stored in checkpoint.tensors.values())
        self.error: ModelError | None = None  # the first one: transformers does not pass errors on as they are
        progress(0, self._total)

    def read(self, name: str) -> Tensor:
        """A tensor, as it is in the file."""
        with self._lock:
            try:
                ((_, tensor),) = self._checkpoint.read([name])
            except ModelError as error:
                self.error = self.error or error
                raise
            self._done += self._checkpoint.tensors[name].num_bytes
            self._progress(self._done, self._total)
        return tensor


class Read:
    """A tensor in a file, in a table for `from_pretrained`."""

    def __init__(self, reading: Reading, name: str) -> None:
        self._reading = reading
        self._name = name

    def __getitem__(self, place: Any) -> Tensor:  # noqa: ANN401  (it is always [...])
        return self._reading.read(self._name)


def construct(
    kind: type[PreTrainedModel],
    config: PreTrainedConfig,
    tensors: Mapping[str, Shape] | Mapping[str, Read],
    checkpoint: Checkpoint,
    *,
    dtype: str,
    device: str,
    attention: str,
    experts: str | None = None,
) -> PreTrainedModel:
    """A model of this kind with these tensors, of the checkpoint's names and shapes.

    attention, experts: names of implementations, as transformers knows them.
    Raises ModelError where tensors are missing, left over or of another shape.
    """
    build: Any = kind.from_pretrained  # whose types do not say what it returns
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
                ignore_mismatched_sizes=True,  # they are reported like the others
                output_loading_info=True,
            )
    except Exception as error:  # whatever the code of a model may raise about a configuration
        raise ModelError(
            f"{checkpoint.place}: transformers cannot build its {kind.__name__}: {error!s:.300}"
        ) from error
    _check(found, kind.__name__, checkpoint)
    module: nn.Module = model
    module.to(device).requires_grad_(requires_grad=False).eval()
    built: PreTrainedModel = model
    return built


def _check(found: Mapping[str, Any], architecture: str, checkpoint: Checkpoint) -> None:
    """Raise ModelError unless all tensors found their place."""
    place = checkpoint.place
    if found["mismatched_keys"]:
        name, shape, expected = min(found["mismatched_keys"])
        raise ModelError(f"{place}: {name}: expected shape {tuple(expected)}, found {tuple(shape)}")
    if found["missing_keys"]:
        some = sorted(found["missing_keys"])
        raise ModelError(f"{place} lacks {len(some)} tensors of its {architecture}: expected {some[0]}, found nothing")
    if found["unexpected_keys"]:
        some = sorted(found["unexpected_keys"])
        raise ModelError(
            f"{place} has {len(some)} tensors that its {architecture} has no place for: found {some[0]}, "
            f"expected nothing"
        )


@contextmanager
def quiet() -> Iterator[None]:
    """transformers prints nothing meanwhile: quire says what is wrong, and shows its own progress."""
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
