"""Imports at first use: those that need torch, and others that are slow and that most runs do without."""

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

_WITHOUT_TORCH = ("quire.scheduler.journal", "tokenizers", "jinja2", "rich.progress")  # imported meanwhile

_FROZEN_BY_PYTHON = 1000  # above the number of objects that Python itself freezes: 375 in 3.12, none in 3.11


def import_with_torch(name: str) -> ModuleType:
    """Import a module that imports torch, and return it.

    Opening torch's shared libraries is a fifth of its import time and does not need the interpreter lock. A thread
    opens them while this thread imports modules without torch: numpy, the control plane, the tokenizer libraries.
    """
    if "torch" in sys.modules:
        return import_module(name)
    with gc_disabled():
        opening = Thread(target=_load_torch_libraries, name="quire-open-torch", daemon=True)
        opening.start()
        for other in _WITHOUT_TORCH:
            import_module(other)
        opening.join()
        return import_module(name)


def import_late(name: str) -> ModuleType:
    """Import a module without torch that is slow to import, and return it."""
    with gc_disabled():
        return import_module(name)


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable the garbage collector for the block, then move all objects to its oldest generation.

    Importing torch creates about 200 000 permanent objects. A collection of them takes 0.1 s, and without this they
    would be scanned three times before they reach the oldest generation.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() < _FROZEN_BY_PYTHON:  # objects that the program froze stay frozen
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
        if collects:
            gc.enable()


def _load_torch_libraries() -> None:
    """Load torch's libraries except its Python bindings. Errors are ignored, because `import torch` reports them."""
    spec = find_spec("torch")
    if spec is not None and spec.origin is not None:
        with suppress(OSError):
            ctypes.CDLL(str(Path(spec.origin).with_name("lib") / "libtorch.so"))
