"""Costs in /get_server_info, and rejected or missed deadlines over HTTP."""

import asyncio
import threading

import pytest
from multi_tenant_server import GENERATING, error_of

from quire.core.output import EndCause, Output
from quire.cost.step_time import CostModel
from quire.engine.engine import EngineStats
from quire.errors import DeadlineUnreachable
from quire.fleet.fleet import Fleet
from quire.startup.model_info import model_info_of
from quire.supervisor.engine_handle import EngineThread


def test_costs_of_the_requests_so_far(keyless):
    body = {"prompt": [[5] * 40] * 8, "n": 4, "max_tokens": 24, "ignore_eos": True}
    assert keyless.post(None, "/v1/completions", **body).status_code == 200
    info = keyless.ask(None, "GET", "/get_server_info").json()
    assert info["costs"]["prompt_seconds_per_token"] > 0
    assert info["costs"]["step_seconds"] > 0
    assert info["costs"]["seconds_per_byte_out"] is None
    assert "block_size_advice" not in info


@pytest.mark.parametrize("path", ["/live", "/ready", "/health"])
def test_probes_answer_head(keyless, path):
    answer = keyless.ask(None, "HEAD", path)
    assert (answer.status_code, answer.content) == (200, b"")


class Stuck:
    """An engine whose step blocks until `go` is set."""

    def __init__(self):
        self.go = threading.Event()
        self.has_work = True
        self.num_counted = {}

    def step(self, on_launch):
        self.go.wait(60)
        return []

    def take_key_changes(self):
        return None

    def take_service(self):
        return {}

    def stats(self):
        return EngineStats.zero()

    def cost_figures(self):
        return CostModel().figures()

    def close(self):
        pass


def test_cost_figures_of_an_engine_that_does_not_answer_are_none(monkeypatch, served):
    facts = model_info_of(served.built)
    monkeypatch.setattr("quire.fleet.fleet.STALL_SECONDS", 0.05)

    async def main():
        stuck = Stuck()
        host = EngineThread(stuck, facts)
        host.launch()
        engine = Fleet(host)
        assert await engine.cost_figures() is None  # not started
        await engine.start()
        assert await engine.cost_figures() is None
        stuck.has_work = False
        stuck.go.set()
        assert await engine.cost_figures() == CostModel().figures()
        await engine.close()
        assert await engine.cost_figures() is None

    asyncio.run(main())


@pytest.mark.parametrize("path", GENERATING)
def test_a_deadline_that_cannot_be_met_is_a_429_that_says_when_to_come_again(keyless, monkeypatch, path):
    def refuse(_request):
        raise DeadlineUnreachable(7.2, 2.5)

    monkeypatch.setattr(keyless.engine, "add", refuse, raising=False)
    answer = keyless.post(None, path, **GENERATING[path], deadline=2.5)
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "5"
    error = error_of(answer)
    assert (error["param"], error["code"]) == ("deadline", "deadline_unreachable")
    assert error["type"] in ("rate_limit_error", None)
    assert "predicted to take 7.2 s" in error["message"]


@pytest.mark.parametrize(("num_before", "status"), [(0, 429), (2, 200)])
def test_a_deadline_that_is_missed_on_the_way(keyless, monkeypatch, num_before, status):
    """The engine aborts a request before or after its first tokens."""
    step = keyless.engine.step

    def missing(on_launch):
        outputs = step(on_launch)
        return [_given_up(output, num_before) for output in outputs]

    monkeypatch.setattr(keyless.engine, "step", missing, raising=False)
    answer = keyless.post(None, "/v1/completions", prompt="Hello", max_tokens=1, ignore_eos=True)
    assert answer.status_code == status
    if status == 200:
        choice = answer.json()["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", "too late")
    else:
        assert error_of(answer)["message"].startswith("too late; allow more time")


def _given_up(output, num_before):
    tokens = output.token_ids[:1] * num_before
    return Output(output.request_id, output.index, output.seq_id, tokens, EndCause.DEADLINE, error="too late")
