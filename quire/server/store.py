"""Objects that tenants store on the server: responses, files and batches. SQLite, in a file or in memory.

An object has a body, which is JSON, and possibly contents: byte strings in an order. It belongs to one tenant, expires,
and counts for the limits of its tenant. Statements run on one thread. A transaction reads, writes and deletes few
pieces, and tenants take turns between transactions.
"""

import asyncio
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeVar

from quire.errors import ConfigError, EngineStopped
from quire.server.errors import Busy, StoreFull, StoreUnavailable
from quire.server.store_database import is_of_disk, open_database
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

PIECE_BYTES = 2**18  # of a body or of contents in one row
MAX_ROWS = 4  # with bodies or pieces that one transaction reads or deletes; it writes one
INCOMPLETE_SECONDS = 3600  # after which an object that is not completed is deleted
LOG_SECONDS = 60.0  # between two log lines about a store that fails

_HOUSEKEEPER = "\0housekeeper"  # takes turns with the tenants
_PAGE_ROWS = 64  # of a page that one transaction reads
_END = 2**62  # beyond all places
_COLUMNS = "number, body, num_bytes, body_place, body_pieces, num_pieces, pinned"
_OWN = "tenant = ? AND kind = ? AND id = ? AND expires_at > ?"


class _Row(NamedTuple):
    """The row of an object. body: None if it is incomplete, empty if it is long. The others: see store_database.py."""

    number: int
    body: str | None
    num_bytes: int
    body_place: int
    body_pieces: int
    num_pieces: int | None
    pinned: int


class LargerBody(Exception):
    """The body of an object is larger than its reader allows. num_bytes: its size."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.num_bytes = num_bytes


class Store:
    """The stored objects of all tenants. clock: seconds since 1970.

    An object is pinned while it is in use: it is not deleted to make room for others. An object that is deleted or has
    expired is not found any more; its rows are deleted step by step, and count for its tenant until then.

    A store whose disk is full, read-only or broken raises StoreUnavailable in each call that needs the disk, and works
    again when the disk does.
    """

    def __init__(self, path: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        """Open or create the file; without a path, use memory, which the first call opens.

        Raises ConfigError for a file that cannot be used, is no store, or is in use by another server. If the disk is
        the cause, it is opened by the first call that can.
        """
        self.clock = clock
        self._path = path
        self._max_bytes = MAX_MEMORY if path is None else MAX_FILE
        self._pool = ThreadPool(max_per_tenant=1, num_more=0)
        self._lock = threading.Lock()
        self._is_closed = False
        self._db: sqlite3.Connection | None = None
        self._num_before = 0  # the highest number of an object of an earlier server
        self._endings: dict[Kind, Callable[[bytes], bytes]] = {}
        self._interrupted = set[tuple[str, Kind, str]]()  # pinned objects of this server that could not be updated,
        self._ending = set[tuple[str, Kind, str]]()  # and objects whose ending is being written
        self._has_deleted = True  # perhaps there are rows of deleted objects,
        self._has_interrupted = False  # and pinned objects of an earlier server
        self._housekeeping: asyncio.Task[None] | None = None
        self._logged_at = -LOG_SECONDS
        if path is None:
            return
        try:
            self._connection()
        except (OSError, sqlite3.Error) as error:
            if not is_of_disk(error, path):
                raise ConfigError(f"store_path: {path} cannot be used ({error}); name another file") from error
            self._log(error)

    async def create(
        self, tenant: str, kind: Kind, id: str, body: bytes | None, *, expires_at: float, pinned: bool = False
    ) -> None:
        """Add an object. If the tenant's limit requires it, its oldest objects of this kind are deleted.

        body: None for an object that `update` completes, and that is not found before. Raises StoreFull.
        """
        num_bytes = len(body or b"")
        is_long = num_bytes > PIECE_BYTES
        row: tuple[object, ...] = (expires_at, pinned, num_bytes, None if body is None else body.decode())
        if is_long:
            row = (min(expires_at, self.clock() + INCOMPLETE_SECONDS), True, 0, None)

        def work(db: sqlite3.Connection) -> bool | None:
            if not self._make_room(db, tenant, kind, 1, num_bytes):
                return None
            _expire(db, "tenant = ? AND kind = ? AND id = ? AND expires_at <= ?", (tenant, kind, id, self.clock()))
            db.execute(
                "INSERT INTO objects (tenant, kind, id, expires_at, pinned, num_bytes, body) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (tenant, kind, id, *row),
            )
            return True

        await self._in_steps(tenant, work)
        if is_long:
            try:
                await self.update(tenant, kind, id, body or b"", expires_at=expires_at, pinned=pinned)
            except BaseException:
                await self.delete(tenant, kind, id)
                raise

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

        Raises StoreFull, and then changes nothing. An object has one update or append at a time.
        """
        pieces = _pieces(body) if len(body) > PIECE_BYTES else []
        first, has_rest = 0, bool(pieces)

        def work(db: sqlite3.Connection, i: int) -> bool | None:
            """Write the i-th piece beside the body, or behind the last one replace the body."""
            nonlocal first, has_rest
            row = self._row(db, tenant, kind, id)
            if row is None:
                return False
            added = len(body) - _body_bytes(db, row)
            if i in (0, len(pieces)) and not self._make_room(db, tenant, kind, 0, added, row.number):
                return None
            lowest = _int(db, "SELECT min(place) FROM contents WHERE object = ?", row.number, default=0)
            if pieces and i == 0:
                first = min(lowest, row.body_place, 0) - len(pieces)
            if i < len(pieces):
                db.execute("INSERT INTO contents VALUES (?, ?, ?)", (row.number, first + i, pieces[i]))
            else:
                has_rest = lowest < 0
                _replace_body(db, row, added, "" if pieces else body.decode(), first or row.body_place, len(pieces))
                db.execute(
                    "UPDATE objects SET pinned = ?, expires_at = coalesce(?, expires_at) WHERE number = ?",
                    (pinned, expires_at, row.number),
                )
            return True

        try:
            found = all([await self._in_steps(tenant, partial(work, i=i)) for i in range(len(pieces) + 1)])
        except (StoreUnavailable, Busy):
            if kind in self._endings:
                self._interrupted.add((tenant, kind, id))
            raise
        finally:
            if has_rest:
                with suppress(StoreUnavailable, Busy, EngineStopped):
                    await self._in_steps(tenant, lambda db: self._clear_bodies(db, tenant, kind, id))
        self._interrupted.discard((tenant, kind, id))
        return found

    async def append(self, tenant: str, kind: Kind, id: str, data: bytes, body: bytes | None = None) -> bool:
        """Add a piece to the contents of a pinned object, or several if it is long.

        body: replaces the object's, with PIECE_BYTES at most; None: it stays.

        Returns whether there is such an object. Raises StoreFull, and then changes nothing. After an exception the
        pieces that were added are not part of the contents.
        """
        pieces = _pieces(data) or [data]

        def work(db: sqlite3.Connection, i: int) -> bool | None:
            row = self._row(db, tenant, kind, id)
            if row is None:
                return False
            grown = 0 if body is None else len(body) - _body_bytes(db, row)
            is_last = i == len(pieces) - 1
            if (i == 0 or is_last) and not self._make_room(db, tenant, kind, 0, len(data) + grown, row.number):
                return None
            first = row.num_pieces
            if first is None:
                text = "SELECT max(place) FROM contents WHERE object = ? AND place >= 0"
                first = 1 + _int(db, text, row.number, default=-1)
            elif i == 0 and not _clear(db, row.number, first, _END):  # pieces of an append that was interrupted
                return None
            db.execute("INSERT INTO contents VALUES (?, ?, ?)", (row.number, first + i, pieces[i]))
            if is_last:
                db.execute("UPDATE objects SET num_bytes = num_bytes + ? WHERE number = ?", (len(data), row.number))
                if body is not None:
                    _replace_body(db, row, grown, body.decode(), row.body_place, 0)
            db.execute("UPDATE objects SET num_pieces = ? WHERE number = ?", (None if is_last else first, row.number))
            return True

        return all([await self._in_steps(tenant, partial(work, i=i)) for i in range(len(pieces))])

    async def get(self, tenant: str, kind: Kind, id: str, most: int | None = None) -> bytes | None:
        """The body of an object; None if there is none. One that was interrupted is ended, see `end_interrupted`.

        Raises LargerBody for one of more than `most` bytes, which is not read.
        """

        def work(db: sqlite3.Connection) -> _Row | None:
            row = self._row(db, tenant, kind, id, complete=True)
            if row is not None and most is not None and row.num_bytes > most:
                num_bytes = _body_bytes(db, row)
                if num_bytes > most:
                    raise LargerBody(num_bytes)
            return row

        while True:
            found = await self._run(tenant, work)
            if found is None:
                return None
            body = await self._body(tenant, found)
            if body is not None:
                break  # otherwise it was replaced meanwhile
        if kind in self._endings and self._is_interrupted(tenant, kind, id, found):
            body = await asyncio.to_thread(self._endings[kind], body)
            with suppress(StoreUnavailable, Busy, EngineStopped):
                await self._end(tenant, kind, id, body)
        return body

    async def content(self, tenant: str, kind: Kind, id: str, place: int) -> bytes | None:
        """The piece of the contents at this place, from 0; None behind the last one, and without the object."""

        def work(db: sqlite3.Connection) -> bytes | None:
            row = self._row(db, tenant, kind, id)
            if row is None or (row.num_pieces is not None and place >= row.num_pieces):
                return None
            return _piece(db, row.number, place)

        return await self._run(tenant, work)

    async def copy_contents(self, tenant: str, kind: Kind, source: str, target: str, places: range) -> bool:
        """Add these pieces of the contents of `source` to those of the pinned object `target`.

        Returns whether both objects and the pieces are there. Raises StoreFull, and then adds no more.
        """

        def work(db: sqlite3.Connection, first: int) -> bool | None:
            end = min(first + MAX_ROWS, places.stop)
            old, new = (self._row(db, tenant, kind, id) for id in (source, target))
            if old is None or new is None:
                return False
            selected = "FROM contents WHERE object = ? AND place >= ? AND place < ?"
            own = (old.number, first, end)
            num_bytes = _int(db, f"SELECT sum(length(data)) {selected}", *own, default=0)
            db.execute(
                "UPDATE objects SET pinned = 1 WHERE number = ?", (old.number,)
            )  # so that it makes no room itself
            has_room = self._make_room(db, tenant, kind, 0, num_bytes, new.number)
            db.execute("UPDATE objects SET pinned = ? WHERE number = ?", (old.pinned, old.number))
            if not has_room:
                return None
            text = "SELECT max(place) FROM contents WHERE object = ? AND place >= 0"
            moved = 1 + _int(db, text, new.number, default=-1) - first
            added = db.execute(f"INSERT INTO contents SELECT ?, place + ?, data {selected}", (new.number, moved, *own))
            db.execute("UPDATE objects SET num_bytes = num_bytes + ? WHERE number = ?", (num_bytes, new.number))
            return added.rowcount == end - first

        starts = places[::MAX_ROWS]
        return all([await self._in_steps(tenant, partial(work, first=first)) for first in starts])

    async def delete(self, tenant: str, kind: Kind, id: str) -> bool:
        """Delete an object with its contents. Returns whether there was one."""

        def work(db: sqlite3.Connection) -> bool:
            row = self._row(db, tenant, kind, id)
            if row is not None:
                self._has_deleted = True
                _expire(db, "number = ?", (row.number,))
                self._delete_rows(db, "number = ?", (row.number,))
            return row is not None

        self._interrupted.discard((tenant, kind, id))
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

        where: names and values of fields that the bodies must have. A long body has none.
        """
        conditions = "".join(" AND json_extract(CASE body WHEN '' THEN '{}' ELSE body END, ?) = ?" for _ in where)
        values = [text for name, value in where.items() for text in (f"$.{name}", value)]
        found: list[tuple[str, _Row]] = []

        def work(db: sqlite3.Connection) -> bool | None:
            """Read more rows. Returns False if there is no object `after`, and None if there may be further rows."""
            start = found[-1][1] if found else None
            if start is None and after is not None:
                start = self._row(db, tenant, kind, after, complete=True)
                if start is None:
                    return False
            behind = "" if start is None else f" AND number {'>' if ascending else '<'} {start.number}"
            rows = db.execute(
                f"SELECT id, {_COLUMNS} FROM objects INDEXED BY by_number "
                f"WHERE tenant = ? AND kind = ? AND expires_at > ? AND body IS NOT NULL{conditions}{behind} "
                f"ORDER BY number {'ASC' if ascending else 'DESC'} LIMIT ?",
                (tenant, kind, self.clock(), *values, min(limit - len(found), _PAGE_ROWS)),
            ).fetchall()
            found.extend((str(id), _Row(*row)) for id, *row in rows)
            return True if len(rows) < _PAGE_ROWS or len(found) >= limit else None

        if not await self._in_steps(tenant, work):
            return None
        bodies = [await self._body(tenant, row) or await self.get(tenant, kind, id) for id, row in found]
        return [body for body in bodies if body is not None]

    async def pinned(self, kind: Kind) -> list[tuple[str, str]]:
        """Tenant and id of each pinned object of an earlier server, oldest first."""
        return await self._run(
            _HOUSEKEEPER,
            lambda db: [
                (str(tenant), str(id))
                for tenant, id in db.execute(
                    "SELECT tenant, id FROM objects WHERE kind = ? AND pinned = 1 AND number <= ? AND expires_at > ? "
                    "AND body IS NOT NULL ORDER BY number",
                    (kind, self._num_before, self.clock()),
                )
            ],
        )

    async def end_interrupted(self, kind: Kind, ending: Callable[[bytes], bytes]) -> None:
        """End the objects of this kind that were pinned when an earlier server ended, or that `update` fails to store.

        `get` returns `ending(body)` for them. The store writes it as soon as it can. An ending that has no room deletes
        its object. ending: is called on any thread.
        """
        self._endings[kind] = ending
        self._has_interrupted = True
        with suppress(StoreUnavailable):
            await self._run(_HOUSEKEEPER, lambda _db: None)  # starts the housekeeping

    def close(self) -> None:
        """Close the file. Later calls raise StoreUnavailable or EngineStopped. Can be called again."""
        self._pool.close()
        with self._lock:
            self._is_closed = True
            if self._db is not None:
                self._db.close()

    async def _in_steps(self, tenant: str, work: Callable[[sqlite3.Connection], T | None]) -> T:
        """The first result of `work` that is not None, each time in a transaction of its own, which is committed."""
        while True:
            result = await self._run(tenant, work)
            if result is not None:
                return result

    async def _run(self, tenant: str, work: Callable[[sqlite3.Connection], T]) -> T:
        """The result of `work` in one transaction, on a thread. Raises Busy, EngineStopped, StoreUnavailable."""

        def locked() -> T:
            with self._lock:
                db = self._connection()
                if not self._has_deleted:
                    self._has_deleted = _has_expired(db, self.clock())
                with db:
                    return work(db)

        try:
            result = await self._pool.run(tenant, locked)
        except (sqlite3.Error, OSError) as error:
            self._log(error)
            raise StoreUnavailable from error
        has_work = self._has_deleted or self._interrupted or (self._has_interrupted and self._endings)
        if has_work and (self._housekeeping is None or self._housekeeping.done()):
            self._housekeeping = asyncio.create_task(self._keep_house())
        return result

    def _connection(self) -> sqlite3.Connection:
        """The connection, without a transaction. Raises OSError, sqlite3.Error."""
        if self._is_closed:
            raise sqlite3.ProgrammingError("the store is closed")
        if self._db is None:
            db = open_database(self._path)
            try:
                self._num_before = _int(db, "SELECT max(number) FROM objects", default=0)
            except BaseException:
                db.close()
                raise
            self._db = db
        if self._db.in_transaction:  # of an earlier call, whose rollback failed
            self._db.rollback()
        return self._db

    def _log(self, error: Exception) -> None:
        """Log that the store fails, at most once in LOG_SECONDS."""
        now = time.monotonic()
        if now - self._logged_at >= LOG_SECONDS:
            self._logged_at = now
            log.error("the store fails, and is tried again with each call (%s): %s", self._path or "in memory", error)

    async def _keep_house(self) -> None:
        """Delete the rows of deleted objects, and end those that were interrupted."""
        try:
            while await self._run(_HOUSEKEEPER, self._sweep):
                pass
            for kind in tuple(self._endings):
                while (found := await self._run(_HOUSEKEEPER, partial(self._next_interrupted, kind=kind))) is not None:
                    tenant, id, row = found
                    body = await self._body(_HOUSEKEEPER, row)
                    if body is not None:
                        await self._end(tenant, kind, id, await asyncio.to_thread(self._endings[kind], body))
            self._has_interrupted = False
        except (StoreUnavailable, Busy, EngineStopped):
            pass  # another call tries again

    def _sweep(self, db: sqlite3.Connection) -> bool:
        """Delete a few rows of deleted objects. Returns whether there were any."""
        return self._delete_rows(db, "expires_at <= ?", (self.clock(),)) > 0 or self._delete_incomplete(db)

    def _delete_incomplete(self, db: sqlite3.Connection) -> bool:
        """The same for incomplete objects of an earlier server."""
        found = self._delete_rows(db, "body IS NULL AND number <= ?", (self._num_before,)) > 0
        self._has_deleted = found
        return found

    def _delete_rows(self, db: sqlite3.Connection, where: str, values: tuple[object, ...]) -> int:
        """Delete at most MAX_ROWS rows of the objects that `where` selects. Returns their number."""
        number = _int(db, f"SELECT number FROM objects WHERE {where} LIMIT 1", *values, default=0)
        if not number:
            return 0
        deleted = db.execute(
            "DELETE FROM contents WHERE rowid IN (SELECT rowid FROM contents WHERE object = ? LIMIT ?)",
            (number, MAX_ROWS),
        ).rowcount
        if deleted < MAX_ROWS:
            db.execute("DELETE FROM objects WHERE number = ?", (number,))
        return deleted + 1

    def _next_interrupted(self, db: sqlite3.Connection, kind: Kind) -> tuple[str, str, _Row] | None:
        """Tenant, id and row of an object that was interrupted."""
        columns = f"tenant, id, {_COLUMNS}"
        for key in [key for key in self._interrupted if key[1] == kind]:
            row = self._row(db, *key, complete=True)
            if row is not None:
                return key[0], key[2], row
            self._interrupted.discard(key)
        found = db.execute(
            f"SELECT {columns} FROM objects WHERE kind = ? AND pinned = 1 AND number <= ? AND body IS NOT NULL "
            "AND expires_at > ? ORDER BY number LIMIT 1",
            (kind, self._num_before, self.clock()),
        ).fetchone()
        return None if found is None else (str(found[0]), str(found[1]), _Row(*found[2:]))

    def _is_interrupted(self, tenant: str, kind: Kind, id: str, row: _Row) -> bool:
        return (tenant, kind, id) in self._interrupted or (bool(row.pinned) and row.number <= self._num_before)

    async def _end(self, tenant: str, kind: Kind, id: str, body: bytes) -> None:
        """Store the last body of an object, once at a time. Without room for it, the object is deleted."""
        key = tenant, kind, id
        if key in self._ending:
            return
        self._ending.add(key)
        try:
            await self.update(*key, body)
        except StoreFull:
            await self.delete(*key)
        finally:
            self._ending.discard(key)

    def _row(self, db: sqlite3.Connection, tenant: str, kind: Kind, id: str, *, complete: bool = False) -> _Row | None:
        """The row of an object. complete: whether it must have a body."""
        found = db.execute(f"SELECT {_COLUMNS} FROM objects WHERE {_OWN}", (tenant, kind, id, self.clock())).fetchone()
        return None if found is None or (complete and found[1] is None) else _Row(*found)

    async def _body(self, tenant: str, row: _Row) -> bytes | None:
        """The body of an object that is complete; None if it was replaced or deleted since `row` was read."""
        if not row.body_pieces:
            return (row.body or "").encode()

        def work(db: sqlite3.Connection, first: int) -> list[bytes | None]:
            places = range(first, min(first + MAX_ROWS, row.body_place + row.body_pieces))
            return [_piece(db, row.number, place) for place in places]

        pieces: list[bytes] = []
        for first in range(row.body_place, row.body_place + row.body_pieces, MAX_ROWS):
            for piece in await self._run(tenant, partial(work, first=first)):
                if piece is None:
                    return None
                pieces.append(piece)
        return b"".join(pieces)

    def _clear_bodies(self, db: sqlite3.Connection, tenant: str, kind: Kind, id: str) -> bool | None:
        """Delete a few pieces of bodies that were replaced or not completed. Returns None if some may be left."""
        row = self._row(db, tenant, kind, id)
        if row is None:
            return True
        begin = row.body_place if row.body_pieces else 0
        return (_clear(db, row.number, -_END, begin) and _clear(db, row.number, begin + row.body_pieces, 0)) or None

    def _make_room(
        self, db: sqlite3.Connection, tenant: str, kind: Kind, number: int, num_bytes: int, kept: int = 0
    ) -> bool:
        """Delete a few rows of deleted objects, and the tenant's oldest of this kind that are not pinned.

        Returns whether the new ones fit; otherwise another transaction has to go on. Raises StoreFull if they cannot
        fit. kept: the number of an object that stays.
        """
        if number <= 0 and num_bytes <= 0:
            return True
        own, now, limit, num_rows = (tenant, kind), self.clock(), LIMITS[kind], 0
        while True:
            used = _usage(db, "tenant = ? AND kind = ?", own)
            total = _usage(db, "true", ())[1]
            fits = used[0] + number <= limit.number and used[1] + num_bytes <= limit.num_bytes
            if fits and total + num_bytes <= self._max_bytes:
                return True
            if num_rows >= MAX_ROWS:
                return False
            deleted = self._delete_rows(db, "tenant = ? AND kind = ? AND expires_at <= ?", (*own, now))
            if not deleted and fits:
                deleted = self._delete_rows(db, "expires_at <= ?", (now,))
            if not deleted:
                where = "tenant = ? AND kind = ? AND (pinned = 1 OR number = ?)"
                count, size = db.execute(
                    f"SELECT count(*), coalesce(sum(num_bytes), 0) FROM objects WHERE {where}", (*own, kept)
                ).fetchone()
                if (
                    count + number > limit.number
                    or size + num_bytes > limit.num_bytes
                    or total - used[1] + size + num_bytes > self._max_bytes
                ):
                    raise StoreFull(kind, limit.number, limit.num_bytes)
                oldest = "SELECT min(number) FROM objects WHERE tenant = ? AND kind = ? AND pinned = 0 AND number != ?"
                if not _expire(db, f"number = ({oldest})", (*own, kept)):
                    raise StoreFull(kind, limit.number, limit.num_bytes)
                self._has_deleted = True
            num_rows += deleted


def _usage(db: sqlite3.Connection, where: str, values: tuple[object, ...]) -> tuple[int, int]:
    """Number and bytes of the objects of some tenants."""
    sums = "SELECT coalesce(sum(number), 0), coalesce(sum(num_bytes), 0) FROM usage"
    number, num_bytes = db.execute(f"{sums} WHERE {where}", values).fetchone()
    return int(number), int(num_bytes)


def _has_expired(db: sqlite3.Connection, now: float) -> bool:
    return bool(_int(db, "SELECT EXISTS (SELECT 1 FROM objects WHERE expires_at <= ?)", now, default=0))


def _expire(db: sqlite3.Connection, where: str, values: tuple[object, ...]) -> bool:
    """Let an object expire now, so that it is not found, and its id is free. Returns whether there was one."""
    text = "UPDATE objects SET expires_at = 0, pinned = 0, id = 'deleted ' || number WHERE"
    return db.execute(f"{text} {where}", values).rowcount > 0


def _clear(db: sqlite3.Connection, number: int, begin: int, end: int) -> bool:
    """Delete at most MAX_ROWS pieces of an object, at places from `begin` to `end`. Returns whether none is left."""
    deleted = db.execute(
        "DELETE FROM contents WHERE rowid IN "
        "(SELECT rowid FROM contents WHERE object = ? AND place >= ? AND place < ? LIMIT ?)",
        (number, begin, end, MAX_ROWS),
    )
    return deleted.rowcount < MAX_ROWS


def _replace_body(db: sqlite3.Connection, row: _Row, added: int, body: str, place: int, num_pieces: int) -> None:
    """Replace the body. place, num_pieces: of its pieces if it is long. added: bytes."""
    db.execute(
        "UPDATE objects SET body = ?, body_place = ?, body_pieces = ?, num_bytes = num_bytes + ? WHERE number = ?",
        (body, place, num_pieces, added, row.number),
    )


def _body_bytes(db: sqlite3.Connection, row: _Row) -> int:
    if not row.body_pieces:
        return len((row.body or "").encode())
    return _int(
        db,
        "SELECT sum(length(data)) FROM contents WHERE object = ? AND place >= ? AND place < ?",
        *(row.number, row.body_place, row.body_place + row.body_pieces),
        default=0,
    )


def _piece(db: sqlite3.Connection, number: int, place: int) -> bytes | None:
    found = db.execute("SELECT data FROM contents WHERE object = ? AND place = ?", (number, place)).fetchone()
    return None if found is None else bytes(found[0])


def _pieces(data: bytes) -> list[bytes]:
    return [data[i : i + PIECE_BYTES] for i in range(0, len(data), PIECE_BYTES)]


def _int(db: sqlite3.Connection, statement: str, *values: object, default: int) -> int:
    """The first column of the first row; the default if it is NULL, or there is no row."""
    found = db.execute(statement, values).fetchone()
    return default if found is None or found[0] is None else int(found[0])
