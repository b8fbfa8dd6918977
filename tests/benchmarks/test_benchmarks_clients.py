"""The program of OpenAI's client against a server, and the table of several clients."""

import json
import shutil
import sys
from io import StringIO
from pathlib import Path

import pytest
from embedded_model_server import run_app, service_of, small_engine
from rich.console import Console

from benchmarks.clients.__main__ import CLIENTS, NODE, NotInstalled, Result, install, python_program, run_client, table
from benchmarks.clients.programs import PACKAGES
from quire.server.app import make_app

PYTHON = Path(sys.executable)
NOWHERE = "http://127.0.0.1:9"


def test_the_program_of_openais_client():
    with run_app(make_app(service_of(small_engine()))) as url:
        found = run_client("openai", python_program(PYTHON, "openai"), url)
    assert not found.failed, found.errors
    assert {"tool call and answer", "response: tool call and answer", "batch"} <= found.errors.keys()


def test_a_failed_client_run_reports_the_error_of_each_step():
    gone = run_client("openai", python_program(PYTHON, "openai"), NOWHERE)
    assert gone.failed and "APIConnectionError" in gone.errors["chat"]
    broken = run_client("none", python_program(PYTHON, "none"), NOWHERE)
    assert broken.failed and "KeyError" in broken.errors["start"]
    console = Console(width=200, file=StringIO())
    console.print(table([Result("a", "1.2", {"chat": None, "stream": "Oops: no"}), gone]))
    assert "stream: Oops: no" in console.file.getvalue()


def test_each_client_has_a_program_and_packages():
    for name in NODE:
        assert Path(sys.modules[install.__module__].__file__).with_name(f"{name.replace('-', '_')}.mjs").is_file()
    assert set(CLIENTS) == {*PACKAGES, *NODE}


def test_without_node_a_client_is_not_installed(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(NotInstalled, match="apt-get install -y nodejs npm"):
        install(tmp_path / "ai-sdk", "ai-sdk")


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_a_program_for_node_prints_what_is_read(tmp_path):
    shutil.copy(Path(sys.modules[install.__module__].__file__).with_name("checks.mjs"), tmp_path)
    package = tmp_path / "node_modules" / "thing"
    package.mkdir(parents=True)
    (package / "package.json").write_text(json.dumps({"version": "1.2"}))
    program = tmp_path / "thing.mjs"
    program.write_text(
        'import { main, ensure } from "./checks.mjs";\n'
        'await main(["thing"], { good() {}, bad: async () => ensure(false, "not  so") });\n'
    )
    assert run_client("thing", ["node", str(program)], NOWHERE) == Result(
        "thing", "1.2", {"good": None, "bad": "Error: not so"}
    )
