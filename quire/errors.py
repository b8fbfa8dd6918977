"""Exception types of quire. Every message says what to change."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import wraps
from types import MappingProxyType
from typing import TypeVar

T = TypeVar("T")


class QuireError(Exception):
    """Base class of all errors that quire raises on purpose."""


class RequestError(QuireError, ValueError):
    """A request that cannot be served. Other requests are not affected.

    `param` names the invalid field, as in the OpenAI error object.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def out_of_vocabulary(token: int, vocab_size: int, param: str | None = None) -> RequestError:
    """The error for a token id that the model does not have."""
    return RequestError(
        f"token id {token} is out of vocabulary, which has {vocab_size} tokens (0 to {vocab_size - 1})", param
    )


class ContextLengthExceeded(RequestError):
    """A prompt that does not fit into the model's context."""


class DeadlineUnreachable(RequestError):
    """A request that is predicted to miss its deadline. predicted: time that it takes; deadline: both in seconds."""

    def __init__(self, predicted: float, deadline: float) -> None:
        super().__init__(
            f"the deadline is {deadline:.3g} s away, and this request is predicted to take {predicted:.3g} s at least; "
            "allow more time, shorten the prompt or lower max_tokens",
            "deadline",
        )
        self.predicted = predicted
        self.deadline = deadline


MAX_EXPECTED_RETRIES = 512  # refused requests of a tenant that are expected to return; bounds Retry-After in a flood


class QueueFull(RequestError):
    """A rejection because the queue is at its limit.

    retry_after: predicted seconds until the request would fit. spacing: seconds that each further request of the same
    tenant would have to wait longer; None: the next one may be accepted.
    """

    def __init__(self, reason: str, retry_after: float, spacing: float | None = None) -> None:
        super().__init__(f"{reason}; try again in {retry_after:.3g} s")
        self.reason = reason
        self.retry_after = retry_after
        self.spacing = spacing


def refusal_of_all(refusals: Sequence[QueueFull | DeadlineUnreachable]) -> QueueFull | DeadlineUnreachable:
    """The refusals of one request by several engines as one: it says when the first of them would take the request.

    It is a QueueFull if there is one, as the request can be served later. Otherwise its deadline is nearest to what is
    predicted. Together the queues empty faster: their rates add up. If one would take the tenant's next request,
    because it refused this one for another reason, `spacing` is None.
    """
    full = [one for one in refusals if isinstance(one, QueueFull)]
    if not full:
        return min((one for one in refusals if isinstance(one, DeadlineUnreachable)), key=lambda one: one.predicted)
    soonest = min(full, key=lambda one: one.retry_after)
    spacings = [one.spacing for one in full if one.spacing is not None]
    if len(spacings) < len(refusals):
        return QueueFull(soonest.reason, soonest.retry_after)
    return QueueFull(
        soonest.reason, soonest.retry_after, 1 / sum(1 / one for one in spacings) if all(spacings) else 0.0
    )


class EngineStopped(QuireError):
    """The engine accepts no requests, because it is shutting down or has failed."""


class ConfigError(QuireError, ValueError):
    """The engine cannot be built with these options."""


class DoesNotFit(ConfigError):
    """The model and one sequence need more memory than there is."""


class ModelError(QuireError):
    """The model's files are missing, damaged, or describe something that quire cannot run."""


class AdapterError(ModelError):
    """An adapter's files are missing or damaged, or it cannot be used with the model."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The hint ` (did you mean 'x'?)` for an unknown name, or "" if no known name is similar."""
    matches = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def known_arguments_only(
    error: type[QuireError], elsewhere: Mapping[str, str] = MappingProxyType({})
) -> Callable[[type[T]], type[T]]:
    """Class decorator: a dataclass raises `error` with the nearest name, not TypeError, for an unknown argument.

    elsewhere: names of parameters in other engines -> their names in quire.
    """

    def wrap(cls: type[T]) -> type[T]:
        built = cls.__init__
        known = [f.name for f in fields(cls)]  # type: ignore[arg-type]

        @wraps(built)
        def __init__(self: T, **values: object) -> None:
            for name in values:
                if name in elsewhere:
                    raise error(f"unknown parameter {name!r} (quire calls it {elsewhere[name]!r})")
                if name not in known:
                    raise error(f"unknown parameter {name!r}{nearest(name, known)}")
            built(self, **values)

        cls.__init__ = __init__  # type: ignore[assignment]
        return cls

    return wrap
