"""The program of OpenAI's client against a server, and the table of several clients."""

import sys
from io import StringIO
from pathlib import Path

from embedded_model_server import run_app, service_of, small_engine
from rich.console import Console

from benchmarks.clients.__main__ import Result, run_client, table
from quire.server.app import make_app


def test_the_program_of_openais_client():
    with run_app(make_app(service_of(small_engine()))) as url:
        found = run_client(Path(sys.executable), "openai", url)
    assert not found.failed, found.errors


def test_what_fails_is_told_with_its_message():
    gone = run_client(Path(sys.executable), "openai", "http://127.0.0.1:9")
    assert gone.failed and "APIConnectionError" in gone.errors["chat"]
    broken = run_client(Path(sys.executable), "none", "http://127.0.0.1:9")
    assert broken.failed and "KeyError" in broken.errors["start"]
    console = Console(width=200, file=StringIO())
    console.print(table([Result("a", "1.2", {"chat": None, "stream": "Oops: no"}), gone]))
    assert "stream: Oops: no" in console.file.getvalue()
