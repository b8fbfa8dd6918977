"""Garbage collection policy of the engine process and of the HTTP process.

A full collection visits every entry of every container: of the prompts of all waiting requests, for example. It stops
the process, so that all streams pause. So it runs when the process has no requests, and rarely otherwise. Requests
leave no garbage that only a full collection finds.
"""

import gc
import time
from collections.abc import Callable

_NEVER = 2**31 - 1
_IDLE_SHARE = 1 / 100  # the most share of time of full collections while the process is idle
_BUSY_SHARE = 1 / 2000  # the same while requests run
_BUSY_SECONDS = 300.0  # least time between these: with a longer queue a collection takes longer than the last one


class GCPolicy:
    """Schedules the full collections of a process. Use one instance per process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Freeze all live objects, which are not scanned any more, and disable automatic full collections."""
        self._clock = clock
        self._collection_seconds = 0.0  # seconds of the last full collection
        gc.collect()
        gc.freeze()
        self._thresholds = gc.get_threshold()
        gc.set_threshold(*self._thresholds[:2], _NEVER)
        self._last_collection = clock()

    def collect_if_due(self, *, idle: bool) -> None:
        """Run a full collection if it is due. idle: whether the process has no requests."""
        begin = self._clock()
        pause = (
            self._collection_seconds / _IDLE_SHARE
            if idle
            else max(self._collection_seconds / _BUSY_SHARE, _BUSY_SECONDS)
        )
        if begin - self._last_collection < pause or not gc.get_count()[2]:
            return
        gc.collect()
        self._last_collection = self._clock()
        self._collection_seconds = self._last_collection - begin

    def close(self) -> None:
        """Enable automatic full collections again."""
        gc.set_threshold(*self._thresholds)
