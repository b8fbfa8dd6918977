"""Runs of a batch on a bounded thread pool: programs may block and execute any Python code."""

import contextvars
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from quire.errors import RequestError

T = TypeVar("T")

AUTO_THREADS = 96
MAX_THREADS = 1024


def run_all(
    work: Sequence[Callable[[], T]],
    num_threads: int | str,
    cancel: Callable[[], None],
    *,
    show_progress: bool,
    name: str,
) -> Iterator[T]:
    """Yields the results in order, each as soon as it is ready. Raises the first error in that order.

    num_threads: how many run at a time; "auto" is 96. cancel: called after an error, or if the iterator is closed
    early; it must make the running calls end soon. The others are then not started. Raises RequestError.
    """
    threads = AUTO_THREADS if num_threads == "auto" else num_threads
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= MAX_THREADS:
        raise RequestError(f"num_threads must be 'auto' or 1 to {MAX_THREADS}, not {num_threads!r}", "num_threads")
    return _run_all(work, threads, cancel, show_progress=show_progress, name=name)


def _run_all(
    work: Sequence[Callable[[], T]], threads: int, cancel: Callable[[], None], *, show_progress: bool, name: str
) -> Iterator[T]:
    bar = Progress(
        TextColumn(name),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not show_progress,
    )
    task = bar.add_task(name, total=len(work))
    pool = ThreadPoolExecutor(max(1, min(threads, len(work))), thread_name_prefix="quire-program")
    running: deque[Future[T]] = deque()
    try:
        with bar:
            for one in work:
                running.append(pool.submit(contextvars.copy_context().run, one))
                if len(running) > 2 * threads:  # bounds the results that wait for a slow consumer
                    yield running.popleft().result()
                    bar.advance(task)
            while running:
                yield running.popleft().result()
                bar.advance(task)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        cancel()
        raise
    finally:
        pool.shutdown()
