"""Kernel modules of which tests replace some functions, and to which they may add names."""

from types import SimpleNamespace

from quire.kernels.contract import CONTRACT


def changed(kernels, **functions) -> SimpleNamespace:
    """A copy of a kernel module with other functions in place of some of its own."""
    return SimpleNamespace(**{name: getattr(kernels, name) for name in CONTRACT} | functions)
