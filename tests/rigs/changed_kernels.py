"""Kernel modules of which tests replace some functions."""

from types import ModuleType, SimpleNamespace


def changed(module: ModuleType, **functions) -> SimpleNamespace:
    """A copy of a kernel module with other functions in place of some of its own."""
    return SimpleNamespace(**{**vars(module), **functions})
