"""Scheduling parameters of a request: priority, deadline, retention, program hints."""

import msgspec

from quire.errors import RequestError

MAX_NAME_LEN = 256  # characters
MAX_SECONDS = 1e9
MAX_PROGRAM_TTL = 600.0  # seconds, so that hints of a program that is never ended expire
_MAX_PRIORITY = 2**31 - 1  # of the absolute value of a priority


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_int(value) or isinstance(value, float)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME_LEN and value.isprintable()


def _invalid_value(field: str, expected: str, value: object) -> RequestError:
    return RequestError(f"{field} must be {expected}, not {value!r:.80}", field)


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """Retention of the KV that a request leaves. Raises RequestError for a value out of bounds.

    It has no guarantee: blocks that running sequences need are evicted, except for pins within the limits of
    docs/eviction.md.
    """

    priority: int = 50  # 0 to 100: lower is evicted first, under the eviction policies "priority" and "cost"
    ttl: float | None = None  # seconds after the end of the request in which retention applies; None: no limit
    pin: bool = False  # no eviction during the ttl

    def __post_init__(self) -> None:
        if not _is_int(self.priority) or not 0 <= self.priority <= 100:
            raise _invalid_value("retention.priority", "a whole number from 0 to 100", self.priority)
        if self.ttl is not None and (not _is_number(self.ttl) or not 0 <= self.ttl <= MAX_SECONDS):
            raise _invalid_value("retention.ttl", f"a number of seconds from 0 to {MAX_SECONDS:.0e}", self.ttl)
        if not isinstance(self.pin, bool):
            raise _invalid_value("retention.pin", "true or false", self.pin)


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """Program hints of a request (docs/programs.md). Raises RequestError for a value out of bounds.

    Hints change the order of requests and of evictions, never an output. An id is valid within its tenant.
    """

    id: str  # of one run of the program
    branch: str = ""  # branch of the run; "" is the trunk
    expects_more: bool = True  # another request will continue from the KV of this one; else the branch ends with it
    ttl: float = 60.0  # seconds after the end of the request in which that is expected

    def __post_init__(self) -> None:
        if not _is_name(self.id):
            raise _invalid_value("program.id", f"1 to {MAX_NAME_LEN} printable characters", self.id)
        if self.branch != "" and not _is_name(self.branch):
            raise _invalid_value("program.branch", f"up to {MAX_NAME_LEN} printable characters", self.branch)
        if not isinstance(self.expects_more, bool):
            raise _invalid_value("program.expects_more", "true or false", self.expects_more)
        if not _is_number(self.ttl) or not 0 <= self.ttl <= MAX_PROGRAM_TTL:
            raise _invalid_value("program.ttl", f"a number of seconds from 0 to {MAX_PROGRAM_TTL:g}", self.ttl)


class SchedulingParams(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduling parameters of a request. Raises RequestError for a value out of bounds."""

    priority: int = 0  # lower runs earlier; only under the policy "priority"
    deadline: float | None = None  # seconds after arrival at which the last token stops being useful
    retention: Retention = Retention()
    program: Program | None = None

    def __post_init__(self) -> None:
        if not _is_int(self.priority) or abs(self.priority) > _MAX_PRIORITY:
            raise _invalid_value("priority", f"a whole number from {-_MAX_PRIORITY} to {_MAX_PRIORITY}", self.priority)
        if self.deadline is not None and (not _is_number(self.deadline) or not 0 < self.deadline <= MAX_SECONDS):
            raise _invalid_value("deadline", f"a number of seconds above 0 and up to {MAX_SECONDS:.0e}", self.deadline)


DEFAULT_SCHEDULING_PARAMS = SchedulingParams()
