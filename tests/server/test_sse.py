"""Server-sent events: clients read what was written, for any text and packets, with three parsers."""

import asyncio
import json
from itertools import pairwise

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from openai._streaming import SSEDecoder

from quire.server.sse import DONE, EventStream, event, padded_event

UGLY = st.sampled_from(
    [
        "\n",
        "\r",
        "\r\n",
        "\n\n",
        "\0",
        "\x0b\x0c\x1c\x1d\x1e",
        "\x7f",
        "\x85",
        "\u2028",
        "\u2029",
        "\ufeff",
        "data: ",
        ":",
    ]
)
TEXT = st.lists(UGLY | st.text(max_size=8), max_size=6).map("".join)  # st.text has no surrogates
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


def by_the_standard(chunks):
    """WHATWG's HTML, 9.2.6: lines end with CR LF, LF or CR; an empty line ends an event."""
    text = b"".join(chunks).decode().replace("\r\n", "\n").replace("\r", "\n")
    data, events = [], []
    for line in text.split("\n"):
        if not line and data:
            events.append("\n".join(data))
            data = []
        name, _, value = line.partition(":")
        if name == "data":
            data.append(value.removeprefix(" "))
    assert not data
    return events


def by_openai(chunks):
    return [found.data for found in SSEDecoder().iter_bytes(iter(chunks))]


def by_lines(chunks):
    """A parser over httpx's lines, which end at all line ends of Unicode."""
    lines = httpx.Response(200, content=iter(chunks), headers={"content-type": "text/event-stream"}).iter_lines()
    return [line.removeprefix("data: ") for line in lines if line]


def cut(data, places):
    bounds = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in pairwise(bounds)]


@pytest.mark.parametrize("read", [by_the_standard, by_openai, by_lines])
@given(values=st.lists(JSON, max_size=4), places=st.lists(st.integers(0, 10_000), max_size=8))
@example(values=["\u2028\u2029\x85\r\n\n\0", {"\n\ndata: [DONE]\n\n": "[DONE]"}], places=[1, 2, 3])
def test_sse_events_cut_anywhere_are_read_as_written(read, values, places):
    written = b"".join(map(event, values)) + DONE
    *got, last = read(cut(written, places))
    assert last == "[DONE]"
    assert [json.loads(one) for one in got] == values


@given(TEXT, st.sampled_from(["\ud800", "\udfff", "\udc00\ud800"]))
def test_an_sse_event_with_invalid_unicode_is_an_error(text, wrong):
    with pytest.raises(UnicodeEncodeError):
        event({"text": text + wrong})


class Failed(Exception):
    pass


@pytest.mark.parametrize(("num_good", "wrong"), [(0, "\ud800"), (3, "\ud800"), (3, None)])
def test_a_stream_that_fails_is_whole_to_its_last_event(num_good, wrong, caplog):
    sent, closed = [], []

    async def events():
        for i in range(num_good):
            yield event({"number": i})
        if wrong is None:
            raise Failed("secret")
        yield event({"text": wrong})

    async def receive():
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    asyncio.run(
        EventStream(events(), lambda: closed.append(True))(
            {"type": "http", "path": "/v1/completions", "state": {}}, receive, send
        )
    )
    *good, error, done = by_the_standard([message.get("body", b"") for message in sent])
    assert [json.loads(one)["number"] for one in good] == list(range(num_good))
    assert set(json.loads(error)) == {"error"}
    assert "secret" not in error
    assert (done, closed, sent[-1]["more_body"]) == ("[DONE]", [True], False)


@given(TEXT)
def test_padded_events_have_the_text_and_few_sizes(text):
    data = padded_event({"text": text})
    assert len(data) % 256 == 0
    (chunk,) = map(json.loads, by_the_standard([data]))
    assert chunk["text"] == text
    assert len(chunk["obfuscation"]) < 256


def test_the_padding_is_random():
    assert len({padded_event({"text": "a"}) for _ in range(10)}) == 10
