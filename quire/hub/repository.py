"""Model repositories on the Hugging Face Hub, with their local cache.

The cache is huggingface_hub's and shared with other programs. It has blobs by their hash, a folder of links per
commit, and under refs/ the commit of each branch. A ref is written last, so that an offline lookup of a branch never
finds an incomplete model.
"""

import errno
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import httpx2
from filelock import FileLock
from huggingface_hub import HfApi, constants, get_token, hf_hub_download, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from quire.errors import ModelError, nearest
from quire.hub.download import TIMEOUT, fetch
from quire.hub.names import HubName, NoNetwork
from quire.models.sentence_transformers import MODULES, module_folders
from quire.weights.checkpoint import INDEX_FILE, WEIGHTS_FILE
from quire.weights.json_file import read_json_object

_SMALL_FILE_PATTERNS = ("*.json", "*.jinja", "merges.txt", "vocab.txt", "additional_chat_templates/*.jinja")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_SHARD = re.compile(r"-\d{5}-of-(\d{5})(?=\.gguf$)")


_CONFIG = "config.json"


def gguf_files(name: HubName, names: Iterable[str]) -> list[str]:
    """The GGUF file that `name` means, or all its shards in order; empty if `name` means no GGUF file.

    Raises ModelError that lists the GGUF files of the repository.
    """
    sets: dict[str, list[str]] = {}
    for path in sorted(names):
        if path.endswith(".gguf") and not path.rpartition("/")[2].startswith("mmproj"):
            sets.setdefault(_SHARD.sub("", path), []).append(path)
    if name.file is not None:
        whole = _SHARD.sub("", name.file)
        if name.file not in sets.get(whole, ()):
            raise ModelError(f"{name.repo} has no file {name.file}{nearest(name.file, sets)}; {_list_available(sets)}")
        return sets[whole]
    if name.quantization is not None:
        wanted = re.compile(rf"(?<![^\W_]){re.escape(name.quantization)}(?!\w)", re.IGNORECASE)
        fitting = [whole for whole in sets if wanted.search(whole)]
        if len(fitting) != 1:
            found = f"several files called {name.quantization}" if fitting else f"no GGUF file {name.quantization}"
            raise ModelError(f"{name.repo} has {found}; {_list_available(fitting or sets)}")
        return sets[fitting[0]]
    return []


def is_complete(shards: list[str]) -> bool:
    """Whether `shards` are all shards of a GGUF file. A file without shards is complete."""
    count = _SHARD.search(shards[0])
    return count is None or len(shards) == int(count[1])


def small_files(name: HubName, names: Iterable[str]) -> list[str]:
    """The files of configuration, tokenizer, templates and weight index.

    Raises ModelError if the repository has no weights that quire reads, or no config.json.
    """
    listing = sorted(names)
    if WEIGHTS_FILE not in listing and INDEX_FILE not in listing:
        ggufs = {_SHARD.sub("", path) for path in listing if path.endswith(".gguf")}
        if ggufs:
            raise ModelError(
                f"{name.repo} has its weights as GGUF; choose a file, as in {name.repo}:Q4_K_M; "
                f"{_list_available(ggufs)}"
            )
        pickles = [path for path in listing if path.endswith(_PICKLES)]
        if pickles:
            raise ModelError(
                f"{name.repo} has weights only as pickles ({pickles[0]}), which can run code; quire reads safetensors "
                f"and GGUF. Look for a converted copy: another repository, or a pull request's revision (@refs/pr/1)"
            )
        raise ModelError(f"{name.repo} has no weights: neither {WEIGHTS_FILE} nor {INDEX_FILE}")
    if _CONFIG not in listing:
        raise ModelError(f"{name.repo} has no {_CONFIG}, so it is not a model that quire can run")
    return [path for path in listing if any(fnmatch(path, pattern) and path.count("/") == pattern.count("/")
                                            for pattern in _SMALL_FILE_PATTERNS)]  # fmt: skip


def weight_files(names: Iterable[str], indexed: Iterable[str]) -> list[str]:
    """The safetensors files of a repository: the single file, or those in `indexed`, the names in its index."""
    listing = set(names)
    return [WEIGHTS_FILE] if WEIGHTS_FILE in listing else sorted(listing & set(indexed))


def module_files(names: Iterable[str], modules: Path) -> list[str]:
    """The files of the modules behind an embedding model, in folders that `modules`, its modules.json, names."""
    wanted = {f"{folder}/{file}" for folder in module_folders(modules) for file in ("config.json", WEIGHTS_FILE)}
    return sorted({*names} & wanted)


def _list_available(sets: Iterable[str]) -> str:
    names = sorted(sets)
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return f"there are {', '.join(names[:12])}{more}" if names else "it has no GGUF files"


@contextmanager
def convert_errors(repo: str, revision: str, cache: Path) -> Iterator[None]:
    """Convert errors of huggingface_hub, HTTP and the disk in the block to ModelError and NoNetwork."""
    try:
        yield
    except RevisionNotFoundError as error:
        raise ModelError(f"{repo} has no revision {revision!r}; give a branch, a tag or a commit") from error
    except GatedRepoError as error:
        raise ModelError(
            f"{repo} is gated: accept its terms on its page while logged in, "
            f"then set HF_TOKEN to a token of that account"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"there is no model {repo!r} on the Hub, or it is private; check the spelling, "
            f"or set HF_TOKEN to a token that may read it"
        ) from error
    except (HfHubHTTPError, httpx2.HTTPStatusError) as error:
        raise ModelError(_http_error_message(repo, error.response.status_code)) from error
    except (httpx2.RequestError, OfflineModeIsEnabled, LocalEntryNotFoundError) as error:
        raise NoNetwork(f"{error}" or type(error).__name__) from error
    except OSError as error:
        what = "the disk is full" if error.errno == errno.ENOSPC else f"{error}"
        raise ModelError(f"{repo} cannot be written to {cache}: {what}; make room, or name another folder") from error


def _http_error_message(repo: str, status: int) -> str:
    if status in (401, 403):
        return f"the Hub refused {repo} (status {status}); set HF_TOKEN to a token that may read it, or unset a bad one"
    if status == 429:
        return "the Hub is limiting requests (status 429); wait a few minutes, or set HF_TOKEN"
    return f"the Hub failed with status {status} for {repo}; try again later"


_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_UNSAFE = re.compile(r"(?:^|[/\\])\.\.(?:$|[/\\])|^[/\\]|:|\0")  # paths that may point outside of the folder
_DEFAULT_BRANCH = "main"


@dataclass(frozen=True, slots=True)
class _RemoteFile:
    """A file of a repository."""

    size: int  # bytes
    sha256: str | None  # None for small files


@dataclass(frozen=True, slots=True)
class _Listing:
    """What the Hub says of one commit of a repository."""

    commit: str
    files: Mapping[str, _RemoteFile]  # by path
    licence: str | None  # as the model card names it


class Repository:
    """One repository at one revision. Methods raise ModelError."""

    def __init__(self, name: HubName, *, cache_dir: str | None, endpoint: str | None) -> None:
        self._name = name
        self._cache = Path(cache_dir or constants.HF_HUB_CACHE).expanduser().resolve()
        self._endpoint = endpoint
        self._revision = name.revision or _DEFAULT_BRANCH
        self._folder = self._cache / "--".join(["models", *name.repo.split("/")])

    def in_cache(self) -> Path | None:
        """The folder or GGUF file if all of it is in the cache, else None. Uses no network."""
        commit = self._revision if _COMMIT.fullmatch(self._revision) else self._cached_commit()
        folder = self._folder / "snapshots" / commit if commit else None
        if folder is None or not folder.is_dir():
            return None
        names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        try:
            ggufs = gguf_files(self._name, names)
            if ggufs:
                return folder / ggufs[0] if is_complete(ggufs) else None
            small_files(self._name, names)
        except ModelError:
            return None
        missing = (
            [name for name in self._files_of_index(folder / INDEX_FILE) if name not in names]
            if WEIGHTS_FILE not in names
            else []
        )
        return None if missing else folder

    def download(self, report: Callable[[str], None], progress: Callable[[int, int], None]) -> Path:
        """Download the missing files to the cache. Returns the folder or GGUF file.

        progress(done, total): in bytes, called only if a file is downloaded. Also raises NoNetwork.
        """
        with convert_errors(self._name.repo, self._revision, self._cache):
            listing = self._listing()
            commit, files = listing.commit, listing.files
            ggufs = gguf_files(self._name, files)
            if ggufs:
                self._download_missing(ggufs, listing, report, progress)
            else:
                self._download_missing(small_files(self._name, files), listing, report, progress)
                modules = module_files(files, self._path(MODULES, commit)) if MODULES in files else []
                self._download_missing(modules, listing, report, progress)
                indexed = [] if WEIGHTS_FILE in files else self._files_of_index(self._path(INDEX_FILE, commit))
                self._download_missing(weight_files(files, indexed), listing, report, progress)
            self._write_cached_commit(commit)
        folder = self._folder / "snapshots" / commit
        return folder / ggufs[0] if ggufs else folder

    def download_config(self) -> Path:
        """Download config.json alone, for a plan. Returns its folder in the cache. Also raises NoNetwork."""
        with convert_errors(self._name.repo, self._revision, self._cache):
            listing = self._listing()
            if _CONFIG not in listing.files:
                raise ModelError(f"{self._name.repo} has no {_CONFIG}, so it is not a model that quire can run")
            self._download_missing([_CONFIG], listing, lambda _line: None, lambda _done, _total: None)
        return self._folder / "snapshots" / listing.commit

    def _cached_commit(self) -> str | None:
        try:
            commit = (self._folder / "refs" / self._revision).read_text().strip()
        except OSError:
            return None
        return commit if _COMMIT.fullmatch(commit) else None

    def _write_cached_commit(self, commit: str) -> None:
        if commit != self._revision:
            path = self._folder / "refs" / self._revision
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(commit)

    def _listing(self) -> _Listing:
        """The listing of the revision, from one HTTP request."""
        api = HfApi(endpoint=self._endpoint)
        try:
            info = api.model_info(self._name.repo, revision=self._revision, files_metadata=True, timeout=TIMEOUT)
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, OSError):  # an HTTP error of the library, which may also be a ValueError
                raise
            raise ModelError(_not_a_hub_message(api.endpoint)) from error
        if info.sha is None or not _COMMIT.fullmatch(info.sha):
            raise ModelError(_not_a_hub_message(api.endpoint))
        unsafe = [each.rfilename for each in info.siblings or () if _UNSAFE.search(each.rfilename)]
        if unsafe:
            raise ModelError(f"{self._name.repo} lists the unsafe path {unsafe[0]!r:.80}; do not use it")
        files = {
            each.rfilename: _RemoteFile(each.lfs.size, each.lfs.sha256)
            if each.lfs
            else _RemoteFile(each.size or 0, None)
            for each in info.siblings or ()
        }
        licence = info.card_data and (info.card_data.get("license_name") or info.card_data.get("license"))
        return _Listing(info.sha, files, licence if isinstance(licence, str) else None)

    def _path(self, name: str, commit: str) -> Path:
        return self._folder / "snapshots" / commit / name

    def _files_of_index(self, path: Path) -> list[str]:
        """The names of weight files in an index."""
        weights = read_json_object(path).get("weight_map")
        return sorted({str(file) for file in weights.values()}) if isinstance(weights, dict) else []

    def _download_missing(
        self,
        wanted: list[str],
        listing: _Listing,
        report: Callable[[str], None],
        progress: Callable[[int, int], None],
    ) -> None:
        """Download those of the `wanted` files that are not in the cache, one after another."""
        commit, files = listing.commit, listing.files
        missing = [name for name in wanted if not self._is_cached(name, commit)]
        total = sum(files[name].size for name in missing)
        if not missing:
            return
        self._check_space(total - sum(self._partial_size(files[name]) for name in missing))
        if total > 1e6:
            licence = f"licence {listing.licence}" if listing.licence else "no licence named"
            report(f"downloading {self._name}: {len(missing)} files, {total / 1e9:.2f} GB, {licence}, to {self._cache}")
        done = 0
        for name in missing:
            self._download_file(name, files[name], commit, partial(_advance, progress, done, total))
            done += files[name].size
            progress(done, total)

    def _is_cached(self, name: str, commit: str) -> bool:
        found = try_to_load_from_cache(self._name.repo, name, cache_dir=self._cache, revision=commit)
        return isinstance(found, str)

    def _download_file(self, name: str, listed: _RemoteFile, commit: str, on_progress: Callable[[int], None]) -> None:
        """Download a file. `fetch` writes large files to their blob; huggingface_hub does the rest."""
        repo, endpoint = self._name.repo, self._endpoint
        if listed.sha256 is not None and _SHA256.fullmatch(listed.sha256):
            blob = self._folder / "blobs" / listed.sha256
            lock = self._cache / ".locks" / self._folder.name / f"{listed.sha256}.lock"
            for folder in (blob.parent, lock.parent):
                folder.mkdir(parents=True, exist_ok=True)
            with FileLock(lock):
                if not blob.exists():
                    growing = _partial_path(blob)
                    url = hf_hub_url(repo, name, revision=commit, endpoint=endpoint)
                    fetch(
                        url,
                        growing,
                        size=listed.size,
                        sha256=listed.sha256,
                        headers={"authorization": f"Bearer {token}"} if (token := get_token()) else {},
                        on_progress=on_progress,
                    )
                    growing.rename(blob)
        hf_hub_download(
            repo,
            name,
            revision=commit,
            cache_dir=self._cache,
            endpoint=endpoint,
            tqdm_class=_NoProgressBar,
        )

    def _partial_size(self, listed: _RemoteFile) -> int:
        """Size in bytes of the partial file of an earlier download."""
        path = _partial_path(self._folder / "blobs" / (listed.sha256 or "none"))
        return path.stat().st_size if path.exists() else 0

    def _check_space(self, needed: int) -> None:
        self._cache.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._cache).free
        if needed > free:
            raise ModelError(
                f"{self._name} needs {needed / 1e9:.1f} GB in {self._cache}, where {free / 1e9:.1f} GB are free; "
                f"make room, or name another folder"
            )


def _partial_path(blob: Path) -> Path:
    """The path of a partial file."""
    return blob.with_name(f"{blob.name}.partial")


def _advance(progress: Callable[[int, int], None], before: int, total: int, here: int) -> None:
    progress(before + here, total)


def _not_a_hub_message(endpoint: str) -> str:
    return f"{endpoint} does not answer as the Hugging Face Hub does; check the network's log-in page, and HF_ENDPOINT"


class _NoProgressBar:
    """A stand-in for tqdm that shows nothing."""

    def __init__(self, *args: object, **options: object) -> None:
        """Accept all arguments of tqdm."""

    def __enter__(self) -> "_NoProgressBar":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def update(self, amount: float | None = 1) -> None:
        """Ignore the progress."""
