"""Terms: what a request asks of the scheduler and of the memory, besides tokens."""

import msgspec

from quire.errors import RequestError

MAX_SESSION = 256  # characters
MAX_SECONDS = 1e9
MAX_PROGRAM_TTL = 600.0  # seconds: who forgets to end a program is not heeded for ever
_LARGEST = 2**31 - 1  # priority, either way


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_whole(value) or isinstance(value, float)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_SESSION and value.isprintable()


def _wrong(field: str, expected: str, value: object) -> RequestError:
    return RequestError(f"{field} must be {expected}, not {value!r:.80}", field)


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """How long the KV that a request leaves behind is kept, as far as there is room.

    It is a wish: memory that running sequences need goes to them, but for pins within the bounds of docs/eviction.md.
    Raises RequestError for a value out of bounds.
    """

    priority: int = 50  # 0 to 100: what has less goes first, in eviction "priority" and "cost"
    ttl: float | None = None  # seconds after its end; then it is as if nothing had been asked. None: for ever
    pin: bool = False  # not to be evicted at all, while the ttl lasts
    session: str | None = None  # a conversation: what its latest request asks holds for what it left

    def __post_init__(self) -> None:
        if not _is_whole(self.priority) or not 0 <= self.priority <= 100:
            raise _wrong("retention.priority", "a whole number from 0 to 100", self.priority)
        if self.ttl is not None and (not _is_number(self.ttl) or not 0 <= self.ttl <= MAX_SECONDS):
            raise _wrong("retention.ttl", f"a number of seconds from 0 to {MAX_SECONDS:.0e}", self.ttl)
        if not isinstance(self.pin, bool):
            raise _wrong("retention.pin", "true or false", self.pin)
        if self.session is not None and not _is_name(self.session):
            raise _wrong("retention.session", f"1 to {MAX_SESSION} printable characters", self.session)


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """The program that a request is a part of: what runs with it, and what comes behind it (docs/programs.md).

    A hint: it changes in which order requests run and KV is evicted, never what is answered. An id means nothing
    outside its tenant. Raises RequestError for a value out of bounds.
    """

    id: str  # of one run; its requests count as arrived when it began
    branch: str = ""  # one line of it; "" is the trunk, which others fork from
    expects_more: bool = True  # another request goes on from what this one leaves; else the branch ends with it
    ttl: float = 60.0  # seconds after the end of the request for which that is expected

    def __post_init__(self) -> None:
        if not _is_name(self.id):
            raise _wrong("program.id", f"1 to {MAX_SESSION} printable characters", self.id)
        if self.branch != "" and not _is_name(self.branch):
            raise _wrong("program.branch", f"up to {MAX_SESSION} printable characters", self.branch)
        if not isinstance(self.expects_more, bool):
            raise _wrong("program.expects_more", "true or false", self.expects_more)
        if not _is_number(self.ttl) or not 0 <= self.ttl <= MAX_PROGRAM_TTL:
            raise _wrong("program.ttl", f"a number of seconds from 0 to {MAX_PROGRAM_TTL:g}", self.ttl)


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for nothing, unless it is said otherwise. Raises RequestError for a value out of bounds."""

    priority: int = 0  # less runs earlier; only policy "priority" heeds it
    deadline: float | None = None  # seconds after its arrival by which its last token is of use
    retention: Retention = Retention()
    program: Program | None = None

    def __post_init__(self) -> None:
        if not _is_whole(self.priority) or abs(self.priority) > _LARGEST:
            raise _wrong("priority", f"a whole number from {-_LARGEST} to {_LARGEST}", self.priority)
        if self.deadline is not None and (not _is_number(self.deadline) or not 0 < self.deadline <= MAX_SECONDS):
            raise _wrong("deadline", f"a number of seconds above 0 and up to {MAX_SECONDS:.0e}", self.deadline)


NO_TERMS = Terms()
