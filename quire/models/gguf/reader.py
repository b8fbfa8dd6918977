"""Reads GGUF headers: metadata, and where each tensor lies. Decodes no tensor and knows no model. No torch here.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

import math
import re
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path

import numpy as np

from quire.errors import ModelError
from quire.models.gguf.bytes_in import BytesIn, Value
from quire.models.gguf.tensor_types import REFUSED, TENSOR_TYPES, TensorType

_MAGIC = int.from_bytes(b"GGUF", "little")
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 20
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: its type, its shape as torch has it, and its bytes."""

    path: Path
    data: mmap
    type: TensorType
    shape: tuple[int, ...]
    start: int
    num_bytes: int

    def part_bytes(self, part: int | None) -> int:
        """Bytes of one index of the first dimension, or of all."""
        return self.num_bytes if part is None else self.num_bytes // self.shape[0]

    def bytes_of(self, part: int | None) -> np.ndarray:
        """These bytes, as a view of the file."""
        size = self.part_bytes(part)
        return np.frombuffer(self.data, np.uint8, size, self.start + (part or 0) * size)


@dataclass(frozen=True, slots=True)
class Header:
    """What one file, or a set of shards, says before its numbers begin."""

    path: Path
    metadata: dict[str, Value]
    tensors: dict[str, Entry]


def read_header(path: Path) -> Header:
    """The header of a model: of this file and, where it is one of several shards, of all of them.

    Raises ModelError, saying what to do: missing or unreadable files, damage, tensor types that are not
    supported, big-endian and version 1 files.
    """
    header = _read_file(path)
    count = _split(header, "count", default=1)
    if count in (0, 1):
        return header
    headers = [_read_file(shard) for shard in _shards(path, count)]
    tensors: dict[str, Entry] = {}
    for number, shard in enumerate(headers):
        if (_split(shard, "no", default=0), _split(shard, "count", default=1)) != (number, count):
            raise ModelError(f"{shard.path} is not part {number + 1} of {count}, as its name says; download it again")
        if twice := tensors.keys() & shard.tensors:
            raise ModelError(f"{shard.path} has {min(twice)}, which a file before it has too; download them again")
        tensors |= shard.tensors
    first = headers[0]
    total = _split(first, "tensors.count", default=len(tensors))
    if total != len(tensors):
        raise ModelError(f"{first.path} and the files after it have {len(tensors)} tensors, not {total}")
    return Header(first.path, first.metadata, tensors)


def _split(header: Header, name: str, *, default: int) -> int:
    """A number that says how a model is split into files."""
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
        with path.open("rb") as file:
            data = mmap(file.fileno(), 0, access=ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise ModelError(f"{path} cannot be read ({error}); download it again") from error
    source = BytesIn(data, path)
    if source.unsigned("I") != _MAGIC:
        raise source.error("it does not begin with GGUF")
    version = source.unsigned("I")
    if version & 0xFFFF == 0:
        raise ModelError(f"{path} is a big-endian GGUF file; get or convert a little-endian one")
    if version not in (2, 3):
        raise ModelError(f"{path} is a GGUF file of version {version}; quire reads versions 2 and 3")
    num_tensors = source.count("tensors", 24)  # name, dimensions, type and offset take at least as much
    num_pairs = source.count("metadata pairs", 13)
    metadata: dict[str, Value] = {}
    for _ in range(num_pairs):
        key = source.text()
        if key in metadata:
            raise source.error(f"the key {key:.80} twice")
        metadata[key] = source.value(source.unsigned("I"))
    return Header(path, metadata, _entries(source, data, path, num_tensors, metadata))


def _entries(source: BytesIn, data: mmap, path: Path, count: int, metadata: dict[str, Value]) -> dict[str, Entry]:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        raise source.error(f"general.alignment must be a power of two, not {alignment!r:.80}")
    described = [_describe(source) for _ in range(count)]
    base = -(-source.position // alignment) * alignment
    entries: dict[str, Entry] = {}
    for name, shape, number, offset in described:
        kind = TENSOR_TYPES.get(number)
        if kind is None:
            raise ModelError(
                f"{path}: {name} is of type {REFUSED.get(number, number)}; quire reads "
                f"{', '.join(each.name for each in TENSOR_TYPES.values())}. Get a file of one of those, such as Q4_K_M"
            )
        if name in entries:
            raise source.error(f"the tensor {name} twice")
        if shape[-1] % kind.block_size:
            raise source.error(f"{name} has rows of {shape[-1]} numbers, no multiple of {kind.block_size}")
        num_bytes = math.prod(shape) // kind.block_size * kind.block_bytes
        if offset % alignment or base + offset + num_bytes > len(data):
            raise source.error(f"{name} does not lie within the file, or not at a multiple of {alignment} bytes")
        entries[name] = Entry(path, data, kind, shape, base + offset, num_bytes)
    return entries


def _describe(source: BytesIn) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape, type and offset of one tensor; GGUF writes the shape with the fastest dimension first."""
    name = source.text()
    dimensions = source.unsigned("I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise source.error(f"{name:.80} has {dimensions} dimensions")
    shape = tuple(source.unsigned("Q") for _ in range(dimensions))[::-1]
    if 0 in shape:
        raise source.error(f"{name:.80} is empty")
    return name, shape, source.unsigned("I"), source.unsigned("Q")
