"""Constructors of the backend that runs a model in this process. They import torch only when they are called."""

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
    """A backend with a model in this process; without a name or folder, the model that ships with quire.

    model_path: SGLang's name for `model`. hints: whether requests carry program hints. options: fields of
    EngineOptions, such as memory and dtype, and SGLang's lora_paths, the folders of adapters by the names that programs
    use. Raises ConfigError, ModelError.
    """
    module = import_with_torch("quire.lang.backends.engine")
    if model is not None and model_path is not None:
        raise ConfigError("model_path is another name for model; give one of them")
    given = model_path if model is None else model
    named = None if given is None else fspath(given)
    return cast(Backend, module.open_engine(model=named, hints=hints, **options))


def Runtime(model_path: str | PathLike[str] | None = None, **options: object) -> Backend:
    """The same as Engine. No server is started, unlike in SGLang."""
    return Engine(model_path, **options)  # type: ignore[arg-type]  # hints may be any object here
