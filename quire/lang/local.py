"""Engine: the backend that runs a model in this process. Made here, so that only who makes one waits for torch."""

from os import PathLike, fspath
from typing import cast

from quire.errors import ConfigError
from quire.lang.backends.backend import Backend
from quire.preload import import_with_torch


def Engine(
    model: str | PathLike[str] | None = None,
    *,
    model_path: str | PathLike[str] | None = None,
    hints: bool = True,
    **options: object,
) -> Backend:
    """A model in this process; without a name or folder the one that ships with quire. model_path: SGLang's name.

    hints: whether the scheduler is told of programs. options: fields of EngineOptions, such as memory and dtype.
    Raises ConfigError, ModelError.
    """
    module = import_with_torch("quire.lang.backends.engine")
    if model is not None and model_path is not None:
        raise ConfigError("model_path is another name for model; give one of them")
    given = model_path if model is None else model
    named = None if given is None else fspath(given)
    return cast(Backend, module.open_engine(model=named, hints=hints, **options))


def Runtime(model_path: str | PathLike[str] | None = None, **options: object) -> Backend:
    """The same as Engine: programs reach the engine without a server between. Raises as Engine does."""
    return Engine(model_path, **options)  # type: ignore[arg-type]  # hints is checked by who reads it
