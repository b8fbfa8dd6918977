"""A database of a store whose transactions are recorded, and whose disk can be full."""

import sqlite3
from contextlib import contextmanager

WRITES = ("INSERT", "UPDATE", "DELETE", "BEGIN")


def full():
    """SQLite's exception for a full disk."""
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    return error


class Disk:
    """fails(number, statement): whether this statement fails; numbers count from 0. A commit is the statement COMMIT.

    transactions: the statements of each, with the number of rows that they changed.
    """

    def __init__(self):
        self.fails = lambda number, statement: False
        self.num_statements = 0
        self.transactions = [[]]

    def check(self, statement):
        number, self.num_statements = self.num_statements, self.num_statements + 1
        if self.fails(number, statement):
            raise full()

    @contextmanager
    def is_full(self):
        before, self.fails = self.fails, lambda _number, statement: statement.lstrip().startswith(WRITES)
        try:
            yield
        finally:
            self.fails = before


class _Watched:
    def __init__(self, db, disk):
        self._db = db
        self._disk = disk

    def __getattr__(self, name):
        return getattr(self._db, name)

    def execute(self, statement, values=()):
        self._disk.check(statement)
        cursor = self._db.execute(statement, values)
        self._disk.transactions[-1].append((statement, max(0, cursor.rowcount)))
        return cursor

    def executescript(self, script):
        self._disk.check(script)
        return self._db.executescript(script)

    def __enter__(self):
        self._disk.transactions.append([])
        return self

    def __exit__(self, kind, error, trace):
        if kind is None:
            try:
                self._disk.check("COMMIT")
            except sqlite3.Error:
                self._db.rollback()
                raise
        return self._db.__exit__(kind, error, trace)


def watch(monkeypatch):
    """The disk of all databases that are opened from now on."""
    disk, connect = Disk(), sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *args, **more: _Watched(connect(*args, **more), disk))
    return disk
