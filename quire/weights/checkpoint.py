"""Checkpoints: config fields and tensors of a model's files, with Hugging Face's names.

An implementation for a format with other names (GGUF) translates them.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire.errors import ModelError
from quire.kernels.contract import QuantizedRows, Scheme
from quire.weights.json_file import read_json_object


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's description in the header of its file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # the format's name: "BF16", "F32", "Q4_K"
    num_bytes: int  # in the file
    is_float: bool  # whether `read` yields plain floating point numbers
    scheme: Scheme | None = None  # in which `read_codes` can yield it with the same values, up to the type of scales

    @property
    def num_parameters(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


Ranges = tuple[range, ...]  # part of a tensor: rows, columns, ..., each range without a step
WHOLE: Mapping[str, Ranges] = MappingProxyType({})


def part_of(tensor: Tensor, ranges: Ranges | None) -> Tensor:
    """A view of the part of a tensor; the tensor itself without ranges."""
    return tensor if ranges is None else tensor[slices(ranges)]


def slices(ranges: Ranges) -> tuple[slice, ...]:
    """The same as an index."""
    return tuple(slice(one.start, one.stop) for one in ranges)


class Checkpoint(Protocol):
    """A model on disk. The constructor reads only headers, and raises ModelError if a file is missing or damaged."""

    @property
    def path(self) -> Path:
        """The folder or file, for error messages."""

    @property
    def config(self) -> Mapping[str, object]:
        """The fields of config.json."""

    @property
    def generation_config(self) -> Mapping[str, object]:
        """The fields of generation_config.json; empty without such a file."""

    @property
    def quant_method(self) -> str | None:
        """The layout of its quantized weights, by the name in quantization_config; None if it has none."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """All tensors by Hugging Face name, with the shapes of a Hugging Face checkpoint."""

    def read(self, names: Iterable[str], ranges: Mapping[str, Ranges] = WHOLE) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor), one at a time, in the order of the files. Raises ModelError for a damaged file.

        ranges: by name, the part of a tensor that is read. Others are read whole.
        """

    def read_codes(
        self, schemes: Mapping[str, Scheme], ranges: Mapping[str, Ranges] = WHOLE
    ) -> Iterator[tuple[str, QuantizedRows]]:
        """Yield (name, rows) of the tensors that `schemes` names, as `read` does, in schemes that hold their own.

        The scales of columns that are read together belong to these columns alone: see `has_whole_groups`.
        """


WEIGHTS_FILE = "model.safetensors"
GENERATION_CONFIG_FILE = "generation_config.json"
INDEX_FILE = "model.safetensors.index.json"
_OTHER_FORMATS = ("*.bin", "*.pt", "*.pth")
_DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def find_weights(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a folder: one file, or the shards listed in its index.

    Raises ModelError if there are none, or if shards are missing.
    """
    if (folder / WEIGHTS_FILE).exists():
        return (folder / WEIGHTS_FILE,)
    if (folder / INDEX_FILE).exists():
        return _shards(folder / INDEX_FILE)
    renamed = sorted(path.name for path in folder.glob("*.safetensors"))
    if renamed:
        raise ModelError(
            f"{folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}, but {', '.join(renamed[:3])}; rename the file to "
            f"{WEIGHTS_FILE}, or download the index"
        )
    others = sorted(path.name for pattern in _OTHER_FORMATS for path in folder.glob(pattern))
    if others:
        raise ModelError(
            f"{folder} has weights only as {', '.join(others[:3])}; quire reads safetensors only, because the "
            f"others can run code or are not supported yet. Save the model with `save_pretrained` to convert it"
        )
    raise ModelError(f"{folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; download the weights")


def _shards(index: Path) -> tuple[Path, ...]:
    try:
        names = sorted(set(read_json_object(index)["weight_map"].values()))
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


def header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name. Raises ModelError if it is truncated or no safetensors file."""
    try:
        with safe_open(file, framework="numpy") as opened:
            tensors = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  (not a dict)
            return {
                name: _stored(file, tuple(tensor.get_shape()), tensor.get_dtype()) for name, tensor in tensors.items()
            }
    except (SafetensorError, OSError) as error:
        raise _damaged(file, error) from error


def _damaged(file: Path, error: Exception) -> ModelError:
    return ModelError(f"{file} is damaged or truncated ({error}); delete it and download it again")


def _stored(file: Path, shape: tuple[int, ...], dtype: str) -> StoredTensor:
    """A tensor's description. Types that are not in _DTYPE_BYTES belong to quantized checkpoints."""
    return StoredTensor(
        file, shape, dtype, math.prod(shape) * _DTYPE_BYTES.get(dtype, 1), is_float=dtype in _DTYPE_BYTES
    )


class ConfigCheckpoint:
    """A checkpoint without weights: its config.json describes the model. Raises ModelError if there is none."""

    def __init__(self, path: Path) -> None:
        """path: of a config.json, or of the folder with one."""
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise ModelError(f"there is no config.json in {path}")
        self._path = file
        self._config = read_json_object(file)

    generation_config: Mapping[str, object] = MappingProxyType({})
    quant_method = None
    tensors: Mapping[str, StoredTensor] = MappingProxyType({})

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    @property
    def config(self) -> Mapping[str, object]:
        """The fields of config.json without quantization_config, which is the one of the weights."""
        return {name: value for name, value in self._config.items() if name != "quantization_config"}

    @property
    def quantization_config(self) -> object:
        """The settings of quantized weights; None without any."""
        return self._config.get("quantization_config")

    def read(self, names: Iterable[str], ranges: Mapping[str, Ranges] = WHOLE) -> Iterator[tuple[str, Tensor]]:
        """Yield nothing: there are no weights."""
        del names, ranges
        yield from ()

    def read_codes(
        self, schemes: Mapping[str, Scheme], ranges: Mapping[str, Ranges] = WHOLE
    ) -> Iterator[tuple[str, QuantizedRows]]:
        """Yield nothing: there are no weights."""
        del schemes, ranges
        yield from ()


class FolderCheckpoint:
    """A folder in Hugging Face's format. The constructor reads the JSON files and the headers of the weights.

    Raises ModelError with a remedy if the folder or a file is missing, incomplete or damaged.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ModelError(
                f"there is no model folder {str(folder)!r}. Give the path of a local folder; "
                f"`hf download OWNER/NAME --local-dir FOLDER` downloads one from a Hugging Face id"
            )
        path = folder / "config.json"
        if not path.exists():
            raise ModelError(f"{folder} has no config.json, so it is not the folder of a Hugging Face checkpoint")
        generation = folder / GENERATION_CONFIG_FILE
        self._folder = folder
        self._config = read_json_object(path)
        self._generation_config = read_json_object(generation) if generation.exists() else {}
        self._tensors: dict[str, StoredTensor] = {}
        for file in find_weights(folder):
            self._tensors |= header(file)

    @property
    def path(self) -> Path:
        """The folder."""
        return self._folder

    @property
    def config(self) -> Mapping[str, object]:
        """The fields of config.json."""
        return self._config

    @property
    def generation_config(self) -> Mapping[str, object]:
        """The fields of generation_config.json; empty without such a file."""
        return self._generation_config

    @property
    def quant_method(self) -> None:
        """None: its tensors have plain numbers."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The tensors of all files, by name."""
        return self._tensors

    def read(self, names: Iterable[str], ranges: Mapping[str, Ranges] = WHOLE) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor), file after file. Each file is opened once. Only the ranges are read of a tensor."""
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self._tensors[name].file, []).append(name)
        for file, some in by_file.items():
            try:
                with safe_open(file, framework="pt") as opened:
                    for name in some:
                        part = ranges.get(name)
                        yield name, opened.get_slice(name)[slices(part)] if part else opened.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise _damaged(file, error) from error

    def read_codes(
        self, schemes: Mapping[str, Scheme], ranges: Mapping[str, Ranges] = WHOLE
    ) -> Iterator[tuple[str, QuantizedRows]]:
        """Yield nothing: no tensor of this format has a scheme."""
        del schemes, ranges
        yield from ()
