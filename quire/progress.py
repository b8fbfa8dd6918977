"""Progress: what a person at a terminal sees while tokens come. Knows rich."""

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class TokenProgress:
    """A bar of finished sequences with tokens per second, on the error stream.

    work: what is being done, in a word. shown: None shows it where that stream is a terminal.
    """

    def __init__(self, work: str, total: int, *, shown: bool | None = None) -> None:
        self._bar = Progress(
            TextColumn(work),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[speed]:.0f} tokens/s"),
            console=Console(stderr=True),
            disable=not (sys.stderr.isatty() if shown is None else shown),
        )
        self._task = self._bar.add_task(work, total=total, speed=0.0)
        self._num_tokens = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def add(self, num_tokens: int, num_finished: int) -> None:
        """Count what a step brought: tokens, and sequences that ended."""
        if self._bar.disable:
            return
        self._num_tokens += num_tokens
        elapsed = self._bar.tasks[self._task].elapsed or 0.0
        self._bar.update(self._task, advance=num_finished, speed=self._num_tokens / elapsed if elapsed else 0.0)
