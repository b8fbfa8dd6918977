"""A GGUF file as a Checkpoint, with Hugging Face's names, shapes and fields."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from quire.errors import ModelError
from quire.kernels.contract import QuantizedRows, Scheme
from quire.weights.checkpoint import GENERATION_CONFIG_FILE, WHOLE, Ranges, StoredTensor, part_of
from quire.weights.gguf.config import check_unread, hf_config
from quire.weights.gguf.info import GgufInfo
from quire.weights.gguf.names import TensorSource, numbers_of_metadata, tensor_sources
from quire.weights.gguf.quants import dequantize, quantized_rows, scheme_of
from quire.weights.gguf.reader import Metadata, TensorEntry, read_header
from quire.weights.gguf.special_tokens import eos_token_ids, special_token_ids
from quire.weights.gguf.tensor_types import TensorType
from quire.weights.json_file import read_json_object
from quire.weights.schemes import convert, part_of_rows

T = TypeVar("T")
Decode = Callable[[np.ndarray, TensorType, tuple[int, ...]], T]  # of bytes, their type, and a shape

_EMBEDDING = "token_embd.weight"
_PLAIN_DTYPES = {"F32": "float32", "F16": "float16"}
_SAMPLING = {  # key of the file -> name in generation_config.json
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


class GgufCheckpoint:
    """A model in one GGUF file, or in shards of which `path` is one.

    The constructor raises ModelError with a remedy for files that are missing, damaged or not supported.
    """

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        self._entries = header.tensors
        self.metadata = Metadata(header.metadata, header.path)
        if _EMBEDDING not in self._entries:
            raise self.metadata.error(f"{_EMBEDDING} is missing; this is not a complete language model")
        facts = GgufInfo(self.metadata, frozenset(self._entries), self._entries[_EMBEDDING].shape[0], self._factors)
        ids = special_token_ids(self.metadata)
        self._config = hf_config(facts) | {"dtype": self._dtype(), **ids}
        self._sources: dict[str, TensorSource] = {}
        for name, entry in self._entries.items():
            self._sources |= dict(tensor_sources(facts, name, entry.shape))
        self._numbers = numbers_of_metadata(facts)
        check_unread(self.metadata)
        self._tensors = {name: self._stored(name) for name in self._sources}
        for name, numbers in self._numbers.items():
            self._tensors[name] = StoredTensor(self.path, tuple(numbers.shape), "F32", numbers.nbytes, is_float=True)

    @property
    def path(self) -> Path:
        """The file, or the first of its shards."""
        return self.metadata.path

    @property
    def config(self) -> Mapping[str, object]:
        """The config.json of the model from which the file was converted."""
        return self._config

    @property
    def generation_config(self) -> Mapping[str, object]:
        """The tokens that end an output, and sampling defaults: the file's own, and over them those beside the file.

        Most GGUF files have no such defaults. A generation_config.json in their folder can add them.
        """
        found: dict[str, object] = {"eos_token_id": eos_token_ids(self.metadata)}
        for key, name in _SAMPLING.items():
            if self.metadata.has(key):
                found[name] = self.metadata.number(key) if name == "top_k" else self.metadata.real(key)
        beside = self.path.with_name(GENERATION_CONFIG_FILE)
        more = read_json_object(beside) if beside.exists() else {}
        return found | {name: more[name] for name in _SAMPLING.values() if name in more}

    @property
    def quant_method(self) -> str:
        """The name of the format, which has types for low-bit weights."""
        return "gguf"

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """All tensors by Hugging Face name, with the shapes of a Hugging Face checkpoint."""
        return self._tensors

    def read(self, names: Iterable[str], ranges: Mapping[str, Ranges] = WHOLE) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor): numbers of the metadata, then tensors in the order of the file.

        F16 and BF16 keep their type; all others become float32.
        """
        names = list(names)
        yield from ((name, self._numbers[name]) for name in names if name in self._numbers)
        wanted = [(self._source(name), name) for name in names if name not in self._numbers]
        for origin, name in sorted(wanted, key=lambda pair: self._position(pair[0])):
            numbers, rest = self._decoded(origin, ranges.get(name), dequantize)
            yield name, part_of(origin.transform(numbers) if origin.transform else numbers, rest)

    def read_codes(
        self, schemes: Mapping[str, Scheme], ranges: Mapping[str, Ranges] = WHOLE
    ) -> Iterator[tuple[str, QuantizedRows]]:
        """Yield (name, rows) in the order of the file: see Checkpoint."""
        for name in sorted(schemes, key=lambda name: self._position(self._source(name))):
            origin, scheme = self._sources[name], schemes[name]
            rows, rest = self._decoded(origin, ranges.get(name), quantized_rows)
            stored = self._stored(name).scheme or scheme
            if origin.moved_parts and (own := scheme_of(self._entries[origin.name].type)) is not None:
                rows = convert(rows, own, stored)
            if origin.transform:
                rows = rows.map_rows(origin.transform)
            yield name, convert(part_of_rows(rows, stored, rest), stored, scheme)

    def _decoded(self, origin: TensorSource, ranges: Ranges | None, decode: Decode[T]) -> tuple[T, Ranges | None]:
        """The rows that hold a part of a tensor, decoded, and the part of these rows.

        They are all rows of a vector, and of a tensor that is transformed.
        """
        entry = self._entries[origin.name]
        data, shape = entry.part_data(origin.part), _part_shape(entry, origin)
        if ranges is not None and origin.transform is None and len(shape) > 1:
            row_bytes, rows = len(data) // shape[0], ranges[0]
            data, shape = data[rows.start * row_bytes : rows.stop * row_bytes], (len(rows), *shape[1:])
            ranges = (range(len(rows)), *ranges[1:])
        return decode(data, entry.type, shape), ranges

    def _source(self, name: str) -> TensorSource:
        if name not in self._sources:
            raise self.metadata.error(f"there is no tensor {name}")
        return self._sources[name]

    def _position(self, origin: TensorSource) -> tuple[str, int, int]:
        entry = self._entries[origin.name]
        return entry.file.path.name, entry.start, origin.part or 0

    def _stored(self, name: str) -> StoredTensor:
        origin = self._sources[name]
        entry = self._entries[origin.name]
        shape = _part_shape(entry, origin)
        if origin.transform:
            try:
                shape = tuple(origin.transform(torch.empty(shape, device="meta")).shape)
            except RuntimeError as error:
                raise self.metadata.error(f"{origin.name} of shape {shape} does not fit the number of heads") from error
        scheme = origin.scheme(scheme_of(entry.type), shape[1]) if len(shape) == 2 else None
        num_bytes = entry.part_bytes(origin.part)
        return StoredTensor(entry.file.path, shape, entry.type.name, num_bytes, is_float=True, scheme=scheme)

    def _dtype(self) -> str:
        """Compute dtype: the type of most numbers. Quantized types count as bfloat16, which rounds less."""
        sizes: dict[str, int] = {}
        for entry in self._entries.values():
            dtype = _PLAIN_DTYPES.get(entry.type.name, "bfloat16")
            sizes[dtype] = sizes.get(dtype, 0) + entry.num_bytes // entry.type.block_bytes * entry.type.block_size
        return max(sizes, key=lambda dtype: sizes[dtype])

    def _factors(self, name: str) -> np.ndarray | None:
        entry = self._entries.get(name)
        if entry is None:
            return None
        if len(entry.shape) != 1:
            raise ModelError(f"{entry.file.path}: {name} must have one dimension, not {len(entry.shape)}")
        numbers: np.ndarray = dequantize(entry.part_data(None), entry.type, entry.shape).float().numpy()
        return numbers


def _part_shape(entry: TensorEntry, origin: TensorSource) -> tuple[int, ...]:
    """The shape of a tensor, or of one part of a stacked tensor."""
    return entry.shape if origin.part is None else entry.shape[1:]
