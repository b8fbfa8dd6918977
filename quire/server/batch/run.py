"""Batch runs: requests from a file, results to another.

Each line is sent to the app in process, so it has the checks, errors and limits of an HTTP request.
"""

import asyncio
import fcntl
import os
import signal
import stat
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

import msgspec
from fastapi import FastAPI
from starlette.types import ASGIApp

from quire.config import EngineOptions
from quire.errors import ConfigError
from quire.server.app import make_app
from quire.server.batch.file_format import (
    READ_SIZE,
    RESULT_DECODER,
    BadLine,
    LineSplitter,
    Task,
    TaskReader,
    result_line,
)
from quire.server.batch.in_process_client import Response
from quire.server.batch.sender import BatchStopped, send_lines
from quire.server.observability.activity import ActivityLine
from quire.server.options import ServerOptions
from quire.server.serve import launched
from quire.server.service import Service

_TICK_SECONDS = 0.5  # between checks whether a line of figures is due


class ResultFile:
    """The file of results. done_ids: custom_ids that have a result. invalid_lines: numbers of invalid lines."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        """Open or create the file. resume: read its results, and remove an incomplete last line.

        Raises ConfigError if it cannot be written, is in use, has other content, or has results without `resume`.
        """
        self.done_ids: set[str] = set()
        self.invalid_lines: set[int] = set()
        try:
            self._file = path.open("a+b", buffering=0) if not path.exists() or path.is_file() else path.open("wb", 0)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
        try:
            self._lock_and_read(path, resume=resume)
        except BaseException:
            self._file.close()
            raise

    def write(self, line: bytes) -> None:
        """Append a line, newline included. Raises OSError."""
        while line:
            line = line[self._file.write(line) or 0 :]

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _lock_and_read(self, path: Path, *, resume: bool) -> None:
        if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):  # a terminal or a pipe holds no earlier results
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"{path} is being written by another batch; wait for it or name another file") from error
        if not resume and os.fstat(self._file.fileno()).st_size:
            raise ConfigError(f"{path} has results already; continue it with --resume, or name another file")
        self._read_results(path)

    def _read_results(self, path: Path) -> None:
        whole = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    known = RESULT_DECODER.decode(line)
                except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                    raise ConfigError(
                        f"line {number} of {path} is no result of a batch ({error}); name another file"
                    ) from error
                whole += len(line)
                if known.error is not None and known.error.line is not None:
                    self.invalid_lines.add(known.error.line)
                elif known.custom_id is not None:
                    self.done_ids.add(known.custom_id)
        self._file.truncate(whole)


CONCURRENCY = 256  # of each engine: twice the default of max_num_seqs, so that some requests wait


def run_batch(  # noqa: PLR0913 (a flag each)
    options: EngineOptions,
    source: Path,
    target: Path,
    *,
    resume: bool = False,
    concurrency: int | None = None,
    data_parallel_size: int = 1,
    model_name: str | None = None,
    lora_modules: Sequence[str] = (),
    lora_dir: str | None = None,
    report: Callable[[str], None],
    progress: Callable[[int, int], None],
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Send all lines of `source`, at most `concurrency` at once, and append results to `target` as they arrive.

    concurrency: None: CONCURRENCY for each of `data_parallel_size` replicas. resume: skips lines that have a result in
    `target`. lora_modules, lora_dir: as in ServerOptions. report(line) gets the memory plan, lines of figures and the
    summary, progress(done, total) bytes of the model, advance(done, total) lines. Raises ConfigError for unusable files
    and options, before the model is loaded; ConfigError, ModelError, EngineStopped for the engine; BatchStopped.
    """
    server = ServerOptions(
        served_model_name=(model_name,) if model_name else (),
        lora_modules=tuple(lora_modules),
        lora_dir=lora_dir,
        data_parallel_size=data_parallel_size,
        watchdog=0.0,
    )
    server.check()
    if source.exists() and target.exists() and source.samefile(target):
        raise ConfigError(f"{target} is the input; name another file for the results")
    try:
        file = source.open("rb")
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error.strerror}") from error
    with file:
        total = _num_lines(file) if source.is_file() else 0  # a pipe can be read only once
        if total:
            file.seek(0)
        output = ResultFile(target, resume=resume)
        try:
            with launched(options, server, report=report, progress=progress) as service:
                app = make_app(service, with_tarpit=False)
                batch = Batch(app, output, lambda done: advance(done, max(done, total)))
                activity = ActivityLine(lambda: service.engine.health().stats, report)
                asyncio.run(
                    _until_signal(
                        app,
                        _checked(service, batch.run(file, concurrency or CONCURRENCY * data_parallel_size)),
                        activity,
                    )
                )
        except (asyncio.CancelledError, KeyboardInterrupt):
            raise BatchStopped(f"stopped; finished results are in {target}, and --resume continues") from None
        except OSError as error:
            raise BatchStopped(f"{error}; finished results are in {target}, and --resume continues") from error
        finally:
            output.close()
    report(f"{batch.num_done} requests: {batch.summary()}; results are in {target}")


def _num_lines(file: BinaryIO) -> int:
    lines = LineSplitter()
    return sum(len(lines.push(data)) for data in iter(partial(file.read, READ_SIZE), b"")) + len(lines.finish())


async def _until_signal(app: FastAPI, work: Coroutine[object, object, None], activity: ActivityLine) -> None:
    """Run `work` while the app is started, with lines of figures. SIGTERM cancels it, as Ctrl-C does."""
    async with app.router.lifespan_context(app):
        working, reporting = asyncio.ensure_future(work), asyncio.ensure_future(_report(activity))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, working.cancel)
        try:
            await working
        finally:
            reporting.cancel()


async def _checked(service: Service, work: Coroutine[object, object, None]) -> None:
    """Run `work` in the app that has started. Raises ConfigError for adapters that cannot be used, EngineStopped."""
    if service.adapters.failure is not None:
        work.close()
        raise service.adapters.failure
    await work


async def _report(activity: ActivityLine) -> None:
    while True:
        await asyncio.sleep(_TICK_SECONDS)
        activity.update()


class Batch:
    """One batch run, whose results go to a file. advance(done): called with the number of lines done."""

    def __init__(self, app: ASGIApp, output: ResultFile, advance: Callable[[int], None]) -> None:
        self._app = app
        self._output = output
        self._advance = advance
        self.num_done = 0
        self.num_skipped = 0  # skipped: they have a result of an earlier run
        self.num_failed = 0

    async def run(self, file: BinaryIO, concurrency: int) -> None:
        """Send all lines and write their results. Raises BatchStopped, OSError."""
        try:
            slots = asyncio.Semaphore(concurrency)
            await send_lines(self._app, _tasks(file), self, concurrency=concurrency, slots=slots)
        except BatchStopped as error:
            raise BatchStopped(f"{error}; finished results are written, and --resume continues") from None

    def has(self, found: Task | BadLine) -> bool:
        """Whether the file has a result of this line. If so, counts it as skipped."""
        known = (
            found.number in self._output.invalid_lines
            if isinstance(found, BadLine)
            else found.custom_id in self._output.done_ids
        )
        if known:
            self.num_skipped += 1
            self._count()
        return known

    async def add(self, found: Task | BadLine, answer: Response | None) -> None:
        """Write a result. Raises OSError."""
        self._output.write(result_line(found, answer))
        self.num_failed += answer is None or answer.status >= 400
        self._count()

    def summary(self) -> str:
        """The numbers of answered, skipped and failed lines, as text."""
        good = self.num_done - self.num_skipped - self.num_failed
        known = f", {self.num_skipped} before" if self.num_skipped else ""
        return f"{good} answered{known}, {self.num_failed} failed"

    def _count(self) -> None:
        self.num_done += 1
        self._advance(self.num_done)


async def _tasks(file: BinaryIO) -> AsyncIterator[Task | BadLine]:
    reader = TaskReader()
    while data := file.readline(READ_SIZE):
        for found in reader.push(data):
            yield found
    for found in reader.finish():
        yield found
