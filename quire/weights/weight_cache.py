"""Weight cache: a file with a model's weights in their final layout, which later starts map or copy into memory.

A file has a header of one page, then each tensor of the decoder from a new page on. The header has a key, which is a
hash of all that decides the bytes of the weights, the size of the file, and the sum of its 64-bit words. A file that
does not match one of the three is not used. Processes that map the same file share its pages. So a file is never
changed: a new one is written and renamed.

Decode steps need large pages. The page cache has them on some systems and for some files only. Without them the
weights are copied from the file into the memory that they would have without a cache.
"""

import fcntl
import hashlib
import mmap
import os
import platform
import re
import resource
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from quire.kernels.contract import PackedWeight
from quire.kernels.cpu import EXTENSION
from quire.kernels.cpu import kernels as cpu
from quire.weights.checkpoint import Checkpoint, Ranges
from quire.weights.file_identity import file_identity, has_recorded_time
from quire.weights.schemes import Schemes

_HEADER = struct.Struct("<8s32sQQ")  # _MAGIC, key, bytes of the file, sum of the 64-bit words behind the header
_MAGIC = b"quire-w1"
_PAGE = 4096  # bytes
_LARGE_PAGE = 2**18  # bytes per page fault, on average, from which on pages of the file are large enough
_ROOT = Path(__file__).parents[1]
CODE = ("kernels", "layers", "models", "weights")  # folders of quire whose code decides the bytes of weights


class UnusableFile(Exception):
    """A file of the cache cannot be used. The text is the reason."""


class WeightCache(NamedTuple):
    """The folder of the cache, and a function that receives a line about its use."""

    folder: Path
    report: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Identity:
    """All that decides the bytes of a model's weights, except for the code."""

    checkpoint: Checkpoint
    dtype: str
    kernels: str  # name of the kernel module
    schemes: Schemes
    ranges: Mapping[str, Ranges]  # of tensors that are read in part

    @property
    def file_name(self) -> str:
        """A name that stays the same when the checkpoint's files or the code change, so that the file is replaced."""
        path = self.checkpoint.path.resolve()
        digest = hashlib.sha256(repr((str(path), *self._options)).encode())
        return f"{re.sub(r'[^A-Za-z0-9._-]', '_', path.name)}-{digest.hexdigest()[:16]}.weights"

    @property
    def _options(self) -> tuple[object, ...]:
        return self.dtype, self.kernels, sorted(self.schemes.items()), sorted(self.ranges.items(), key=itemgetter(0))

    @property
    def files(self) -> list[Path]:
        """The files of the checkpoint whose content decides the bytes."""
        weights = {stored.file for stored in self.checkpoint.tensors.values()}
        return sorted(weights.union(self.checkpoint.path.glob("*.json")))

    def key(self, tensors: Mapping[str, Tensor]) -> bytes:
        """A hash (32 bytes) of all that decides the bytes: docs/serving.md has the list. Raises OSError."""
        identities = [file_identity(file) for file in self.files]
        layout = [(name, one.shape, one.dtype) for name, one in tensors.items()]
        parts = (identities, stored_layout(self.checkpoint), layout, self._options, code_digest(), environment())
        return hashlib.sha256(repr(parts).encode()).digest()


def stored_layout(checkpoint: Checkpoint) -> tuple[object, ...]:
    """The fields of config.json, and names, shapes and types of the tensors. Its `repr` is that of the layout."""
    tensors = [(name, one.shape, one.dtype) for name, one in checkpoint.tensors.items()]
    return tuple(sorted(checkpoint.config.items())), tuple(tensors)


def environment() -> tuple[str, ...]:
    """What decides the bytes of weights and the speed of steps besides code and options.

    These are versions of Python and of libraries that compute, and the build of the kernels that the processor gets.
    """
    build = cpu.description() if EXTENSION is None else EXTENSION
    return platform.python_version(), platform.machine(), torch.__version__, np.__version__, build


@cache
def code_digest() -> str:
    """A hash of the code that decides the bytes of weights and the speed of steps, compiled kernels included."""
    files = [path for folder in CODE for path in (_ROOT / folder).rglob("*") if path.suffix in (".py", ".so")]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def load_through(where: WeightCache, model: nn.Module, identity: Identity, load: Callable[[], None]) -> None:
    """Map or copy the weights of `model` from the cache's file. Without a usable file, call `load` and write one.

    Errors of the cache are reported in a line and not raised.
    """
    tensors = _tensors(model)
    file = where.folder.expanduser() / identity.file_name
    reason = ""
    try:
        if num_bytes := sum(file.stat().st_size for file in identity.files if has_recorded_time(file)):
            where.report(f"weights    reading {num_bytes / 1e9:.1f} GB to compare: times of the files may be recorded")
        key = identity.key(tensors)
    except OSError as error:
        load()
        where.report(f"weights    not cached: {error}")
        return
    try:
        way = _read(tensors, file, key)
    except FileNotFoundError:
        pass
    except UnusableFile as error:
        reason = f", because the one before {error}"
    except OSError as error:
        reason = f", because the one before cannot be read ({error.strerror})"
    else:
        where.report(f"weights    {way} from the cache {file}")
        return
    load()
    try:
        _write(tensors, file, key)
        _read(tensors, file, key)  # pages of the file can be shared with other processes
    except (OSError, UnusableFile) as error:
        where.report(f"weights    not written to the cache: {error}")
    else:
        where.report(f"weights    written to the cache {file}{reason}")


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters of a model and the tensors of its packed weights, by name."""
    found: dict[str, Tensor] = dict(model.named_parameters())
    for place, module in model.named_modules():
        for name, weight in vars(module).items():
            if isinstance(weight, PackedWeight):
                for part in ("data", "scales", "offsets"):
                    if (tensor := getattr(weight, part)) is not None:
                        found[f"{place}.{name}.{part}"] = tensor
    return found


def _offsets(tensors: Mapping[str, Tensor]) -> tuple[list[int], int]:
    """The place of each tensor in the file, and the size of the file, in bytes."""
    offsets, end = [], _PAGE
    for tensor in tensors.values():
        offsets.append(end)
        end += -(-tensor.nbytes // _PAGE) * _PAGE
    return offsets, end


@torch.no_grad()
def _read(tensors: Mapping[str, Tensor], file: Path, key: bytes) -> Literal["mapped", "copied"]:
    """Let the tensors have the memory of the file if its pages are large, else copy it.

    Raises UnusableFile and OSError, and then changes no tensor.
    """
    offsets, size = _offsets(tensors)
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        stat = os.fstat(descriptor)
        if stat.st_uid != os.geteuid():
            raise UnusableFile("belongs to another user")
        header = os.read(descriptor, _HEADER.size)
        if len(header) < _HEADER.size or stat.st_size < _PAGE:
            raise UnusableFile("is truncated")
        magic, found, num_bytes, checksum = _HEADER.unpack(header)
        if magic != _MAGIC or found != key:
            raise UnusableFile("is of other files, options or code")
        if not num_bytes == stat.st_size == size:
            raise UnusableFile("is truncated")
        # torch warns of memory that it cannot write; a private mapping never changes the file
        memory = mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)
    num_faults = -resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    if _checksum(memory) != checksum:
        raise UnusableFile("is damaged")
    num_faults += resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    way: Literal["mapped", "copied"] = "mapped" if num_faults * _LARGE_PAGE <= size else "copied"
    whole = torch.from_numpy(np.frombuffer(memory, np.uint8))
    for tensor, offset in zip(tensors.values(), offsets, strict=True):
        values = whole[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        if way == "mapped":
            tensor.data = values
        else:
            tensor.copy_(values)
    return way


def _checksum(memory: mmap.mmap) -> int:
    """The sum of the 64-bit words behind the header, modulo 2^64. Reading them brings the pages into memory."""
    return int(np.frombuffer(memory, "<u8", offset=_PAGE).sum(dtype=np.uint64))


def _write(tensors: Mapping[str, Tensor], file: Path, key: bytes) -> None:
    """Write the file, only readable by this user, and rename it into place. Raises OSError, UnusableFile.

    The lock is released when the descriptor is closed, also by the end of the process.
    """
    offsets, size = _offsets(tensors)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        _lock(descriptor, temporary)
        os.ftruncate(descriptor, 0)
        os.ftruncate(descriptor, size)
        for tensor, offset in zip(tensors.values(), offsets, strict=True):
            _write_all(descriptor, tensor.detach().reshape(-1).view(torch.uint8).numpy(), offset)
        with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as memory:
            checksum = _checksum(memory)
        os.pwrite(descriptor, _HEADER.pack(_MAGIC, key, size, checksum), 0)
        os.fsync(descriptor)
        temporary.replace(file)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def _lock(descriptor: int, file: Path) -> None:
    """Raises UnusableFile if another process writes the file, or has just renamed it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        renamed = file.stat().st_ino != os.fstat(descriptor).st_ino
    except (BlockingIOError, FileNotFoundError):
        renamed = True
    if renamed:
        raise UnusableFile(f"another process writes {file}")


def _write_all(descriptor: int, values: np.ndarray, offset: int) -> None:
    """Write bytes, of which one call of the system writes at most 2 GiB."""
    left = values.data
    while left:
        written = os.pwrite(descriptor, left, offset)
        left, offset = left[written:], offset + written
