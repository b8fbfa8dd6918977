"""Framing: messages of bounded length in a byte stream, for any packets."""

import socket
import threading
from itertools import pairwise

import pytest
from held_items import num_held
from hypothesis import given
from hypothesis import strategies as st

from quire.supervisor.protocol import MAX_FRAME, BadFrame, FrameReader, frame, receive_frame


@given(sent=st.lists(st.binary(max_size=300), max_size=6), cuts=st.lists(st.integers(0, 2000), max_size=8))
def test_frames_that_are_cut_at_random_places_come_whole(sent, cuts):
    stream = b"".join(map(frame, sent))
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    reader, came = FrameReader(), []
    for start, stop in pairwise(places):
        came += reader.feed(stream[start:stop])
    assert came == sent


def test_frames_byte_by_byte_come_whole():
    reader = FrameReader()
    stream = frame(b"") + frame(b"ab") + frame(b"c")
    assert [one for i in range(len(stream)) for one in reader.feed(stream[i : i + 1])] == [b"", b"ab", b"c"]


@given(data=st.binary(max_size=400), sizes=st.lists(st.integers(1, 50), min_size=1, max_size=9))
def test_random_bytes_are_frames_or_bad_frames_and_nothing_grows(data, sizes):
    reader, at = FrameReader(), 0
    try:
        for size in sizes:
            for message in reader.feed(data[at : at + size]):
                assert len(message) <= at + size
            at += size
            assert num_held(reader) <= at
    except BadFrame as error:
        assert "announces" in str(error)


def test_a_frame_that_announces_too_much_is_refused_before_it_comes():
    reader = FrameReader()
    assert list(reader.feed(MAX_FRAME.to_bytes(4, "little"))) == []
    assert num_held(reader) == 4
    with pytest.raises(BadFrame, match="announces"):
        list(FrameReader().feed((MAX_FRAME + 1).to_bytes(4, "little")))


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_receive_frame_reads_one_frame_and_no_byte_behind_it(pair):
    ours, theirs = pair
    long = bytes(range(256)) * 2000
    sender = threading.Thread(target=theirs.sendall, args=(frame(long) + frame(b"next") + frame(b"last"),))
    sender.start()
    assert receive_frame(ours) == long
    sender.join(60)
    assert receive_frame(ours) == b"next"
    assert list(FrameReader().feed(ours.recv(100))) == [b"last"]


@pytest.mark.parametrize("data", [b"", b"\x05", b"\x05\x00\x00\x00", b"\x05\x00\x00\x00abcd"])
def test_receive_frame_of_a_closed_peer_is_none(pair, data):
    ours, theirs = pair
    theirs.sendall(data)
    theirs.close()
    assert receive_frame(ours) is None


def test_receive_frame_rejects_an_oversized_length(pair):
    ours, theirs = pair
    theirs.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(BadFrame, match="announces"):
        receive_frame(ours)
