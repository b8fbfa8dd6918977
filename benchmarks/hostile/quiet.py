"""The quiet tenant: chat streams one after the other, probes of /live, and new schemas, each on its own connection."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

PROBE_SECONDS = 0.02  # between two probes of /live
_SCHEMA_SECONDS = 0.25  # between two new schemas
_CHAT = {"messages": [{"role": "user", "content": "Hello! Who are you?"}], "temperature": 0}
_STREAM = {**_CHAT, "max_tokens": 48, "ignore_eos": True, "stream": True}


@dataclass
class Waits:
    """Seconds that the quiet tenant waited, and what went wrong."""

    gaps: list[float] = field(default_factory=list)  # between two tokens of a stream
    first: list[float] = field(default_factory=list)  # from a request to its first token
    live: list[float] = field(default_factory=list)  # of a probe
    schema: list[float] = field(default_factory=list)  # of a request with a new schema and one token
    stored: list[float] = field(default_factory=list)  # of a list of its files, which is in the store
    problems: Counter[str] = field(default_factory=Counter)


class Quiet:
    """The requests of the quiet tenant until it is stopped."""

    def __init__(self, port: int, key: str, waits: Waits) -> None:
        self._port = port
        self._key = key
        self._waits = waits
        self._clock: Callable[[], float] = asyncio.get_running_loop().time

    async def streams(self) -> None:
        """One stream after the other."""
        body = json.dumps(_STREAM).encode()
        while True:
            async with _Connection(self._port, self._waits.problems, "stream") as one:
                while True:
                    before, num_events = self._clock(), 0
                    await one.post("/v1/chat/completions", self._key, body)
                    while not one.is_end(line := await one.reader.readline()):
                        num_events += line.startswith(b"data:")
                        if line.startswith(b"data:") and num_events > 1:  # the first one has the role alone
                            waits = self._waits.first if num_events == 2 else self._waits.gaps
                            waits.append(self._clock() - before)
                            before = self._clock()

    async def probes(self) -> None:
        """Probe /live every PROBE_SECONDS."""
        while True:
            async with _Connection(self._port, self._waits.problems, "/live") as one:
                while True:
                    before = self._clock()
                    one.writer.write(b"GET /live HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
                    await one.answer()
                    self._waits.live.append(self._clock() - before)
                    await asyncio.sleep(max(0.0, before + PROBE_SECONDS - self._clock()))

    async def stored(self) -> None:
        """List the files every PROBE_SECONDS."""
        while True:
            async with _Connection(self._port, self._waits.problems, "stored") as one:
                while True:
                    before = self._clock()
                    fields = f"host: 127.0.0.1\r\nauthorization: Bearer {self._key}\r\n"
                    one.writer.write(f"GET /v1/files HTTP/1.1\r\n{fields}\r\n".encode())
                    await one.answer()
                    self._waits.stored.append(self._clock() - before)
                    await asyncio.sleep(max(0.0, before + PROBE_SECONDS - self._clock()))

    async def schemas(self) -> None:
        """Send a new harmless schema every _SCHEMA_SECONDS."""
        for number in count(10**7):
            schema = {"type": "object", "properties": {f"name{number}": {"type": "string", "maxLength": 8}}}
            form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
            body = json.dumps({**_CHAT, "max_tokens": 1, "response_format": form}).encode()
            async with _Connection(self._port, self._waits.problems, "schema") as one:
                before = self._clock()
                await one.post("/v1/chat/completions", self._key, body)
                await one.answer()
                self._waits.schema.append(self._clock() - before)
            await asyncio.sleep(_SCHEMA_SECONDS)


class _Connection:
    """A connection as a context manager, which counts its errors instead of raising them."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def __init__(self, port: int, problems: Counter[str], name: str) -> None:
        self._port = port
        self._problems = problems
        self._name = name

    async def __aenter__(self) -> "_Connection":
        while True:
            try:
                self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
                return self
            except OSError:
                self._problems[f"{self._name}: no connection"] += 1
                await asyncio.sleep(0.1)

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> bool:
        self.writer.transport.abort()
        if isinstance(error, ConnectionError | asyncio.IncompleteReadError | ValueError):
            self._problems[f"{self._name}: {error if isinstance(error, ValueError) else 'closed'}"] += 1
            return True
        return False

    async def post(self, path: str, key: str, body: bytes) -> None:
        """Send a request with a body."""
        fields = f"host: 127.0.0.1\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n"
        self.writer.write(f"POST {path} HTTP/1.1\r\n{fields}content-length: {len(body)}\r\n\r\n".encode() + body)
        await self.writer.drain()

    async def answer(self) -> None:
        """Read an answer with a length. Raises ValueError for another status than 200."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        await self.reader.readexactly(next(int(line[15:]) for line in head if line.startswith("content-length:")))
        if head[0].split()[1] != "200":
            raise ValueError(head[0].split()[1])

    def is_end(self, line: bytes) -> bool:
        """Whether a line of a stream is its end. Raises ValueError for another status than 200, or a broken stream."""
        if not line:
            raise ConnectionError
        if line.startswith(b"HTTP/1.1 ") and line[9:12] != b"200":
            raise ValueError(line[9:12].decode())
        return line == b"0\r\n"
