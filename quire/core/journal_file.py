"""The file of a journal: msgpack records, each behind its length and its CRC-32 in 4 bytes each.

A journal is data only. Its file can be read by its owner only, because it has the tokens of prompts and outputs.
"""

import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from typing import BinaryIO, TypeVar

import msgspec

from quire.core import codec
from quire.errors import ConfigError, QuireError

log = logging.getLogger(__name__)

T = TypeVar("T")
_HEAD = struct.Struct("<II")  # bytes of a record, and their CRC-32


class JournalError(QuireError):
    """A file is not a journal, is damaged, or has another format."""


class ReplayReport(msgspec.Struct, frozen=True):
    """The number of equal steps of a replay. `difference` is empty if all steps are equal.

    what: name of the steps, for messages.
    """

    num_steps: int
    difference: str
    what: str = "steps"


def open_journal(path: str) -> BinaryIO:
    """Create a journal. Raises ConfigError if the file exists or cannot be written."""
    try:
        return open(path, "xb", opener=_for_owner)
    except FileExistsError as error:
        raise ConfigError(f"the journal {path!r} exists; name another file, or move it away") from error
    except OSError as error:
        raise ConfigError(f"the journal {path!r} cannot be written: {error.strerror}") from error


def open_restart_journal(path: str) -> BinaryIO | None:
    """Create the journal of a restarted engine: the first of `path`.1, `path`.2, ... that does not exist.

    None, with a line in the log, if it cannot be written: a restart is worth more than its journal.
    """
    number = 1
    while True:
        try:
            return open(f"{path}.{number}", "xb", opener=_for_owner)
        except FileExistsError:
            number += 1
        except OSError as error:
            log.error("the engine runs without a journal: %s.%d cannot be written: %s", path, number, error.strerror)
            return None


def _for_owner(path: str, flags: int) -> int:
    """An opener of files that their owner alone can read."""
    return os.open(path, flags, 0o600)


class JournalFile:
    """A journal that is written. An OSError ends the journal, not the process."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._write_failed = False  # whether a write failed; later records would be useless

    def write(self, data: bytes) -> None:
        """Append an encoded record."""
        self._with_file(lambda file: file.write(_HEAD.pack(len(data), zlib.crc32(data)) + data))

    def flush(self) -> None:
        """Give the records to the operating system."""
        self._with_file(lambda file: file.flush())

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # on a full disk, buffered records are lost
            self._file.close()

    def _with_file(self, action: Callable[[BinaryIO], object]) -> None:
        if self._write_failed:
            return
        try:
            action(self._file)
        except OSError as error:
            self._write_failed = True
            log.error("the journal cannot be written and ends here: %s", error)


def read_journal(file: BinaryIO, kind: type[T]) -> Iterator[T]:
    """The records of a journal. An incomplete last record (the process died) is omitted.

    Raises JournalError for a record that is damaged, with its number: 0 is the header.
    """
    for number in count():
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return
        length, checksum = _HEAD.unpack(head)
        data = file.read(length)
        if number and len(data) < length:
            return
        if zlib.crc32(data) != checksum:
            raise JournalError(_damaged(number, "its checksum differs"))
        try:
            yield codec.decode(data, kind)
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            raise JournalError(_damaged(number, str(error))) from error


def _damaged(number: int, why: str) -> str:
    if number == 0:
        return f"not a quire journal, damaged at its begin, or of an old format: {why}"
    return f"record {number} is damaged: {why}"
