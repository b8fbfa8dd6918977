"""The class of commands. Their help has options under headings, rare ones only with --help-all."""

from collections.abc import Mapping
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand

from quire.config import Help

_ALL = "quire.help_all"  # in the context: whether rare options are shown


class GroupedCommand(TyperCommand):
    """A command whose options have the headings that `helps` names, by option. Other options come first."""

    helps: ClassVar[Mapping[str, Help]] = {}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 (of typer's own click)
        """As typer's, for vLLM's several adapters after one flag, too."""
        return super().parse_args(ctx, _with_each_flag(args))

    def format_options(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 (of typer's own click)
        """Write arguments, options by heading, and how many are left out."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        num_rare = 0
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            how = Help("") if param.param_type_name == "argument" else self.helps.get(param.name or "", Help(""))
            if how.rare and _ALL not in ctx.meta:
                num_rare += 1
                continue
            sections.setdefault("Arguments" if param.param_type_name == "argument" else how.group, []).append(record)
        for name, records in sections.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)
        if num_rare:
            with formatter.section("More"):
                formatter.write_text(f"--help-all shows {num_rare} more options.")


def _with_each_flag(args: list[str]) -> list[str]:
    """`--lora-modules A B` as `--lora-modules A --lora-modules B`. B has an `=`, or is JSON."""
    flag, made = "--lora-modules", list[str]()
    for one in args:
        is_module = one.startswith("{") or ("=" in one and not one.startswith("-"))
        made += [flag, one] if is_module and made[-2:-1] == [flag] else [one]
    return made


def show_all(ctx: typer.Context, wanted: bool) -> None:  # noqa: FBT001 (typer's signature)
    """Callback of --help-all: print the help with rare options, and end."""
    if wanted:
        ctx.meta[_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit
