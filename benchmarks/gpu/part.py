"""A part of the benchmark: rows of figures, and skipped measurements with their reasons."""

import gc
import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch

from benchmarks.gpu.processes import Row


class OutOfTime(BaseException):
    """The time of a part is over. It is no Exception, because measured code may catch those."""


@dataclass
class Part:
    """Results of a part. file: where they are written. limits: figures of the device, see `limits`."""

    name: str
    file: Path
    deadline: float  # of time.monotonic()
    limits: Row
    rows: list[Row] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)

    def row(self, what: str, **figures: object) -> Row:
        """Add a row, or add figures to an existing row, and write the file."""
        found = next((row for row in self.rows if row["what"] == what), None)
        if found is None:
            found = {"what": what}
            self.rows.append(found)
        found.update(figures)
        self.save()
        return found

    def skip(self, what: str, why: object) -> None:
        """Record that a measurement is missing, with the reason."""
        text = str(why).strip()
        if isinstance(why, Exception):
            text = f"{type(why).__name__}: {text}" if text else type(why).__name__
        self.skipped.append({"what": what, "why": text[-1500:]})
        print(f"  skipped {what}: {text.splitlines()[0][:200] if text else 'no reason'}", flush=True)
        self.save()

    def attempt(self, what: str, measure: Callable[[], object]) -> bool:
        """Run one measurement if time is left. An error makes it skipped, with the error as the reason."""
        if time.monotonic() >= self.deadline:
            self.skip(what, "no time left")
            return False
        try:
            with ending_at(self.deadline):
                measure()
            return True
        except OutOfTime:
            self.skip(what, "it took longer than there was time")
        except Exception as error:
            self.skip(what, error)
        gc.collect()  # frees the tensors that the error held
        if torch.cuda.is_initialized():
            try:
                torch.cuda.empty_cache()
            except RuntimeError:  # the device is lost
                self.deadline = 0.0
        return False

    def save(self) -> None:
        """Write the results to the file."""
        text = json.dumps({"rows": self.rows, "skipped": self.skipped})
        unfinished = self.file.with_suffix(".part")
        unfinished.write_text(text)
        unfinished.replace(self.file)


@contextmanager
def ending_at(deadline: float) -> Iterator[None]:
    """Raise OutOfTime in the block at the deadline. For the main thread only; calls may be nested."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    begin = time.monotonic()
    around, _ = signal.setitimer(signal.ITIMER_REAL, max(deadline - begin, 0.01))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if around:
            signal.setitimer(signal.ITIMER_REAL, max(around - (time.monotonic() - begin), 0.01))
