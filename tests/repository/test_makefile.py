"""Commands of the Makefile: the torch that it installs, and its messages after a failure."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INHERITED = ("MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS", "VENV", "ARGS")  # set by the make that runs the tests
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def make(*arguments, env=None):
    inherited = {name: value for name, value in os.environ.items() if name not in INHERITED}
    return subprocess.run(
        ["make", *arguments],
        cwd=ROOT,
        env={**inherited, **(env or {})},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def pinned_torch():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line.removeprefix("torch==") for line in lines if line.startswith("torch=="))


@pytest.mark.parametrize("target", ["serve", "test"])
def test_torch_for_cpus_is_taken_from_its_own_index_before_quire_is_installed(target, tmp_path):
    printed = make("--dry-run", target, "TORCH=cpu", f"VENV={tmp_path}/venv").stdout
    installs = [line for line in printed.splitlines() if " pip " in line and " install " in line]
    assert f"install --no-deps --{'index'}-url {CPU_INDEX} 'torch=={pinned_torch()}+cpu'" in installs[0]
    assert "-c constraints.txt -e" in installs[1]
    assert len(installs) == 2


@pytest.mark.parametrize("target", ["serve", "test"])
def test_without_TORCH_make_installs_the_default_torch_and_prints_its_size(target, tmp_path):
    printed = make("--dry-run", target, f"VENV={tmp_path}/venv", env={"TORCH": "cpu"}).stdout  # no variable chooses it
    assert CPU_INDEX not in printed
    assert "its build for CUDA, 5.1 GB in all. TORCH=cpu takes 1.1 GB" in printed


def test_serve_takes_a_model(tmp_path):
    (tmp_path / "bin").mkdir()
    for name in ("bin/python", ".installed"):
        (tmp_path / name).touch()
    for arguments, command in (
        ((), "serve"),
        (("MODEL=smollm2",), "serve smollm2"),
        (("MODEL=a/b", "ARGS=--port 1"), "serve a/b --port 1"),
    ):
        printed = make("--dry-run", "serve", f"VENV={tmp_path}", *arguments, env={"MODEL": "no variable chooses it"})
        assert printed.stdout.split() == [f"{tmp_path}/bin/quire", *command.split()]


def test_a_new_source_of_the_kernels_is_compiled(tmp_path):
    (tmp_path / "bin").mkdir()
    for name in ("bin/python", ".installed", ".installed-dev"):
        (tmp_path / name).touch()
    source = next((ROOT / "quire" / "kernels" / "cpu" / "csrc").glob("*.cpp")).relative_to(ROOT)
    for target in ("serve", "test"):
        assert " install " not in make("--dry-run", target, f"VENV={tmp_path}").stdout
        assert " install " in make("--dry-run", f"--what-if={source}", target, f"VENV={tmp_path}").stdout


def test_other_choices_are_refused():
    done = make("serve", "TORCH=cuda")
    assert done.returncode == 2
    assert "TORCH=cuda is not known: TORCH=cpu takes torch's build for CPUs" in done.stderr


def test_another_build_of_torch_is_not_replaced_silently(tmp_path):
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    for name in ("bin/python", ".installed", ".installed-dev"):
        (venv / name).touch()
    done = make(f"{venv}/.torch-cpu", "TORCH=cpu", f"VENV={venv}")
    assert done.returncode == 2
    assert "has torch from the package index. Run make clean first, then again with TORCH=cpu." in done.stderr


def test_a_choice_of_torch_is_remembered(tmp_path):
    (tmp_path / ".torch-cpu").touch()
    printed = make("--dry-run", "test", f"VENV={tmp_path}").stdout
    assert "torch for CPUs from its own index" in printed
    assert "CUDA" not in printed


def test_an_index_that_cannot_be_reached_is_explained(tmp_path):
    nowhere = {"PIP_PROXY": "http://127.0.0.1:9", "PIP_RETRIES": "0", "PIP_FIND_LINKS": str(tmp_path)}
    venv = tmp_path / "venv"
    done = make(f"{venv}/.torch-cpu", "TORCH=cpu", f"VENV={venv}", env=nowhere)
    assert done.returncode == 2
    assert "Is download.pytorch.org reachable from here? Without TORCH=cpu torch comes from" in done.stderr
    assert not (venv / ".torch-cpu").exists()
