"""C++ kernels for CPUs, compiled for several instruction sets. The best build that runs on this machine is used."""

try:
    import torch as _torch  # noqa: F401  (first, so that the extension shares torch's OpenMP thread pool)

    from quire.kernels.cpu import _C
except ImportError as error:
    EXTENSION: str | None = (
        f"its extension cannot be loaded ({error}); install a C++ compiler, then install quire again"
    )
    _C = None  # type: ignore[assignment]  # keeps the modules here importable; `choose` never selects them
else:
    EXTENSION = None

__all__ = ["EXTENSION", "_C"]
