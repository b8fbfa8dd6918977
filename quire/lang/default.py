"""The backend of programs that are run without one. SGLang's `set_default_backend`."""

from quire.errors import ConfigError
from quire.lang.backends.backend import Backend


class _Default:
    backend: Backend | None = None


def set_default_backend(backend: Backend | None) -> None:
    """What programs run on that name no backend."""
    _Default.backend = backend


def backend_or_default(backend: Backend | None) -> Backend:
    """The one that was given, or else the default. Raises ConfigError where there is none."""
    found = backend or _Default.backend
    if found is None:
        raise ConfigError("there is no backend: give backend=..., or call set_default_backend(...) first")
    return found


def flush_cache(backend: Backend | None = None) -> None:
    """Let a backend forget all KV that nobody uses. Raises ConfigError, RequestError."""
    backend_or_default(backend).flush_cache()
