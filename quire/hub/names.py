"""Parsing of model ids on the Hugging Face Hub."""

import re
from dataclasses import dataclass
from pathlib import Path

from quire.errors import ConfigError, ModelError, nearest
from quire.hub import packaged

_NAME = re.compile(r"(?P<repo>[^@:]+)(?:@(?P<revision>[^@:]+))?(?::(?P<quantization>[\w.-]+))?")
_REPO = re.compile(
    r"(?!.*(?:--|\.\.|\.git$))(?=.{1,96}$)[A-Za-z0-9_][\w.-]*(?:/[A-Za-z0-9_][\w.-]*)?(?<![.-])", re.ASCII
)
_BAD_REVISION = re.compile(r"\.\.|[\s\\?*\[~^]|^[-/]|/$")


class NoNetwork(Exception):
    """The Hub did not answer. For use inside this package only."""


@dataclass(frozen=True, slots=True)
class HubName:
    """A parsed model id: repository, revision, and the GGUF file if one is meant."""

    repo: str  # "owner/name", or a name without an owner
    revision: str | None = None  # branch, tag or commit
    quantization: str | None = None  # of a GGUF file: "Q4_K_M"
    file: str | None = None  # path of a GGUF file

    def __str__(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        inside = f":{self.quantization}" if self.quantization else f" ({self.file})" if self.file else ""
        return f"{self.repo}{at}{inside}"


def parse_hub_name(model: str, revision: str | None) -> HubName:
    """The Hub id that a name stands for. Raises ModelError for a name that is no id, ConfigError for two revisions."""
    matched = _NAME.fullmatch(model)
    if matched is None or _is_path(model):
        raise _unknown_model_error(model)
    repo, at, quantization = matched["repo"], matched["revision"], matched["quantization"]
    if at is not None and revision is not None and at != revision:
        raise ConfigError(f"{model!r} names the revision {at!r}, the option {revision!r}; give one")
    chosen = at or revision
    if chosen is not None and _BAD_REVISION.search(chosen):
        raise ModelError(f"{chosen!r} cannot be a revision; give a branch, a tag or a commit")
    owner_and_name, file = "/".join(repo.split("/")[:2]), "/".join(repo.split("/")[2:]) or None
    is_file = repo.endswith(".gguf")
    if not _REPO.fullmatch(owner_and_name) or is_file is (file is None) or (is_file and quantization):
        raise _unknown_model_error(model)
    if chosen is None and quantization is None and _is_near_a_name(repo):
        raise _unknown_model_error(model)
    return HubName(owner_and_name, chosen, quantization, file)


def _is_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or "\\" in model or model.endswith("/") or model in ("", "..")


def _is_near_a_name(repo: str) -> bool:
    """Whether an id is probably a slip: in an existing folder, or similar to a packaged or a local model's name."""
    first, slash, _ = repo.partition("/")
    return Path(first).is_dir() if slash else bool(_nearest_name(repo))


def _nearest_name(model: str) -> str:
    """A hint to the nearest name of a local model, or of a packaged one if `model` is no path; "" without one."""
    path = Path(model)
    hint = nearest(path.name, _models_in(path.parent))
    return hint or (nearest(model.lower(), packaged.PACKAGED) if path.name == model else "")


def _models_in(folder: Path) -> list[str]:
    """Names of the folders and .gguf files in a folder; empty if it cannot be read."""
    try:
        return sorted(path.name for path in folder.expanduser().iterdir() if path.suffix == ".gguf" or path.is_dir())
    except (OSError, RuntimeError):
        return []


def _unknown_model_error(model: str) -> ModelError:
    return ModelError(
        f"there is no folder or .gguf file {model!r}{_nearest_name(model)}. Give the path of one, a name that "
        f"`quire pull` lists, or an id on the Hugging Face Hub as in 'owner/name', 'owner/name@revision' or "
        f"'owner/name:Q4_K_M'"
    )
