"""Resolution of a model name to local files: a folder, a .gguf file, or an id on the Hugging Face Hub.

A name that looks like a path is never sent over the network. An id is sent only after its syntax is checked.
"""

import re
from collections.abc import Callable
from pathlib import Path

from quire.errors import ConfigError, ModelError, nearest
from quire.hub.repository import HubName, NoNetwork

_NAME = re.compile(r"(?P<repo>[^@:]+)(?:@(?P<revision>[^@:]+))?(?::(?P<quantization>[\w.-]+))?")
_REPO = re.compile(
    r"(?!.*(?:--|\.\.|\.git$))(?=.{1,96}$)[A-Za-z0-9_][\w.-]*(?:/[A-Za-z0-9_][\w.-]*)?(?<![.-])", re.ASCII
)
_BAD_REVISION = re.compile(r"\.\.|[\s\\?*\[~^]|^[-/]|/$")


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

    model: an existing folder or .gguf file; "owner/name" on the Hub, also "owner/name@revision"; a GGUF file in
    a repository as "owner/name:Q4_K_M" or "owner/name/path/file.gguf". revision: branch, tag or commit.
    offline: use local and cached files only. cache_dir: None means huggingface_hub's cache. endpoint: of the Hub.
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
    name = _hub_name(model, revision)
    from quire.hub.repository import Repository  # noqa: PLC0415  (the import above already loads this module)

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
                f"the path of a folder or a .gguf file. What has arrived is kept"
            ) from error
        report(f"the Hub cannot be reached; {name} is taken from the cache")
        return cached


def _existing(model: str) -> Path | None:
    """The path if it exists, else None."""
    try:
        path = Path(model).expanduser()
        return path if model and path.exists() else None
    except (OSError, RuntimeError):  # a name that is too long, or "~" with an unknown user
        return None


def _local(path: Path) -> Path:
    if path.is_dir() or path.suffix == ".gguf":
        return path
    raise ModelError(f"{path} is neither a folder nor a .gguf file; give the folder that it lies in")


def _hub_name(model: str, revision: str | None) -> HubName:
    """The Hub id that a name stands for. Raises ModelError for a name that is no id, ConfigError for two revisions."""
    matched = _NAME.fullmatch(model)
    if matched is None or _is_path(model):
        raise _no_such(model)
    repo, at, quantization = matched["repo"], matched["revision"], matched["quantization"]
    if at is not None and revision is not None and at != revision:
        raise ConfigError(f"{model!r} names the revision {at!r}, the option {revision!r}; give one")
    chosen = at or revision
    if chosen is not None and _BAD_REVISION.search(chosen):
        raise ModelError(f"{chosen!r} cannot be a revision; give a branch, a tag or a commit")
    owner_and_name, file = "/".join(repo.split("/")[:2]), "/".join(repo.split("/")[2:]) or None
    is_file = repo.endswith(".gguf")
    if not _REPO.fullmatch(owner_and_name) or is_file is (file is None) or (is_file and quantization):
        raise _no_such(model)
    if chosen is None and quantization is None and _is_near_a_path(repo):
        raise _no_such(model)
    return HubName(owner_and_name, chosen, quantization, file)


def _is_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or "\\" in model or model.endswith("/") or model in ("", "..")


def _is_near_a_path(repo: str) -> bool:
    """Whether an id is probably a mistyped path: in an existing folder, or similar to a name in the current folder."""
    first, slash, _ = repo.partition("/")
    return Path(first).is_dir() if slash else bool(nearest(repo, _models_in(Path())))


def _models_in(folder: Path) -> list[str]:
    """Names of the folders and .gguf files in a folder; empty if it cannot be read."""
    try:
        return sorted(path.name for path in folder.expanduser().iterdir() if path.suffix == ".gguf" or path.is_dir())
    except (OSError, RuntimeError):
        return []


def _no_such(model: str) -> ModelError:
    path = Path(model)
    hint = nearest(path.name, _models_in(path.parent))
    return ModelError(
        f"there is no folder or .gguf file {model!r}{hint}. Give the path of one, or an id on the Hugging Face Hub "
        f"as in 'owner/name', 'owner/name@revision' or 'owner/name:Q4_K_M'"
    )
