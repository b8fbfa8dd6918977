"""Programs over HTTP and offline: hints in the engine, ends, errors."""

import pytest
from embedded_model_server import STORY
from multi_tenant_server import GENERATING, error_of, refused

from quire import SamplingParams
from quire.core.request import Request
from quire.core.scheduling_params import Program, SchedulingParams
from quire.errors import RequestError
from quire.fleet.open_requests import OpenRequests
from quire.supervisor import protocol
from quire.supervisor.protocol import FrameReader

WHOLE = {"id": "run-1", "branch": "a/b", "expects_more": False, "ttl": 5}
END = "/v1/programs/end"


@pytest.fixture
def ended(site, monkeypatch):
    """The arguments of the engine's `end_program`, from the messages to its process."""
    calls = []
    end = site.engine.end_program
    monkeypatch.setattr(site.engine, "end_program", lambda *about: (calls.append(about), end(*about)), raising=False)
    return calls


@pytest.mark.parametrize("path", GENERATING)
def test_a_program_reaches_the_engine(keyless, path):
    for given, expected in (
        (WHOLE, Program(**WHOLE)),
        ({"id": "r", "branch": None, "ttl": None}, Program(id="r")),
        (None, None),
    ):
        answer = keyless.post(None, path, **GENERATING[path], program=given)
        assert answer.status_code == 200, answer.text
        assert keyless.engine.scheduling_params[f"{answer.headers['x-request-id']}-0"] == SchedulingParams(
            program=expected
        )


@pytest.mark.parametrize("path", GENERATING)
def test_a_program_that_cannot_be_is_refused_by_name(keyless, path):
    for program, param, code in (
        ({"id": ""}, "program.id", "invalid_value"),
        ({"id": "x" * 257}, "program.id", "invalid_value"),
        ({"id": 5}, "program.id", "invalid_type"),
        ({"id": "a", "branch": "\n"}, "program.branch", "invalid_value"),
        ({"id": "a", "ttl": 601}, "program.ttl", "invalid_value"),
        ({"id": "a", "ttl": 1e999}, "program.ttl", None),
        ({"id": "a", "expects_more": "no"}, "program.expects_more", "invalid_type"),
        ({"branch": "a"}, "program.id", None),
        ("run-1", "program", None),
    ):
        answer = keyless.post(None, path, **GENERATING[path], program=program)
        assert answer.status_code == 400, (program, answer.text)
        error = error_of(answer)
        assert error["param"] == param, (program, error)
        assert code in (None, error["code"]), (program, error)
    answer = keyless.post(None, path, **GENERATING[path], program={"id": "a", "branches": "b"})
    assert "unknown field 'branches' (did you mean 'branch'?)" in error_of(answer)["message"]


def test_a_prompt_can_be_computed_ahead_of_a_fork(keyless):
    ahead = {"prompt": STORY, "max_tokens": 0, "program": {"id": "ahead"}}
    assert keyless.post(None, "/v1/completions", **ahead).status_code == 200
    goes_on = {"prompt": f"{STORY} and", "max_tokens": 1, "program": {"id": "ahead", "branch": "1"}}
    usage = keyless.post(None, "/v1/completions", **goes_on).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 3


def test_ending_a_program_uses_the_tenant_of_the_api_key(site, ended):
    for who, asked, expected in (
        ("ann", {"id": "run-1"}, ("ann", "run-1", None)),
        ("bob", {"id": "run-1", "branch": "a/b"}, ("bob", "run-1", "a/b")),
        ("ann", {"id": "never heard of", "branch": ""}, ("ann", "never heard of", "")),
    ):
        answer = site.post(who, END, **asked)
        assert answer.status_code == 200
        assert answer.json() == {"object": "program.ended", "id": asked["id"], "branch": asked.get("branch")}
        site.post("ann", "/tokenize", prompt="a")
        site.ask("root", "GET", "/flush_cache")  # the answer comes after all earlier messages were handled
        assert ended[-1] == expected
    refused(site.post(None, END, id="run-1"), 401, "invalid_api_key")


@pytest.mark.parametrize(
    ("body", "param"),
    [({}, "id"), ({"id": ""}, "id"), ({"id": "a", "branch": "x" * 257}, "branch"), ({"id": "a", "b": 1}, None)],
)
def test_an_end_that_cannot_be_is_refused_by_name(keyless, body, param):
    error = keyless.post(None, END, **body)
    assert error.status_code == 400
    error = error.json()["error"]
    assert param in (None, error["param"])
    assert "program." not in error["message"]


def test_an_end_travels_as_it_is_and_a_restart_knows_the_program():
    end = protocol.EndProgram("ann", "p", None)
    (frame,) = FrameReader().feed(protocol.encode_frame([end]))
    assert protocol.decode_commands(frame) == [end]
    open_requests = OpenRequests()
    scheduling_params = SchedulingParams(program=Program(**WHOLE))
    open_requests.add([Request("a", [1, 2], SamplingParams(seed=1), scheduling_params=scheduling_params)])
    assert open_requests.resume("a").scheduling_params == scheduling_params


def test_a_program_offline(llm, monkeypatch):
    seen = []
    add = llm.llm_engine.add
    monkeypatch.setattr(llm.llm_engine, "add", lambda request: (seen.append(request.scheduling_params), add(request)))
    one = SamplingParams(max_tokens=1)
    llm.generate([STORY, STORY], one, program=[{"id": "a"}, None])
    llm.chat([{"role": "user", "content": "Hello"}], one, program=Program(**WHOLE))
    assert [scheduling_params.program for scheduling_params in seen] == [Program(id="a"), None, Program(**WHOLE)]
    llm.end_program("a")
    llm.end_program("never heard of", "b")
    with pytest.raises(RequestError, match="id must be"):
        llm.end_program("")
    for wrong, message in (
        ({"branch": "b"}, "program needs an id"),
        ({"id": "a", "brnch": "b"}, r"program has no field 'brnch' \(did you mean 'branch'\?\)"),
        ("a", "program must be Program"),
        ({"id": "a", "ttl": 1e9}, "program.ttl must be"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.generate(STORY, one, program=wrong)


def test_openapi_json_has_the_bounds_of_program_fields(keyless):
    schemas = keyless.ask(None, "GET", "/openapi.json").json()["components"]["schemas"]
    ttl = next(one for one in schemas["ProgramBody"]["properties"]["ttl"]["anyOf"] if one["type"] == "number")
    assert (ttl["minimum"], ttl["maximum"]) == (0, 600)
    assert schemas["EndProgramBody"]["properties"]["id"]["maxLength"] == 256
