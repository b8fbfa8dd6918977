"""Stored objects: compared with a plain model, their limits, and what is left after a restart."""

import asyncio
import errno
import json
import os
import re
import sqlite3
import stat
import subprocess
import sys
from contextlib import contextmanager
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from watched_database import watch

from quire.errors import ConfigError, EngineStopped
from quire.server import store as store_module
from quire.server.errors import Busy, StoreFull, StoreUnavailable
from quire.server.store import LIMITS, LargerBody, Limit, Store

LATER = 10**10


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def small(monkeypatch):
    limits = {"response": Limit(3, 100), "file": Limit(2, 100), "batch": Limit(2, 100)}
    monkeypatch.setattr(store_module, "LIMITS", limits)


@contextmanager
def database(store):
    """The database of a store, which waits meanwhile."""
    with store._lock:
        yield store._db


def check_usage(store):
    """The sums are those of the objects, which are those of their bodies and contents. Nothing has lost its object."""
    with database(store) as db:
        check_rows(db, store.clock())


def check_rows(db, now=0.0):
    """See `check_usage`. now: objects that have expired may be deleted in part."""
    sums = "SELECT tenant, kind, count(*), sum(num_bytes) FROM objects GROUP BY tenant, kind ORDER BY tenant, kind"
    usage = "SELECT tenant, kind, number, num_bytes FROM usage WHERE number ORDER BY tenant, kind"
    assert db.execute(usage).fetchall() == db.execute(sums).fetchall()
    assert not db.execute("SELECT * FROM usage WHERE NOT number AND num_bytes").fetchall()
    sizes = """SELECT num_bytes, length(CAST(body AS BLOB)) + (SELECT coalesce(sum(length(data)), 0) FROM contents
        WHERE object = number AND place < coalesce(num_pieces, 4611686018427387904)
        AND (place >= 0 OR place BETWEEN body_place AND body_place + body_pieces - 1))
        FROM objects WHERE body IS NOT NULL AND expires_at > ?"""
    assert all(counted == real for counted, real in db.execute(sizes, (now,)))
    assert not db.execute("SELECT object FROM contents WHERE object NOT IN (SELECT number FROM objects)").fetchall()


TENANTS = st.sampled_from(["ann", "bob"])
IDS = st.sampled_from(["a", "b", "c", "d"])
BODIES = st.integers(0, 60).map(lambda size: b'"' + b"x" * size + b'"')


class StoreMachine(RuleBasedStateMachine):
    """One kind of object. The model is a list of [tenant, id, body, contents, expires_at, pinned], oldest first."""

    LIMIT = Limit(3, 200)

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.store = Store(None, self.clock)
        self.model = []

    def teardown(self):
        self.store.close()

    def run(self, work):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store_module, "LIMITS", dict.fromkeys(LIMITS, self.LIMIT))
            patch.setattr(store_module, "PIECE_BYTES", 16)  # so that bodies and pieces are long,
            patch.setattr(store_module, "MAX_ROWS", 2)  # and take many transactions
            return asyncio.run(work)

    def found(self, tenant, id):
        return next((one for one in self.model if one[:2] == [tenant, id] and one[4] > self.clock.now), None)

    def room(self, tenant, number, num_bytes, kept=None):
        """Evicts from the model as the store should. Returns whether the new bytes fit."""
        model = [one for one in self.model if one[4] > self.clock.now]
        while True:
            own = [one for one in model if one[0] == tenant]
            used = sum(len(one[2]) + sum(map(len, one[3])) for one in own)
            if len(own) + number <= self.LIMIT.number and used + num_bytes <= self.LIMIT.num_bytes:
                self.model = model
                return True
            loose = [one for one in own if not one[5] and one is not kept]
            if not loose or num_bytes > self.LIMIT.num_bytes:
                return False
            model.remove(loose[0])

    @rule(tenant=TENANTS, id=IDS, body=BODIES, ttl=st.sampled_from([5, 50]), pinned=st.booleans())
    def create(self, tenant, id, body, ttl, pinned):
        if any(one[:2] == [tenant, id] for one in self.model):
            return
        work = self.store.create(tenant, "response", id, body, expires_at=self.clock.now + ttl, pinned=pinned)
        if self.room(tenant, 1, len(body)):
            self.run(work)
            self.model.append([tenant, id, body, [], self.clock.now + ttl, pinned])
        else:
            with pytest.raises(StoreFull):
                self.run(work)

    @rule(tenant=TENANTS, id=IDS, body=BODIES, pinned=st.booleans())
    def update(self, tenant, id, body, pinned):
        one, work = self.found(tenant, id), self.store.update(tenant, "response", id, body, pinned=pinned)
        if one is None:
            assert self.run(work) is False
        elif len(body) <= len(one[2]) or self.room(tenant, 0, len(body) - len(one[2]), one):
            assert self.run(work) is True
            one[2], one[5] = body, pinned
        else:
            with pytest.raises(StoreFull):
                self.run(work)

    @rule(tenant=TENANTS, id=IDS, data=st.binary(min_size=1, max_size=60))
    def append(self, tenant, id, data):
        one = self.found(tenant, id)
        if one is not None and not one[5]:
            return
        work = self.store.append(tenant, "response", id, data)
        if one is None:
            assert self.run(work) is False
        elif self.room(tenant, 0, len(data), one):
            assert self.run(work) is True
            one[3] += (data[i : i + 16] for i in range(0, len(data), 16))
        else:
            with pytest.raises(StoreFull):
                self.run(work)

    @rule(tenant=TENANTS, id=IDS)
    def delete(self, tenant, id):
        one = self.found(tenant, id)
        assert self.run(self.store.delete(tenant, "response", id)) is (one is not None)
        if one is not None:
            self.model.remove(one)

    @rule(seconds=st.sampled_from([1, 10]))
    def wait(self, seconds):
        self.clock.now += seconds

    @rule(tenant=TENANTS, after=IDS | st.none(), limit=st.integers(1, 3), ascending=st.booleans())
    def page(self, tenant, after, limit, ascending):
        own = [one for one in self.model if one[0] == tenant and one[4] > self.clock.now]
        own = own if ascending else own[::-1]
        ids = [one[1] for one in own]
        work = self.store.page(tenant, "response", limit, after=after, ascending=ascending)
        if after is not None and after not in ids:
            assert self.run(work) is None
        else:
            start = 0 if after is None else ids.index(after) + 1
            assert self.run(work) == [one[2] for one in own[start : start + limit]]

    @invariant()
    def objects_are_as_in_the_model(self):
        for tenant in ("ann", "bob"):
            for id in "abcd":
                one = self.found(tenant, id)
                assert self.run(self.store.get(tenant, "response", id)) == (None if one is None else one[2])
                if one is not None:
                    pieces = [self.run(self.store.content(tenant, "response", id, i)) for i in range(len(one[3]) + 1)]
                    assert pieces == [*one[3], None]
        assert self.run(self.store.get("ann", "file", "a")) is None

    @invariant()
    def usage_is_that_of_the_objects(self):
        check_usage(self.store)


TestStoredResponsesEqualAModelOfTheStore = StoreMachine.TestCase
TestStoredResponsesEqualAModelOfTheStore.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)


def test_the_oldest_objects_make_room_and_those_in_use_do_not(small):
    async def main():
        store = Store()
        for id in "abc":
            await store.create("ann", "response", id, b"{}", expires_at=LATER, pinned=id == "a")
        await store.create("bob", "response", "a", b"{}", expires_at=LATER)
        await store.create("ann", "response", "d", b"{}", expires_at=LATER)
        found = [await store.get("ann", "response", id) for id in "abcd"]
        assert found == [b"{}", None, b"{}", b"{}"]
        with pytest.raises(StoreFull, match="may store 3 of them with 100 bytes"):
            await store.create("ann", "response", "e", b"x" * 101, expires_at=LATER)
        assert await store.get("ann", "response", "c"), "an object that cannot fit removes nothing"
        assert await store.get("bob", "response", "a")
        store.close()

    asyncio.run(main())


def test_all_tenants_share_the_bytes_of_the_store(monkeypatch):
    monkeypatch.setattr(store_module, "MAX_MEMORY", 250)

    async def main():
        store = Store()
        await store.create("ann", "file", "a", b"x" * 200, expires_at=LATER, pinned=True)
        with pytest.raises(StoreFull):
            await store.create("bob", "response", "a", b"x" * 100, expires_at=LATER)
        await store.create("bob", "response", "a", b"x" * 50, expires_at=LATER)
        store.close()

    asyncio.run(main())


def test_fields_select_objects():
    async def main():
        store = Store()
        for id, purpose in (("a", "batch"), ("b", "evals"), ("c", "batch")):
            body = json.dumps({"id": id, "purpose": purpose}).encode()
            await store.create("ann", "file", id, body, expires_at=LATER)
        page = await store.page("ann", "file", 10, where={"purpose": "batch"})
        assert [json.loads(body)["id"] for body in page] == ["c", "a"]
        assert await store.page("ann", "file", 10, where={"purpose": "' OR 1=1 --"}) == []
        store.close()

    asyncio.run(main())


def test_a_store_in_a_file_is_there_after_a_restart(tmp_path):
    path = tmp_path / "store"

    async def first():
        store = Store(path)
        await store.create("ann", "response", "a", '{"é": 1}'.encode(), expires_at=LATER)
        await store.create("ann", "file", "b", b"{}", expires_at=LATER, pinned=True)
        await store.append("ann", "file", "b", b"\x00\xff")
        await store.create("ann", "file", "incomplete", None, expires_at=LATER, pinned=True)
        await store.append("ann", "file", "incomplete", b"lost")
        store.close()
        store.close()
        with pytest.raises(EngineStopped, match="shutting down"):
            await store.get("ann", "response", "a")

    async def second():
        store = Store(path)
        assert await store.get("ann", "response", "a") == '{"é": 1}'.encode()
        assert await store.content("ann", "file", "b", 0) == b"\x00\xff"
        assert await store.pinned("file") == [("ann", "b")]
        assert await store.content("ann", "file", "incomplete", 0) is None
        store.close()

    asyncio.run(first())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    asyncio.run(second())


def test_a_file_that_cannot_be_used_is_named_at_the_start(tmp_path):
    path = tmp_path / "store"
    store = Store(path)
    program = f"from pathlib import Path\nfrom quire.server.store import Store\nStore(Path({str(path)!r}))"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "ConfigError" in other.stderr
    assert "locked" in other.stderr
    store.close()
    with pytest.raises(ConfigError, match="cannot be used"):
        Store(tmp_path / "missing" / "store")
    with pytest.raises(ConfigError, match="cannot be used"):
        Store(tmp_path)
    (tmp_path / "text").write_text("This is a text and no database. " * 100)
    with pytest.raises(ConfigError, match="not a database"):
        Store(tmp_path / "text")
    with sqlite3.connect(tmp_path / "foreign") as foreign:
        foreign.execute("CREATE TABLE pets (name)")
    foreign.close()
    with pytest.raises(ConfigError, match="no store of this version"):
        Store(tmp_path / "foreign")


def test_deleted_content_is_not_left_in_the_file(tmp_path):
    path = tmp_path / "store"

    async def main():
        store = Store(path)
        await store.create("ann", "response", "a", b'"a secret text"' + b" " * 5000, expires_at=LATER)
        await store.delete("ann", "response", "a")
        store.close()

    asyncio.run(main())
    assert b"a secret text" not in path.read_bytes()


def test_a_tenant_with_too_many_store_jobs_gets_busy():
    async def main():
        store = Store()
        await store.get("ann", "file", "a")
        with database(store):
            jobs = [asyncio.ensure_future(store.get("ann", "file", "a")) for _ in range(300)]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            failed = [job for job in jobs if job.done()]
        assert failed
        assert all(isinstance(job.exception(), Busy) for job in failed)
        assert {await job for job in jobs if job not in failed} == {None}
        store.close()

    asyncio.run(main())


def test_a_failing_disk_is_an_error_of_the_server(monkeypatch):
    async def main():
        store = Store()
        await store.get("ann", "file", "a")
        with database(store) as db:
            db.execute("DROP TABLE contents")
            db.execute("DROP TABLE objects")
        with pytest.raises(StoreUnavailable) as caught:
            await store.get("ann", "file", "a")
        assert caught.value.status_code == 503
        store.close()

    asyncio.run(main())


async def file_of(store, num_pieces, tenant="ann", id="big"):
    """An object with many pieces."""
    await store.create(tenant, "file", id, b"{}", expires_at=LATER, pinned=True)
    for _ in range(num_pieces):
        await store.append(tenant, "file", id, b"x" * 100)


def num_rows(store, table="contents"):
    with database(store) as db:
        return db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]


def most_deleted(disk):
    """The most rows that one transaction has deleted."""
    return max(sum(rows for text, rows in each if text.startswith("DELETE")) for each in disk.transactions)


def test_a_large_object_is_deleted_in_pieces_between_which_tenants_take_turns(monkeypatch):
    disk = watch(monkeypatch)

    async def main():
        store = Store()
        await file_of(store, 40)
        await store.create("bob", "file", "a", b"{}", expires_at=LATER)
        assert await store.delete("ann", "file", "big")
        assert num_rows(store) > 30, "the call does not wait for the pieces"
        assert await store.get("ann", "file", "big") is None
        assert await store.content("ann", "file", "big", 39) is None
        assert await store.page("ann", "file", 9) == []
        assert not await store.append("ann", "file", "big", b"more")
        turns = 0
        while num_rows(store):
            left = num_rows(store)
            assert await store.get("bob", "file", "a") == b"{}"
            assert left - num_rows(store) <= 2 * store_module.MAX_ROWS
            turns += 1
        assert turns >= 40 / store_module.MAX_ROWS / 2 - 4
        assert most_deleted(disk) <= store_module.MAX_ROWS + 1
        await settled(store)
        assert num_rows(store, "objects") == 1
        check_usage(store)
        store.close()

    asyncio.run(main())


async def settled(store):
    """Wait until the store has deleted the rows of deleted objects."""
    while (task := store._housekeeping) is not None and not task.done():
        await asyncio.wait([task])


def test_evicted_and_expired_objects_are_deleted_in_pieces(monkeypatch):
    disk, clock = watch(monkeypatch), Clock()
    monkeypatch.setattr(store_module, "LIMITS", {"file": Limit(9, 5000), "response": Limit(9, 5000)})
    monkeypatch.setattr(store_module, "PIECE_BYTES", 100)

    async def main():
        store = Store(None, clock)
        await store.create("ann", "response", "a", b"x" * 4000, expires_at=LATER)
        await store.create("ann", "response", "b", b"y" * 4000, expires_at=2000)
        assert await store.get("ann", "response", "a") is None
        assert await store.get("ann", "response", "b") == b"y" * 4000
        clock.now = 2001
        await store.create("ann", "response", "c", b"z" * 4000, expires_at=LATER)
        assert await store.get("ann", "response", "c") == b"z" * 4000
        await store.update("ann", "response", "c", b"short")
        await settled(store)
        assert num_rows(store) == 0
        check_usage(store)
        store.close()

    asyncio.run(main())
    assert most_deleted(disk) <= store_module.MAX_ROWS + 2
    inserted = [
        sum(rows for text, rows in each if text.startswith("INSERT INTO contents")) for each in disk.transactions
    ]
    assert max(inserted) == 1


def test_incomplete_objects_of_an_earlier_server_are_deleted_in_pieces_after_the_start(tmp_path, monkeypatch):
    path = tmp_path / "store"

    async def first():
        store = Store(path)
        await store.create("ann", "file", "incomplete", None, expires_at=LATER, pinned=True)
        for _ in range(20):
            await store.append("ann", "file", "incomplete", b"lost")
        await file_of(store, 20)
        await store.delete("ann", "file", "big")
        store.close()

    async def second():
        disk = watch(monkeypatch)
        store = Store(path)
        assert num_rows(store) > 30, "the start does not wait for it"
        await store.end_interrupted("response", bytes)
        await settled(store)
        assert num_rows(store) == num_rows(store, "objects") == 0
        assert most_deleted(disk) <= store_module.MAX_ROWS + 1
        check_usage(store)
        store.close()

    asyncio.run(first())
    asyncio.run(second())


def test_a_body_that_is_replaced_while_it_is_read_is_read_whole(monkeypatch):
    monkeypatch.setattr(store_module, "PIECE_BYTES", 10)

    async def main():
        store = Store()
        await store.create("ann", "response", "a", b"a" * 1000, expires_at=LATER)
        for letter in (b"b", b"c", b"d"):
            reading = [asyncio.ensure_future(store.get("ann", "response", "a")) for _ in range(5)]
            await store.update("ann", "response", "a", letter * 1000)
            assert all(len(set(body)) == 1 and len(body) == 1000 for body in await asyncio.gather(*reading))
        await store.update("ann", "response", "a", b"short")
        await settled(store)
        assert num_rows(store) == 0
        store.close()

    asyncio.run(main())


def test_a_store_of_the_first_version_is_read(tmp_path):
    path = tmp_path / "store"
    Store(path).close()
    with sqlite3.connect(path) as old:  # what the second version added
        for name in ("by_number", "by_tenant_and_expiry", "in_use", "incomplete"):
            old.execute(f"DROP INDEX {name}")
        for name in ("body_place", "body_pieces", "num_pieces"):
            old.execute(f"ALTER TABLE objects DROP COLUMN {name}")
        old.execute("PRAGMA user_version = 1")
        old.execute("INSERT INTO objects VALUES (7, 'ann', 'file', 'a', ?, 1, 6, '{}')", (LATER,))
        old.execute("INSERT INTO contents VALUES (7, 0, ?)", (b"data",))
    old.close()

    async def main():
        store = Store(path)
        assert await store.get("ann", "file", "a") == b"{}"
        await store.append("ann", "file", "a", b"more")
        assert [await store.content("ann", "file", "a", i) for i in range(3)] == [b"data", b"more", None]
        check_usage(store)
        store.close()

    asyncio.run(main())


async def every_call(store, clock):
    """Every call of a store, with short and long bodies. Yields the result of each, or its exception."""

    async def tried(work):
        try:
            return await work
        except (StoreUnavailable, StoreFull) as error:
            return error

    long = b"x" * 90
    yield await tried(store.end_interrupted("response", lambda body: b"ended"))
    yield await tried(store.pinned("batch"))
    yield await tried(store.create("ann", "response", "a", b"{}", expires_at=2000))
    yield await tried(store.create("ann", "response", "b", long, expires_at=LATER, pinned=True))
    yield await tried(store.get("ann", "response", "b"))
    yield await tried(store.update("ann", "response", "b", long * 2, pinned=True))
    yield await tried(store.update("ann", "response", "b", b"short"))
    clock.now += 2000
    yield await tried(store.create("ann", "response", "c", long * 2, expires_at=LATER))
    yield await tried(store.create("ann", "response", "d", long * 2, expires_at=LATER))
    yield await tried(store.create("ann", "file", "f", None, expires_at=LATER, pinned=True))
    yield await tried(store.append("ann", "file", "f", b"one"))
    yield await tried(store.update("ann", "file", "f", b"{}", pinned=True))
    yield await tried(store.append("ann", "file", "f", long, b"{ }"))
    yield await tried(store.append("ann", "file", "f", b"last"))
    yield await tried(store.content("ann", "file", "f", 1))
    yield await tried(store.page("ann", "file", 5, where={"a": "b"}))
    yield await tried(store.delete("ann", "file", "f"))
    await settled(store)


@pytest.mark.parametrize("lasts", [False, True])
def test_a_disk_that_fails_at_any_statement_leaves_no_half_change(lasts, monkeypatch, tmp_path):
    """lasts: whether all later statements fail, too, until the disk works again."""
    disk = watch(monkeypatch)
    monkeypatch.setattr(store_module, "PIECE_BYTES", 32)
    monkeypatch.setattr(store_module, "MAX_ROWS", 2)
    monkeypatch.setattr(store_module, "LIMITS", dict.fromkeys(LIMITS, Limit(4, 400)))

    async def attempt(path):
        clock = Clock()
        store = Store(path, clock)
        results = [result async for result in every_call(store, clock)]
        disk.fails = lambda number, text: False
        await store.get("ann", "response", "c")
        await settled(store)
        check_usage(store)
        for id, body in [("a", None), ("b", b"short"), ("c", b"x" * 180), ("d", b"x" * 180)]:
            assert await store.get("ann", "response", id) in (None, body, b"ended"), "whole, or not at all"
        await store.create("ann", "file", "after", b"{}", expires_at=LATER)
        await store.append("ann", "file", "after", b"works")
        assert await store.content("ann", "file", "after", 0) == b"works"
        store.close()
        return results

    good = asyncio.run(attempt(None))
    assert not any(isinstance(result, Exception) for result in good)
    num_statements = disk.num_statements
    assert num_statements > 200
    num_failed = 0
    for first in range(lasts, num_statements, 2):  # the other parameter takes the other half
        disk.num_statements = 0
        disk.fails = partial(lambda first, number, _: first <= number and (lasts or number == first), first)
        num_failed += any(isinstance(result, Exception) for result in asyncio.run(attempt(None)))
    assert num_failed > num_statements // 6


def test_a_full_disk_refuses_writes_and_not_reads(tmp_path):
    async def main():
        store = Store(tmp_path / "store")
        await file_of(store, 3)
        with database(store) as db:
            (pages,) = db.execute("PRAGMA page_count").fetchone()
            db.execute(f"PRAGMA max_page_count = {pages}").fetchall()
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                await store.append("ann", "file", "big", b"y" * 100_000)
            with pytest.raises(StoreUnavailable):
                await store.create("ann", "response", "long", b"z" * 1_000_000, expires_at=LATER)
        assert await store.get("ann", "file", "big") == b"{}"
        assert await store.content("ann", "file", "big", 2) == b"x" * 100
        assert await store.content("ann", "file", "big", 3) is None
        check_usage(store)
        with database(store) as db:
            db.execute("PRAGMA max_page_count = 1000000").fetchall()
        assert await store.append("ann", "file", "big", b"y" * 100_000)
        assert await store.delete("ann", "file", "big")
        await settled(store)
        check_usage(store)
        store.close()

    asyncio.run(main())


@pytest.mark.parametrize("is_new", [False, True])
def test_a_disk_that_fails_at_the_start_is_tried_again(is_new, monkeypatch, tmp_path, caplog):
    path = tmp_path / "store"
    if not is_new:
        Store(path).close()
    disk = watch(monkeypatch)

    async def main(first):
        disk.num_statements, disk.fails = 0, lambda number, _: number >= first
        store = Store(path)
        failed = disk.num_statements > first
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                await store.create("ann", "file", "a", b"{}", expires_at=LATER)
        disk.fails = lambda number, _: False
        await store.create("ann", "file", "a", b"{}", expires_at=LATER)
        assert await store.get("ann", "file", "a") == b"{}"
        await store.delete("ann", "file", "a")
        store.close()
        return failed

    first = 0
    while asyncio.run(main(first)):
        assert "the store fails, and is tried again" in caplog.text
        if is_new:
            path.unlink()
        first += 1
    assert first >= 9


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_store_on_a_disk_that_takes_no_file_is_tried_again(code, monkeypatch, tmp_path):
    async def main():
        def fail(*_, **__):
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", fail)
            patch.setattr(sqlite3, "connect", fail)
            store = Store(tmp_path / "store")
            with pytest.raises(StoreUnavailable):
                await store.get("ann", "file", "a")
        assert await store.get("ann", "file", "a") is None
        store.close()

    asyncio.run(main())
    denied = PermissionError(errno.EACCES, "no")
    monkeypatch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(denied))
    with pytest.raises(ConfigError, match="cannot be used"):
        Store(tmp_path / "store")


def test_unfinished_objects_of_an_earlier_server_are_ended_on_read_and_written_later(monkeypatch, tmp_path):
    monkeypatch.setattr(store_module, "PIECE_BYTES", 10)

    async def first():
        store = Store(tmp_path / "store")
        await store.create("ann", "response", "a", b"began" * 10, expires_at=LATER, pinned=True)
        await store.create("ann", "response", "b", b"began", expires_at=LATER, pinned=True)
        await store.create("ann", "response", "done", b"done", expires_at=LATER)
        await store.create("ann", "file", "f", b"{}", expires_at=LATER, pinned=True)
        store.close()

    async def second():
        disk = watch(monkeypatch)
        with disk.is_full():
            store = Store(tmp_path / "store")
            await store.end_interrupted("response", lambda body: body + b", failed")
            await settled(store)
            for _ in range(2):
                assert await store.get("ann", "response", "a") == b"began" * 10 + b", failed"
            assert await store.get("ann", "response", "done") == b"done"
            assert await store.get("ann", "file", "f") == b"{}"
            assert await store.pinned("response") == [("ann", "a"), ("ann", "b")]
            await settled(store)
        assert await store.get("ann", "response", "done") == b"done"
        await settled(store)
        assert await store.pinned("response") == [], "once the disk works, the endings are written"
        assert await store.get("ann", "response", "a") == b"began" * 10 + b", failed"
        await store.create("ann", "response", "new", b"new", expires_at=LATER, pinned=True)
        assert await store.get("ann", "response", "new") == b"new"
        with disk.is_full(), pytest.raises(StoreUnavailable):
            await store.update("ann", "response", "new", b"done")
        assert await store.get("ann", "response", "new") == b"new, failed"
        await settled(store)
        check_usage(store)
        store.close()

    asyncio.run(first())
    asyncio.run(second())


@pytest.mark.parametrize("error", [StoreUnavailable, Busy])
def test_an_object_that_could_not_be_updated_is_ended_by_the_next_call_of_any_tenant(error, monkeypatch):
    async def main():
        store = Store()
        await store.end_interrupted("response", lambda body: body + b", failed")
        await settled(store)
        await store.create("ann", "response", "a", b"running", expires_at=LATER, pinned=True)
        with monkeypatch.context() as patch:
            patch.setattr(store, "_in_steps", refused)
            with pytest.raises(error):
                await store.update("ann", "response", "a", b"done", pinned=False)
        await store.page("bob", "file", 1)
        await settled(store)
        with database(store) as db:
            assert db.execute("SELECT body, pinned FROM objects").fetchall() == [("running, failed", 0)]
        store.close()

    async def refused(*_):
        raise error

    asyncio.run(main())


def test_an_ending_of_many_pieces_is_not_written_by_each_reader(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "PIECE_BYTES", 16)
    body = bytes(range(65, 91)) * 8

    async def main():
        store = Store(tmp_path / "store")
        await store.create("ann", "response", "a", body, expires_at=LATER, pinned=True)
        store.close()
        store, updates = Store(tmp_path / "store"), []
        update = store.update

        async def noted(*args):
            updates.append(args)
            return await update(*args)

        monkeypatch.setattr(store, "update", noted)
        await store.end_interrupted("response", lambda one: one + b", failed")
        found = await asyncio.gather(*(store.get("ann", "response", "a") for _ in range(8)))
        assert set(found) == {body + b", failed"}
        await settled(store)
        assert 1 <= len(updates) < 8  # a reader that began before the first one ended may write the same again
        assert await store.get("ann", "response", "a") == body + b", failed"
        check_usage(store)
        store.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_pieces_of_an_append_that_failed_are_no_part_of_the_contents(monkeypatch):
    disk = watch(monkeypatch)
    monkeypatch.setattr(store_module, "PIECE_BYTES", 10)

    async def main():
        store = Store()
        await file_of(store, 0)
        await store.append("ann", "file", "big", b"first")
        inserts = iter(range(100))
        disk.fails = lambda _number, text: text.startswith("INSERT INTO contents") and next(inserts) == 7
        with pytest.raises(StoreUnavailable):
            await store.append("ann", "file", "big", b"x" * 100, b'{"bytes": 105}')
        assert num_rows(store) == 8
        assert [await store.content("ann", "file", "big", place) for place in (0, 1, 6)] == [b"first", None, None]
        assert await store.get("ann", "file", "big") == b"{}"
        await store.append("ann", "file", "big", b"second")
        assert [await store.content("ann", "file", "big", i) for i in range(3)] == [b"first", b"second", None]
        assert num_rows(store) == 2
        check_usage(store)
        store.close()

    asyncio.run(main())


def test_statements_have_plain_placeholders(monkeypatch):
    """Python 3.14 refuses others with a sequence of values."""
    disk = watch(monkeypatch)
    monkeypatch.setattr(store_module, "PIECE_BYTES", 32)
    monkeypatch.setattr(store_module, "LIMITS", dict.fromkeys(LIMITS, Limit(4, 400)))

    async def main():
        clock = Clock()
        store = Store(None, clock)
        assert [result async for result in every_call(store, clock)]
        store.close()

    asyncio.run(main())
    statements = {text for each in disk.transactions for text, _ in each}
    assert len(statements) > 20
    assert not [text for text in statements if re.search(r"\?\d|[:@$][a-z]", text)]


def test_a_body_that_is_too_large_is_not_read(small):
    async def main():
        store = Store()
        await store.create("ann", "file", "a", b'"' + b"b" * 18 + b'"', expires_at=LATER, pinned=True)
        await store.append("ann", "file", "a", b"c" * 50)
        assert await store.get("ann", "file", "a", 20) == b'"' + b"b" * 18 + b'"'
        with pytest.raises(LargerBody) as caught:
            await store.get("ann", "file", "a", 19)
        assert caught.value.num_bytes == 20, "without the contents"
        assert await store.get("ann", "file", "x", 0) is None
        store.close()

    asyncio.run(main())


def test_contents_are_copied_in_steps_that_make_room_and_keep_the_source(small, monkeypatch):
    monkeypatch.setattr(store_module, "MAX_ROWS", 2)

    async def main():
        store, pieces = Store(), [bytes([97 + i]) * 6 for i in range(5)]
        await store.create("ann", "response", "source", None, expires_at=LATER, pinned=True)
        for piece in pieces:
            await store.append("ann", "response", "source", piece)
        await store.update("ann", "response", "source", b"1")
        await store.create("ann", "response", "other", b" " * 44 + b"2", expires_at=LATER)
        await store.create("ann", "response", "copy", None, expires_at=LATER, pinned=True)
        await store.append("ann", "response", "copy", b"0")
        assert await store.copy_contents("ann", "response", "source", "copy", range(1, 5))
        assert await store.get("ann", "response", "other") is None, "it made room; the source is older and did not"
        found = [await store.content("ann", "response", "copy", place) for place in range(6)]
        assert found == [b"0", *pieces[1:], None]
        check_usage(store)
        assert not await store.copy_contents("ann", "response", "source", "copy", range(4, 6))
        assert not await store.copy_contents("ann", "response", "x", "copy", range(1))
        with pytest.raises(StoreFull):
            await store.copy_contents("ann", "response", "source", "copy", range(5))
            await store.copy_contents("ann", "response", "source", "copy", range(5))
        check_usage(store)
        store.close()

    asyncio.run(main())
