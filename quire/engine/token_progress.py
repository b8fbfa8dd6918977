"""The progress bar of generations in this process."""

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from quire.core.prompt_progress import PromptProgress


class TokenProgress:
    """Progress bar on stderr: finished sequences, tokens per second, and prompts that take more than one step.

    work: label of the bar. shown: None shows the bar if stderr is a terminal.
    """

    def __init__(self, work: str, total: int, *, shown: bool | None = None) -> None:
        self._bar: Progress | None = None
        if not (sys.stderr.isatty() if shown is None else shown):
            return
        self._bar = Progress(
            TextColumn(work),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[speed]:.0f} tokens/s"),
            TextColumn("{task.fields[prompts]}"),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task(work, total=total, speed=0.0, prompts="")
        self._num_tokens = 0

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show_prompts(self, progress: PromptProgress) -> None:
        """Show how far the running prompts are."""
        if self._bar is not None:
            self._bar.update(self._task, prompts=str(progress) if progress.num_prompts else "")

    def update(self, num_tokens: int, num_finished: int) -> None:
        """Count the tokens of a step and the sequences that ended in it."""
        if self._bar is None:
            return
        self._num_tokens += num_tokens
        elapsed = self._bar.tasks[self._task].elapsed or 0.0
        self._bar.update(self._task, advance=num_finished, speed=self._num_tokens / elapsed if elapsed else 0.0)
