"""`quire replay FILE --page`: the updates of a real journal, forwards and backwards, over a real server."""

import random
import subprocess
import sys
import threading

import httpx
import msgspec
import pytest
from embedded_model_server import run_app
from scripted_engine import Rig
from typer.testing import CliRunner
from viewer_state import ViewerState, whole

from quire.cli import app
from quire.core.journal_file import JournalError
from quire.core.request import Namespace
from quire.monitor import recording
from quire.monitor.monitor import Load, Monitor
from quire.monitor.recording import record_file
from quire.monitor.update import Watcher
from quire.scheduler import journal
from quire.server.replay import replay_app


def ignore(done, total):
    pass


@pytest.fixture(scope="module")
def journal_file(tmp_path_factory):
    """A journal of random requests, of which some share prefixes and some are preempted."""
    rng, rig = random.Random(4), Rig(num_blocks=28, prefix_index="radix", steps_in_flight=2)
    prefixes = [[rng.randrange(50) for _ in range(12)] for _ in range(3)]
    for i in range(150):
        if i % 2:
            prompt = rng.choice(prefixes) + [rng.randrange(50) for _ in range(rng.randrange(1, 9))]
            rig.add(str(i), prompt, max_tokens=rng.randrange(1, 40), namespace=Namespace(tenant=rng.choice("ab")))
        rig.step()
    rig.run()
    assert rig.engine.stats().num_preemptions
    path = tmp_path_factory.mktemp("journal") / "real.journal"
    path.write_bytes(rig.file.getvalue())
    return path


@pytest.fixture(scope="module")
def recorded(journal_file):
    made, why = record_file(journal_file, ignore)
    assert not why
    return made


@pytest.fixture(scope="module")
def url(recorded):
    with run_app(replay_app(recorded, "real.journal")) as url:
        yield url


def test_each_step_has_the_state_of_the_replay(journal_file, url):
    """Forwards one by one, and backwards by any number of steps."""
    states, monitor = [], None

    def begin(scheduler):
        nonlocal monitor
        monitor = Monitor(scheduler, Load())

    with journal_file.open("rb") as file:
        for scheduler, step, _ in journal.replay_steps(journal.read_records(file), on_begin=begin):
            if step is not None:
                now = scheduler.step_log.newest.at
                update = monitor.update(0, Watcher("", sees_all=True), 0, now, now)
                states.append(whole(msgspec.json.decode(msgspec.json.encode(update))))
    assert len(states) > 120
    forwards, at = ViewerState(), 0
    while at < len(states):
        answer = httpx.get(f"{url}/monitor/steps", params={"first": at, "count": 7}).json()
        assert answer["num_steps"] == len(states) and answer["steps"][0]["full"]
        for update in answer["steps"]:
            forwards.apply(update)
            assert forwards.whole == states[at]
            assert update["step"] == at
            at += 1
    for at in (len(states) - 1, 77, 50, 49, 3, 0):
        (only,) = httpx.get(f"{url}/monitor/steps", params={"first": at}).json()["steps"]
        assert only["full"] and whole(only) == states[at]


def test_nodes_have_their_tokens_at_each_step(journal_file, url):
    seen = 0
    with journal_file.open("rb") as file:
        number = -1
        for scheduler, step, _ in journal.replay_steps(journal.read_records(file)):
            number += step is not None
            if step is None or number % 9:
                continue
            for node in scheduler.cache.index.trees.nodes():
                if node.edge:
                    answer = httpx.get(f"{url}/monitor/nodes/{node.id}", params={"step": number}).json()
                    tokens = [int.from_bytes(node.edge[i : i + 8], "little") for i in range(0, len(node.edge), 8)]
                    assert answer["token_ids"] == tokens and answer["text"] == ""
                    assert (answer["path_tokens"], answer["hits"]) == (len(node.path) // 8, node.most_hits)
                    seen += 1
    assert seen > 50


def test_unknown_steps_nodes_and_routes_of_a_replay_are_a_404(url):
    for path in (
        "/monitor/steps?first=5000",
        "/monitor/nodes/999999",
        "/monitor/nodes/1?step=5000",
        "/monitor",
        "/v1/models",
    ):
        answer = httpx.get(url + path)
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "invalid_request_error")
    assert httpx.get(f"{url}/monitor/steps?first=-1").status_code == 400
    assert httpx.get(f"{url}/monitor/steps", headers={"host": "rebound.example"}).status_code == 403


def test_the_page_knows_its_mode(url):
    mode = httpx.get(f"{url}/page/mode.json").json()
    assert (mode["mode"], mode["keys"], mode["model"]) == ("replay", False, "real.journal")
    assert "script-src 'self'" in httpx.get(url).headers["content-security-policy"]


def test_answers_are_bounded(monkeypatch, recorded):
    monkeypatch.setattr(recording, "MOST_ANSWERED", 5)
    assert len(msgspec.json.decode(recorded.steps(10, 1000))["steps"]) == 5
    monkeypatch.setattr(recording, "_MOST_ANSWERED_BYTES", 1)
    assert len(msgspec.json.decode(recorded.steps(10, 1000))["steps"]) == 2


def test_a_long_journal_is_cut_and_says_so(monkeypatch, journal_file):
    monkeypatch.setattr(recording, "MOST_STEPS", 60)
    made, why = record_file(journal_file, ignore)
    assert made.num_steps == 60 and "the first 60 steps; the journal has more" in why
    monkeypatch.setattr(recording, "MOST_STEPS", 20_000)
    monkeypatch.setattr(recording, "MOST_BYTES", 100)
    made, why = record_file(journal_file, ignore)
    assert made.num_steps == 50 and "more" in why
    monkeypatch.setattr(recording, "_MOST_NODE_BYTES", 8)
    made, _ = record_file(journal_file, ignore)
    (update,) = msgspec.json.decode(made.steps(49, 1))["steps"]
    details = [made.node(49, row[0]) for row in update["tree"]["nodes"]]
    assert details and not any(one.token_ids for one in details), "nodes whose tokens are not kept are shown"


def test_progress_ends_at_the_size_of_the_file(journal_file):
    progress = []
    record_file(journal_file, lambda done, total: progress.append((done, total)))
    size = journal_file.stat().st_size
    assert progress[-1] == (size, size) and progress == sorted(progress) and len(progress) > 100


def test_a_damaged_journal_is_an_error(tmp_path, journal_file):
    path = tmp_path / "damaged"
    path.write_bytes(journal_file.read_bytes()[:3000] + b"x" * 3000)
    result = CliRunner().invoke(app, ["replay", str(path), "--page", "--port", "0"])
    assert result.exit_code == 1 and isinstance(result.exception, JournalError)


def test_only_loopback_addresses_serve_a_journal(journal_file):
    result = CliRunner().invoke(app, ["replay", str(journal_file), "--page", "--host", "0.0.0.0"])
    assert result.exit_code == 1 and "use 127.0.0.1" in str(result.exception)


def test_the_command_serves_until_it_is_ended(journal_file):
    command = [
        sys.executable,
        "-c",
        "from quire.cli import main; main()",
        "replay",
        str(journal_file),
        "--page",
        "--port",
        "0",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        watchdog = threading.Timer(60, process.kill)
        watchdog.start()
        try:
            line = process.stdout.readline()
            assert " steps on http://127.0.0.1:" in line
            url = line.split()[-1]
            assert httpx.get(f"{url}/monitor/steps?first=3&count=2").json()["steps"][1]["step"] == 4
            process.terminate()
            assert process.wait(60) in (0, -15)
        finally:
            watchdog.cancel()
            process.kill()
