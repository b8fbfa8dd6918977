"""The Containerfile: what it copies is enough for the wheel, and its commands are understood. No image is built."""

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

import quire
from quire.server.options import ServerOptions

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


class Instruction(NamedTuple):
    name: str
    value: str


def stages(text):
    """The instructions of each stage, in order. Those before the first FROM are in none."""
    joined = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE))
    found = []
    for line in filter(None, map(str.strip, joined.splitlines())):
        name, value = line.split(maxsplit=1)
        if name == "FROM":
            found.append([])
        if found:
            found[-1].append(Instruction(name, " ".join(value.split())))
    return found


BUILD, IMAGE = stages((ROOT / "Containerfile").read_text())


def values(stage, name):
    return [one.value for one in stage if one.name == name]


def copied():
    """The sources that the build stage copies, with their targets below the working folder."""
    for value in values(BUILD, "COPY"):
        *sources, target = value.split()
        for source in sources:
            yield source, Path(target) / source if target.endswith("/") else Path(target)


def is_ignored(path):
    """Whether .containerignore leaves a file out. The last line that names it or a folder above decides."""
    ignored = False
    for line in filter(None, (ROOT / ".containerignore").read_text().splitlines()):
        pattern = line.removeprefix("!").removeprefix("**/")
        parts = path.parts if line.startswith("**/") else path.parts[:1]
        if not line.startswith("#") and any(fnmatch.fnmatch(part, pattern) for part in parts):
            ignored = not line.startswith("!")
    return ignored


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    """A folder as the build stage has it: what is copied, without what is ignored."""
    folder = tmp_path_factory.mktemp("context")
    for source, target in copied():
        paths = [path for path in (ROOT / source).rglob("*") if path.is_file()] or [ROOT / source]
        for path in paths:
            if not is_ignored(path.relative_to(ROOT)):
                place = folder / target / path.relative_to(ROOT / source)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, place)
    return folder


def test_copied_files_are_in_the_repository_and_not_ignored():
    for source, _ in copied():
        assert (ROOT / source).exists(), source
        assert not is_ignored(Path(source)), source
    assert is_ignored(Path("tests/conftest.py")) and is_ignored(Path(".git/config"))
    assert is_ignored(Path("quire/kernels/cpu/_C.abi3.so")) and is_ignored(Path("quire/__pycache__/cli.pyc"))


def test_the_targets_of_make_need_nothing_else(context):
    commands = [one for value in values(BUILD, "RUN") for one in value.split(" && ") if one.startswith("make ")]
    assert [command.split()[1] for command in commands] == ["install-torch", "install-wheel"]
    for command in commands:
        for torch, installs in (("cpu", "torch==.*\\+cpu"), ("", "-c constraints.txt torch")):
            arguments = command.replace("${TORCH}", torch).split()[1:]
            inherited = {name: value for name, value in os.environ.items() if "MAKE" not in name and name != "MFLAGS"}
            done = subprocess.run(
                ["make", "--dry-run", *arguments],
                cwd=context,
                env=inherited,
                capture_output=True,
                text=True,
                check=True,
            )
            assert re.search(f"/opt/quire/bin/python -m pip .* install .*{installs}", done.stdout)


def test_the_wheel_of_what_is_copied_has_all_of_the_package(context):
    tracked = subprocess.run(["git", "ls-files", "quire"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    compiler = {"CC": "/bin/false", "CXX": "/bin/false"}  # the extension is optional; `make try-wheel` builds it
    compiler["PYTHONWARNINGS"] = ""  # of setuptools, which tells of its next versions
    command = [sys.executable, "setup.py", "--quiet", "bdist_wheel"]
    done = subprocess.run(
        command, cwd=context, env={**os.environ, **compiler}, capture_output=True, text=True, check=False
    )
    (wheel,) = (context / "dist").glob("quire-*.whl")
    assert done.returncode == 0, done.stderr
    missing = set(tracked.split()) - set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in missing if not name.startswith("quire/kernels/cpu/csrc/")} == set()


def test_the_image_runs_as_an_ordinary_user_who_owns_the_volumes():
    (user,) = values(IMAGE, "USER")
    created = next(value for value in values(IMAGE, "RUN") if "useradd" in value)
    uid, group = user.split(":")
    assert uid == group != "0" and f"--uid {uid} " in created
    (volumes,) = values(IMAGE, "VOLUME")
    assert all(f" {folder}" in created.partition("--owner")[2] for folder in json.loads(volumes))


def test_the_command_is_understood_and_asks_for_a_key():
    (entry,), (command,) = values(IMAGE, "ENTRYPOINT"), values(IMAGE, "CMD")
    assert json.loads(entry) == list(PROJECT["project"]["scripts"])
    program = [sys.executable, "-c", "from quire.cli import main; main()", *json.loads(command)]
    keyless = {name: value for name, value in os.environ.items() if name != "QUIRE_API_KEY"}
    done = subprocess.run(program, cwd=ROOT, env=keyless, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "0.0.0.0 can be reached by other machines, so that API keys are required" in done.stderr


def test_the_health_check_is_a_module_of_the_package_that_fails_without_a_server():
    assert values(IMAGE, "EXPOSE") == [str(ServerOptions().port)]
    (check,) = values(IMAGE, "HEALTHCHECK")
    program, *arguments = json.loads(check.partition(" CMD ")[2])
    assert (program, arguments) == ("python", ["-m", "quire.server.health_check"])


def test_the_version_is_that_of_the_package():
    assert PROJECT["project"]["version"] == quire.__version__
