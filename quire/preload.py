"""Early: what makes imports with torch shorter. Knows Python's collector, and where torch keeps its libraries."""

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from types import ModuleType

_WITHOUT_TORCH = ("quire.scheduler.journal", "tokenizers", "jinja2", "rich.progress")  # but needed with it

_FROZEN_BY_PYTHON = 1000  # more objects than an interpreter freezes of its own: 375 in Python 3.12, none in 3.11


def import_with_torch(name: str) -> ModuleType:
    """Import a module that imports torch.

    A fifth of torch's import is the opening of its libraries, which needs no Python. So a thread does it while this
    one imports what needs no torch: numpy, the mind, and what reads and writes text.
    """
    if "torch" in sys.modules:
        return import_module(name)
    with collector_at_rest():
        opening = Thread(target=_open_torch, name="quire-open-torch", daemon=True)
        opening.start()
        for other in _WITHOUT_TORCH:
            import_module(other)
        opening.join()
        return import_module(name)


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Let nobody search for garbage what is made meanwhile, nor with what is young behind it.

    Torch's import makes some 200 000 objects that stay. To search them takes 0.1 s, and would be done three times
    until they are old.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() < _FROZEN_BY_PYTHON:  # what somebody froze stays so
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
        if collects:
            gc.enable()


def _open_torch() -> None:
    """Open torch's libraries, but for those that know Python. What goes wrong here, torch's own import will tell."""
    spec = find_spec("torch")
    if spec is not None and spec.origin is not None:
        with suppress(OSError):
            ctypes.CDLL(str(Path(spec.origin).with_name("lib") / "libtorch.so"))
