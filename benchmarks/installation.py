"""README's two commands in a fresh clone, on each Python version found on this machine.

    python benchmarks/installation.py [--pythons 3.11,3.12,3.13] [--no-tests] [--json FILE]
    python benchmarks/installation.py --of-commit HASH

Runs `make serve` until a chat is answered, then `make test`. Reports the seconds of each, the size of the environment
and the torch that pip chose. The clone is of the last commit. With --of-commit it prints the interpreter with which CI
tests a commit: commits take turns. Needs the standard library only.
"""

import argparse
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
CI_GIGABYTES = 12.0  # free on the disk for an environment with torch from the package index, and what pip keeps of it
INHERITED = ("MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "VENV", "ARGS", "TORCH")


def interpreter(version: str) -> str | None:
    """An interpreter of that version, from the path or from pyenv; None if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [shutil.which(f"python{version}"), *sorted(map(str, pyenv.glob(f"versions/{version}.*/bin/python")))]
    ask = "import sys; print('%d.%d' % sys.version_info[:2])"
    for path in filter(None, candidates):
        done = subprocess.run([path, "-c", ask], capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return path
    return None


def has_headers(python: str) -> bool:
    """Whether an interpreter has its headers, without which the kernels are not compiled."""
    ask = "import os, sysconfig; print(os.path.exists(os.path.join(sysconfig.get_path('include'), 'Python.h')))"
    return subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False).stdout.strip() == "True"


def of_commit(commit: str, found: Mapping[str, str], default: str, free_gigabytes: float) -> tuple[str, str]:
    """The interpreter with which CI tests a commit, and why: commits take the installed Pythons in turn, by their hash.

    found: version -> interpreter. default: the interpreter if there is no other, or no room for another environment.
    """
    if not found:
        return default, f"no Python of {', '.join(PYTHONS)} was found beside {default}"
    version = sorted(found, key=PYTHONS.index)[int(commit, 16) % len(found)]
    if free_gigabytes < CI_GIGABYTES:
        return (
            default,
            f"{version} is due, but needs {CI_GIGABYTES:.0f} GB, and {free_gigabytes:.0f} GB are free",
        )
    return found[version], f"commit {commit[:9]} takes {version} of {', '.join(found)}"


def serve_and_ask(clone: Path, python: str) -> dict[str, Any]:
    """Seconds from `make serve` to the first answer, and the answer."""
    start = time.perf_counter()
    command = ["make", "serve", f"PYTHON={python}", "ARGS=--port 0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with (
        subprocess.Popen(command, cwd=clone, env=trial_environment(), start_new_session=True, **pipes) as server,
        ExitStack() as at_the_end,
    ):
        at_the_end.callback(_end, server.pid)
        assert server.stdout is not None
        said = []
        url = None
        for line in server.stdout:
            said.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                url = found[0]
                break
        if url is None:
            raise SystemExit(f"make serve failed on {python}:\n{''.join(said)}")
        body = {"temperature": 0, "messages": [{"role": "user", "content": "Who are you?"}]}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)["choices"][0]["message"]["content"]
        seconds = time.perf_counter() - start
    return {"seconds_to_first_answer": round(seconds, 1), "answer": answer}


def trial_environment() -> dict[str, str]:
    """The environment without the variables that an outer make would pass on to the inner one."""
    return {name: value for name, value in os.environ.items() if name not in INHERITED}


def _end(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)


def gigabytes(folder: Path) -> float:
    """Size of a folder on the disk in GB."""
    done = subprocess.run(["du", "-sk", str(folder)], capture_output=True, text=True, check=True)
    return round(int(done.stdout.split()[0]) * 1024 / 1e9, 2)


def test(clone: Path, python: str) -> dict[str, Any]:
    """Exit status, seconds, summary line and failed tests of `make test`."""
    start = time.perf_counter()
    command = ["make", "test", f"PYTHON={python}"]
    done = subprocess.run(command, cwd=clone, env=trial_environment(), capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {
        "exit": done.returncode,
        "seconds": round(time.perf_counter() - start),
        "summary": next((line for line in reversed(lines) if " passed" in line), done.stderr[-2000:]),
        "failed": failed,
    }


def attempt(version: str, *, tests: bool) -> dict[str, Any]:
    """Run everything on one Python."""
    python = interpreter(version)
    if python is None:
        return {"found": False}
    with tempfile.TemporaryDirectory(prefix=f"quire-{version}-") as folder:
        clone = Path(folder) / "quire"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        result: dict[str, Any] = {"found": True, **serve_and_ask(clone, python)}
        ask = "import platform, importlib.metadata as m; print(platform.python_version(), m.version('torch'))"
        done = subprocess.run([str(clone / ".venv/bin/python"), "-c", ask], capture_output=True, text=True, check=True)
        result["python"], result["torch"] = done.stdout.split()
        result["environment_gb"] = gigabytes(clone / ".venv")
        if tests:
            result["tests"] = test(clone, python)
    return result


def main() -> None:
    """Measure, print and write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pythons", help=f"default: those of {', '.join(PYTHONS)} that are found")
    parser.add_argument("--of-commit", metavar="HASH")
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {version: path for version in PYTHONS if (path := interpreter(version)) is not None}
    if options.of_commit is not None:
        able = {version: path for version, path in found.items() if has_headers(path)}
        python, why = of_commit(options.of_commit, able, "python3", shutil.disk_usage(ROOT).free / 1e9)
        print(f"python     {python}: {why}", file=sys.stderr)
        print(python)
        return
    wanted = options.pythons.split(",") if options.pythons else list(found)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    report: dict[str, Any] = {
        **{"commit": commit.stdout.strip(), "date": date.today().isoformat(), "machine": _cpu()},
        **{"command": f"python {' '.join(sys.argv)}", "pythons": {}},
    }
    if options.json and options.json.exists():  # keep the figures of Pythons that are not run now
        report["pythons"] = json.loads(options.json.read_text())["pythons"]
    for version in wanted:
        report["pythons"][version] = {"commit": commit.stdout.strip(), **attempt(version, tests=not options.no_tests)}
        print(version, json.dumps(report["pythons"][version], indent=1), flush=True)
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    results = [report["pythons"][version] for version in wanted]
    if not all(one["found"] and one.get("tests", {}).get("exit", 0) == 0 for one in results):
        sys.exit("some Python was not found, or its tests failed: see above")


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return f"{len(names)} x {names[0]}" if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
