"""run-batch: requests from a file, results into another. Knows files and the app; the routes do the work.

All that a route does for a client it does for a line: checks, errors, limits. There is no socket.
"""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
from fastapi import FastAPI
from starlette.types import ASGIApp

from quire.config import EngineOptions
from quire.errors import ConfigError, QuireError
from quire.server.app import make_app
from quire.server.batch.batch_output import Output
from quire.server.batch.file_format import BadLine, Task, duplicate, parse, read_lines, result
from quire.server.batch.in_process_client import Answer, post
from quire.server.launch import launched

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
