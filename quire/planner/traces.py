"""Traces of requests in the formats that people have, read as sessions.

    ShareGPT JSON       [{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}]
    benchmark JSONL     {"prompt": ..., "output_tokens": 100}: custom data sets of vLLM and SGLang, also
                        {"conversations": [{"content": ...}, {"content": ...}]}
    benchmark results   {"input_lens": [...], "output_lens": [...]}: detailed ones of vLLM and SGLang
    Mooncake            {"timestamp": ms, "input_length": 6755, "output_length": 500, "hash_ids": [...]}
    OpenAI logs         {"request": {"messages": ...}, "response": {"usage": ...}}, batch files, and logs that have
                        prompt_tokens and completion_tokens, such as the access log of quire
    journals            files that `quire serve --journal` writes

Text becomes tokens by the model's tokenizer. Without one, every 4 characters are a token: equal prefixes stay equal,
and lengths are about those of English text.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import chain, count
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

import msgspec

from quire.core.journal_file import JournalError
from quire.core.output import Output
from quire.core.request import Request
from quire.cost.memory_plan import format_bytes
from quire.errors import ConfigError
from quire.planner.workloads import NewTokens, Part, Session, Turn, first_requests
from quire.scheduler.journal import Add, Record, ReplayMismatch, read_records, replay_steps

Tokenize = Callable[[str], Sequence[int]]
MAX_BYTES = 2 * 2**30  # of a file
PAUSE = 10.0  # seconds between an answer and the next question, where a format has no times
DEFAULT_OUTPUT = 128  # tokens, where a line says nothing about its output
_MOONCAKE_BLOCK = 512  # tokens of one of its hash ids
_MOST_TOKENS = 2**24  # of a prompt, and of an output
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BYTE = re.compile(r"\(byte (\d+)\)$")  # the place, in an error of msgspec
_CHARACTERS = 4  # of a token without a tokenizer
_OUTPUT_FIELDS = (
    "output_tokens",
    "output_len",
    "output_length",
    "expected_output_len",
    "completion_tokens",
    "max_tokens",
)
_USER, _MODEL = ("human", "user"), ("gpt", "assistant", "chatgpt", "bard", "model")


def approximate_tokens(text: str, vocab_size: int = 32_000) -> list[int]:
    """A token for every 4 characters: their CRC-32 modulo the vocabulary."""
    pieces = (text[i : i + _CHARACTERS] for i in range(0, len(text), _CHARACTERS))
    return [crc32(piece.encode("utf-8", "replace")) % vocab_size for piece in pieces]


def read_trace(path: Path, tokenize: Tokenize = approximate_tokens, most: int | None = None) -> list[Session]:
    """The sessions of a file, in one of the formats above, recognized by its content.

    most: requests; reading stops there, in the order of the file. Raises ConfigError that names the line if the file
    cannot be read, is larger than MAX_BYTES, or has a line that is not understood.
    """
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ConfigError(
                f"the trace {path} has {format_bytes(size)}, and at most {format_bytes(MAX_BYTES)} are read; split it"
            )
        with path.open("rb") as file:
            start = file.peek(4096)[:4096].removeprefix(_BYTE_ORDER_MARK).lstrip()[:1]
            read = {b"[": _of_array, b"{": _of_lines}.get(start)
            sessions = _of_journal(path) if read is None else read(path, file, _Reader(tokenize))
            return _from_zero(path, list(sessions) if most is None else first_requests(sessions, most))
    except OSError as error:
        raise ConfigError(f"the trace {path} cannot be read: {error.strerror}") from error


def _of_array(path: Path, file: BinaryIO, reader: "_Reader") -> Iterator[Session]:
    data = file.read().removeprefix(_BYTE_ORDER_MARK)
    for number, entry in enumerate(_decode(data, f"the trace {path}"), 1):
        yield from _read_entry(reader, entry, f"{path}, entry {number}")


def _of_lines(path: Path, file: BinaryIO, reader: "_Reader") -> Iterator[Session]:
    """The sessions of a file with an object in each line, or of one object over several lines."""
    begin, first = 1, file.readline().removeprefix(_BYTE_ORDER_MARK)
    while first.isspace():
        begin, first = begin + 1, file.readline()
    try:
        msgspec.json.decode(first)
    except (msgspec.DecodeError, RecursionError):
        first += file.read()
    for number, line in enumerate(chain([first], file), begin):
        if line.strip():
            where = f"{path}, line {number}"
            yield from _read_entry(reader, _decode(line, where), where)


def _decode(data: bytes, where: str) -> Any:  # noqa: ANN401 (JSON)
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        at = _BYTE.search(str(error))
        line = f", in its line {data[: int(at[1])].count(10) + 1}" if at and b"\n" in data.strip() else ""
        raise ConfigError(f"{where}: not valid JSON: {error}{line}") from error


def _read_entry(reader: "_Reader", entry: object, where: str) -> Iterator[Session]:
    """The sessions of one entry. Raises ConfigError for one that no format has."""
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: expected an object with the fields of a request, not {entry!r:.60}")
    for fields, read in _FORMATS:
        if all(field in entry for field in fields):
            try:
                yield from read(reader, entry)
            except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
                names, why = ", ".join(fields), f"no field {error}" if isinstance(error, KeyError) else str(error)
                raise ConfigError(f"{where}: a request with {names} that is not understood: {why}") from error
            return
    known = "; ".join(" and ".join(fields) for fields, _ in _FORMATS)
    raise ConfigError(f"{where}: unknown format with the fields {', '.join(map(str, entry))!s:.100}; known: {known}")


class _Reader:
    """Reads entries of all formats."""

    def __init__(self, tokenize: Tokenize) -> None:
        self.tokenize = tokenize
        self._keys = count(1)

    def lengths(self, entry: Mapping[str, Any]) -> Iterator[Session]:
        """Detailed results of a benchmark: requests without content."""
        for prompt, output in zip(entry["input_lens"], entry["output_lens"], strict=True):
            if output:  # a request that failed has none
                yield self._single(0.0, self._unique(prompt), output)

    def mooncake(self, entry: Mapping[str, Any]) -> Iterator[Session]:
        """A request whose prompt is known by the hashes of its blocks."""
        left, parts = _positive(entry["input_length"]), list[NewTokens]()
        for key in entry.get("hash_ids", ()):
            take = min(left, _MOONCAKE_BLOCK)
            if take:
                parts.append(Part(-1 - _natural(key), take))
            left -= take
        if left:
            parts += self._unique(left)
        yield self._single(_number(entry.get("timestamp", 0)) / 1000, tuple(parts), entry["output_length"])

    def conversation(self, entry: Mapping[str, Any]) -> Iterator[Session]:
        """Questions and answers by turns. A question without an answer is left out, and so is a leading answer."""
        turns: list[Turn] = []
        question: list[int] = []
        for place, message in enumerate(entry["conversations"]):
            text = message.get("value", message.get("content", ""))
            role = message.get("from", message.get("role", _MODEL[0] if place % 2 else _USER[0]))
            if role not in _MODEL:
                question += self.tokenize(text)
            elif question:
                output = tuple(self.tokenize(text))
                if output:
                    parent = len(turns) - 1
                    turns.append(Turn((tuple(question),), len(output), parent, PAUSE if turns else 0.0, output=output))
                question = []
        if turns:
            yield Session(_time(entry), tuple(turns))

    def prompt(self, entry: Mapping[str, Any]) -> Iterator[Session]:
        """A prompt as text or token ids, with the length or the text of its output."""
        prompt = entry["prompt"]
        tokens = self.tokenize(prompt) if isinstance(prompt, str) else [_natural(token) for token in prompt]
        yield self._with_output(entry, tokens, entry.get("output", entry.get("completion")))

    def batch_line(self, entry: Mapping[str, Any]) -> Iterator[Session]:
        """A line of OpenAI's batch input."""
        yield self._with_output(entry["body"], self._content(entry["body"]), None)

    def logged(self, entry: Mapping[str, Any]) -> Iterator[Session]:
        """A request with its response."""
        response, request = entry.get("response") or {}, entry["request"]
        body = response.get("body", response)
        choice = (body.get("choices") or [{}])[0]
        text = choice.get("text") or (choice.get("message") or {}).get("content")
        usage = body.get("usage") or {}
        merged = {**request, **usage, **{name: entry[name] for name in _TIMES if name in entry}}
        yield self._with_output(merged, self._content(request), text)

    def counted(self, entry: Mapping[str, Any]) -> Iterator[Session]:
        """A line of a log with the numbers of tokens, and with texts if the log has them."""
        prompt, output = entry["prompt_tokens"], entry["completion_tokens"]
        if not prompt or not output:
            return  # another route, or an error
        texts, answers = (list(entry.get(name) or ()) for name in ("prompts", "outputs"))
        if len(texts) == 1 and isinstance(texts[0], str):
            answer = answers[0] if answers and isinstance(answers[0], str) else None
            session = self._with_output(entry, self.tokenize(texts[0]), answer)
        else:
            session = self._single(_time(entry), self._unique(prompt), output)
        yield Session(session.at, session.turns, str(entry.get("tenant") or ""))

    def _content(self, request: Mapping[str, Any]) -> Sequence[int]:
        """The tokens of a request's messages, prompt or input."""
        if "messages" in request:
            texts = []
            for message in request["messages"]:
                content = message.get("content") or ""
                parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
                texts.append(f"{message['role']}: {''.join(parts)}\n")
            return self.tokenize("".join(texts))
        prompt = request.get("prompt", request.get("input"))
        if prompt is None:
            raise ValueError("it has neither messages nor prompt nor input")
        return self.tokenize(prompt) if isinstance(prompt, str) else [_natural(token) for token in prompt]

    def _with_output(self, entry: Mapping[str, Any], prompt: Sequence[int], answer: object) -> Session:
        recorded = tuple(self.tokenize(answer)) if isinstance(answer, str) else ()
        named = next((entry[name] for name in _OUTPUT_FIELDS if entry.get(name) is not None), None)
        number = _positive(named) if named is not None else len(recorded) or DEFAULT_OUTPUT
        return self._single(_time(entry), (tuple(prompt) or (0,),), number, recorded[:number])

    def _single(
        self, at: float, new: tuple[NewTokens, ...], num_output: object, recorded: tuple[int, ...] = ()
    ) -> Session:
        return Session(at, (Turn(new, _positive(num_output), output=recorded),))

    def _unique(self, length: object) -> tuple[NewTokens, ...]:
        return (Part(next(self._keys), _positive(length)),)


_TIMES = ("timestamp", "time", "created", "created_at", "arrival_time")
_FORMATS: tuple[tuple[tuple[str, ...], Callable[[_Reader, Mapping[str, Any]], Iterator[Session]]], ...] = (
    (("input_lens", "output_lens"), _Reader.lengths),
    (("input_length", "output_length"), _Reader.mooncake),
    (("conversations",), _Reader.conversation),
    (("request",), _Reader.logged),
    (("body",), _Reader.batch_line),
    (("prompt_tokens", "completion_tokens"), _Reader.counted),
    (("prompt",), _Reader.prompt),
)


def _time(entry: Mapping[str, Any]) -> float:
    """The arrival in seconds; 0 without one. Text is a date in ISO format."""
    value = next((entry[name] for name in _TIMES if entry.get(name) is not None), 0.0)
    return datetime.fromisoformat(value).timestamp() if isinstance(value, str) else _number(value)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r:.60} is not a number")
    return float(value)


def _natural(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TypeError(f"{value!r:.60} is not a whole number from 0")
    return value


def _positive(value: object) -> int:
    number = _natural(value)
    if not number:
        raise ValueError("a number of tokens is 0")
    if number > _MOST_TOKENS:
        raise ValueError(f"{number} tokens are more than the {_MOST_TOKENS} that a request may have")
    return number


def _from_zero(path: Path, sessions: list[Session]) -> list[Session]:
    """The sessions in the order of their arrival, the first at time 0. Raises ConfigError if there are none."""
    if not sessions:
        raise ConfigError(f"the trace {path} has no requests with an output")
    first = min(session.at for session in sessions)
    moved = [replace(session, at=session.at - first) for session in sessions]
    return sorted(moved, key=lambda session: session.at)


def _of_journal(path: Path) -> list[Session]:
    """The accepted requests of a journal, with the outputs that their engine generated.

    All samples of a request have the length of the longest one. Beams count as samples.
    """
    requests: dict[str, tuple[Request, float]] = {}
    outputs: dict[str, dict[int, list[int]]] = {}  # by request and index

    def record_outputs(some: list[Output]) -> None:
        for output in some:
            outputs.setdefault(output.request_id, {}).setdefault(output.index, []).extend(output.token_ids)

    try:
        with path.open("rb") as file:
            for _ in replay_steps(_noting(read_records(file), requests), record_outputs):
                pass
    except (JournalError, ReplayMismatch) as error:
        raise ConfigError(f"the trace {path} is neither JSON nor a journal that can be replayed: {error}") from error
    sessions = []
    for request_id, (request, at) in requests.items():
        samples = outputs.get(request_id, {})
        longest = max(map(len, samples.values()), default=0)
        if longest:
            turn = Turn(
                (tuple(request.prompt),),
                longest,
                output=tuple(samples.get(0, ())),
                num_samples=request.num_sequences,
                scheduling_params=request.scheduling_params,
            )
            sessions.append(Session(at, (turn,), request.namespace.tenant))
    return sessions


def _noting(records: Iterator[Record], requests: dict[str, tuple[Request, float]]) -> Iterator[Record]:
    """The records; requests that are added go into `requests`, with their arrival."""
    for record in records:
        if isinstance(record, Add):
            requests[record.request.id] = record.request, record.now
        yield record
