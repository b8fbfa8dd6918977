"""Checkpoint: what a model's files say, whatever their format. Names and values are Hugging Face's.

A format that has other names (GGUF) translates them; nothing behind this interface knows.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as its file's header describes it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # as the format calls it: "BF16", "F32", "Q4_K"
    num_bytes: int  # in the file
    is_float: bool  # whether it reads as plain floating point numbers

    @property
    def num_parameters(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)


class Checkpoint(Protocol):
    """A model on disk. Making one reads headers only; raises ModelError where a file is missing or damaged."""

    @property
    def place(self) -> Path:
        """The folder or file, for messages."""

    @property
    def config(self) -> Mapping[str, object]:
        """As in config.json."""

    @property
    def generation_config(self) -> Mapping[str, object]:
        """As in generation_config.json; empty where there is none."""

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """All tensors by Hugging Face's names, with their shapes as a Hugging Face checkpoint has them."""

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """These tensors, one at a time, in the order that suits the files. Raises ModelError for damaged ones."""
