"""Journals whose records do not fit each other: a replay ends with a report or a JournalError, and nothing else."""

import io
import zlib
from pathlib import Path
from random import Random
from struct import Struct

import msgspec
import pytest
from scripted_engine import Rig

from quire.core.journal_file import JournalError
from quire.errors import ConfigError, QuireError
from quire.monitor.recording import record_file
from quire.planner.traces import read_trace
from quire.scheduler import journal

MUTATIONS = 150
NUMBERS = (-1, 0, 1, 7, 2**31, 2**63 - 1, 0.5, None, "x", [], {})
HEAD = Struct("<II")  # bytes of a record, and their CRC-32


@pytest.fixture(scope="module")
def records():
    """The records of a journal as plain values."""
    rig = Rig(num_blocks=16, watermark=0.0, seed=3)
    for i in range(4):
        rig.add(str(i), list(range(20 + i)), max_tokens=8)
    rig.step()
    rig.engine.abort("2")
    rig.run()
    data, found, at = rig.file.getvalue(), [], 0
    while at < len(data):
        length, _ = HEAD.unpack_from(data, at)
        found.append(msgspec.msgpack.decode(data[at + HEAD.size : at + HEAD.size + length]))
        at += HEAD.size + length
    return found


def written(records):
    parts = [msgspec.msgpack.encode(record) for record in records]
    return b"".join(HEAD.pack(len(part), zlib.crc32(part)) + part for part in parts)


def places(value):
    """Every (container, key) inside of a value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(pairs):
        yield value, key
        yield from places(inner)


def mutated(rng, records):
    """A copy of the records in which one was changed, dropped, repeated or moved."""
    some = msgspec.msgpack.decode(msgspec.msgpack.encode(records))
    number = rng.randrange(len(some))
    match rng.choice(("change", "change", "change", "change", "drop", "repeat", "move", "bytes")):
        case "drop":
            del some[number]
        case "repeat":
            some.insert(number, some[number])
        case "move":
            some.insert(rng.randrange(len(some)), some.pop(number))
        case "bytes":
            inside = [place for place in places(some[number]) if isinstance(place[0][place[1]], bytes)]
            if inside:
                container, key = rng.choice(inside)
                container[key] = container[key][: rng.randrange(len(container[key]) + 1)]
        case _:
            container, key = rng.choice(list(places(some[number])))
            container[key] = rng.choice(NUMBERS)
    return some


def test_a_journal_that_was_not_changed_replays(records):
    report = journal.replay(journal.read_records(io.BytesIO(written(records))))
    assert report.difference == "" and report.num_steps > 5


@pytest.mark.parametrize("read", ["replay", "page", "trace"])
def test_a_changed_journal_gives_a_report_or_a_journal_error(records, tmp_path, read):
    rng, path, refused = Random(5), Path(tmp_path / "some.journal"), 0
    for _ in range(MUTATIONS):
        path.write_bytes(written(mutated(rng, records)))
        try:
            if read == "replay":
                journal.replay_journal(path)
            elif read == "page":
                record_file(path, lambda done, total: None)
            else:
                read_trace(path)
        except QuireError as error:
            assert isinstance(error, ConfigError if read == "trace" else JournalError), error
            refused += 1
    assert 0 < refused < MUTATIONS


def test_a_cache_that_does_not_fit_into_memory_is_refused(records):
    some = msgspec.msgpack.decode(msgspec.msgpack.encode(records))
    groups = [place for place in places(some[0]) if place[1] == "num_blocks"]
    for container, key in groups:
        container[key] = 2**40
    assert groups
    with pytest.raises(JournalError, match=r"its cache has 1\d+ blocks; a replay has at most 16777216"):
        journal.replay(journal.read_records(io.BytesIO(written(some))))
