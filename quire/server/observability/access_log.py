"""The access log: one line of JSON per request, written after its response has ended.

A thread appends the pending lines to the file (O_APPEND), normally in one write. Before each write it reopens the file
if another one, or none, is at its path. So the log can be renamed or truncated for rotation without a signal.
"""

import logging
import os
import queue
import threading
from collections.abc import Callable
from datetime import UTC, datetime

import msgspec

from quire.control_characters import visible_json
from quire.errors import ConfigError
from quire.server.observability.request_record import RequestRecord

log = logging.getLogger(__name__)

MAX_PENDING_LINES = 10_000  # pending; further ones are dropped if the disk is too slow
MAX_PENDING_BYTES = 64 * 2**20  # of pending lines together; lines with prompts can be long
CLOSE_SECONDS = 2.0  # maximum time for pending lines
_MODE = 0o640
_STDOUT = 1


class AccessLog:
    """A sink of request records. path: "-" is stdout. on_lost(num_lines): called for lines that were not written.

    with_content: whether to write prompts and outputs, too. Raises ConfigError for a file that cannot be written. Later
    errors are logged and do not fail requests.
    """

    def __init__(self, path: str, on_lost: Callable[[int], None], *, with_content: bool = False) -> None:
        self._on_lost = on_lost
        self._path = None if path == "-" else path
        self._with_content = with_content
        self._failing = False
        self._num_queued_bytes = self._num_written_bytes = 0  # bytes; each counter has one writing thread
        self._file = _open_or_config_error(path)
        self._lines: queue.Queue[bytes | None] = queue.Queue(MAX_PENDING_LINES)
        self._thread = threading.Thread(target=self._run, name="quire-access-log", daemon=True)
        self._thread.start()

    def __call__(self, record: RequestRecord) -> None:
        """Queue the line of an ended request."""
        line = msgspec.json.encode(line_of(record, with_content=self._with_content)) + b"\n"
        waiting = self._num_queued_bytes - self._num_written_bytes
        try:
            if waiting and waiting + len(line) > MAX_PENDING_BYTES:
                raise queue.Full
            self._lines.put_nowait(line)
            self._num_queued_bytes += len(line)
        except queue.Full:
            self._on_lost(1)

    def close(self) -> None:
        """Write pending lines, within about twice CLOSE_SECONDS. The log must not be called afterwards."""
        try:
            self._lines.put(None, timeout=CLOSE_SECONDS)
        except queue.Full:
            return
        self._thread.join(CLOSE_SECONDS)
        if self._path is not None and not self._thread.is_alive() and self._file >= 0:
            os.close(self._file)

    # The following methods run on the thread.

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            lines = [line]
            last = False
            while not (self._lines.empty() or last):
                more = self._lines.get()
                last = more is None
                lines += [] if more is None else [more]
            self._write(lines)
            self._num_written_bytes += sum(map(len, lines))
            if last:
                return

    def _write(self, lines: list[bytes]) -> None:
        try:
            self._reopen_if_rotated()
            data = visible_json(b"".join(lines))
            while data:
                data = data[os.write(self._file, data) :]
            self._failing = False
        except OSError as error:
            self._on_lost(len(lines))
            if not self._failing:  # logged once per failure
                log.error("the access log cannot be written: %s", error)
            self._failing = True

    def _reopen_if_rotated(self) -> None:
        """Reopen the file if another one, or none, is at its path."""
        if self._path is None:
            return
        if self._file >= 0:
            try:
                there, ours = os.stat(self._path), os.fstat(self._file)
                if (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino):
                    return
            except FileNotFoundError:
                pass
            os.close(self._file)
            self._file = -1
        self._file = _open(self._path)


def check_path(path: str) -> None:
    """Create the file if it is missing. Raises ConfigError if it cannot be written."""
    file = _open_or_config_error(path)
    if file != _STDOUT:
        os.close(file)


def line_of(record: RequestRecord, *, with_content: bool) -> dict[str, object]:
    """The fields of a request's line. Seconds are rounded to microseconds."""
    stats = record.get_stats(with_content) if record.get_stats else None
    first = None if record.first_byte is None else record.first_byte - record.began
    client = record.scope.get("client")
    line: dict[str, object] = {
        "time": datetime.fromtimestamp(record.arrival_time, UTC).isoformat(timespec="milliseconds"),
        "request_id": record.id,
        "answer_id": record.answer_id,
        "tenant": record.tenant,
        "client": client[0] if client else None,
        "method": record.method,
        "route": record.route,
        "status": record.status,
        "error": record.error,
        "ignored": record.ignored,
        "complete": record.complete,
        "bytes": record.num_bytes,
        "seconds": round(record.seconds, 6),
        "first_byte_seconds": None if first is None else round(first, 6),
        "model": record.model,
        "prompt_tokens": stats and stats.num_prompt_tokens,
        "completion_tokens": stats and stats.num_output_tokens,
        "cached_tokens": stats and stats.num_cached_tokens,
        "finish_reasons": stats and stats.finish_reasons,
    }
    if with_content and stats:
        line |= {"prompts": stats.prompts, "outputs": stats.outputs}
    return line


def _open_or_config_error(path: str) -> int:
    try:
        return _STDOUT if path == "-" else _open(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the access log {path} cannot be written ({error}); name another file") from error


def _open(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _MODE)
