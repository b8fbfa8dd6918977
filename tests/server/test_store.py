"""Stored objects: compared with a plain model, their limits, and what is left after a restart."""

import asyncio
import json
import sqlite3
import stat
import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from quire.errors import ConfigError, EngineStopped
from quire.server import store as store_module
from quire.server.errors import Busy, StoreFull, StoreUnavailable
from quire.server.store import LIMITS, Limit, Store

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
        before, store_module.LIMITS = store_module.LIMITS, dict.fromkeys(LIMITS, self.LIMIT)
        try:
            return asyncio.run(work)
        finally:
            store_module.LIMITS = before

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
            one[3].append(data)
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


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)


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


def test_a_tenant_with_many_waiting_jobs_is_told_to_come_later():
    async def main():
        store = Store()
        with store._lock:
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
        store._db.execute("DROP TABLE contents")
        store._db.execute("DROP TABLE objects")
        with pytest.raises(StoreUnavailable) as caught:
            await store.get("ann", "file", "a")
        assert caught.value.status_code == 503
        store.close()

    asyncio.run(main())
