"""The load of one phase, as a process of its own: raw sockets that send prepared bytes.

    python -m benchmarks.hostile.load PHASE PORT KEY SECONDS

It prints "ready", begins when it reads a line, and at the end prints the answers' statuses as JSON, by count. A
connection that the server closed without an answer counts as "closed".
"""

import asyncio
import json
import resource
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from itertools import count, cycle
from typing import Any

from benchmarks.hostile.stored import deletes

MAX_BODY = 16 * 2**20  # bytes: the server's bound
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
_HELLO = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
_MARK = b"@@@@@@@@"  # replaced by a number in each body, so that no answer is cached
_PIECE = 2**16

Load = Callable[["Attack"], Coroutine[Any, Any, None]]


class Attack:
    """The connections of one phase until its end. statuses: of the answers, by count."""

    def __init__(self, port: int, key: str, seconds: float) -> None:
        self.port = port
        self.key = key
        self.seconds = seconds
        self.statuses: Counter[str] = Counter()

    def head(self, path: str, length: int, method: str = "POST") -> bytes:
        """The head of a request with this key."""
        fields = f"host: 127.0.0.1\r\nauthorization: Bearer {self.key}\r\ncontent-type: application/json\r\n"
        return f"{method} {path} HTTP/1.1\r\n{fields}content-length: {length}\r\n\r\n".encode()

    def get(self, path: str) -> bytes:
        """A GET with this key."""
        return self.head(path, 0, "GET")

    async def ask(self, method: str, path: str, body: object = None) -> Any:  # noqa: ANN401 (JSON)
        """The answer to one request, on a connection of its own. Raises ValueError for another status than 200."""
        data = b"" if body is None else json.dumps(body).encode()
        reader, writer = await self.connect()
        try:
            writer.write(self.head(path, len(data), method) + data)
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = next(int(line[15:]) for line in head.split("\r\n") if line.startswith("content-length:"))
            answer = await reader.readexactly(length)
        finally:
            writer.transport.abort()
        if head[9:12] != "200":
            raise ValueError(answer.decode())
        return json.loads(answer)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to the server."""
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def repeat(self, path: str, bodies: Iterator[bytes]) -> None:
        """Send one body after the other on one connection, each after the answer to the one before."""
        while True:
            try:
                reader, writer = await self.connect()
                while True:
                    body = next(bodies)
                    writer.write(self.head(path, len(body)))
                    for start in range(0, len(body), _PIECE):
                        writer.write(body[start : start + _PIECE])
                        await writer.drain()
                    head = await reader.readuntil(b"\r\n\r\n")
                    self.statuses[head[9:12].decode()] += 1
                    lines = head.decode().lower().split("\r\n")
                    length = next((int(line[15:]) for line in lines if line.startswith("content-length:")), None)
                    if length is None or "connection: close" in lines:
                        writer.transport.abort()
                        break
                    await reader.readexactly(length)
            except (ConnectionError, asyncio.IncompleteReadError):
                self.statuses["closed"] += 1
                await asyncio.sleep(0.01)

    async def flood(self, path: str, bodies: Iterator[bytes], num_connections: int) -> None:
        """`repeat` on several connections."""
        await asyncio.gather(*(self.repeat(path, bodies) for _ in range(num_connections)))

    async def hold(self, data: bytes, num_connections: int, *, pause: float = 0.0) -> None:
        """Open connections, send `data` on each, and read nothing. pause: seconds between two of them."""
        held = []
        for _ in range(num_connections):
            try:
                reader, writer = await self.connect()
                writer.transport.pause_reading()  # type: ignore[attr-defined]  # StreamReader's type is narrow
                writer.write(data)
                held.append((reader, writer))
            except OSError:
                self.statuses["closed"] += 1
            await asyncio.sleep(pause)
        self.statuses["open"] = len(held)
        await asyncio.sleep(self.seconds)


def _numbered(bodies: list[bytes]) -> Iterator[bytes]:
    """The bodies in turn, each with another number in place of the mark."""
    numbers = count(10**7)
    return (body.replace(_MARK, str(next(numbers)).encode()) for body in cycle(bodies))


def _padded(begin: bytes, piece: bytes, end: bytes) -> bytes:
    """A body of just under MAX_BODY bytes."""
    return begin + piece * ((MAX_BODY - len(begin) - len(end) - 1) // len(piece)) + end


async def large(attack: Attack) -> None:
    """Bodies of up to 16 MiB: a text, escapes, numbers, objects, fields, a schema with a long text, biases."""
    chat = b'{"messages": [{"role": "user", "content": "'
    schema = b'{"messages": [{"role": "user", "content": "a"}], "structured_outputs": {"json": {"description": "'
    fields = b'{"messages": [], "metadata": {' + b",".join(b'"%d":1' % i for i in range(10**6)) + b"}}"
    bodies = [
        fields,
        _padded(schema, b"a", b'"}}}'),
        json.dumps({**_HELLO, "logit_bias": {str(i): 1 for i in range(65_536)}, "temperature": -1}).encode(),
        _padded(chat, b"a", b'"}]}'),
        _padded(chat, rb"\u0041", b'"}]}'),
        _padded(b'{"prompt": [1', b",1", b"]}"),
        _padded(b'{"messages": [{}', b",{}", b"]}"),
    ]
    await attack.flood(CHAT, cycle(bodies), 8)


async def deep(attack: Attack) -> None:
    """JSON of 8 million levels, and texts full of backslashes."""
    half = MAX_BODY // 2 - 100
    bodies = [
        b'{"messages": ' + b"[" * half + b"]" * half + b"}",
        b'{"messages": "' + b"\\\\" * half + b'", "tools": ' + b"[" * 30 + b"]" * 30 + b"}",
    ]
    await attack.flood(CHAT, cycle(bodies), 8)


async def messages(attack: Attack) -> None:
    """Chats of 16,000 messages, 100 at once."""
    body = json.dumps({"messages": [{"role": "user", "content": "a"}] * 16_000}).encode()
    await attack.flood(CHAT, cycle([body]), 100)


async def tools(attack: Attack) -> None:
    """Tools with long schemas in the dialects that have tools, 16 at once."""
    word = {"type": "string", "enum": [str(number) for number in range(30)]}
    schema = {"type": "object", "properties": {f"p{i}": word for i in range(60)}}
    functions = [{"name": f"f{i}", "parameters": schema} for i in range(60)]
    of_chat = [{"type": "function", "function": {**one, "strict": True}} for one in functions]
    bodies = {
        CHAT: {**_HELLO, "tools": of_chat},
        "/v1/responses": {"input": "Hello!", "tools": [{"type": "function", **one} for one in functions]},
        "/v1/messages": {
            **_HELLO,
            "tools": [{"name": one["name"], "input_schema": one["parameters"]} for one in functions],
        },
        "/generate": {"text": ["Hello!"] * 500, "tools": of_chat, "tool_choice": "required"},
    }
    await asyncio.gather(*(attack.flood(path, cycle([json.dumps(bodies[path]).encode()]), 4) for path in bodies))


async def small(attack: Attack) -> None:
    """Short bodies that are refused, on 100 connections."""
    await attack.flood(CHAT, cycle([json.dumps({**_HELLO, "no_such_field": 1}).encode()]), 100)


async def half(attack: Attack) -> None:
    """Bodies of which a part is never sent."""
    await attack.hold(attack.head(CHAT, 2**20) + b'{"messages": "' + b"a" * 2**17, 200)


async def unread(attack: Attack) -> None:
    """100 streams with several choices and 20 logprobs, of which nothing is read."""
    body = json.dumps(
        {"prompt": "One Tuesday", "max_tokens": 1900, "ignore_eos": True, "stream": True, "n": 16, "logprobs": 20}
    ).encode()
    await attack.hold(attack.head("/v1/completions", len(body)) + body, 100)


async def idle(attack: Attack) -> None:
    """Connections without a request, more than the server has file descriptors."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    await attack.hold(b"", min(1100, hard - 64))


async def schemas(attack: Attack) -> None:
    """Eight expensive schemas and grammars at once."""
    objects = [{"properties": {f"@@@@@@@@{i}": {"type": "string"}}, "required": [f"@@@@@@@@{i}"]} for i in range(4)]
    product = {"allOf": [{"anyOf": [{"type": "object", **one} for one in objects]} for _ in range(5)]}
    names = {f"@@@@@@@@{'a' * 900}{i}": {"type": "string", "maxLength": 9} for i in range(511)}
    long = {"type": "object", "properties": {**names, "last": {"type": "array", "uniqueItems": True}}}
    wide = {f"@@@@@@@@{i}": {"anyOf": [{"type": "string"}, {"type": "null"}]} for i in range(4000)}
    large = {"type": "object", "properties": wide, "required": list(wide)}
    rules = "\n".join(f'r{i} ::= "@@@@@@@@" r{i + 1} | r{i + 1} "{i}" | "{i}"' for i in range(500))
    forms: list[dict[str, Any]] = [
        *({"structured_outputs": {"json": schema}} for schema in (product, long, large)),
        {"structured_outputs": {"grammar": f'root ::= r0\n{rules}\nr500 ::= "a'}},
    ]
    await attack.flood(CHAT, _numbered([json.dumps({**_HELLO, **form}).encode() for form in forms]), 8)


async def prompts(attack: Attack) -> None:
    """Long prompts that are admitted, all different."""
    body = json.dumps({"prompt": "@@@@@@@@ " + "the river and the lamp " * 90, "max_tokens": 1}).encode()
    await attack.flood("/v1/completions", _numbered([body]), 16)


def _long_conversation() -> dict[str, Any]:
    """A response that continues 15 MB of messages, of which the last one fits."""
    messages = [{"role": role, "content": role * 1950} for role in ("user", "assistant") for _ in range(500)]
    messages = [*messages[::2], *messages[1::2], {"role": "user", "content": "Hello!"}]
    return {"input": messages, "truncation": "auto", "max_output_tokens": 1}


async def conversations(attack: Attack) -> None:
    """60 requests at once of 120 bytes that continue a stored conversation of 15 MB."""
    stored = await attack.ask("POST", RESPONSES, _long_conversation())
    body = {"input": "@@@@@@@@", "previous_response_id": stored["id"], "truncation": "auto", "max_output_tokens": 1}
    await attack.flood(RESPONSES, _numbered([json.dumps(body).encode()]), 60)


async def replays(attack: Attack) -> None:
    """Clients that never read: 60 replays of a stored stream, 60 GETs of its response and of its input items."""
    logprobs = {"top_logprobs": 20, "include": ["message.output_text.logprobs"], "ignore_eos": True}
    body = {**_long_conversation(), **logprobs, "max_output_tokens": 200, "background": True, "stream": True}
    data = json.dumps(body).encode()
    reader, writer = await attack.connect()
    writer.write(attack.head(RESPONSES, len(data)) + data)
    await reader.readuntil(b'"id":"')
    answer = await reader.readuntil(b'"')
    id = answer[:-1].decode()
    while not answer.endswith(b"0\r\n\r\n"):
        answer = (answer + await reader.read(_PIECE))[-_PIECE:]
    writer.transport.abort()
    path = f"{RESPONSES}/{id}"
    paths = (f"{path}?stream=true", path, f"{path}/input_items?limit=100")
    await asyncio.gather(*(attack.hold(attack.get(one), 60) for one in paths))


async def logprobs(attack: Attack) -> None:
    """Four whole answers at once with as many logprobs as are allowed: 64 choices of 500 tokens, 129 for each."""
    body = {"prompt": "One Tuesday @@@@@@@@", "n": 64, "logprobs": 128, "max_tokens": 500, "ignore_eos": True}
    await attack.flood("/v1/completions", _numbered([json.dumps(body).encode()]), 4)


async def nothing(_attack: Attack) -> None:
    """No load."""
    await asyncio.sleep(3600)


PHASES: dict[str, Load] = {
    one.__name__: one
    for one in (
        *(nothing, large, deep, messages, tools, small, half, unread, idle, schemas, prompts),
        *(conversations, replays, logprobs, deletes),
    )
}


async def _run(phase: Load, attack: Attack) -> None:
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    try:
        async with asyncio.timeout(attack.seconds):
            await phase(attack)
    except TimeoutError:
        pass
    print(json.dumps(attack.statuses), flush=True)


if __name__ == "__main__":
    _name, _port, _key, _seconds = sys.argv[1:]
    asyncio.run(_run(PHASES[_name], Attack(int(_port), _key, float(_seconds))))
