"""Terms as callers give them: for one request, or for several at once. Knows names and what an engine heeds."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from quire.config import EngineOptions
from quire.core.scheduling_params import Program, Retention, Terms
from quire.errors import RequestError, nearest

_BY_PRIORITY = ("priority", "cost")  # orders of eviction

RetentionLike = Retention | Mapping[str, object]  # a mapping has fields of Retention
ProgramLike = Program | Mapping[str, object]  # and of Program
T = TypeVar("T", Retention, Program)


def make_terms(
    options: EngineOptions,
    priority: int | None = None,
    deadline: float | None = None,
    retention: RetentionLike | None = None,
    program: ProgramLike | None = None,
) -> Terms:
    """What one request asks for; None asks for nothing. options: of the engine. Raises RequestError.

    A priority or a pin that would change nothing is refused: whoever gives it counts on it. A program never is.
    """
    terms = Terms(
        priority=0 if priority is None else priority,
        deadline=deadline,
        retention=Retention() if retention is None else _made("retention", Retention, retention),
        program=None if program is None else _made("program", Program, program),
    )
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
    program: ProgramLike | Sequence[ProgramLike | None] | None = None,
) -> list[Terms]:
    """Of `count` prompts: a value is for all of them, a list has one for each. Raises RequestError."""
    names = {"priority": priority, "deadline": deadline, "retention": retention, "program": program}
    columns = [_each(name, value, count) for name, value in names.items()]
    return [make_terms(options, *values) for values in zip(*columns, strict=True)]


def _made(name: str, kind: type[T], given: T | Mapping[str, object]) -> T:
    """Terms of one kind, checked by name and, when they are made, by value."""
    if isinstance(given, kind):
        return given
    if not isinstance(given, Mapping):
        raise RequestError(f"{name} must be {kind.__name__}(...) or a mapping, not {type(given).__name__}", name)
    for field in given:
        if field not in kind.__struct_fields__:
            hint = nearest(str(field), kind.__struct_fields__)
            raise RequestError(f"{name} has no field {field!r:.80}{hint}", name)
    if kind is Program and "id" not in given:
        raise RequestError("program needs an id, which all requests of one run have in common", "program.id")
    return kind(**given)  # type: ignore[arg-type]  # checked by name here, and by value when it is made


def _each(name: str, value: object, count: int) -> list[Any]:
    """One for each prompt; what is wrong in them is found when they are used."""
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{count} prompts need as many values of {name}, not {len(value)}", name)
    return list(value)
