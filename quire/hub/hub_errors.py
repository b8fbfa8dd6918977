"""What can go wrong with the Hub, as what the user can do about it. Knows the library's errors, no repository."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from quire.errors import ModelError
from quire.hub.hub_files import NoNetwork


@contextmanager
def explained(repo: str, revision: str, cache: Path) -> Iterator[None]:
    """Around work with a repository at a revision that writes to `cache`. Raises ModelError, and NoNetwork."""
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
        raise ModelError(_refusal(repo, error.response.status_code)) from error
    except (httpx2.RequestError, OfflineModeIsEnabled, LocalEntryNotFoundError) as error:
        raise NoNetwork(f"{error}" or type(error).__name__) from error
    except OSError as error:
        what = "the disk is full" if error.errno == errno.ENOSPC else f"{error}"
        raise ModelError(f"{repo} cannot be written to {cache}: {what}; make room, or name another folder") from error


def _refusal(repo: str, status: int) -> str:
    if status in (401, 403):
        return f"the Hub refused {repo} (status {status}); set HF_TOKEN to a token that may read it, or unset a bad one"
    if status == 429:
        return "the Hub is limiting requests (status 429); wait a few minutes, or set HF_TOKEN"
    return f"the Hub failed with status {status} for {repo}; try again later"
