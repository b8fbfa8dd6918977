"""Threads with a stack of a known size, for work that recurses: a parser in C or Rust ends the process without it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

STACK_BYTES = 16 * 2**20  # twice what the bounds of constraints were tried with

_SETTING = threading.Lock()


@contextmanager
def deep_stacks() -> Iterator[None]:
    """Threads that are started meanwhile have such a stack, whatever the system's limit is."""
    with _SETTING:
        before = threading.stack_size(STACK_BYTES)
        try:
            yield
        finally:
            threading.stack_size(before)
