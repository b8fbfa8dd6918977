"""Terms as callers give them: for one request, or for several at once. Knows names and what a policy heeds."""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.config import Policy
from quire.core.terms import Retention, Terms
from quire.errors import RequestError, nearest

RetentionLike = Retention | Mapping[str, object]  # a mapping has fields of Retention


def make_terms(
    policy: Policy, priority: int | None = None, deadline: float | None = None, retention: RetentionLike | None = None
) -> Terms:
    """What one request asks for; None asks for nothing. Raises RequestError.

    A priority that would change nothing is refused: whoever gives it counts on it.
    """
    terms = Terms(priority=0 if priority is None else priority, deadline=deadline, retention=_retention(retention))
    if terms.priority and policy != "priority":
        raise RequestError(
            f"priority {terms.priority} needs the policy 'priority', and this engine runs {policy!r}; leave it out, or "
            "start the engine with policy='priority' (--policy priority)",
            "priority",
        )
    return terms


def terms_each(
    count: int,
    policy: Policy,
    *,
    priority: int | Sequence[int] | None,
    deadline: float | Sequence[float | None] | None,
    retention: RetentionLike | Sequence[RetentionLike | None] | None,
) -> list[Terms]:
    """Of `count` prompts: a value is for all of them, a list has one for each. Raises RequestError."""
    names = {"priority": priority, "deadline": deadline, "retention": retention}
    columns = [_each(name, value, count) for name, value in names.items()]
    return [make_terms(policy, *values) for values in zip(*columns, strict=True)]


def _retention(given: RetentionLike | None) -> Retention:
    if given is None:
        return Retention()
    if isinstance(given, Retention):
        return given
    if not isinstance(given, Mapping):
        raise RequestError(f"retention must be Retention(...) or a mapping, not {type(given).__name__}", "retention")
    for name in given:
        if name not in Retention.__struct_fields__:
            hint = nearest(str(name), Retention.__struct_fields__)
            raise RequestError(f"retention has no field {name!r:.80}{hint}", "retention")
    return Retention(**given)  # type: ignore[arg-type]  # checked by name and, when made, by value


def _each(name: str, value: object, count: int) -> list[Any]:
    """One for each prompt; what is wrong in them is found when they are used."""
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{count} prompts need as many values of {name}, not {len(value)}", name)
    return list(value)
