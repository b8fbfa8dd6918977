"""Sends the lines of a batch to the app in process. Each has the checks, errors and limits of an HTTP request."""

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

import msgspec
from starlette.types import ASGIApp

from quire.errors import QuireError
from quire.server.api_keys import Caller
from quire.server.batch.file_format import BadLine, Task
from quire.server.batch.in_process_client import Response, post

_MAX_WAIT = 60.0  # seconds, upper bound of a Retry-After
_NO_RETRY = ("deadline_unreachable", "draining")  # codes of errors that the same request would have again


class BatchStopped(QuireError):
    """A batch ended before all lines had a result. The results so far are written."""


class Results(Protocol):
    """Where the results of a batch go."""

    def has(self, found: Task | BadLine) -> bool:
        """Whether an earlier run has a result of this line."""

    async def add(self, found: Task | BadLine, answer: Response | None) -> None:
        """Add a result. answer: None for a BadLine. Raises what ends the batch."""


class _Error(msgspec.Struct):
    code: str | None = None
    message: str = ""


class _ErrorBody(msgspec.Struct):
    error: _Error


async def send_lines(
    app: ASGIApp,
    lines: AsyncIterator[Task | BadLine],
    results: Results,
    *,
    concurrency: int,
    slots: asyncio.Semaphore,
    caller: Caller | None = None,
) -> None:
    """Send all lines that have no result yet, at most `concurrency` at once.

    slots: one is held while a request is in the app, but not until it is sent again. caller: the sender of the
    requests; None for a server without keys. Raises BatchStopped if the app serves no more requests; those that were
    sent before have their results then. Raises what `results` raises.
    """
    stopped: list[BatchStopped] = []
    places = asyncio.Semaphore(concurrency)

    async def work(found: Task | BadLine) -> None:
        try:
            await results.add(found, await _answer(app, found, slots, caller) if isinstance(found, Task) else None)
        except BatchStopped as error:
            stopped.append(error)
        finally:
            places.release()

    try:
        async with asyncio.TaskGroup() as group:
            async for found in lines:
                if results.has(found):
                    continue
                await places.acquire()
                if stopped:
                    break
                group.create_task(work(found))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    if stopped:
        raise stopped[0]


async def _answer(app: ASGIApp, task: Task, slots: asyncio.Semaphore, caller: Caller | None) -> Response:
    """The response, after retries while the app is busy. Raises BatchStopped if it serves no more requests."""
    while True:
        async with slots:
            answer = await post(app, task.url, task.body, caller)
        wait = _retry_after(answer)
        if wait is None:
            break
        await asyncio.sleep(wait)
    if answer.status == 503:
        raise BatchStopped(_error_of(answer).message)
    return answer


def _retry_after(answer: Response) -> float | None:
    """Seconds until a retry; None for a final response."""
    after = answer.headers.get("retry-after", "")
    busy = answer.status in (429, 503) and after.isdecimal() and _error_of(answer).code not in _NO_RETRY
    return min(float(after), _MAX_WAIT) if busy else None


def _error_of(answer: Response) -> _Error:
    return msgspec.json.decode(answer.body, type=_ErrorBody).error
