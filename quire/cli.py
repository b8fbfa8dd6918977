"""The command line: flags to options, results to the terminal. Knows no engine; `quire.LLM` and `quire.serve` do.

The flags of the engine are made from the fields of EngineOptions and their Help, so that there is
one list of options.
"""

import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, fields
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

import quire
from quire.config import MODEL_HELP, EngineOptions, Help
from quire.errors import QuireError, RequestError
from quire.params import SamplingParams
from quire.sched.journal import replay_file
from quire.server.keys import Role, add_key, new_key

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def main() -> None:
    """The `quire` command."""
    try:
        app()
    except QuireError as error:
        typer.secho(f"quire: {error}", fg="red", err=True)
        sys.exit(1)


def with_engine_flags(command: Callable[..., None]) -> Callable[..., None]:
    """A command with `options: EngineOptions`, as one with a flag for each field that it does not take itself."""
    own = [parameter for parameter in signature(command).parameters.values() if parameter.name != "options"]
    taken = {parameter.name for parameter in own}
    types = get_type_hints(EngineOptions, include_extras=True)
    flags = [_flag(f.name, types[f.name], f.default) for f in fields(EngineOptions) if f.name not in taken]
    names = {f.name for f in fields(EngineOptions)}

    def run(**values: Any) -> None:  # noqa: ANN401 (what typer parsed)
        options = EngineOptions(**{name: value for name, value in values.items() if name in names})
        command(**{name: value for name, value in values.items() if name not in names}, options=options)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = Signature([*own, *flags])  # type: ignore[attr-defined]  # what inspect.signature reads
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *flags)}
    return run


def _flag(name: str, annotated: Any, default: object) -> Parameter:  # noqa: ANN401 (a type)
    kind, *notes = get_args(annotated)
    text = next(note for note in notes if isinstance(note, Help))
    flag = f"--{name.replace('_', '-')}"
    option = typer.Option(
        f"{flag}/--no-{flag[2:]}" if default is True else flag, help=f"{text.text} ({text.stability})"
    )
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _print_version(wanted: bool) -> None:  # noqa: FBT001 (typer's signature)
    if wanted:
        typer.echo(f"quire {quire.__version__}")
        raise typer.Exit


@app.callback()
def _quire(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print it")
    ] = False,
) -> None:
    """An LLM serving engine. Without a model's name, commands use the one that ships with quire."""


@app.command()
@with_engine_flags
def serve(
    *,
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP)] = None,
    host: Annotated[str, typer.Option(help="address to listen on; others than loopback need keys")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on; 0 takes a free one", min=0, max=65535)] = 8000,
    served_model_name: Annotated[str | None, typer.Option(help="the name that requests use")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="JSON file of API keys and their tenants")] = None,
    options: EngineOptions,
) -> None:
    """Serve the OpenAI API over HTTP."""
    quire.serve(
        options,
        host=host,
        port=port,
        model_name=served_model_name,
        api_key_file=api_key_file,
        report=typer.echo,
        progress=WeightsBar(),
    )


@app.command()
def key(
    *,
    tenant: Annotated[str, typer.Argument(help="whom the key speaks for; requests of one tenant share cached tokens")],
    role: Annotated[Role, typer.Option(help="admin: may also see figures and flush the cache")] = "user",
    file: Annotated[Path | None, typer.Option(help="where its hash is added, for `quire serve --api-key-file`")] = None,
) -> None:
    """Make an API key and print it, this once. What is kept is its hash, which cannot be turned back."""
    secret, entry = new_key(tenant, role)
    if file is not None:
        add_key(file, entry)
    typer.echo(secret)
    if file is None:
        typer.echo(msgspec.json.encode(entry).decode())
    else:
        typer.secho(f"added to {file}; a server that runs reads it when it is started again", err=True)


@app.command()
@with_engine_flags
def generate(
    *,
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...", help="texts to continue")],
    max_tokens: Annotated[int, typer.Option(help="tokens to generate at most", min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy", min=0)] = 1.0,
    n: Annotated[int, typer.Option(help="continuations of each prompt", min=1)] = 1,
    options: EngineOptions,
) -> None:
    """Continue prompts and print the texts, each on lines of its own."""
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, n=n)
    with closing(_load(options)) as llm:
        for result in llm.generate(prompts, params):
            for output in result.outputs:
                typer.echo(output.text)


@app.command()
@with_engine_flags
def chat(
    *,
    temperature: Annotated[float, typer.Option(help="0 is greedy", min=0)] = 0.7,
    system: Annotated[str | None, typer.Option(help="what the model is told first")] = None,
    options: EngineOptions,
) -> None:
    """Talk with a model. /exit or end of input ends it, Ctrl-C cuts an answer short."""
    with closing(_load(options)) as llm:
        _converse(llm, system, SamplingParams(max_tokens=None, temperature=temperature))


@app.command()
def replay(file: Annotated[Path, typer.Argument(help="a journal, as --journal writes it")]) -> None:
    """Run a journal's scheduler again and compare every step. Exit code 1 where one differs."""
    try:
        report = replay_file(file)
    except OSError as error:
        typer.secho(f"quire: {file} cannot be read: {error.strerror}", fg="red", err=True)
        raise typer.Exit(1) from error
    if report.difference:
        typer.echo(report.difference)
        raise typer.Exit(1)
    typer.echo(f"{report.num_steps} steps, all the same")


@app.command()
@with_engine_flags
def doctor(
    *,
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP)] = None,
    options: EngineOptions,
) -> None:
    """Say what this installation and machine can do, and whether a model will run. Exit code 1 where not."""
    topic, healthy = "", True
    for finding in quire.examine(options, WeightsBar()):
        if finding.topic != topic:
            topic = finding.topic
            typer.secho(topic, bold=True)
        typer.secho(f"  {finding.text}", fg="red" if finding.problem else None)
        healthy = healthy and not finding.problem
    if not healthy:
        raise typer.Exit(1)


def _converse(llm: "quire.LLM", system: str | None, params: SamplingParams) -> None:
    """Turn by turn, until the person ends it."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    while (text := _read_turn()) is not None:
        messages.append({"role": "user", "content": text})
        answer = ""
        try:
            for piece in llm.stream_chat(messages, params):
                answer += piece
                typer.echo(piece, nl=False)
        except KeyboardInterrupt:
            typer.echo(" [cut short]", nl=False)
        except RequestError as error:  # such as a conversation that has become too long
            typer.secho(f"{error}", fg="red", err=True)
            messages.pop()
            continue
        typer.echo()
        messages.append({"role": "assistant", "content": answer})


class WeightsBar:
    """A bar on the error stream, from the first bytes of a download or of weights to the last."""

    def __init__(self) -> None:
        columns = (TextColumn("model files"), BarColumn(), DownloadColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())
        self._task = self._bar.add_task("loading", start=False)

    def __call__(self, done: int, total: int) -> None:
        """`done` of `total` bytes are loaded."""
        self._bar.start()
        self._bar.update(self._task, completed=done, total=total)
        if done >= total:
            self._bar.stop()


def _load(options: EngineOptions) -> "quire.LLM":
    return quire.LLM(**asdict(options), progress=WeightsBar())


def _read_turn() -> str | None:
    """What the person says next; None to end."""
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return None
        if text == "/exit":
            return None
        if text:
            return text
