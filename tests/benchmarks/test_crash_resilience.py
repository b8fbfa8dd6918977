"""A server and a batch run with a killed engine, and misbehaving clients. Longer: `make chaos`, `make soak`."""

import json
import os
import signal
import subprocess
import sys
import time

from benchmarks.trust.chaos import chaos
from benchmarks.trust.server import engine_of
from benchmarks.trust.soak import soak

BATCH = (sys.executable, "-c", "from quire.cli import main; main()", "run-batch", "--max-num-seqs", "16")


def test_streams_over_http_end_as_without_kills():
    came = chaos(num_streams=100, num_kills=8)
    assert came.good, came


def test_a_server_whose_engine_is_killed_for_40_seconds_recovers_fully():
    came = soak(seconds=40.0)
    assert came.good, came
    assert came.num_kills > 0
    assert min(came.asked.values()) > 0


def test_a_batch_whose_engine_is_killed_has_all_its_answers(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": "One Tuesday Mira went", "max_tokens": 200, "ignore_eos": True, "temperature": 1}
    lines = [
        {"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": {**body, "seed": i}}
        for i in range(80)
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [*BATCH, "-i", str(source), "-o", str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not (target.exists() and target.read_bytes()):  # until some are answered and others are not
            assert process.poll() is None
            time.sleep(0.01)
        pid = engine_of(process.pid)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "the engine ended by signal SIGKILL" in said
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert {answer["custom_id"] for answer in answers} == {line["custom_id"] for line in lines}
    assert {answer["response"]["status_code"] for answer in answers} == {200}
    assert {answer["response"]["body"]["usage"]["completion_tokens"] for answer in answers} == {200}
