"""Messages between front end and engine process: plain data, validated when it is decoded."""

import socket
import struct
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from quire.cache.key_report import KeyChanges
from quire.config import EngineOptions
from quire.core import codec
from quire.core.adapter import Adapter
from quire.core.explanation import Explanation
from quire.core.output import Output
from quire.core.request import Request
from quire.cost.step_time import CostFigures
from quire.engine.engine import EngineStats
from quire.errors import (
    ConfigError,
    ContextLengthExceeded,
    DeadlineUnreachable,
    ModelError,
    QueueFull,
    QuireError,
    RequestError,
)
from quire.monitor.update import Watcher
from quire.scheduler.queue.waiting_queue import MOST_REPORTED, MOST_SERVICE
from quire.startup.model_info import ModelInfo
from quire.startup.replica_share import WHOLE, ReplicaShare

MAX_FRAME = 2**28  # bytes; enough for 2**24 tokens, more than a body of 16 MiB has
# weighted tokens by tenant, as the policy `fair` counts them
Service = Annotated[
    dict[str, Annotated[int, msgspec.Meta(ge=0, le=MOST_SERVICE)]], msgspec.Meta(max_length=MOST_REPORTED)
]
_LENGTH = struct.Struct("<I")
_AT_ONCE = 2**16


class BadFrame(QuireError):
    """A message that is too long or cannot be encoded or decoded."""


def frame(data: bytes) -> bytes:
    """A message with its length prefix. Raises BadFrame if it is too long."""
    if len(data) > MAX_FRAME:
        raise BadFrame(f"a message of {len(data):,} bytes is longer than the {MAX_FRAME:,} that are allowed")
    return _LENGTH.pack(len(data)) + data


def receive_frame(connection: socket.socket) -> bytes | None:
    """The next message, read without any byte after it; None if the other side has closed. Raises BadFrame."""
    head = _receive_exactly(connection, _LENGTH.size)
    return None if head is None else _receive_exactly(connection, _frame_length(head))


def _receive_exactly(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        more = connection.recv(min(size - len(data), _AT_ONCE))
        if not more:
            return None
        data += more
    return bytes(data)


def _frame_length(data: bytes | bytearray, at: int = 0) -> int:
    length: int = _LENGTH.unpack_from(data, at)[0]
    if length > MAX_FRAME:
        raise BadFrame(f"a message announces {length:,} bytes, more than the {MAX_FRAME:,} that are allowed")
    return length


class FrameReader:
    """Splits a byte stream into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add bytes, and yield the messages that are now complete. Raises BadFrame for a length that is too large."""
        self._bytes += data
        at = 0
        while len(self._bytes) - at >= _LENGTH.size:
            end = at + _LENGTH.size + _frame_length(self._bytes, at)
            if len(self._bytes) < end:
                break
            yield bytes(self._bytes[at + _LENGTH.size : end])
            at = end
        del self._bytes[:at]


class Command(msgspec.Struct, frozen=True, tag=True):
    """Base class of messages from the front end."""


class Begin(Command, frozen=True, tag=True):
    """The first command: build an engine with these options, for this part of the machine.

    is_restart: whether another engine served before.
    """

    options: EngineOptions
    is_restart: bool = False
    share: ReplicaShare = WHOLE


class Add(Command, frozen=True, tag=True):
    """Queue requests, all or none."""

    number: int
    requests: list[Request]


class Abort(Command, frozen=True, tag=True):
    """Abort requests."""

    request_ids: list[str]


class Finish(Command, frozen=True, tag=True):
    """End a sequence at a stop string, after `num_tokens` output tokens."""

    seq_id: int
    num_tokens: int


class EndProgram(Command, frozen=True, tag=True):
    """End a branch of a program (None: all branches)."""

    tenant: str
    program: str
    branch: str | None


class ServedElsewhere(Command, frozen=True, tag=True):
    """Count service that other replicas have given to tenants."""

    service: Service


class Explain(Command, frozen=True, tag=True):
    """Return the explanations of requests."""

    number: int
    request_ids: list[str]


class Flush(Command, frozen=True, tag=True):
    """Evict all cached KV that no running request uses."""

    number: int


class ReadAdapter(Command, frozen=True, tag=True):
    """Read and check the files of an adapter, beside the steps, and return the Adapter."""

    number: int
    name: str
    path: str


class PinAdapter(Command, frozen=True, tag=True):
    """Load an adapter and keep it in memory, or let it leave again."""

    number: int
    adapter: Adapter
    pinned: bool


class AskCosts(Command, frozen=True, tag=True):
    """Return the figures of the cost model."""

    number: int


class MonitorUpdate(Command, frozen=True, tag=True):
    """Return the next update of a viewer as JSON. See Engine.monitor_update."""

    number: int
    viewer: int
    watcher: Watcher
    num_seen: int


class MonitorNode(Command, frozen=True, tag=True):
    """Return one node of the radix trees as JSON: "null" if the watcher may not see one with this id."""

    number: int
    watcher: Watcher
    node: int


class ForgetViewer(Command, frozen=True, tag=True):
    """A viewer has left."""

    viewer: int


class Close(Command, frozen=True, tag=True):
    """End the engine after its current step."""


class Failure(msgspec.Struct, frozen=True):
    """An error as data. kind: name of the class, or of its nearest base class that both processes import."""

    kind: str
    message: str
    param: str | None = None
    numbers: list[float] = []


Result = int | bytes | CostFigures | Adapter | list[Explanation] | None


class Answer(msgspec.Struct, frozen=True):
    """The result or the error of the command with this number."""

    number: int
    result: Result = None
    failure: Failure | None = None


class Launched(msgspec.Struct, frozen=True, array_like=True):
    """A step that begins. names: its request ids, one per chunk; None if they are those of the step before."""

    names: list[str] | None
    positions: list[int]  # at which each chunk stops
    predicted_seconds: float


class Batch(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The message of one engine turn: outputs of the step before, answers, and the step that begins now.

    num_counted: prompt tokens in `stats` of unfinished requests whose prompt was counted in part, by request id.
    """

    outputs: list[Output]
    answers: list[Answer]
    num_steps: int  # committed so far
    launched: Launched | None
    stats: EngineStats
    num_counted: dict[str, int] = {}
    keys: KeyChanges | None = None  # of cached blocks; None if the engine reports none
    service: Service = {}  # that the engine gave since the message before, if other replicas are to hear of it


class Pulse(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Heartbeat. turned: when the last turn of the engine loop began, seconds of the machine's monotonic clock."""

    turned: float


class Report(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A line of the report on the engine's start."""

    line: str


class Loading(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Progress of a start: bytes of the model's files that are downloaded or loaded."""

    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The engine accepts commands. share: that of Begin, with the available memory and the costs that it found."""

    facts: ModelInfo
    share: ReplicaShare = WHOLE


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The engine could not be built."""

    failure: Failure


Commands = list[
    Begin
    | Add
    | Abort
    | Finish
    | EndProgram
    | ServedElsewhere
    | Explain
    | Flush
    | ReadAdapter
    | PinAdapter
    | AskCosts
    | MonitorUpdate
    | MonitorNode
    | ForgetViewer
    | Close
]
EngineMessage = Batch | Pulse | Report | Loading | Ready | Refused

_COMMANDS = codec.decoder(Commands)
_ENGINE_MESSAGE = codec.decoder(EngineMessage)


def encode_frame(message: Commands | EngineMessage) -> bytes:
    """An encoded message with its length prefix. Raises BadFrame for invalid Unicode or one that is too long."""
    try:
        return frame(codec.encode(message))
    except UnicodeEncodeError as error:
        raise BadFrame(f"a message cannot be written: {error}") from error


def decode_commands(data: bytes) -> Commands:
    """Decode commands. Raises BadFrame for invalid data."""
    commands: Commands = _decode(_COMMANDS, data)
    return commands


def decode_message(data: bytes) -> EngineMessage:
    """Decode a message of the engine. Raises BadFrame for invalid data."""
    message: EngineMessage = _decode(_ENGINE_MESSAGE, data)
    return message


def _decode(decoder: "msgspec.msgpack.Decoder[Any]", data: bytes) -> Any:  # noqa: ANN401  (as the decoder says)
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:  # also of a value
        raise BadFrame(f"a message cannot be read: {error}") from error


_WITH_PARAM = {kind.__name__: kind for kind in (RequestError, ContextLengthExceeded)}
_PLAIN = {kind.__name__: kind for kind in (ConfigError, ModelError, QuireError)}
_KINDS = {*_WITH_PARAM, *_PLAIN, "DeadlineUnreachable", "QueueFull"}


def encode_error(error: Exception) -> Failure:
    """An error as data."""
    match error:
        case DeadlineUnreachable():
            numbers = [error.predicted, error.deadline]
        case QueueFull():
            numbers = [error.retry_after, *(() if error.spacing is None else (error.spacing,))]
        case _:
            numbers = []
    names = [kind.__name__ for kind in type(error).__mro__]
    kind = next((name for name in names if name in _KINDS), names[0])  # nearest class that decode_error can build
    message = error.reason if isinstance(error, QueueFull) else str(error)
    return Failure(kind, message, getattr(error, "param", None), numbers)


def decode_error(failure: Failure) -> Exception:
    """The exception of a Failure: the class named by `kind` if it is an error of quire, else RuntimeError."""
    match failure:
        case Failure("DeadlineUnreachable", _, _, [predicted, asked]):
            return DeadlineUnreachable(predicted, asked)
        case Failure("QueueFull", reason, _, [_] | [_, _] as numbers):
            return QueueFull(reason, *numbers)
    if failure.kind in _WITH_PARAM:
        return _WITH_PARAM[failure.kind](failure.message, failure.param)
    if failure.kind in _PLAIN:
        return _PLAIN[failure.kind](failure.message)
    return RuntimeError(f"{failure.kind}: {failure.message}")
