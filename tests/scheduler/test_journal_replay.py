"""Journals: replay, printed differences, rejection of damaged files, and encoding of steps."""

import io
import re
import struct
import zlib

import msgspec
import numpy as np
import pytest
from scripted_engine import VOCAB, Rig

from quire.cache.kv_cache import KVCache
from quire.core import step as steps
from quire.core.codec import decode
from quire.core.journal_file import JournalError, open_journal, open_restart_journal
from quire.core.output import EndCause
from quire.core.request import Request
from quire.core.step import Chunk, ChunkOutput, Chunks, TableUpdates
from quire.errors import RequestError
from quire.params import SamplingParams
from quire.runner.scripted_runner import script
from quire.scheduler import journal
from quire.scheduler.lifecycle import SchedulerState


def recorded() -> Rig:
    rig = Rig(num_blocks=16, watermark=0.0, seed=3)
    for i in range(4):
        rig.add(str(i), list(range(20 + i)), max_tokens=20)
    rig.step()
    rig.engine.abort("2")
    rig.run()
    return rig


def test_a_replay_is_the_same():
    report = recorded().replay()
    assert report.difference == ""
    assert report.num_steps > 20


def test_a_replay_by_another_scheduler_prints_the_first_difference(monkeypatch):
    rig = recorded()
    monkeypatch.setattr(
        SchedulerState, "preempt_one", lambda self, seq, reason, now: self.end(seq, EndCause.STEP_FAILED, now)
    )
    report = rig.replay()
    assert 0 < report.num_steps < rig.engine.stats().num_steps
    assert "recorded:\nstep" in report.difference
    assert "replayed:\nstep" in report.difference


def test_a_journal_cut_off_in_the_middle_replays_up_to_there():
    data = recorded().file.getvalue()
    whole = journal.replay(journal.read_records(io.BytesIO(data)))
    part = journal.replay(journal.read_records(io.BytesIO(data[: len(data) // 2])))
    assert part.difference == ""
    assert 0 < part.num_steps < whole.num_steps


@pytest.mark.parametrize("data", [b"", b"\x05\x00\x00\x00hello", b"not a journal at all, but long enough"])
def test_other_files_are_refused(data):
    with pytest.raises(JournalError, match="not a quire journal"):
        journal.replay(journal.read_records(io.BytesIO(data)))


def test_a_refused_request_is_refused_again():
    rig = Rig()
    rig.add("a", [1, 2, 3])
    with pytest.raises(RequestError, match="in use"):
        rig.add("a", [1, 2, 3])
    rig.run()
    assert rig.replay().difference == ""


def test_a_request_that_is_not_refused_again_is_a_difference():
    rig = Rig()
    rig.add("a", [1, 2, 3])
    with pytest.raises(RequestError, match="in use"):
        rig.add("a", [1, 2, 3])
    rig.run()
    rig.file.seek(0)
    without_first = (one for one in journal.read_records(rig.file) if not isinstance(one, journal.Add))
    assert "recorded:\nrejected: request id 'a' is in use" in journal.replay(without_first).difference


def test_closing_the_engine_closes_the_journal():
    rig = recorded()
    rig.engine.close()
    assert rig.file.closed


def test_damaged_records_are_named():
    data = recorded().file.getvalue()
    whole, number = journal.replay(journal.read_records(io.BytesIO(data))), 0
    for place in range(8, len(data), 97):
        damaged = data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]
        try:
            report = journal.replay(journal.read_records(io.BytesIO(damaged)))
        except JournalError as error:
            found = re.match(r"record (\d+) is damaged|not a quire journal, damaged", str(error))
            assert found, error
            assert number <= (number := int(found[1] or 0))
        else:  # a length beyond the end of the file, as after a death in the middle of a record
            assert report.difference == ""
            assert report.num_steps < whole.num_steps
    assert number > 20


def test_a_damaged_record_that_would_still_be_read_is_refused():
    data = bytearray(recorded().file.getvalue())
    place = data.index(bytes(range(20)))  # the first prompt
    data[place] += 1  # another token id
    with pytest.raises(JournalError, match="record 1 is damaged: its checksum differs"):
        journal.replay(journal.read_records(io.BytesIO(data)))


@pytest.mark.parametrize("restarts", [False, True])
def test_only_the_owner_can_read_a_journal(tmp_path, restarts):
    path = tmp_path / "journal"
    with (open_restart_journal if restarts else open_journal)(str(path)):
        (found,) = tmp_path.iterdir()
        assert found.stat().st_mode & 0o777 == 0o600


def test_the_step_that_kills_the_process_is_in_the_journal(tmp_path):
    file = (tmp_path / "journal").open("wb")
    rig = Rig()
    scheduler = journal.JournalledScheduler(rig.config, KVCache(rig.cache.config), file)
    params = SamplingParams(max_tokens=3, seed=1)
    scheduler.add(Request(id="a", prompt=[1, 2, 3], params=params), 0.0)
    step = scheduler.plan(0.5)
    with (tmp_path / "journal").open("rb") as found:  # without close, as after SIGKILL
        *_, add, plan = journal.read_records(found)
    file.close()
    assert add.request.id == "a"
    assert plan.step == steps.to_bytes(step)


def test_a_full_disk_ends_the_journal_and_nothing_else(caplog):
    rig = Rig()
    rig.add("a", [1, 2, 3], max_tokens=4)
    rig.step()
    kept = rig.file.tell()

    def full(data):
        raise OSError(28, "No space left on device")

    rig.file.write = full
    rig.run()
    del rig.file.write
    assert rig.tokens["a", 0] == script([1, 2, 3], 4, VOCAB)
    assert [record.getMessage() for record in caplog.records] == [
        "the journal cannot be written and ends here: [Errno 28] No space left on device"
    ]
    assert rig.file.tell() == kept
    assert rig.replay().difference == ""
    rig.engine.close()
    assert rig.file.closed


def test_requests_that_the_journal_cannot_encode_are_rejected():
    rig = Rig()
    with pytest.raises(RequestError, match="valid Unicode"):
        rig.add("a\ud800", [1, 2, 3])
    assert not rig.scheduler.has_work
    with pytest.raises(RequestError, match="valid Unicode"):
        SamplingParams(stop=["\ud800"])


def test_another_format_is_refused(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(journal, "FORMAT", 99)
        rig = Rig()
    with pytest.raises(JournalError, match="format 99 is not supported"):
        rig.replay()


def test_steps_survive_their_bytes_and_print_readably():
    rig = Rig()
    rig.add("a", [1, 2, 3, 4, 5], max_tokens=3)
    step = rig.scheduler.plan(0.0)
    data = steps.to_bytes(step)
    again = steps.from_bytes(data)
    assert steps.to_bytes(again) == data
    assert list(again.chunks) == [Chunk(0, 0, 0, 5, 0, 1, ChunkOutput.SAMPLE)]
    assert str(again) == "step 0: 1 chunks, 5 tokens, reset\n  open row 0 seq 0\n  row 0 seq 0 [0:5) -> sample"


def test_arrays_of_objects_cannot_be_smuggled_in():
    rig = Rig()
    rig.add("a", [1], max_tokens=1)
    data = steps.to_bytes(rig.scheduler.plan(0.0)).replace(b"<i4", b"|O8")
    with pytest.raises(Exception, match="not allowed"):
        decode(data, steps.Step)


def test_writes_land_where_they_say():
    table = np.zeros((3, 6), np.int32)
    TableUpdates.of([(0, 2, [7, 8]), (2, 0, [9]), (1, 3, [])]).apply(table)
    assert table.tolist() == [[0, 0, 7, 8, 0, 0], [0] * 6, [9, 0, 0, 0, 0, 0]]
    TableUpdates.of([]).apply(table)
    assert len(Chunks.of([])) == 0


def test_a_journal_of_another_format_is_refused():
    rig = Rig()
    rig.run()
    rig.file.seek(0)
    header, *_ = journal.read_records(rig.file)
    for number in (journal.FORMAT - 1, journal.FORMAT + 1):
        with pytest.raises(JournalError, match=f"format {number} is not .* reads format {journal.FORMAT}"):
            journal.replay(iter([msgspec.structs.replace(header, format=number)]))


@pytest.mark.parametrize("cache", [None, 3, {}, {"groups": [7]}, {"groups": [{}]}, {"groups": {"a": 1}}, [1]])
def test_a_damaged_header_is_refused(cache):
    data = msgspec.msgpack.encode({"type": "Header", "format": journal.FORMAT, "scheduler": {}, "cache": cache})
    file = io.BytesIO(struct.pack("<II", len(data), zlib.crc32(data)) + data)
    with pytest.raises(JournalError, match="damaged at its begin"):
        journal.replay(journal.read_records(file))
