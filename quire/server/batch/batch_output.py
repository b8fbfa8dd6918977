"""The file of a batch's results. Knows files and what is in one already; no requests.

Lines are added whole. A process that is killed leaves all lines that it wrote, of which the machine's own end may
tear the last one: whoever goes on with the file cuts that off.
"""

import fcntl
import os
import stat
from pathlib import Path

import msgspec

from quire.errors import ConfigError
from quire.server.batch.file_format import KNOWN


class Output:
    """Results, old and new. done: custom_ids with a result. told: numbers of lines that were bad."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        """Open the file, made where there is none. resume: go on with what is in it.

        Raises ConfigError where it cannot be written, is in use, or holds something else than is to be expected.
        """
        self.done: set[str] = set()
        self.told: set[int] = set()
        try:
            self._file = path.open("a+b", buffering=0) if not path.exists() or path.is_file() else path.open("wb", 0)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
        try:
            self._take(path, resume=resume)
        except BaseException:
            self._file.close()
            raise

    def write(self, line: bytes) -> None:
        """Add a line, which ends with a newline. Raises OSError."""
        while line:
            line = line[self._file.write(line) or 0 :]

    def close(self) -> None:
        """No more is written."""
        self._file.close()

    def _take(self, path: Path, *, resume: bool) -> None:
        if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):  # a terminal or a pipe has no past
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"{path} is being written by another batch; wait for its end or name another") from error
        if not resume and os.fstat(self._file.fileno()).st_size:
            raise ConfigError(f"{path} has results already; go on with it with --resume, or name another file")
        self._read(path)

    def _read(self, path: Path) -> None:
        whole = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    known = KNOWN.decode(line)
                except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                    raise ConfigError(
                        f"line {number} of {path} is no result of a batch ({error}); name another file"
                    ) from error
                whole += len(line)
                if known.error is not None and known.error.line is not None:
                    self.told.add(known.error.line)
                elif known.custom_id is not None:
                    self.done.add(known.custom_id)
        self._file.truncate(whole)
