"""Progress bars on stderr, shown if it is a terminal."""

import sys

from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from quire.terminal.console import VisibleConsole


class CountBar:
    """Progress of a number of things, such as the lines of a batch. It appears with the first call."""

    def __init__(self, things: str, *columns: ProgressColumn) -> None:
        """columns: after the bar; by default the count and the remaining time."""
        columns = columns or (MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            *columns,
            console=VisibleConsole(stderr=True),
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task(things, start=False)

    def __call__(self, done: float, total: float) -> None:
        """`done` of `total` things are done."""
        self._start()
        self._bar.update(self._task, completed=done, total=total)
        if done >= total:
            self._bar.stop()

    def describe(self, text: str) -> None:
        """Show what is done now, in place of the name of the things."""
        self._start()
        self._bar.update(self._task, description=text)

    def _start(self) -> None:
        if not self._bar.live.is_started:
            self._bar.start()
            self._bar.start_task(self._task)


class WeightsBar(CountBar):
    """Progress of downloading or loading a model, in bytes."""

    def __init__(self) -> None:
        super().__init__("model files", DownloadColumn())
