"""Objects that tenants store on the server: responses, files and batches. SQLite, in a file or in memory.

An object has a body, which is JSON, and possibly contents: byte strings in an order. It belongs to one tenant, expires,
and counts for the limits of its tenant. Statements run on the threads of a pool, one at a time.
"""

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeVar

from quire.errors import ConfigError
from quire.server.errors import StoreFull, StoreUnavailable
from quire.server.thread_pool import ThreadPool

log = logging.getLogger(__name__)

T = TypeVar("T")
Kind = Literal["response", "file", "batch"]


class Limit(NamedTuple):
    """Bounds for the objects of one tenant and one kind. num_bytes: of bodies and contents together."""

    number: int
    num_bytes: int


LIMITS: Mapping[Kind, Limit] = MappingProxyType(
    {"response": Limit(4096, 2**26), "file": Limit(1024, 2**28), "batch": Limit(1024, 2**24)}
)
MAX_MEMORY = 2**30  # bytes of all tenants in a store in memory,
MAX_FILE = 2**36  # and in one in a file

_APPLICATION_ID = 0x71756972  # in the header of the file
_VERSION = 1  # of the tables
_SETTINGS = (
    *("PRAGMA locking_mode = EXCLUSIVE", "PRAGMA journal_mode = WAL", "PRAGMA synchronous = NORMAL"),
    *("PRAGMA foreign_keys = ON", "PRAGMA secure_delete = ON"),
)
# `usage` has the sums over `objects`. A pinned object is not deleted to make room. A body is NULL until its object is
# complete.
_TABLES = f"""
BEGIN EXCLUSIVE;
CREATE TABLE IF NOT EXISTS objects (
    number INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, kind TEXT NOT NULL, id TEXT NOT NULL,
    expires_at REAL NOT NULL, pinned INTEGER NOT NULL, num_bytes INTEGER NOT NULL, body TEXT,
    UNIQUE (tenant, kind, id)
);
CREATE INDEX IF NOT EXISTS by_age ON objects (tenant, kind, pinned, number);
CREATE INDEX IF NOT EXISTS by_expiry ON objects (expires_at);
CREATE TABLE IF NOT EXISTS contents (
    object INTEGER NOT NULL REFERENCES objects ON DELETE CASCADE, place INTEGER NOT NULL, data BLOB NOT NULL,
    UNIQUE (object, place)
);
CREATE TABLE IF NOT EXISTS usage (
    tenant TEXT NOT NULL, kind TEXT NOT NULL, number INTEGER NOT NULL, num_bytes INTEGER NOT NULL,
    PRIMARY KEY (tenant, kind)
);
CREATE TRIGGER IF NOT EXISTS object_inserted AFTER INSERT ON objects BEGIN
    INSERT INTO usage VALUES (new.tenant, new.kind, 1, new.num_bytes)
    ON CONFLICT DO UPDATE SET number = number + 1, num_bytes = num_bytes + excluded.num_bytes;
END;
CREATE TRIGGER IF NOT EXISTS object_resized AFTER UPDATE OF num_bytes ON objects BEGIN
    UPDATE usage SET num_bytes = num_bytes + new.num_bytes - old.num_bytes
    WHERE tenant = new.tenant AND kind = new.kind;
END;
CREATE TRIGGER IF NOT EXISTS object_deleted AFTER DELETE ON objects BEGIN
    UPDATE usage SET number = number - 1, num_bytes = num_bytes - old.num_bytes
    WHERE tenant = old.tenant AND kind = old.kind;
END;
DELETE FROM objects WHERE body IS NULL;
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {_VERSION};
COMMIT;
"""
_OWN = "tenant = ? AND kind = ? AND id = ? AND expires_at > ?"


class LargerBody(Exception):
    """The body of an object is larger than its reader allows. num_bytes: its size."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.num_bytes = num_bytes


class Store:
    """The stored objects of all tenants. clock: seconds since 1970.

    An object is pinned while it is in use: it is not deleted to make room for others.
    """

    def __init__(self, path: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        """Open or create the file; without a path, use memory. Incomplete objects are deleted.

        Raises ConfigError for a file that cannot be used, is no store, or is in use by another server.
        """
        self.clock = clock
        self._max_bytes = MAX_MEMORY if path is None else MAX_FILE
        self._pool = ThreadPool(max_per_tenant=1)
        self._lock = threading.Lock()
        try:
            self._db = _opened(path)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"store_path: {path} cannot be used ({error}); name another file") from error

    async def create(
        self, tenant: str, kind: Kind, id: str, body: bytes | None, *, expires_at: float, pinned: bool = False
    ) -> None:
        """Add an object. If the tenant's limit requires it, its oldest objects of this kind are deleted.

        body: None for an object that `update` completes, and that is not found before. Raises StoreFull.
        """
        num_bytes = len(body or b"")

        def work(db: sqlite3.Connection) -> None:
            self._make_room(db, tenant, kind, 1, num_bytes)
            db.execute(
                "INSERT INTO objects (tenant, kind, id, expires_at, pinned, num_bytes, body) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (tenant, kind, id, expires_at, pinned, num_bytes, None if body is None else body.decode()),
            )

        await self._run(tenant, work)

    async def update(
        self,
        tenant: str,
        kind: Kind,
        id: str,
        body: bytes,
        *,
        expires_at: float | None = None,
        pinned: bool = False,
    ) -> bool:
        """Replace the body. expires_at: None: as before. Returns whether there is such an object.

        Raises StoreFull, and then changes nothing.
        """

        def work(db: sqlite3.Connection) -> bool:
            row = self._row(db, tenant, kind, id, complete=False)
            if row is not None:
                self._replace_body(db, tenant, kind, row, body)
                db.execute(
                    "UPDATE objects SET pinned = ?, expires_at = coalesce(?, expires_at) WHERE number = ?",
                    (pinned, expires_at, row[0]),
                )
            return row is not None

        return await self._run(tenant, work)

    async def append(self, tenant: str, kind: Kind, id: str, data: bytes, body: bytes | None = None) -> bool:
        """Add a piece to the contents of a pinned object. body: replaces the object's; None: it stays.

        Returns whether there is such an object. Raises StoreFull, and then changes nothing.
        """

        def work(db: sqlite3.Connection) -> bool:
            row = self._row(db, tenant, kind, id, complete=False)
            if row is None:
                return False
            self._make_room(db, tenant, kind, 0, len(data))
            db.execute(
                "INSERT INTO contents SELECT ?, coalesce(max(place), -1) + 1, ? FROM contents WHERE object = ?",
                (row[0], data, row[0]),
            )
            db.execute("UPDATE objects SET num_bytes = num_bytes + ? WHERE number = ?", (len(data), row[0]))
            if body is not None:
                self._replace_body(db, tenant, kind, row, body)
            return True

        return await self._run(tenant, work)

    async def get(self, tenant: str, kind: Kind, id: str, most: int | None = None) -> bytes | None:
        """The body of an object; None if there is none. Raises LargerBody for one of more than `most` bytes."""

        def work(db: sqlite3.Connection) -> bytes | None:
            if most is not None:
                self._check_size(db, tenant, kind, id, most)
            found = db.execute(
                f"SELECT CAST(body AS BLOB) FROM objects WHERE {_OWN} AND body IS NOT NULL",
                (tenant, kind, id, self.clock()),
            ).fetchone()
            return None if found is None else bytes(found[0])

        return await self._run(tenant, work)

    async def content(self, tenant: str, kind: Kind, id: str, place: int) -> bytes | None:
        """The piece of the contents at this place, from 0; None behind the last one, and without the object."""

        def work(db: sqlite3.Connection) -> bytes | None:
            found = db.execute(
                "SELECT data FROM contents WHERE object = ? AND place = ?",
                (self._number(db, tenant, kind, id), place),
            ).fetchone()
            return None if found is None else bytes(found[0])

        return await self._run(tenant, work)

    async def copy_contents(self, tenant: str, kind: Kind, source: str, target: str, places: range) -> bool:
        """Add these pieces of the contents of `source` to those of the pinned object `target`.

        Returns whether both objects and the pieces are there. Raises StoreFull, and then changes nothing.
        """

        def work(db: sqlite3.Connection) -> bool:
            old, new = (self._number(db, tenant, kind, id) for id in (source, target))
            first, end = places.start, places.stop
            if old is None or new is None:
                return False
            number, num_bytes = db.execute(
                "SELECT count(*), coalesce(sum(length(data)), 0) FROM contents "
                "WHERE object = ? AND place >= ? AND place < ?",
                (old, first, end),
            ).fetchone()
            (num_before,) = db.execute("SELECT count(*) FROM contents WHERE object = ?", (new,)).fetchone()
            (pinned,) = db.execute("SELECT pinned FROM objects WHERE number = ?", (old,)).fetchone()
            db.execute("UPDATE objects SET pinned = 1 WHERE number = ?", (old,))  # so that it makes no room itself
            self._make_room(db, tenant, kind, 0, num_bytes)
            db.execute("UPDATE objects SET pinned = ? WHERE number = ?", (pinned, old))
            db.execute(
                "INSERT INTO contents SELECT ?, place + ?, data FROM contents "
                "WHERE object = ? AND place >= ? AND place < ?",
                (new, num_before - first, old, first, end),
            )
            db.execute("UPDATE objects SET num_bytes = num_bytes + ? WHERE number = ?", (num_bytes, new))
            return bool(number == len(places))

        return await self._run(tenant, work)

    async def delete(self, tenant: str, kind: Kind, id: str) -> bool:
        """Delete an object with its contents. Returns whether there was one."""

        def work(db: sqlite3.Connection) -> bool:
            found = db.execute(f"DELETE FROM objects WHERE {_OWN}", (tenant, kind, id, self.clock()))
            return found.rowcount > 0

        return await self._run(tenant, work)

    async def page(
        self,
        tenant: str,
        kind: Kind,
        limit: int,
        *,
        after: str | None = None,
        ascending: bool = False,
        where: Mapping[str, str] = MappingProxyType({}),
    ) -> list[bytes] | None:
        """At most `limit` bodies by age, behind the object `after`. None if there is no such object.

        where: names and values of fields that the bodies must have.
        """

        def work(db: sqlite3.Connection) -> list[bytes] | None:
            start = None if after is None else self._row(db, tenant, kind, after)
            if after is not None and start is None:
                return None
            conditions, values = [], list[object]()
            for name, value in where.items():
                conditions.append("AND json_extract(body, ?) = ?")
                values += [f"$.{name}", value]
            if start is not None:
                conditions.append(f"AND number {'>' if ascending else '<'} ?")
                values.append(start[0])
            rows = db.execute(
                "SELECT body FROM objects WHERE tenant = ? AND kind = ? AND expires_at > ? AND body IS NOT NULL "
                f"{' '.join(conditions)} ORDER BY number {'ASC' if ascending else 'DESC'} LIMIT ?",
                (tenant, kind, self.clock(), *values, limit),
            )
            return [str(body).encode() for (body,) in rows]

        return await self._run(tenant, work)

    def pinned(self, kind: Kind) -> list[tuple[str, bytes]]:
        """Tenant and body of each pinned object, oldest first. For the start of a server: it blocks."""
        with (
            self._lock,
            closing(
                self._db.execute(
                    "SELECT tenant, body FROM objects WHERE kind = ? AND pinned AND body IS NOT NULL ORDER BY number",
                    (kind,),
                )
            ) as rows,
        ):
            return [(str(tenant), str(body).encode()) for tenant, body in rows]

    def close(self) -> None:
        """Close the file. Later calls raise StoreUnavailable or EngineStopped. Can be called again."""
        self._pool.close()
        with self._lock:
            self._db.close()

    async def _run(self, tenant: str, work: Callable[[sqlite3.Connection], T]) -> T:
        """The result of `work` in one transaction, on a thread. Raises Busy, StoreUnavailable."""

        def locked() -> T:
            with self._lock, self._db:
                return work(self._db)

        try:
            return await self._pool.run(tenant, locked)
        except sqlite3.Error as error:
            log.error("the store failed: %s", error)
            raise StoreUnavailable from error

    def _check_size(self, db: sqlite3.Connection, tenant: str, kind: Kind, id: str, most: int) -> None:
        """Raises LargerBody for an object whose body has more than `most` bytes, without reading it."""
        row = db.execute(
            f"SELECT number, num_bytes FROM objects WHERE {_OWN}", (tenant, kind, id, self.clock())
        ).fetchone()
        if row is not None and row[1] > most:
            (of_contents,) = db.execute(
                "SELECT coalesce(sum(length(data)), 0) FROM contents WHERE object = ?", (row[0],)
            ).fetchone()
            if row[1] - of_contents > most:
                raise LargerBody(row[1] - of_contents)

    def _number(self, db: sqlite3.Connection, tenant: str, kind: Kind, id: str) -> int | None:
        """Number of an object, which may be incomplete."""
        row = db.execute(f"SELECT number FROM objects WHERE {_OWN}", (tenant, kind, id, self.clock())).fetchone()
        return None if row is None else int(row[0])

    def _row(
        self, db: sqlite3.Connection, tenant: str, kind: Kind, id: str, *, complete: bool = True
    ) -> tuple[int, str | None] | None:
        """Number and body of an object. complete: whether it must have a body."""
        row: tuple[int, str | None] | None = db.execute(
            f"SELECT number, body FROM objects WHERE {_OWN}", (tenant, kind, id, self.clock())
        ).fetchone()
        return None if row is None or (complete and row[1] is None) else row

    def _replace_body(
        self, db: sqlite3.Connection, tenant: str, kind: Kind, row: tuple[int, str | None], body: bytes
    ) -> None:
        """Replace the body of the object whose number and body are `row`. Raises StoreFull."""
        number, before = row
        added = len(body) - len((before or "").encode())
        db.execute("UPDATE objects SET pinned = 1 WHERE number = ?", (number,))  # so that it makes no room itself
        if added > 0:
            self._make_room(db, tenant, kind, 0, added)
        db.execute(
            "UPDATE objects SET body = ?, num_bytes = num_bytes + ? WHERE number = ?", (body.decode(), added, number)
        )

    def _make_room(self, db: sqlite3.Connection, tenant: str, kind: Kind, number: int, num_bytes: int) -> None:
        """Delete expired objects, then the tenant's oldest of this kind that are not pinned, until the new ones fit.

        Raises StoreFull if they do not fit then.
        """
        db.execute("DELETE FROM objects WHERE expires_at <= ?", (self.clock(),))
        limit = LIMITS[kind]
        while True:
            used = db.execute(
                "SELECT number, num_bytes FROM usage WHERE tenant = ? AND kind = ?", (tenant, kind)
            ).fetchone() or (0, 0)
            (total,) = db.execute("SELECT coalesce(sum(num_bytes), 0) FROM usage").fetchone()
            fits = used[0] + number <= limit.number and used[1] + num_bytes <= limit.num_bytes
            if fits and total + num_bytes <= self._max_bytes:
                return
            deleted = db.execute(
                "DELETE FROM objects WHERE number = (SELECT min(number) FROM objects "
                "WHERE tenant = ? AND kind = ? AND pinned = 0)",
                (tenant, kind),
            )
            if not deleted.rowcount or num_bytes > limit.num_bytes:
                raise StoreFull(kind, limit.number, limit.num_bytes)


def _opened(path: Path | None) -> sqlite3.Connection:
    """A connection that holds the lock of the file, with the tables. Raises OSError, sqlite3.Error."""
    if path is not None:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # for its owner only
    db = sqlite3.connect(":memory:" if path is None else path, timeout=0, check_same_thread=False)
    try:
        for setting in _SETTINGS:
            db.execute(setting).fetchall()
        (application,), (version,) = (
            db.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version")
        )
        (num_tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if num_tables and (application, version) != (_APPLICATION_ID, _VERSION):
            raise sqlite3.DatabaseError("it is no store of this version of quire")
        db.executescript(_TABLES)
    except BaseException:
        db.close()
        raise
    return db
