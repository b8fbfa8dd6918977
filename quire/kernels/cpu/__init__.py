"""C++ kernels for CPUs, compiled for several instruction sets. The best build that runs on this machine is used."""

try:
    import torch as _torch  # noqa: F401  (first, so that the extension shares torch's OpenMP thread pool)

    import quire.kernels.cpu._C as _C
except ImportError as error:
    why = "was not built" if error.name == "quire.kernels.cpu._C" else f"cannot be loaded ({error})"
    EXTENSION: str | None = f"its extension {why}; install a C++ compiler with OpenMP, then install quire again"
    _C = None  # type: ignore[assignment]  # keeps the modules here importable; `choose` never selects them
else:
    EXTENSION = None

__all__ = ["EXTENSION", "_C"]
