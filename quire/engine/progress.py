"""Progress: what a person at a terminal sees while tokens come. Knows rich."""

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from quire.engine.outputs import Delta


class TokenProgress:
    """A bar of finished sequences with tokens per second, on the error stream.

    shown: None shows it where that stream is a terminal.
    """

    def __init__(self, total: int, *, shown: bool | None = None) -> None:
        self._bar = Progress(
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[speed]:.0f} tokens/s"),
            console=Console(stderr=True),
            disable=not (sys.stderr.isatty() if shown is None else shown),
        )
        self._task = self._bar.add_task("generating", total=total, speed=0.0)
        self._num_tokens = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def add(self, delta: Delta) -> None:
        """Count what a step brought."""
        if self._bar.disable:
            return
        self._num_tokens += len(delta.token_ids)
        elapsed = self._bar.tasks[self._task].elapsed or 0.0
        self._bar.update(
            self._task,
            advance=int(delta.finish_reason is not None),
            speed=self._num_tokens / elapsed if elapsed else 0.0,
        )
