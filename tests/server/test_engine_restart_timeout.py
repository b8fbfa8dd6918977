"""`quire serve` whose engine cannot be started again: its health during the attempts, its exit after the timeout."""

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from waiting import wait_until

import quire

FLAGS = ("--port", "0", "--memory", "256MiB", "--max-model-len", "512", "--dtype", "float32", "--calibration", "0.1")
OF_ENGINE = ("heartbeat_age_seconds", "kv_blocks_used", "kv_blocks_total", "last_step_seconds")


@pytest.fixture
def model(tmp_path):
    """A copy of the demo model."""
    return shutil.copytree(Path(quire.__file__).parent / "assets" / "demo_model", tmp_path / "model")


@contextmanager
def served(model, timeout):
    """Process and URL of a server that exits after `timeout` seconds without an engine."""
    command = [sys.executable, "-c", "from quire.cli import main; main()", "serve", str(model), *FLAGS]
    process = subprocess.Popen(
        [*command, "--engine-restart-timeout", str(timeout)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    )
    try:
        ready = next((line for line in process.stdout if line.startswith("ready")), None)
        assert ready, process.stderr.read()
        yield process, re.search(r"http://127\.0\.0\.1:\d+", ready)[0]
    finally:
        process.kill()
        process.communicate()


def engine_pid(process):
    (pid,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(pid)


@contextmanager
def interrupted(process, url, model):
    """Lines of a response whose engine has been killed. The model is away, so no engine can start."""
    body = {"prompt": "One Tuesday", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        model.rename(model.parent / "away")
        os.kill(engine_pid(process), signal.SIGKILL)
        yield lines


def test_health_names_the_error_of_an_engine_that_cannot_start(model):
    with served(model, timeout=300) as (process, url), interrupted(process, url, model):
        wait_until(lambda: httpx.get(f"{url}/health").json()["engine_start_error"])
        health = httpx.get(f"{url}/health")
        figures = health.json()
        assert (health.status_code, figures["engine"], figures["requests_waiting"]) == (503, "restarting", 1)
        assert "model" in figures["engine_start_error"]
        assert {name: figures[name] for name in OF_ENGINE} == dict.fromkeys(OF_ENGINE)
        assert (httpx.get(f"{url}/ready").status_code, httpx.get(f"{url}/live").status_code) == (503, 200)


def test_a_server_without_an_engine_exits_after_the_timeout(model):
    with served(model, timeout=3) as (process, url):
        assert httpx.get(f"{url}/health").json()["engine"] == "serving"
        with interrupted(process, url, model) as lines:
            assert any("no engine has served for 3 s" in line for line in lines), "the open request ends typed"
        assert process.wait(60) == 1
        assert "quire: no engine has served for 3 s" in process.stderr.read()
