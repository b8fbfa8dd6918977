"""Return of freed memory to the system. Imports no torch, because the HTTP process does it, too."""

import ctypes
from contextlib import suppress


def return_freed_memory() -> None:
    """Return freed heap memory to the system. Has an effect with glibc only."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
