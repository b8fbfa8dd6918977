"""Flags of commands, from the fields of their options and the Help of each."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from inspect import Parameter, Signature, signature
from types import MappingProxyType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from msgspec import Meta

from quire.config import REMOVED_VALUES, EngineOptions, Help
from quire.planner.options import PlanOptions, WorkloadOptions
from quire.server.options import ServerOptions
from quire.terminal.help import GroupedCommand, show_all


def flag_of(name: str) -> str:
    """The flag of an option, from its name in Python."""
    return f"--{name.replace('_', '-')}"


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator: replaces the dataclass parameters of a command by one flag per field.

    A field that is also a parameter of the command has no flag of its own.
    """
    types = get_type_hints(command, include_extras=True)
    kinds = {name: types[name] for name in signature(command).parameters if is_dataclass(types[name])}
    own = [parameter for parameter in signature(command).parameters.values() if parameter.name not in kinds]
    if any(parameter.name == "model" for parameter in own):
        own.append(_MODEL_FLAG)
    own.append(_HELP_ALL)
    of_options = {f.name for kind in kinds.values() for f in fields(kind)}
    taken = {parameter.name for parameter in own}
    flags = [flag for kind in kinds.values() for flag in _flags(kind) if flag.name not in taken]

    def run(**values: Any) -> None:  # noqa: ANN401 (what typer parsed)
        del values[_HELP_ALL.name]
        if (named := values.pop(_MODEL_FLAG.name, None)) is not None:
            if values["model"] not in (None, named):
                raise typer.BadParameter(f"the model is given twice: {values['model']} and --model {named}")
            values["model"] = named
        plain = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        made = {name: kind(**{f.name: plain[f.name] for f in fields(kind)}) for name, kind in kinds.items()}
        command(**{name: value for name, value in values.items() if name not in of_options}, **made)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = Signature([*own, *flags])  # type: ignore[attr-defined]  # read by inspect.signature
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *flags)}
    return run


_MODEL_FLAG = Parameter(
    "model_flag",
    Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[str | None, typer.Option("--model", help="the same as MODEL")],
)


_HELP_ALL = Parameter(
    "help_all",
    Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool, typer.Option("--help-all", callback=show_all, is_eager=True, help="show all options and exit")
    ],
)


class Command(GroupedCommand):
    """A command with the flags of options, whose help is in groups."""

    helps = MappingProxyType(
        {
            f.name: next(note for note in get_args(kinds[f.name]) if isinstance(note, Help))
            for options in (EngineOptions, ServerOptions, PlanOptions, WorkloadOptions)
            for kinds in (get_type_hints(options, include_extras=True),)
            for f in fields(options)
        }
    )


def _flags(options: Any) -> list[Parameter]:  # noqa: ANN401 (a dataclass)
    types = get_type_hints(options, include_extras=True)
    return [_flag(f.name, types[f.name], f.default) for f in fields(options)]


def _flag(name: str, annotated: Any, default: object) -> Parameter:  # noqa: ANN401 (a type)
    kind, *notes = get_args(annotated)
    text = next(note for note in notes if isinstance(note, Help))
    bounds = next((note for note in notes if isinstance(note, Meta)), Meta())
    if get_origin(kind) is tuple:
        kind, default = list[get_args(kind)[0]], list(default)  # type: ignore[misc, call-overload]  # a repeated option
    flag = flag_of(name)
    option = typer.Option(
        f"{flag}/--no-{flag[2:]}" if default is True else flag,
        help=text.text if text.stability == "stable" else f"{text.text} ({text.stability})",
        envvar=text.envvar,
        min=bounds.ge,
        max=bounds.le,
        parser=_parser_with_hints(kind, REMOVED_VALUES[name]) if name in REMOVED_VALUES else None,
        metavar=f"[{'|'.join(_choices(kind))}]" if name in REMOVED_VALUES else None,
    )
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _choices(kind: Any) -> tuple[str, ...]:  # noqa: ANN401 (a type)
    """The values of `Literal[...] | None`."""
    return get_args(get_args(kind)[0])


def _parser_with_hints(kind: Any, removed: Mapping[str, str]) -> Callable[[str], str]:  # noqa: ANN401 (a type)
    """A parser of `Literal[...] | None`. Its error says what to use instead of a removed value."""

    def parse(value: str) -> str:
        if value not in _choices(kind):
            hint = f"; {removed[value]}" if value in removed else ""
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(map(repr, _choices(kind)))}{hint}")
        return value

    return parse
