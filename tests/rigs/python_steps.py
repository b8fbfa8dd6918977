"""CPU time of a piece of work, counted in steps of an empty loop of Python: a bound holds on machines of any speed."""

import gc
import time

_STEPS = 500_000


def _timed(work, arguments):
    """CPU seconds of this thread, and the result. Garbage of other tests is not collected meanwhile."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        begin = time.thread_time()
        result = work(*arguments)
        return time.thread_time() - begin, result
    finally:
        if enabled:
            gc.enable()


def _loop():
    for _ in range(_STEPS):
        pass


def python_steps(work, *arguments):
    """Steps of an empty loop that take as long as `work(*arguments)`, and its result.

    A step takes 10 to 30 ns. The loop runs before and after the work, and the slower run counts.
    """
    before, _ = _timed(_loop, ())
    seconds, result = _timed(work, arguments)
    after, _ = _timed(_loop, ())
    return _STEPS * seconds / max(before, after), result
