"""The parser of forms, with httpx's encoder as the oracle."""

import tracemalloc
from itertools import pairwise

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from python_steps import python_steps

from quire.errors import RequestError
from quire.server.multipart import MAX_FIELDS, MAX_HEADERS, MAX_PARTS, MultipartParser, Part

TYPE = "multipart/form-data; boundary=xyz"
BEGIN = b'--xyz\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'


def parsed(content_type, pieces):
    """The content of each part, in order. The first piece of each part is empty."""
    parser, parts = MultipartParser(content_type), []
    for piece in pieces:
        for part, content in parser.push(piece):
            if not content:
                parts.append((part, b""))
            assert parts[-1][0] == part
            parts[-1] = (part, parts[-1][1] + content)
    parser.finish()
    return parts


def test_bytes_behind_a_multipart_form_are_not_buffered():
    parser = MultipartParser(TYPE)
    assert [content for _, content in parser.push(BEGIN + b"x\r\n--xyz--\r\n")] == [b"", b"x"]
    tracemalloc.start()
    for _ in range(64):
        assert not list(parser.push(b"y" * 2**16))
    assert tracemalloc.get_traced_memory()[1] < 2**18
    tracemalloc.stop()
    parser.finish()


CONTENT = (
    st.lists(st.sampled_from([b"\r\n", b"--", b"xyz", b"a", b"\r", b"\n", b"\x00\xff"]), max_size=12)
    .map(b"".join)
    .filter(lambda content: b"\r\n--xyz" not in b"\r\n" + content)  # a client chooses another boundary
)
NAMES = st.text("aé_- .", min_size=1, max_size=6)


@given(
    fields=st.dictionaries(NAMES, st.text("a\r\n-é", max_size=8), max_size=3),
    files=st.lists(st.tuples(NAMES, NAMES, CONTENT), max_size=3),
    cuts=st.lists(st.integers(0, 2000), max_size=12),
)
@settings(max_examples=150, deadline=None)
def test_forms_are_parsed_as_they_were_written_however_they_are_cut(fields, files, cuts):
    boundary = {"content-type": TYPE}
    request = httpx.Request(
        "POST", "http://x", headers=boundary, data=fields, files=[(name, (file, data)) for name, file, data in files]
    )
    body = request.read()
    if not files:
        body = b"".join(
            f'--xyz\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
            for name, value in fields.items()
        )
        body += b"--xyz--\r\n"
    places = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    pieces = [body[start:stop] for start, stop in pairwise(places)]
    expected = [(Part(name, None), value.encode()) for name, value in fields.items()]
    expected += [(Part(name, file), data) for name, file, data in files]
    if fields or files:
        assert parsed(TYPE, pieces) == expected


@pytest.mark.parametrize(
    ("header", "part"),
    [
        ('form-data; name="a\\"b"; filename="c\\\\d;e.txt"', Part('a"b', "c\\d;e.txt")),
        ("form-data; name=a; filename=b.txt", Part("a", "b.txt")),
        ("FORM-DATA; NAME=a", Part("a", None)),
        ("form-data; name=\"a\"; filename*=UTF-8''%e2%82%ac.txt", Part("a", "€.txt")),
    ],
)
def test_headers_of_parts(header, part):
    body = f"--xyz\r\nX-Other: 1\r\ncontent-disposition: {header}\r\n\r\nv\r\n--xyz--".encode()
    assert parsed('multipart/form-data; charset=utf-8; boundary="xyz"', [body]) == [(part, b"v")]


@pytest.mark.parametrize(
    "content_type",
    ["", "application/json", "multipart/form-data", "multipart/form-data; boundary=", "multipart/mixed; boundary=xyz"],
)
def test_another_content_type_is_refused(content_type):
    with pytest.raises(RequestError, match="multipart/form-data and a boundary"):
        MultipartParser(content_type)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"--zyx\r\n", "does not begin"),
        (b"{}", "does not begin"),
        (b"--xyzzz", "followed by other text"),
        (b"--xyz\r\nContent-Disposition: attachment\r\n\r\n", "no header"),
        (b"--xyz\r\n\r\n\r\nv", "no header"),
        (b"--xyz\r\n" + b"a" * (MAX_HEADERS + 9), "headers of a part"),
        ((BEGIN + b"v\r\n") * (MAX_PARTS + 1), "more than"),
        (BEGIN.replace(b"; filename", b"; x") + b"v" * (MAX_FIELDS + 99), "send content as a file"),
        (BEGIN + b"v", "without the last boundary"),
        (b"", "without the last boundary"),
    ],
)
def test_a_malformed_multipart_body_is_rejected(body, says):
    for size in (1000, len(body) + 1):
        with pytest.raises(RequestError, match=says):
            parsed(TYPE, [body[start : start + size] for start in range(0, len(body), size)])


def test_hostile_content_takes_linear_time():
    for content in (b"\r\n--xy" * 100_000, b"\r" * 600_000, b"\r\n" * 300_000):
        body = BEGIN + content + b"\r\n--xyz--"
        pieces = [body[start : start + 4096] for start in range(0, len(body), 4096)]
        steps, ((_, found),) = python_steps(parsed, TYPE, pieces)
        assert found == content
        assert steps < 40_000_000
