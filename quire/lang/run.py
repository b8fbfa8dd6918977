"""Run: one run of a program: all its streams, and the name that the scheduler knows it by."""

import threading
import weakref
from collections.abc import Iterable
from itertools import count
from uuid import uuid4

from quire.lang.interpreter import Setting
from quire.lang.stream import Stream


class Run:
    """owner: the thread on which the program's function runs; None once it is over.

    failed_by_itself: it was stopped by an error of one of its streams, and not by its function's code.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.id = uuid4().hex
        self.owner: int | None = None
        self.failed_by_itself = False
        self._branches = count(1)
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._lock = threading.Lock()
        self.trunk = Stream(setting, self.id)
        self._streams.add(self.trunk)

    def fork(self, names: Iterable[str]) -> Stream:
        """A stream that begins when it is released. names: variables that it will have then."""
        stream = Stream(self.setting, self.id, str(next(self._branches)), held=True, names=names)
        with self._lock:
            self._streams.add(stream)
        return stream

    def end(self) -> None:
        """The function is over: no stream gets more from it."""
        self.owner = None
        for stream in self._all():
            stream.end()

    def sync(self) -> None:
        """Wait until all that was appended is done."""
        for stream in self._all():
            stream.sync()

    def stop(self, error: BaseException) -> None:
        """Give up all that is not done, because of an error, which the trunk then has."""
        self.failed_by_itself = any(stream.error is error for stream in self._all())
        for stream in self._all():
            stream.fail(error)
        self.trunk.fail(error, though_done=True)

    def _all(self) -> list[Stream]:
        with self._lock:
            return list(self._streams)
