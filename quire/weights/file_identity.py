"""Identity of a file: values of which one differs if another content is in its place.

Size and time of change (mtime) are equal if a file was replaced by one of equal size and its time was kept: by `cp -p`,
`rsync -t`, or layers of an image. The time of the last change of the inode (ctime) cannot be set by a program: a file
in a writable folder has another one then. Images may have recorded times of both kinds. So the identity also has a sum
over the content.
"""

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

_HEAD = 2**20  # bytes at the begin of a file that every sum has, and from which on a file is sampled
_PAGE, _STRIDE = 4096, 2**22  # bytes of a piece of a sampled file, and from one piece to the next
_COLUMNS = 1021  # sums of a piece; prime, so that exchanged rows of a tensor change them
_PIECE = 8 * 128 * _COLUMNS  # bytes


class FileIdentity(NamedTuple):
    """Two files with equal values have the same content. Times are nanoseconds."""

    path: str
    size: int
    changed: int
    inode_changed: int
    inode: int
    content: str  # hash of sums over the content: of all of it, or of its begin and of a page of every 4 MiB


def has_recorded_time(file: Path) -> bool:
    """Whether the time of the inode may be a recorded one, so that all of the content counts. Raises OSError.

    The kernel has not set it if it has no fraction of a second, or if the file system cannot be written.
    """
    descriptor = os.open(file, os.O_RDONLY)
    try:
        return _is_recorded(descriptor, os.fstat(descriptor))
    finally:
        os.close(descriptor)


def _is_recorded(descriptor: int, stat: os.stat_result) -> bool:
    return stat.st_ctime_ns % 10**9 == 0 or bool(os.fstatvfs(descriptor).f_flag & os.ST_RDONLY)


def file_identity(file: Path) -> FileIdentity:
    """The identity of a file. Raises OSError. All of it is read if it is small or `has_recorded_time`, else a part."""
    resolved = file.resolve()
    descriptor = os.open(resolved, os.O_RDONLY)
    try:
        stat = os.fstat(descriptor)
        is_whole = stat.st_size <= _HEAD or _is_recorded(descriptor, stat)
        content = _whole(descriptor) if is_whole else _sampled(descriptor, stat.st_size)
    finally:
        os.close(descriptor)
    return FileIdentity(str(resolved), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, content)


def _whole(descriptor: int) -> str:
    """A hash of the sums of 64-bit words, at the rate at which the file is read."""
    digest, buffer, at = hashlib.sha256(), bytearray(_PIECE), 0
    while size := os.preadv(descriptor, [buffer], at):
        at += size
        if size < _PIECE:
            digest.update(memoryview(buffer)[:size])
            continue
        words = np.frombuffer(buffer, np.uint64).reshape(-1, _COLUMNS)
        digest.update(words.sum(axis=0, dtype=np.uint64).tobytes())
    return digest.hexdigest()


def _sampled(descriptor: int, size: int) -> str:
    """A hash of the begin, of a page of every 4 MiB and of the end."""
    digest = hashlib.sha256(os.pread(descriptor, _HEAD, 0))
    for start in (*range(_STRIDE, size - _PAGE, _STRIDE), size - _PAGE):
        digest.update(os.pread(descriptor, _PAGE, start))
    return digest.hexdigest()
