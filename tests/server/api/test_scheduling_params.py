"""Priority, deadline and retention: their values in the engine, over HTTP and offline, and errors."""

import json
from dataclasses import replace

import pytest
from embedded_model_server import CHAT, STORY, run_app, service_of, small_engine
from multi_tenant_server import GENERATING, error_of

from quire import SamplingParams
from quire.config import EngineOptions
from quire.core.scheduling_params import Retention, SchedulingParams
from quire.engine.inputs import make_scheduling_params, scheduling_params_per_prompt
from quire.errors import RequestError
from quire.server.app import make_app

KEPT = {"ttl": 60, "pin": True}
OPTIONS = EngineOptions()
ONE = SamplingParams(max_tokens=1)


def terms_of(site, answer):
    assert answer.status_code == 200, answer.text
    return site.engine.scheduling_params[f"{answer.headers['x-request-id']}-0"]


@pytest.mark.parametrize("path", GENERATING)
def test_terms_reach_the_engine(keyless, path):
    asked = {"deadline": 1000, "retention": KEPT, "priority": 0}
    expected = SchedulingParams(deadline=1000, retention=Retention(**KEPT))
    assert terms_of(keyless, keyless.post(None, path, **GENERATING[path], **asked)) == expected
    partly = {"retention": {"ttl": 5.5, "pin": None}}
    expected = SchedulingParams(retention=Retention(ttl=5.5))
    assert terms_of(keyless, keyless.post(None, path, **GENERATING[path], **partly)) == expected
    nothing = {"deadline": None, "retention": None, "priority": None}
    assert terms_of(keyless, keyless.post(None, path, **GENERATING[path], **nothing)) == SchedulingParams()


def test_a_session_is_refused_with_what_to_send_instead(keyless):
    path = next(iter(GENERATING))
    answer = keyless.post(None, path, **GENERATING[path], retention={"session": "chat-17", "ttl": 5})
    error = error_of(answer)
    assert (answer.status_code, error["param"], error["code"]) == (400, "retention.session", "unknown_parameter")
    assert "set priority, ttl and pin in each request" in error["message"]


REFUSED = [
    ({"deadline": 0}, "deadline", "invalid_value"),
    ({"deadline": -1.5}, "deadline", "invalid_value"),
    ({"deadline": 1e10}, "deadline", "invalid_value"),
    ({"deadline": "soon"}, "deadline", "invalid_type"),
    ({"deadline": True}, "deadline", "invalid_type"),
    ({"priority": 1.5}, "priority", None),
    ({"priority": "high"}, "priority", "invalid_type"),
    ({"priority": 10**30}, "priority", None),
    ({"retention": "long"}, "retention", None),
    ({"retention": {"priority": 101}}, "retention.priority", "invalid_value"),
    ({"retention": {"priority": -1}}, "retention.priority", "invalid_value"),
    ({"retention": {"ttl": -1}}, "retention.ttl", "invalid_value"),
    ({"retention": {"pin": "yes"}}, "retention.pin", "invalid_type"),
    ({"retention": {"ttll": 5}}, "retention.ttll", "unknown_parameter"),
]


@pytest.mark.parametrize("path", GENERATING)
def test_values_out_of_bounds_and_unknown_names_are_refused(keyless, path):
    for fields, param, code in REFUSED:
        answer = keyless.post(None, path, **GENERATING[path], **fields)
        assert answer.status_code == 400, (fields, answer.text)
        error = error_of(answer)
        found = error["param"] if code != "unknown_parameter" else "retention.ttll"
        assert found == param, (fields, error)
        assert code in (None, error["code"]), (fields, error)
        assert param.split(".")[-1] in error["message"]
    whole = json.dumps(GENERATING[path])[:-1] + ', "deadline": 1e999}'
    answer = keyless.ask(None, "POST", path, content=whole)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "deadline"


def test_priority_is_rejected_unless_the_policy_uses_it(keyless):
    body = {**GENERATING["/v1/completions"], "priority": -3}
    error = keyless.post(None, "/v1/completions", **body).json()["error"]
    assert error["param"] == "priority"
    assert "--policy priority" in error["message"]
    for path, body in GENERATING.items():
        error = error_of(keyless.post(None, path, **body, retention={"priority": 51}))
        assert error["param"] == "retention.priority"
        assert "--eviction priority" in error["message"]


def test_priority_is_accepted_under_policy_and_eviction_priority(http):
    built = small_engine()
    service = service_of(replace(built, options=replace(built.options, policy="priority", eviction="priority")))
    with run_app(make_app(service)) as url:
        for priority in (-5, 5):
            answer = http.post(f"{url}/v1/completions", json={**GENERATING["/v1/completions"], "priority": priority})
            assert answer.status_code == 200
            kept = {"retention": {"priority": 50 + priority}}
            answer = http.post(f"{url}/generate", json={**GENERATING["/generate"], **kept})
            assert answer.status_code == 200


# Offline


@pytest.fixture
def noted(llm, monkeypatch):
    """Scheduling parameters of the engine's requests, in order."""
    seen = []
    add = llm.llm_engine.add

    def noting(request):
        seen.append(request.scheduling_params)
        add(request)

    monkeypatch.setattr(llm.llm_engine, "add", noting)
    return seen


def test_terms_of_all_prompts_or_of_each(llm, noted, monkeypatch):
    monkeypatch.setattr(llm, "_options", EngineOptions(policy="priority", eviction="cost"))
    llm.generate([STORY, STORY], ONE, priority=2, deadline=[50, None], retention=KEPT)
    llm.generate([STORY, STORY], ONE, priority=[1, 3], retention=[Retention(ttl=3.0, priority=9), None])
    llm.chat([CHAT, CHAT], ONE, priority=[7, -7], deadline=100.0)
    llm.generate(STORY, ONE)
    kept = Retention(**KEPT)
    assert noted == [
        SchedulingParams(priority=2, deadline=50, retention=kept),
        SchedulingParams(priority=2, retention=kept),
        SchedulingParams(priority=1, retention=Retention(ttl=3.0, priority=9)),
        SchedulingParams(priority=3),
        SchedulingParams(priority=7, deadline=100.0),
        SchedulingParams(priority=-7, deadline=100.0),
        SchedulingParams(),
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"priority": [1, 2, 3]}, "2 prompts need as many values of priority, not 3"),
        ({"deadline": [1.0]}, "2 prompts need as many values of deadline, not 1"),
        ({"priority": 1}, "needs the policy 'priority', and this engine runs 'fcfs'"),
        ({"priority": "high"}, "priority must be a whole number"),
        ({"retention": {"priority": 90}}, "evicts by 'lru'; leave it out, or .*--eviction priority"),
        ({"retention": 5}, "retention must be Retention"),
        ({"retention": {"tll": 5}}, r"retention has no field 'tll' \(did you mean 'ttl'\?\)"),
        ({"retention": [{"ttl": 1}, {"ttl": -1}]}, "retention.ttl must be"),
    ],
)
def test_terms_that_cannot_be_are_refused_before_anything_runs(llm, noted, fields, message):
    with pytest.raises(RequestError, match=message):
        llm.generate([STORY, STORY], ONE, **fields)
    assert noted == []


def test_terms_are_made_without_a_model():
    assert make_scheduling_params(OPTIONS) == SchedulingParams()
    assert scheduling_params_per_prompt(0, OPTIONS, priority=None, deadline=None, retention=None) == []
    assert make_scheduling_params(EngineOptions(policy="priority"), 4, 2.0, {"pin": True}) == SchedulingParams(
        priority=4, deadline=2.0, retention=Retention(pin=True)
    )


@pytest.mark.parametrize(
    ("options", "priority", "pin"),
    [
        ({}, False, True),
        ({"eviction": "lfu"}, False, True),
        ({"eviction": "priority"}, True, True),
        ({"eviction": "cost"}, True, True),
        ({"prefix_index": "hash"}, False, False),
        ({"enable_prefix_caching": False}, False, False),
    ],
)
def test_retention_that_the_engine_options_ignore_is_rejected(options, priority, pin):
    options = EngineOptions(**options)
    for retention, heeded in (({"priority": 60}, priority), ({"pin": True}, pin), ({"priority": 50, "ttl": 1}, True)):
        if heeded:
            assert make_scheduling_params(options, retention=retention).retention == Retention(**retention)
        else:
            with pytest.raises(RequestError, match="leave it out, or start the engine with") as caught:
                make_scheduling_params(options, retention=retention)
            assert caught.value.param == f"retention.{next(iter(retention))}"
