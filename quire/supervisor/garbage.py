"""Garbage: when a process that serves looks for garbage, so that requests do not wait for it. Knows Python's collector.

Python frees at once what nobody refers to any more; the collector is for what refers to itself. A full collection
visits every entry of every list that lives, so of each prompt that waits: with some 14 000 requests in the queue one
took 0.34 s, and there is one whenever the queue has grown by a quarter. Nothing in the path of a request is such
garbage, so full collections can wait for an idle moment, or be rare. Those of young objects, which find what refers
to itself and is short-lived, stay as they are.
"""

import gc
import time
from collections.abc import Callable

_NEVER = 2**31 - 1
_IDLE_SHARE = 1 / 100  # of the time that full collections may take while there is nothing else to do
_BUSY_SHARE = 1 / 2000  # the same while requests wait for them
_BUSY_SECONDS = 300.0  # that there are at least between those: the last one may say little of a queue that has grown


class Garbage:
    """Full collections of this process, from now on. There can be one of it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """What lives now stays: it is not searched any more."""
        self._clock = clock
        self._took = 0.0  # seconds, what the last full collection
        gc.collect()
        gc.freeze()
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, _NEVER)
        self._ended = clock()

    def look(self, *, idle: bool) -> None:
        """Search now, if it is time to. idle: whether nobody waits."""
        begin = self._clock()
        pause = self._took / _IDLE_SHARE if idle else max(self._took / _BUSY_SHARE, _BUSY_SECONDS)
        if begin - self._ended < pause or not gc.get_count()[2]:
            return
        gc.collect()
        self._ended = self._clock()
        self._took = self._ended - begin
