"""Streaming clients of a server, well-behaved and misbehaving, over HTTP/1.1 and server-sent events."""

import asyncio
import json
from random import Random
from typing import NamedTuple
from urllib.parse import urlsplit

_WORDS = ("Mira", "Tomas", "river", "harbour", "lamp", "morning", "sold", "found", "the", "red", "and", "was", "went")

_LONG = 1900  # tokens
_LONG_SCHEMA = json.dumps(
    {"type": "array", "minItems": 200, "items": {"type": "string", "format": "uri", "maxLength": 2083}}
)


class Answer(NamedTuple):
    """An answer: status, texts of the choices, and a description of an error, empty without one."""

    status: int
    texts: dict[int, str]
    problem: str


def queries(count: int, seed: int, max_tokens: int) -> list[dict[str, object]]:
    """Different queries: every other one is greedy, the rest have a seed; some have several choices or a constraint.

    One of 50 writes a JSON text of up to _LONG tokens.
    """
    chance = Random(seed)
    made: list[dict[str, object]] = []
    for i in range(count):
        prompt = " ".join(chance.choices(_WORDS, k=chance.randrange(3, 40)))
        body: dict[str, object] = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": i % 3 > 0, "stream": True}
        body |= {"temperature": 0} if i % 2 else {"temperature": 1, "seed": i, "n": 1 + (i % 10 == 0)}
        if i % 4 == 0:
            body["structured_outputs"] = {
                "regex": '(\\{"name": "[A-Z][a-z]{2,9}", "words": \\[("[a-z]{3,9}", ){9}\\]\\}\\n)+'
            }
        if i % 50 == 1:
            body |= {"structured_outputs": {"json": _LONG_SCHEMA}, "max_tokens": _LONG, "temperature": 1, "seed": i}
        made.append(body)
    return made


class Connection:
    """One request and its streamed answer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def post(cls, url: str, path: str, body: bytes) -> "Connection":
        """Send a request."""
        place = urlsplit(url)
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        head = f"POST {path} HTTP/1.1\r\nHost: {place.netloc}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        return cls(reader, writer)

    async def status(self) -> int:
        """Read the response headers. Returns the status."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        return int(head.split(b" ", 2)[1])

    def leave(self) -> None:
        """Close the connection without a further message."""
        self.writer.transport.abort()


async def stream(url: str, query: dict[str, object], pause: float = 0.0) -> Answer:
    """Send a query and read its answer to the end. pause: seconds between two reads of a slow reader."""
    connection = await Connection.post(url, "/v1/completions", json.dumps(query).encode())
    texts: dict[int, str] = {}
    done = False
    try:
        status = await connection.status()
        if status != 200:
            return Answer(status, {}, (await connection.reader.read()).decode(errors="replace"))
        reasons = set()
        while line := await connection.reader.readline():
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                done = True
                continue
            event = json.loads(line[6:])
            if "error" in event:
                return Answer(status, texts, event["error"]["message"])
            for choice in event["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
                reasons |= {choice["index"]} if choice["finish_reason"] else set()
            if pause:
                await asyncio.sleep(pause)
        whole = done and len(reasons) == query.get("n", 1)
        return Answer(status, texts, "" if whole else "the stream broke off")
    except (ConnectionError, asyncio.IncompleteReadError) as error:
        return Answer(0, texts, f"{type(error).__name__}: {error}")
    finally:
        connection.writer.close()


async def leave_early(url: str, query: dict[str, object], seconds: float) -> None:
    """Send a query, read for some time, and disconnect."""
    connection = await Connection.post(url, "/v1/completions", json.dumps(query).encode())
    try:
        async with asyncio.timeout(seconds):
            await connection.reader.read()
    except (TimeoutError, ConnectionError):
        pass
    finally:
        connection.leave()


async def send_too_much(url: str, num_bytes: int) -> int:
    """Send a body that is too large. Returns the status, or 0 if the connection was closed before."""
    connection = await Connection.post(url, "/v1/completions", b'{"prompt": "' + b"a" * num_bytes + b'"}')
    try:
        return await connection.status()
    except (ConnectionError, asyncio.IncompleteReadError):
        return 0
    finally:
        connection.leave()
