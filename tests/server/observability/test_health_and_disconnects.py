"""Health, metrics, disconnects, and errors during a stream."""

import dataclasses
import http.client
import json
import re
from urllib.parse import urlsplit

import httpx
import pytest
from embedded_model_server import run_app, service_of, small_engine
from waiting import wait_until

from quire.core.output import EndCause, Output
from quire.server.api.native import health
from quire.server.app import make_app
from quire.server.observability.metrics import Metrics

LONG = {"prompt": "One Tuesday", "max_tokens": 400, "ignore_eos": True, "temperature": 0, "speculation": False}


def metric(url, name, **labels):
    """The sum over all series of this name with these labels."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    samples = [line for line in lines if line.startswith(f"quire:{name}{{")]
    chosen = [line for line in samples if all(f'{key}="{value}"' in line for key, value in labels.items())]
    return sum(float(line.rsplit(" ", 1)[1]) for line in chosen)


def idle(served):
    health = served.health()
    return health["requests_running"] + health["requests_waiting"] + health["kv_blocks_used"] == 0


@pytest.mark.parametrize("path", ["/live", "/ready", "/health", "/health_generate"])
def test_health(served, path):
    answer = httpx.get(served.url + path)
    assert answer.status_code == 200
    assert answer.json()["status"] == "ok"


@pytest.fixture
def pieces(monkeypatch):
    """Recorded metrics of the pieces of a sequence, each read at once: number of tokens, whether it is the first."""
    observed, tokens_came = [], Metrics.observe_tokens

    def noting(self, metrics, before, now, num_tokens):
        observed.append((num_tokens, before is None))
        tokens_came(self, metrics, before, now, num_tokens)

    monkeypatch.setattr(Metrics, "observe_tokens", noting)
    return observed


def test_metrics_count_tokens_latencies_and_finished_requests(served, pieces):
    names = ("prompt_tokens_total", "generation_tokens_total", "iterations_total", "e2e_request_latency_seconds_count")
    names += ("time_to_first_token_seconds_count", "inter_token_latency_seconds_count")
    wait_until(lambda: idle(served))
    before = [metric(served.url, name) for name in names]
    ended = metric(served.url, "request_success_total", finished_reason="length")
    body = {"prompt": [[67, 68, 69], [70]], "max_tokens": 5, "n": 2, "ignore_eos": True}
    httpx.post(f"{served.url}/v1/completions", json=body).raise_for_status()
    wait_until(lambda: idle(served))
    added = [metric(served.url, name) - old for name, old in zip(names, before, strict=True)]
    assert added[:2] == [4, 20]
    assert added[2] >= 5
    assert sum(num_tokens for num_tokens, _ in pieces) == 20
    # tokens that arrive with the first one have no inter-token time
    assert added[3:] == [2, 4, sum(num_tokens for num_tokens, is_first in pieces if not is_first)]
    assert metric(served.url, "request_success_total", finished_reason="length") == ended + 4
    assert metric(served.url, "kv_cache_usage_perc", model_name="quire-demo") == 0
    assert metric(served.url, "num_preemptions_total") == 0


@pytest.mark.parametrize(
    ("fields", "num_sequences", "at_once"),
    [({"n": 1, "best_of": 3}, 3, False), ({"n": 2, "use_beam_search": True}, 2, True)],
)
def test_metrics_of_sequences_that_are_compared(served, pieces, fields, num_sequences, at_once):
    names = ("request_success_total", "time_to_first_token_seconds_count", "inter_token_latency_seconds_count")

    def figures():
        return [metric(served.url, name) for name in names]

    wait_until(lambda: idle(served))
    before = figures()
    body = {"prompt": [67, 68], "max_tokens": 5, "ignore_eos": True, **fields}
    httpx.post(f"{served.url}/v1/completions", json=body).raise_for_status()
    added = [now - then for now, then in zip(figures(), before, strict=True)]
    assert sum(num_tokens for num_tokens, _ in pieces) == 5 * num_sequences
    later = sum(num_tokens for num_tokens, is_first in pieces if not is_first)
    assert added == [num_sequences, num_sequences, later]
    if at_once:  # a search returns its beams together at the end
        assert later == 0


def test_every_metric_has_a_name_of_its_own(served):
    page = httpx.get(f"{served.url}/metrics").text
    names = re.findall(r"^# TYPE (\S+)", page, re.MULTILINE)
    assert len(names) == len(set(names))
    assert {"quire:num_requests_running", "quire:num_requests_waiting"} <= set(names)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_blocks(served, stream):
    wait_until(lambda: idle(served))
    steps = served.health()["steps"]
    connection = http.client.HTTPConnection(urlsplit(served.url).netloc)
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps({**LONG, "stream": stream}), headers)
    if stream:
        assert connection.getresponse().readline().startswith(b"data: {")
    else:
        wait_until(lambda: served.health()["steps"] > steps)
    connection.close()
    wait_until(lambda: idle(served))
    assert 0 < served.health()["steps"] - steps < 300


def test_abandoned_requests_are_counted(served):
    def figures():
        aborted = metric(served.url, "request_success_total", finished_reason="abort")
        return aborted, metric(served.url, "e2e_request_latency_seconds_count")

    wait_until(lambda: idle(served))
    aborted, ended = figures()
    with httpx.stream("POST", f"{served.url}/v1/completions", json={**LONG, "n": 2, "stream": True}) as lines:
        next(lines.iter_lines())
    wait_until(lambda: figures() == (aborted + 2, ended + 1))


def test_many_clients_that_go_away_leave_nothing(served):
    for _ in range(20):
        with httpx.stream("POST", f"{served.url}/v1/completions", json={**LONG, "n": 3, "stream": True}):
            pass
    wait_until(lambda: idle(served))
    assert served.health()["failed_steps"] == 0


class Failing:
    """The built engine with another `step`: each outcome in turn, then the real one."""

    def __init__(self, engine, outcomes):
        self._engine = engine
        self._outcomes = outcomes

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def step(self, on_launch):
        outputs = self._engine.step(on_launch)
        outcome = self._outcomes.pop(0) if self._outcomes else None
        if isinstance(outcome, Exception):
            raise outcome
        if outcome is not None:
            for output in outputs:
                self._engine.abort(output.request_id)
            outputs = [
                Output(output.request_id, output.index, output.seq_id, [], end=EndCause.STEP_FAILED, error=outcome)
                for output in outputs
            ]
        return outputs


@pytest.fixture
def failing():
    """A server whose engine's second step has the given outcome."""

    def serve(outcome):
        built = small_engine()
        return run_app(make_app(service_of(dataclasses.replace(built, engine=Failing(built.engine, [None, outcome])))))

    return serve


def events(answer):
    return [line.removeprefix("data: ") for line in answer.text.splitlines() if line]


def test_a_failed_sequence_in_a_stream(failing):
    with failing("secret of the kernel") as url:
        got = events(httpx.post(f"{url}/v1/completions", json={**LONG, "n": 2, "stream": True}, timeout=60))
        assert json.loads(got[-2])["error"]["type"] == "server_error"
        assert got[-1] == "[DONE]"
        assert "secret" not in "".join(got)
        assert httpx.get(f"{url}/health").status_code == 200
        wait_until(lambda: metric(url, "request_success_total", finished_reason="error") == 2)
        assert metric(url, "e2e_request_latency_seconds_count") == 1


def test_a_failed_sequence(failing):
    with failing("secret of the kernel") as url:
        answer = httpx.post(f"{url}/v1/completions", json=LONG, timeout=60)
        assert answer.status_code == 500
        assert "secret" not in answer.text
        assert answer.json()["error"]["code"] in answer.json()["error"]["message"]
        after = httpx.post(f"{url}/v1/completions", json={**LONG, "max_tokens": 3}, timeout=60)
        assert after.status_code == 200


def test_an_engine_that_failed_is_not_healthy(failing):
    with failing(RuntimeError("secret of the engine")) as url:
        got = events(httpx.post(f"{url}/v1/completions", json={**LONG, "stream": True}, timeout=60))
        assert json.loads(got[-2])["error"]["type"] == "service_unavailable"
        wait_until(lambda: metric(url, "request_success_total", finished_reason="error") == 1)
        assert "secret" not in "".join(got)
        for path in ("/health", "/ready", "/live"):
            assert httpx.get(url + path).status_code == 503
        answer = httpx.post(f"{url}/v1/completions", json=LONG)
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "service_unavailable")


def test_health_generate_generates_a_token_or_says_why_not(served, monkeypatch):
    wait_until(lambda: idle(served))
    before = metric(served.url, "generation_tokens_total")
    assert httpx.get(f"{served.url}/health_generate").json() == {"status": "ok"}
    wait_until(lambda: metric(served.url, "generation_tokens_total") == before + 1)
    built = small_engine()
    with run_app(make_app(service_of(built))) as url:
        monkeypatch.setattr(built.engine.runner, "launch", lambda step: [][1])
        answer = httpx.get(f"{url}/health_generate", timeout=60)
        assert (answer.status_code, answer.json()["status"]) == (503, "the generation of a token failed")
        monkeypatch.undo()
        monkeypatch.setattr(health, "_GENERATION_SECONDS", 0.0)
        assert "within 0 s" in httpx.get(f"{url}/health_generate", timeout=60).json()["status"]


@pytest.mark.parametrize("num_failed", [2, 3])
def test_steps_that_fail_in_a_row_turn_health_red_until_one_succeeds(num_failed):
    built = small_engine()
    body = {**LONG, "max_tokens": 2}

    def fail(step):
        raise RuntimeError("secret of the kernel")

    with run_app(make_app(service_of(built))) as url:
        runner = built.engine.runner
        launch, runner.launch = runner.launch, fail
        while built.engine.stats().failed_in_a_row < num_failed:
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 500
        runner.launch = launch
        assert httpx.get(f"{url}/live").status_code == 200
        for path in ("/health", "/ready"):
            answer = httpx.get(url + path)
            assert answer.status_code == (503 if built.engine.stats().failed_in_a_row >= 3 else 200)
            assert ("3 steps failed" in answer.json()["status"]) == (answer.status_code == 503)
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
        assert httpx.get(f"{url}/health").status_code == 200


def test_an_unexpected_exception_shows_no_internals():
    app = make_app(service_of(small_engine()))

    @app.get("/broken")
    async def broken():
        raise RuntimeError("secret")

    with run_app(app) as url:
        answer = httpx.get(f"{url}/broken")
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert answer.json()["error"]["code"]
