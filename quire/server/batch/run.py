"""run-batch: requests from a file, results into another. Knows files and the app; the routes do the work.

All that a route does for a client it does for a line: checks, errors, limits. There is no socket.
"""

import asyncio
import fcntl
import os
import signal
import stat
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
from fastapi import FastAPI
from starlette.types import ASGIApp

from quire.config import EngineOptions
from quire.errors import ConfigError, QuireError
from quire.server.app import make_app
from quire.server.batch.file_format import KNOWN, BadLine, Task, duplicate, parse, read_lines, result
from quire.server.batch.in_process_client import Answer, post
from quire.server.serve import launched


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


CONCURRENCY = 256  # so that some wait while 128 run
_MAX_WAIT = 60.0  # seconds until a request is asked again that was told to come back later


class BatchStopped(QuireError):
    """A batch ended before all was asked. What has been answered is written."""


def run_batch(  # noqa: PLR0913 (a flag each)
    options: EngineOptions,
    source: Path,
    target: Path,
    *,
    resume: bool = False,
    concurrency: int = CONCURRENCY,
    model_name: str | None = None,
    report: Callable[[str], None],
    progress: Callable[[int, int], None],
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Answer all lines of `source`, at most `concurrency` at once, into `target`, as the answers come.

    resume: lines whose custom_id has a result in `target` are passed over. report(line) is told what is planned and
    what came of it; progress(done, total) counts bytes of the model, advance(done, total) lines. Raises ConfigError
    for files that cannot be used, before the model is loaded; BatchStopped.
    """
    if source.exists() and target.exists() and source.samefile(target):
        raise ConfigError(f"{target} is the input; results need a file of their own")
    try:
        file = source.open("rb")
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error.strerror}") from error
    with file:
        total = sum(1 for _ in read_lines(file)) if source.is_file() else 0  # a pipe can be read but once
        if total:
            file.seek(0)
        output = Output(target, resume=resume)
        try:
            with launched(options, model_name, report=report, progress=progress) as service:
                app = make_app(service, holds_back=False)
                batch = Batch(app, output, lambda done: advance(done, max(done, total)))
                asyncio.run(_until_signal(app, batch.run(file, concurrency)))
        except (asyncio.CancelledError, KeyboardInterrupt):
            raise BatchStopped(f"stopped; what is answered is in {target}, and --resume goes on") from None
        except OSError as error:
            raise BatchStopped(f"{error}; what is answered is in {target}, and --resume goes on") from error
        finally:
            output.close()
    report(f"{batch.num_done} requests: {batch.summary()}; results are in {target}")


async def _until_signal(app: FastAPI, work: Coroutine[object, object, None]) -> None:
    """Do the work while the app is up. SIGTERM is taken as Ctrl-C is."""
    async with app.router.lifespan_context(app):
        working = asyncio.ensure_future(work)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, working.cancel)
        await working


class _Refusal(msgspec.Struct):
    code: str | None = None
    message: str = ""


class _Refused(msgspec.Struct):
    error: _Refusal


class Batch:
    """One run. advance(done): so many lines are behind us."""

    def __init__(self, app: ASGIApp, output: Output, advance: Callable[[int], None]) -> None:
        self._app = app
        self._output = output
        self._advance = advance
        self.num_done = 0
        self.num_known = 0  # with a result of an earlier run
        self.num_failed = 0

    async def run(self, file: BinaryIO, concurrency: int) -> None:
        """Answer all lines. Raises BatchStopped, OSError."""
        lines = self._lines(file)
        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(concurrency):
                    workers.create_task(self._work(lines))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    def summary(self) -> str:
        """How they ended, in words."""
        good = self.num_done - self.num_known - self.num_failed
        known = f", {self.num_known} before" if self.num_known else ""
        return f"{good} answered{known}, {self.num_failed} failed"

    def _lines(self, file: BinaryIO) -> Iterator[Task | BadLine]:
        seen: set[str] = set()
        for number, line in read_lines(file):
            found = parse(number, line)
            if found.custom_id in seen:
                found = duplicate(found)
            elif found.custom_id is not None:
                seen.add(found.custom_id)
            yield found

    async def _work(self, lines: Iterator[Task | BadLine]) -> None:
        for found in lines:
            if isinstance(found, BadLine):
                known = found.number in self._output.told
            else:
                known = found.custom_id in self._output.done
            if known:
                self.num_known += 1
            else:
                await self._do(found)
            self.num_done += 1
            self._advance(self.num_done)

    async def _do(self, found: Task | BadLine) -> None:
        answer = await self._answer(found) if isinstance(found, Task) else None
        self._output.write(result(found, answer))
        self.num_failed += answer is None or answer.status >= 400

    async def _answer(self, task: Task) -> Answer:
        """Asks again as long as the app is only busy, as with many other lines. Raises BatchStopped at its end."""
        answer = await post(self._app, task.url, task.body)
        while (wait := _wait(answer)) is not None:
            await asyncio.sleep(wait)
            answer = await post(self._app, task.url, task.body)
        if answer.status == 503:
            raise BatchStopped(f"{_refusal(answer).message}; what is answered is written, and --resume goes on")
        return answer


def _wait(answer: Answer) -> float | None:
    """Seconds until it is worth to ask again; None where the answer will not change."""
    after = answer.headers.get("retry-after", "")
    busy = answer.status in (429, 503) and after.isdecimal() and _refusal(answer).code != "deadline_unreachable"
    return min(float(after), _MAX_WAIT) if busy else None


def _refusal(answer: Answer) -> _Refusal:
    return msgspec.json.decode(answer.body, type=_Refused).error
