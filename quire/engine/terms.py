"""Terms as callers give them: for one request, or for several at once. Knows names and what an engine heeds."""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.config import EngineOptions
from quire.core.terms import Retention, Terms
from quire.errors import RequestError, nearest

_BY_PRIORITY = ("priority", "cost")  # orders of eviction

RetentionLike = Retention | Mapping[str, object]  # a mapping has fields of Retention


def make_terms(
    options: EngineOptions,
    priority: int | None = None,
    deadline: float | None = None,
    retention: RetentionLike | None = None,
) -> Terms:
    """What one request asks for; None asks for nothing. options: of the engine. Raises RequestError.

    A priority or a pin that would change nothing is refused: whoever gives it counts on it.
    """
    terms = Terms(priority=0 if priority is None else priority, deadline=deadline, retention=_retention(retention))
    if terms.priority and options.policy != "priority":
        raise RequestError(
            f"priority {terms.priority} needs the policy 'priority', and this engine runs {options.policy!r}; leave it "
            "out, or start the engine with policy='priority' (--policy priority)",
            "priority",
        )
    _check_heeded(terms.retention, options)
    return terms


def _check_heeded(asked: Retention, options: EngineOptions) -> None:
    has_tree = options.enable_prefix_caching and options.prefix_index == "radix"
    if asked.pin and not has_tree:
        kind = f"the {options.prefix_index} one" if options.enable_prefix_caching else "no prefix cache"
        raise RequestError(
            f"retention.pin needs the radix prefix index, and this engine has {kind}; leave it out, or start the "
            "engine with prefix_index='radix' (--prefix-index radix) and enable_prefix_caching",
            "retention.pin",
        )
    if asked.priority != Retention().priority and not (has_tree and options.eviction in _BY_PRIORITY):
        raise RequestError(
            f"retention.priority {asked.priority} needs eviction 'priority' or 'cost', and this engine evicts by "
            f"{options.eviction!r}; leave it out, or start the engine with eviction='priority' (--eviction priority)",
            "retention.priority",
        )


def terms_each(
    count: int,
    options: EngineOptions,
    *,
    priority: int | Sequence[int] | None,
    deadline: float | Sequence[float | None] | None,
    retention: RetentionLike | Sequence[RetentionLike | None] | None,
) -> list[Terms]:
    """Of `count` prompts: a value is for all of them, a list has one for each. Raises RequestError."""
    names = {"priority": priority, "deadline": deadline, "retention": retention}
    columns = [_each(name, value, count) for name, value in names.items()]
    return [make_terms(options, *values) for values in zip(*columns, strict=True)]


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
