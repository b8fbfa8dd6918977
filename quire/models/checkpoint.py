"""Checkpoint: what a model's files say, whatever their format. Names and values are Hugging Face's.

A format that has other names (GGUF) translates them; nothing behind this interface knows.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire.errors import ModelError


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


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ModelError for a file that is missing, damaged, or holds something else."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise ModelError(f"{path} is not valid JSON, or cannot be read ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object; download it again")
    return value


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_OTHER_FORMATS = ("*.bin", "*.pt", "*.pth")
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def find_weights(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a folder: one, or the shards that its index names.

    Raises ModelError when there are none and when shards are missing.
    """
    if (folder / SINGLE).exists():
        return (folder / SINGLE,)
    if (folder / INDEX).exists():
        return _shards(folder / INDEX)
    others = sorted(path.name for pattern in _OTHER_FORMATS for path in folder.glob(pattern))
    if others:
        raise ModelError(
            f"{folder} has weights only as {', '.join(others[:3])}; quire reads safetensors only, because the "
            f"others can run code or are not supported yet. Save the model with `save_pretrained` to convert it"
        )
    raise ModelError(f"{folder} has neither {SINGLE} nor {INDEX}; download the weights")


def _shards(index: Path) -> tuple[Path, ...]:
    try:
        names = sorted(set(read_object(index)["weight_map"].values()))
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is damaged ({type(error).__name__}: {error}); download it again") from error
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ModelError(f"{index} must name files of its own folder; download it again")
    missing = [name for name in names if not (index.parent / name).exists()]
    if missing:
        raise ModelError(
            f"{index.parent} is half-downloaded: {len(missing)} of {len(names)} weight files are missing, "
            f"the first is {missing[0]}. Download them again"
        )
    return tuple(index.parent / name for name in names)


def header(file: Path) -> dict[str, Stored]:
    """The tensors of a file by name. Raises ModelError where it is truncated or no safetensors file."""
    try:
        with safe_open(file, framework="numpy") as opened:
            tensors = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  (not a dict)
            return {
                name: _stored(file, tuple(tensor.get_shape()), tensor.get_dtype()) for name, tensor in tensors.items()
            }
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is damaged or truncated ({error}); delete it and download it again") from error


def _stored(file: Path, shape: tuple[int, ...], dtype: str) -> Stored:
    """Types that are no plain numbers belong to quantized checkpoints."""
    return Stored(file, shape, dtype, math.prod(shape) * _BYTES.get(dtype, 1), is_float=dtype in _BYTES)


class FolderCheckpoint:
    """Reads the JSON files and the headers of the weights when it is made.

    Raises ModelError, saying what to do, when the folder or a file is missing, incomplete or damaged.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ModelError(
                f"there is no model folder {str(folder)!r}. Give the path of a local folder; "
                f"`hf download OWNER/NAME --local-dir FOLDER` makes one from a Hugging Face id"
            )
        path = folder / "config.json"
        if not path.exists():
            raise ModelError(f"{folder} has no config.json, so it is not the folder of a Hugging Face checkpoint")
        generation = folder / "generation_config.json"
        self._folder = folder
        self._config = read_object(path)
        self._generation_config = read_object(generation) if generation.exists() else {}
        self._tensors: dict[str, Stored] = {}
        for file in find_weights(folder):
            self._tensors |= header(file)

    @property
    def place(self) -> Path:
        """The folder."""
        return self._folder

    @property
    def config(self) -> Mapping[str, object]:
        """config.json."""
        return self._config

    @property
    def generation_config(self) -> Mapping[str, object]:
        """generation_config.json; empty where there is none."""
        return self._generation_config

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """By name, of all files."""
        return self._tensors

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """These tensors, file after file, each opened once."""
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self._tensors[name].file, []).append(name)
        for file, some in by_file.items():
            with safe_open(file, framework="pt") as opened:
                for name in some:
                    yield name, opened.get_tensor(name)
