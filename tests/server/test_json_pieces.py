"""Large answers are written on a thread, in pieces that wait for the client."""

import asyncio
import threading

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.server.errors import Busy
from quire.server.json_pieces import PIECE, JsonList, PieceReader, json_bytes, json_pieces
from quire.server.reply import Reply
from quire.server.sse import PiecewiseResponse

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.lists(VALUES, max_size=4), max_size=4), VALUES)
def test_a_body_of_pieces_equals_the_body_at_once(lists, beside):
    def body(kind):
        return {
            "\x00": beside,
            "choices": [{"index": i, "rows": kind(one)} for i, one in enumerate(lists)],
            "z": beside,
        }

    assert json_bytes(body(JsonList)) == msgspec.json.encode(body(list))


def test_a_value_without_lists_is_one_piece():
    assert list(json_pieces({"text": "a" * 2 * PIECE})) == [msgspec.json.encode({"text": "a" * 2 * PIECE})]


def test_pieces_are_bounded_and_elements_are_made_as_they_are_written():
    made = []

    def elements():
        for i in range(10_000):
            made.append(i)
            yield "x" * 98

    pieces = json_pieces({"rows": JsonList(elements()), "end": 1})
    assert made == []
    first = next(pieces)
    assert PIECE <= len(first) < PIECE + 200
    assert len(made) < 1400
    assert all(len(piece) < PIECE + 200 for piece in pieces)
    assert len(made) == 10_000


def test_json_bytes_of_a_non_json_object_is_an_error():
    with pytest.raises(NotImplementedError, match="object is no JSON"):
        json_bytes({"a": object()})


async def on_thread(work):
    return await asyncio.to_thread(work)


def test_each_piece_is_made_on_a_thread_when_the_client_has_read_the_one_before():
    threads, events = set(), []

    def make():
        for i in range(3):
            threads.add(threading.get_ident())
            events.append(f"made {i}")
            yield b"%d" % i

    async def send(message):
        if message.get("body"):
            events.append(f"sent {message['body'].decode()}")
            await asyncio.sleep(0.01)  # time in which a further piece could be made

    async def receive():
        await asyncio.Event().wait()

    async def main():
        pieces = PieceReader(make, on_thread)
        await pieces.begin()
        response = PiecewiseResponse(pieces, lambda: events.append("closed"))
        await response({"type": "http"}, receive, send)
        return response.headers

    headers = asyncio.run(main())
    assert events == ["made 0", "sent 0", "made 1", "sent 1", "made 2", "sent 2", "closed"]
    assert threading.get_ident() not in threads
    assert headers["content-type"] == "application/json"
    assert "content-length" not in headers


def test_a_client_that_leaves_ends_the_work():
    made, closed = [], []

    def make():
        for i in range(100):
            made.append(i)
            yield b"x"

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        await asyncio.Event().wait()  # the client reads nothing

    async def main():
        pieces = PieceReader(make, on_thread)
        await pieces.begin()
        await PiecewiseResponse(pieces, lambda: closed.append(True))({"type": "http"}, receive, send)

    asyncio.run(main())
    assert closed == [True]
    assert len(made) <= 2


def test_an_error_in_the_first_piece_comes_before_the_response():
    def make():
        raise ValueError("no regular end")

    with pytest.raises(ValueError, match="no regular end"):
        asyncio.run(PieceReader(make, on_thread).begin())


def test_a_response_that_has_begun_waits_for_a_thread(monkeypatch):
    calls = []

    async def run(work):
        calls.append(1)
        if len(calls) < 3:
            raise Busy
        return work()

    monkeypatch.setattr("quire.server.reply._BUSY_SECONDS", 0)
    assert asyncio.run(Reply([], None, None, None, run).on_thread(lambda: 5)) == 5
    assert len(calls) == 3
