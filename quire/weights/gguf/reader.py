"""Reader of GGUF files: metadata, and the positions and bytes of tensors.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. A file is mapped
only while its header or a tensor is read. Imports no torch, because the HTTP process reads the tokenizer of a file.
"""

import math
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from mmap import ACCESS_READ, ALLOCATIONGRANULARITY, mmap
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np

from quire.errors import ModelError
from quire.weights.gguf.tensor_types import TENSOR_TYPES, UNSUPPORTED_TYPES, TensorType

MAX_HEADER = 1 << 29  # bytes; the largest vocabularies take 16 MiB
MAX_VALUES = 1 << 24  # strings and scalars; the largest vocabularies have under a million

Scalar = int | float | bool | str
Value = Scalar | list[str] | np.ndarray

_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")  # of a string, in bytes
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_DTYPES = {
    kind: np.dtype(name)
    for kind, name in zip(
        (0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12),
        ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "u1", "<u8", "<i8", "<f8"),
        strict=True,
    )
}


class HeaderReader:
    """A read position in a mapped file. All methods raise ModelError if the file ends or is invalid there."""

    def __init__(self, data: mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._end = min(len(data), MAX_HEADER)
        self._values = 0
        self.position = 0

    def error(self, message: str) -> ModelError:
        """A ModelError with the file and a remedy."""
        return ModelError(f"{self._path} is damaged or not a GGUF file ({message}); download it again")

    def count(self, what: str, smallest: int) -> int:
        """Read a count of items that follow, each at least `smallest` bytes. An error if the file is too short."""
        value = self.unsigned("Q")
        if value * smallest > self._end - self.position:
            raise self.error(f"{value} {what} do not fit into the rest of it")
        return value

    def unsigned(self, code: str) -> int:
        """Read an unsigned integer. code: struct's letter for its width."""
        return int(self._scalar(code))

    def text(self) -> str:
        """Read a string: its length in bytes, then UTF-8."""
        size = self.count("bytes of text", 1)
        start = self._advance(size)
        try:
            return self._data[start : start + size].decode()
        except UnicodeDecodeError as error:
            raise self.error(f"text at byte {start} is not UTF-8") from error

    def value(self, kind: int) -> Value:
        """Read a metadata value of one of GGUF's types."""
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(self.unsigned("I"))
        if kind not in _SCALARS:
            raise self.error(f"metadata of unknown kind {kind} at byte {self.position}")
        value = self._scalar(_SCALARS[kind])
        # a float32 becomes the float of its shortest decimal: 1e-06, not 9.99999997e-07
        return float(str(np.float32(value))) if kind == 6 else value

    def _array(self, kind: int) -> Value:
        if kind == _STRING:
            return self._texts(self.count("strings", 8))
        if kind not in _DTYPES:
            raise self.error(f"an array of kind {kind} at byte {self.position}; arrays hold numbers or strings")
        dtype = _DTYPES[kind]
        count = self.count("array items", dtype.itemsize)
        return np.frombuffer(self._data, dtype, count, self._advance(count * dtype.itemsize)).copy()

    def _texts(self, count: int) -> list[str]:
        """Read strings, in less than half of the time that `text` takes for each."""
        data, end, position, found = self._data, self._end, self.position, list[str]()
        try:
            for _ in range(count):
                start = position + _LENGTH.size
                position = start + _LENGTH.unpack_from(data, position)[0]
                if position > end:
                    break
                found.append(data[start:position].decode())
        except (struct.error, UnicodeDecodeError):
            pass
        if len(found) < count or self._values + 2 * count > MAX_VALUES:
            return [self.text() for _ in range(count)]  # raises the error
        self._values += 2 * count
        self.position = position
        return found

    def _scalar(self, code: str) -> int | float | bool:
        value: int | float | bool = struct.unpack_from(f"<{code}", self._data, self._advance(struct.calcsize(code)))[0]
        return value

    def _advance(self, size: int) -> int:
        """Advance by `size` bytes, and return where they start."""
        self._values += 1
        if size > self._end - self.position:
            raise self.error(f"the file or its header ends within a value at byte {self.position}")
        if self._values > MAX_VALUES:
            raise self.error(f"its header has more than {MAX_VALUES} values")
        start = self.position
        self.position += size
        return start


_MAGIC = int.from_bytes(b"GGUF", "little")
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 20
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A file whose header was read, with its size and the time of its last change at that time."""

    path: Path
    size: int  # bytes
    changed: int  # nanoseconds

    def view(self, start: int, size: int) -> np.ndarray:
        """Bytes of the file as uint8. They are mapped until no array refers to them.

        Raises ModelError if the file cannot be read, or has changed.
        """
        first = start // ALLOCATIONGRANULARITY * ALLOCATIONGRANULARITY
        try:
            with self.path.open("rb") as opened:
                if _stamp(opened) != (self.size, self.changed):
                    raise ModelError(f"{self.path} has changed while the model was loaded; start again")
                data = mmap(opened.fileno(), start + size - first, access=ACCESS_READ, offset=first)
        except (OSError, ValueError) as error:  # ValueError: it was cut off just now
            raise ModelError(f"{self.path} cannot be read ({error}); download it again") from error
        return np.frombuffer(data, np.uint8, size, start - first)


def _stamp(opened: BinaryIO) -> tuple[int, int]:
    """The size of a file, and the time of its last change."""
    stat = os.fstat(opened.fileno())
    return stat.st_size, stat.st_mtime_ns


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: type, shape in torch's order, position."""

    file: GgufFile
    type: TensorType
    shape: tuple[int, ...]
    start: int
    num_bytes: int

    def part_bytes(self, part: int | None) -> int:
        """Number of bytes of one index of the first dimension, or of the tensor."""
        return self.num_bytes if part is None else self.num_bytes // self.shape[0]

    def part_data(self, part: int | None) -> np.ndarray:
        """The bytes of one index of the first dimension, or of the tensor, as `GgufFile.view`."""
        size = self.part_bytes(part)
        return self.file.view(self.start + (part or 0) * size, size)


@dataclass(frozen=True, slots=True)
class Header:
    """The header of one file, or the merged headers of all shards."""

    path: Path
    metadata: dict[str, Value]
    tensors: dict[str, TensorEntry]


def read_header(path: Path) -> Header:
    """The header of a model: of this file or, if it is one of several shards, of all shards.

    Raises ModelError with a remedy for missing, unreadable or damaged files, unsupported tensor types, big-endian and
    version 1 files.
    """
    header = _read_file(path)
    count = _split(header, "count", default=1)
    if count in (0, 1):
        return header
    headers = [_read_file(shard) for shard in _shards(path, count)]
    tensors: dict[str, TensorEntry] = {}
    for number, shard in enumerate(headers):
        if (_split(shard, "no", default=0), _split(shard, "count", default=1)) != (number, count):
            raise ModelError(
                f"{shard.path} is part {number + 1} of {count} by its name, but not by its metadata; download it again"
            )
        if twice := tensors.keys() & shard.tensors:
            raise ModelError(f"{shard.path} has {min(twice)}, which an earlier part has too; download them again")
        tensors |= shard.tensors
    first = headers[0]
    total = _split(first, "tensors.count", default=len(tensors))
    if total != len(tensors):
        raise ModelError(f"{first.path} and the files after it have {len(tensors)} tensors, not {total}")
    return Header(first.path, first.metadata, tensors)


def _split(header: Header, name: str, *, default: int) -> int:
    """The integer `split.NAME` of the metadata, about a model's shards."""
    value = header.metadata.get(f"split.{name}", default)
    if not isinstance(value, int) or value < 0:
        raise ModelError(f"{header.path}: split.{name} must be a whole number, not {value!r:.80}; download it again")
    return value


def _shards(path: Path, count: int) -> list[Path]:
    """The files of a set by the names that llama.cpp gives them: NAME-00001-of-00003.gguf."""
    named = _SHARD.fullmatch(path.name)
    if named is None or int(named[3]) != count:
        raise ModelError(
            f"{path} is one of {count} files of a model, but its name does not end in -00001-of-{count:0>5}.gguf; "
            f"give the files the names they were published with"
        )
    paths = [path.with_name(f"{named[1]}-{number:05}-of-{named[3]}.gguf") for number in range(1, int(named[3]) + 1)]
    missing = [shard.name for shard in paths if not shard.is_file()]
    if missing:
        raise ModelError(
            f"{path.parent} lacks {len(missing)} of the model's {count} files, the first is {missing[0]}; download them"
        )
    return paths


def _read_file(path: Path) -> Header:
    try:
        with path.open("rb") as opened:
            file = GgufFile(path, *_stamp(opened))
            data = mmap(opened.fileno(), file.size, access=ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise ModelError(f"{path} cannot be read ({error}); download it again") from error
    with data:
        return _header(HeaderReader(data, path), file)


def _header(source: HeaderReader, file: GgufFile) -> Header:
    path = file.path
    if source.unsigned("I") != _MAGIC:
        raise source.error("it does not begin with GGUF")
    version = source.unsigned("I")
    if version & 0xFFFF == 0:
        raise ModelError(f"{path} is a big-endian GGUF file; get or convert a little-endian one")
    if version not in (2, 3):
        raise ModelError(f"{path} is a GGUF file of version {version}; quire reads versions 2 and 3")
    num_tensors = source.count("tensors", 24)  # least size of name, dimensions, type and offset
    num_pairs = source.count("metadata pairs", 13)
    metadata: dict[str, Value] = {}
    for _ in range(num_pairs):
        key = source.text()
        if key in metadata:
            raise source.error(f"it has the key {key:.80} twice")
        metadata[key] = source.value(source.unsigned("I"))
    return Header(path, metadata, _entries(source, file, num_tensors, metadata))


def _entries(source: HeaderReader, file: GgufFile, count: int, metadata: dict[str, Value]) -> dict[str, TensorEntry]:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        raise source.error(f"general.alignment must be a power of two, not {alignment!r:.80}")
    described = [_describe(source) for _ in range(count)]
    base = -(-source.position // alignment) * alignment
    entries: dict[str, TensorEntry] = {}
    for name, shape, number, offset in described:
        kind = TENSOR_TYPES.get(number)
        if kind is None:
            raise ModelError(
                f"{file.path}: {name} is of type {UNSUPPORTED_TYPES.get(number, number)}; quire reads "
                f"{', '.join(each.name for each in TENSOR_TYPES.values())}. Get a file of one of those, such as Q4_K_M"
            )
        if name in entries:
            raise source.error(f"it has the tensor {name} twice")
        if shape[-1] % kind.block_size:
            raise source.error(f"{name} has rows of {shape[-1]} numbers, not a multiple of {kind.block_size}")
        num_bytes = math.prod(shape) // kind.block_size * kind.block_bytes
        if offset % alignment or base + offset + num_bytes > file.size:
            raise source.error(f"{name} does not lie within the file, or not at a multiple of {alignment} bytes")
        entries[name] = TensorEntry(file, kind, shape, base + offset, num_bytes)
    return entries


def _describe(source: HeaderReader) -> tuple[str, tuple[int, ...], int, int]:
    """Read name, shape, type and offset of one tensor. GGUF writes the fastest dimension of a shape first."""
    name = source.text()
    dimensions = source.unsigned("I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise source.error(f"{name:.80} has {dimensions} dimensions")
    shape = tuple(source.unsigned("Q") for _ in range(dimensions))[::-1]
    if 0 in shape:
        raise source.error(f"{name:.80} is empty")
    return name, shape, source.unsigned("I"), source.unsigned("Q")


T = TypeVar("T", int, float)
_MOST = 2**31 - 1  # larger sizes and counts are refused


class Metadata:
    """The metadata of one file. A key that begins with a dot is prefixed with the architecture: ".block_count".

    Methods raise ModelError with the key if the value is missing or of another type.
    """

    def __init__(self, values: Mapping[str, Value], path: Path) -> None:
        self._values = values
        self._read: set[str] = set()  # keys that were asked for
        self.path = path
        self.architecture = self.text("general.architecture")

    def error(self, message: str) -> ModelError:
        """A ModelError with the file in front."""
        return ModelError(f"{self.path}: {message}")

    @property
    def unread(self) -> Mapping[str, Value]:
        """The keys of the architecture that nothing has asked for, with a dot in front, and their values."""
        prefix = f"{self.architecture}."
        found = {key: value for key, value in self._values.items() if key.startswith(prefix) and key not in self._read}
        return {key.removeprefix(self.architecture): value for key, value in found.items()}

    def has(self, key: str) -> bool:
        """Whether the file has this key."""
        return self._name(key) in self._values

    def has_list(self, key: str) -> bool:
        """Whether the file has this key, with a list of numbers."""
        return isinstance(self._values.get(self._name(key)), np.ndarray)

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "text", value)
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """A bool."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def number(self, key: str, default: int | None = None, *, least: int = 0) -> int:
        """An integer from `least` to 2**31 - 1. If it is a list with a value per layer, all values must be equal."""
        value = self._one(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
            raise self._wrong(key, f"a whole number from {least} to {_MOST}", value)
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A finite number. If it is a list with a value per layer, all values must be equal."""
        value = self._one(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._wrong(key, "a number", value)
        return float(value)

    def texts(self, key: str) -> list[str]:
        """A list of strings; empty if the file has none."""
        value = self._values.get(self._name(key), [])
        if not isinstance(value, list):
            raise self._wrong(key, "a list of strings", value)
        return value

    def numbers(self, key: str, kind: type[T], length: int) -> list[T]:
        """A list of `length` numbers, converted to `kind`; empty if the file has none."""
        value = self._values.get(self._name(key))
        if value is None:
            return []
        if not isinstance(value, np.ndarray) or len(value) != length:
            raise self._wrong(key, f"a list of {length} numbers", value)
        return [kind(item) for item in value.tolist()]

    def _name(self, key: str) -> str:
        name = self.architecture + key if key.startswith(".") else key
        self._read.add(name)
        return name

    def _get(self, key: str, default: Value | None) -> Value:
        value = self._values.get(self._name(key), default)
        if value is None:
            raise self.error(f"{self._name(key)} is missing; the file is incomplete, get another one")
        return value

    def _one(self, key: str, default: float | None) -> Value:
        value = self._get(key, default)
        if not isinstance(value, np.ndarray):
            return value
        if len(value) == 0 or (value != value[0]).any():
            raise self.error(f"{self._name(key)} differs between layers, which is not supported")
        one: int | float = value[0].item()
        return one

    def _wrong(self, key: str, kind: str, value: object) -> ModelError:
        shown = f"a list of {len(value)}" if isinstance(value, list | np.ndarray) else f"{value!r:.80}"
        return self.error(f"{self._name(key)} must be {kind}, not {shown}")
