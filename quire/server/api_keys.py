"""API keys: the key file, new keys, the caller of a key.

Imports no web framework, because `quire key` needs none.
"""

import hashlib
import hmac
import os
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from quire.core.request import Namespace
from quire.core.scheduling_params import MAX_NAME_LEN
from quire.errors import ConfigError
from quire.server.middleware.quota import UNLIMITED, Quota

Role = Literal["user", "admin"]

MAX_KEYS = 4096  # the key of each request is compared with all of them
MAX_PER_MINUTE = 10**9
MIN_KEY = 8  # characters of a key that the operator chose
DEFAULT_TENANT = "default"  # of that key
MAX_TENANT = 128  # characters
MAX_KEY_ADAPTERS = 1024  # names that one key is limited to
_MAX_FILE = 4 * 2**20  # bytes
_EMPTY_KEY_SHA256 = hashlib.sha256().hexdigest()
_PREFIX = "qk-"  # makes a key recognizable

PerMinute = Annotated[int, Meta(ge=1, le=MAX_PER_MINUTE)]


class Caller(msgspec.Struct, frozen=True):
    """The sender of a request, by its API key. An admin has access to data of all tenants and of the server."""

    tenant: str
    role: Role
    quota: Quota = UNLIMITED  # of this key
    adapters: frozenset[str] | None = None  # the names that this key may use; None: all of the server

    @property
    def is_admin(self) -> bool:
        """Whether the role is admin."""
        return self.role == "admin"

    def may_use_adapter(self, name: str) -> bool:
        """Whether the key may use an adapter of this name, if there is one."""
        return self.adapters is None or name in self.adapters

    def namespace(self, salt: str | None = None) -> Namespace:
        """The namespace of a request. salt: from the body; it can only narrow the namespace."""
        return Namespace(tenant=self.tenant, salt=salt or "")


KEYLESS_CALLER = Caller(tenant="", role="admin")  # every caller of a server without keys


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The entry of one key in a key file."""

    sha256: Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{64}\Z")]  # hex digits, of the whole key with its prefix
    tenant: str
    role: Role = "user"
    requests_per_minute: PerMinute | UnsetType = UNSET  # no limit
    tokens_per_minute: PerMinute | UnsetType = UNSET  # of prompts and outputs together
    adapters: tuple[str, ...] | UnsetType = UNSET  # names of those that it may use; all

    def caller(self) -> Caller:
        """The caller of the key, with a new Quota."""
        adapters = None if isinstance(self.adapters, UnsetType) else frozenset(self.adapters)
        return Caller(self.tenant, self.role, self.quota(), adapters)

    def quota(self) -> Quota:
        """A new, unused Quota with the limits of the key; UNLIMITED if it has none."""
        limits = (self.requests_per_minute or None, self.tokens_per_minute or None)
        return UNLIMITED if limits == (None, None) else Quota(*limits)

    def __post_init__(self) -> None:
        """Raises ConfigError for an invalid tenant, invalid adapters, and for the hash of an empty key."""
        if not (1 <= len(self.tenant) <= MAX_TENANT and self.tenant.isprintable() and self.tenant.strip()):
            raise ConfigError(f"a tenant's name must have 1 to {MAX_TENANT} printable characters, not only spaces")
        names = self.adapters or ()
        if len(names) > MAX_KEY_ADAPTERS or not all(0 < len(name) <= MAX_NAME_LEN for name in names):
            raise ConfigError(f"adapters must be at most {MAX_KEY_ADAPTERS:,} names of 1 to {MAX_NAME_LEN} characters")
        if self.sha256.lower() == _EMPTY_KEY_SHA256:
            raise ConfigError("this is the sha256 of an empty key; create a key with `quire key`")


class KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a key file."""

    keys: Annotated[tuple[KeyEntry, ...], Meta(max_length=MAX_KEYS)]


class Keys:
    """The keys that a server accepts."""

    def __init__(self, entries: Sequence[KeyEntry]) -> None:
        self._callers = [(bytes.fromhex(entry.sha256), entry.caller()) for entry in entries]

    def caller(self, key: bytes) -> Caller | None:
        """The caller of a key; None for an unknown or empty key. Compares with every entry, in constant time."""
        digest = hashlib.sha256(key).digest()
        found = None
        for known, caller in self._callers:
            if hmac.compare_digest(known, digest):
                found = caller
        return found if key else None

    def caller_of_tenant(self, tenant: str) -> Caller | None:
        """The caller of a tenant's first key; None for a tenant without a key."""
        return next((caller for _, caller in self._callers if caller.tenant == tenant), None)

    @property
    def num_tenants(self) -> int:
        """Number of tenants that the keys name."""
        return len({caller.tenant for _, caller in self._callers})

    def __str__(self) -> str:
        admins = sum(caller.is_admin for _, caller in self._callers)
        limited = sum(caller.quota.is_limited for _, caller in self._callers)
        limits = f", {limited} with limits" if limited else ""
        return (
            f"{len(self._callers)} API keys of {self.num_tenants} tenants, {admins} of them with the role admin{limits}"
        )


def read_keys(path: str | Path) -> Keys:
    """The keys in a file. Raises ConfigError for a missing, empty or invalid file."""
    data = _read_bytes(Path(path))
    if data is None:
        raise ConfigError(f"the key file {path} does not exist; `quire key TENANT --file {path}` creates it")
    entries = _parse_entries(Path(path), data)
    if not entries:
        raise ConfigError(f"{path} lists no keys, so every request would fail; `quire key TENANT --file` adds one")
    return Keys(entries)


def single_key(key: str) -> Keys:
    """Keys with one key of an operator's choice, whose holder is an admin. Raises ConfigError for an unusable key."""
    if not (len(key) >= MIN_KEY and key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(
            f"api_key must have at least {MIN_KEY} ASCII characters without spaces; `quire key` makes one"
        )
    return Keys([KeyEntry(hashlib.sha256(key.encode()).hexdigest(), DEFAULT_TENANT, "admin")])


def new_key(
    tenant: str,
    role: Role,
    requests_per_minute: int | None = None,
    tokens_per_minute: int | None = None,
    adapters: Sequence[str] | None = None,
) -> tuple[str, KeyEntry]:
    """A key of 256 random bits and its entry. Raises ConfigError for an invalid tenant.

    adapters: names of those that the key may use; None: all of the server.
    """
    key = _PREFIX + secrets.token_urlsafe(32)
    limits = {"requests_per_minute": requests_per_minute, "tokens_per_minute": tokens_per_minute}
    given: dict[str, Any] = {name: limit for name, limit in limits.items() if limit is not None}
    if adapters is not None:
        given["adapters"] = tuple(adapters)
    return key, KeyEntry(hashlib.sha256(key.encode()).hexdigest(), tenant, role, **given)


def add_key(path: Path, entry: KeyEntry) -> None:
    """Add an entry to a key file. A missing file is created with mode 0600.

    The file is replaced atomically. Of two concurrent calls one can be lost. Raises ConfigError.
    """
    path = Path(os.path.realpath(path))  # replaces the target of a link, not the link
    if path.is_symlink():
        raise ConfigError(f"the key file {path} is a link that leads to itself; name another")
    data = _read_bytes(path)
    entries = (*(() if data is None else _parse_entries(path, data)), entry)
    if len(entries) > MAX_KEYS:
        raise ConfigError(f"{path} holds {MAX_KEYS} keys already; take out some that are no longer used")
    try:
        handle, new = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # of mode 0600
        with open(handle, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(KeyFile(entries)), indent=2) + b"\n")
        if data is not None:
            os.chmod(new, path.stat().st_mode & 0o777)
        os.replace(new, path)
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be written: {error.strerror}") from error


def _read_bytes(path: Path) -> bytes | None:
    """The content of a key file; None if there is no file. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be read: {error.strerror}") from error
    if len(data) > _MAX_FILE:
        raise ConfigError(f"the key file {path} is longer than {_MAX_FILE} bytes")
    return data


def _parse_entries(path: Path, data: bytes) -> tuple[KeyEntry, ...]:
    """The entries of a key file. Raises ConfigError, also for a key that is listed twice."""
    try:
        entries = msgspec.json.decode(data, type=KeyFile).keys
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # their messages never quote a hash
        raise ConfigError(
            f"the key file {path} is wrong: {error}; it must hold "
            '{"keys": [{"sha256": ..., "tenant": ..., "role": "user" or "admin"}]}, where an entry may have '
            "requests_per_minute, tokens_per_minute and adapters, too"
        ) from error
    places: dict[str, int] = {}
    for place, entry in enumerate(entries):
        first = places.setdefault(entry.sha256.lower(), place)
        if first != place:
            raise ConfigError(f"the key file {path} has one key twice: keys[{first}] and keys[{place}]")
    return entries
