"""Which files of a model repository quire needs. Knows names, no network: the same for a listing and for the cache.

Weights come from safetensors or GGUF; what else a repository holds (pickles, other runtimes' formats,
the same weights under other names) stays where it is.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch

from quire.errors import ModelError, nearest
from quire.models.weights import INDEX, SINGLE

_NEEDED = ("*.json", "*.jinja", "merges.txt", "vocab.txt", "additional_chat_templates/*.jinja")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_SHARD = re.compile(r"-\d{5}-of-(\d{5})(?=\.gguf$)")


class NoNetwork(Exception):
    """The Hub did not answer. (Here, since other errors bring libraries that a local model does without.)"""


@dataclass(frozen=True, slots=True)
class HubName:
    """A model as its id names it, and what in its repository is meant."""

    repo: str  # "owner/name", or a name without an owner
    revision: str | None = None  # branch, tag or commit
    quantization: str | None = None  # of a GGUF file: "Q4_K_M"
    file: str | None = None  # path of a GGUF file

    def __str__(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        inside = f":{self.quantization}" if self.quantization else f" ({self.file})" if self.file else ""
        return f"{self.repo}{at}{inside}"


def gguf_files(name: HubName, names: Iterable[str]) -> list[str]:
    """The GGUF file that is meant, or all shards of it, in order; nothing where a folder of safetensors is.

    Raises ModelError that lists what there is.
    """
    sets: dict[str, list[str]] = {}
    for path in sorted(names):
        if path.endswith(".gguf") and not path.rpartition("/")[2].startswith("mmproj"):
            sets.setdefault(_SHARD.sub("", path), []).append(path)
    if name.file is not None:
        whole = _SHARD.sub("", name.file)
        if name.file not in sets.get(whole, ()):
            raise ModelError(f"{name.repo} has no file {name.file}{nearest(name.file, sets)}; {_there_are(sets)}")
        return sets[whole]
    if name.quantization is not None:
        wanted = re.compile(rf"(?<![^\W_]){re.escape(name.quantization)}(?!\w)", re.IGNORECASE)
        fitting = [whole for whole in sets if wanted.search(whole)]
        if len(fitting) != 1:
            found = f"several files called {name.quantization}" if fitting else f"no GGUF file {name.quantization}"
            raise ModelError(f"{name.repo} has {found}; {_there_are(fitting or sets)}")
        return sets[fitting[0]]
    return []


def is_complete(shards: list[str]) -> bool:
    """Whether these are all shards of a GGUF file, or it is one by itself."""
    count = _SHARD.search(shards[0])
    return count is None or len(shards) == int(count[1])


def small_files(name: HubName, names: Iterable[str]) -> list[str]:
    """Configuration, tokenizer and templates, and the index of the weights.

    Raises ModelError where there are no weights that quire reads, saying what there is instead.
    """
    listing = sorted(names)
    if SINGLE not in listing and INDEX not in listing:
        ggufs = {_SHARD.sub("", path) for path in listing if path.endswith(".gguf")}
        if ggufs:
            raise ModelError(
                f"{name.repo} has its weights as GGUF; choose a file, as in {name.repo}:Q4_K_M; {_there_are(ggufs)}"
            )
        pickles = [path for path in listing if path.endswith(_PICKLES)]
        if pickles:
            raise ModelError(
                f"{name.repo} has weights only as pickles ({pickles[0]}), which can run code; quire reads safetensors "
                f"and GGUF. Look for a converted copy: another repository, or a pull request's revision (@refs/pr/1)"
            )
        raise ModelError(f"{name.repo} has no weights: neither {SINGLE} nor {INDEX}")
    if "config.json" not in listing:
        raise ModelError(f"{name.repo} has no config.json, so it is not a model that quire can run")
    return [path for path in listing if any(fnmatch(path, pattern) and path.count("/") == pattern.count("/")
                                            for pattern in _NEEDED)]  # fmt: skip


def weight_files(names: Iterable[str], indexed: Iterable[str]) -> list[str]:
    """The safetensors of a repository: one file, or those that its index names. `indexed`: names from the index."""
    listing = set(names)
    return [SINGLE] if SINGLE in listing else sorted(listing & set(indexed))


def _there_are(sets: Iterable[str]) -> str:
    names = sorted(sets)
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return f"there are {', '.join(names[:12])}{more}" if names else "there is none at all"
