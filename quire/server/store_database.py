"""The SQLite database of a store: its tables, and how it is opened."""

import errno
import os
import sqlite3
from pathlib import Path

_APPLICATION_ID = 0x71756972  # in the header of the file
_VERSION = 2  # of the tables
_SETTINGS = (
    *("PRAGMA locking_mode = EXCLUSIVE", "PRAGMA journal_mode = WAL", "PRAGMA synchronous = NORMAL"),
    *("PRAGMA foreign_keys = ON", "PRAGMA secure_delete = ON"),
)
# `usage` has the sums over `objects`. A pinned object is not deleted to make room. A body is NULL until its object is
# complete. Version 2 added the long bodies and the long appends: a long body is in `contents` at `body_pieces` places
# from `body_place`, which are negative. `num_pieces` is the number of pieces before an append in progress, or NULL.
_TABLES = """
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
ALTER TABLE objects ADD COLUMN body_place INTEGER NOT NULL DEFAULT 0;
ALTER TABLE objects ADD COLUMN body_pieces INTEGER NOT NULL DEFAULT 0;
ALTER TABLE objects ADD COLUMN num_pieces INTEGER;
CREATE INDEX by_number ON objects (tenant, kind, number);
CREATE INDEX by_tenant_and_expiry ON objects (tenant, kind, expires_at);
CREATE INDEX in_use ON objects (kind, number) WHERE pinned = 1;
CREATE INDEX incomplete ON objects (number) WHERE body IS NULL;
"""
_OF_DISK = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR)  # codes of SQLite


def open_database(path: Path | None) -> sqlite3.Connection:
    """A connection that holds the lock of the file, with the tables; without a path, in memory.

    Nothing is written if the tables are there. Raises OSError, sqlite3.Error.
    """
    if path is not None:
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # for its owner only
        except OSError as error:
            if error.errno != errno.EROFS or not path.exists():  # a file on a read-only disk can be read
                raise
    db = sqlite3.connect(":memory:" if path is None else path, timeout=0, check_same_thread=False)
    try:
        for setting in _SETTINGS:
            db.execute(setting).fetchall()
        (application,), (version,) = (
            db.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version")
        )
        (num_tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if num_tables and (application != _APPLICATION_ID or not 1 <= version <= _VERSION):
            raise sqlite3.DatabaseError("it is no store of this version of quire")
        if not num_tables or version < _VERSION:
            _create_tables(db)
    except BaseException:
        db.close()
        raise
    return db


def is_of_disk(error: OSError | sqlite3.Error, path: Path | None) -> bool:
    """Whether the disk is why `open_database` failed: it is full, read-only, or broken. Otherwise the path is."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # an extended code has the code in its low byte
    if code == sqlite3.SQLITE_CANTOPEN:  # the file is there, but another one beside it cannot be created
        return path is not None and path.exists() and os.access(path.parent, os.W_OK | os.X_OK)
    return code in _OF_DISK


def _create_tables(db: sqlite3.Connection) -> None:
    """Create the tables, or add what version 2 has to those of version 1."""
    header = f"PRAGMA application_id = {_APPLICATION_ID}; PRAGMA user_version = {_VERSION};"
    db.executescript(f"BEGIN EXCLUSIVE; {_TABLES} {header} COMMIT;")
