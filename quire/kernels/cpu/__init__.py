"""Kernels in C++ for processors, compiled for several instruction sets: the best one that runs here is taken."""

try:
    import torch as _torch  # noqa: F401  (first: the extension then shares torch's pool of threads)

    from quire.kernels.cpu import _C
except ImportError as error:
    EXTENSION: str | None = f"its extension cannot be loaded ({error}); install a C++ compiler and quire once more"
    _C = None  # type: ignore[assignment]  # so that modules here can be imported, which nobody then calls
else:
    EXTENSION = None

__all__ = ["EXTENSION", "_C"]
