"""Runs vLLM's own server tests, from its source distribution, against `quire serve`.

The tests are unpacked into a folder of their own, in which `tests.utils` and `tests/conftest.py` are those of
`stand_in/`. The embedded model stands in a cache of model files under each name that a test asks for, so that the
tests load its tokenizer and configuration.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from benchmarks.server_cases import vllm_options
from benchmarks.server_cases.results import Case, SuiteError
from quire.hub import embedded

ROOT = Path(__file__).resolve().parents[2]
_STAND_IN = {"remote_server.py": "utils.py", "recorder.py": "conftest.py"}
_MODEL_NAME = re.compile(r"""["']([\w.-]+/[\w.-]+)["']""")
_SECONDS = 1800  # for all cases
_PYTEST = ("-q", "-p", "no:cacheprovider", "-W", "ignore", "-o", "asyncio_mode=strict")


class Plan(NamedTuple):
    """What to run. files: of test cases. adapted: file, text and its replacement. not_run: names of cases as for -k."""

    files: Sequence[str]
    adapted: Sequence[Mapping[str, str]]
    not_run: Sequence[str]


def plans(about: Mapping[str, Any]) -> tuple[Plan, Plan]:
    """All cases, and those of the files whose numbers are scaled, with these. about: the table `vllm` of cases.toml."""
    not_run, scaled = list(about["not_run"]), [one["file"] for one in about["scaled"]]
    return (
        Plan(about["files"], about["adapted"], not_run),
        Plan(scaled, [one for one in (*about["adapted"], *about["scaled"]) if one["file"] in scaled], not_run),
    )


def run(python: str, sdist: Path, plan: Plan, folder: Path) -> tuple[list[Case], list[str]]:
    """The cases, and vLLM's options that quire's servers did not get.

    python: an interpreter with vLLM, pytest, pytest-asyncio and the clients. folder: an empty one for the tests. Raises
    SuiteError.
    """
    tests = folder / "tests"
    names = unpack(sdist, tests, plan)
    cache_models(names, folder / "models")
    results, log = folder / "results.jsonl", folder / "servers.log"
    server = {
        "command": [sys.executable, "-m", vllm_options.__name__],
        "environment": {**os.environ, "PYTHONPATH": str(ROOT)},
        "log": str(log),
    }
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        **{"QUIRE_SERVER": json.dumps(server), "QUIRE_RESULTS": str(results)},
        **{"HF_HUB_CACHE": str(folder / "models"), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
    }
    files = [f"tests/entrypoints/{file}" for file in plan.files]
    without = " and ".join(f"not {name}" for name in plan.not_run)
    command = [python, "-m", "pytest", *_PYTEST, "-k", without, *files]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    if done.returncode not in (0, 1):  # pytest's for passed and failed
        raise SuiteError(f"pytest has ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    lines = [line for line in log.read_text().splitlines() if line.startswith(vllm_options.LEFT_OUT)]
    left_out = {name for line in lines for name in line.removeprefix(vllm_options.LEFT_OUT).split()}
    return list(recorded_cases(results)), sorted(left_out)


def unpack(sdist: Path, tests: Path, plan: Plan) -> set[str]:
    """Unpack the tests of the entry points, adapt them, and put the stand-ins in place. Returns the model names."""
    adapted: dict[str, list[Mapping[str, str]]] = {}
    for one in plan.adapted:
        adapted.setdefault(one["file"], []).append(one)
    names: set[str] = set()
    with tarfile.open(sdist) as archive:
        for member in archive:
            _, *path = PurePosixPath(member.name).parts
            if path[:2] != ["tests", "entrypoints"] or not member.name.endswith(".py") or ".." in path:
                continue
            content = archive.extractfile(member)
            assert content is not None
            text, name = content.read().decode(), "/".join(path[2:])
            for one in adapted.get(name, ()):
                if one["text"] not in text:
                    raise SuiteError(f"{name} does not have the text {one['text']!r}")
                text = text.replace(one["text"], one["by"])
            if name in plan.files:
                names.update(_MODEL_NAME.findall(text))
            target = tests / "entrypoints" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
    if not names:
        raise SuiteError(f"{sdist} has no tests of vLLM's entry points")
    for source, target_name in _STAND_IN.items():
        shutil.copy(Path(__file__).parent / "stand_in" / source, tests / target_name)
    (tests / "__init__.py").touch()
    return names


def cache_models(names: Sequence[str] | set[str], cache: Path) -> None:
    """Put the embedded model into a cache of Hugging Face's layout under each name."""
    for name in names:
        model = cache / f"models--{name.replace('/', '--')}"
        (model / "refs").mkdir(parents=True, exist_ok=True)
        (model / "refs" / "main").write_text("embedded")
        (model / "snapshots").mkdir(exist_ok=True)
        (model / "snapshots" / "embedded").symlink_to(embedded.folder(), target_is_directory=True)


def recorded_cases(results: Path) -> Iterator[Case]:
    for line in results.read_text().splitlines():
        record = json.loads(line)
        name = record["case"].removeprefix("tests/entrypoints/")
        file, _, case = name.partition("::")
        yield Case(file, case, record["outcome"] == "passed", record["message"])
