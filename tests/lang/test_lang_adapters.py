"""gen and select with an adapter, on all backends."""

from dataclasses import replace

import pytest
from adapter_folders import AdapterNoting, run_adapter_site, write_adapter
from embedded_model_server import small_engine

import quire.lang as sgl
from quire.errors import RequestError
from quire.lang.backends.engine import EngineBackend, open_engine


@sgl.function
def program(s):
    s += "One" + sgl.gen("a", max_tokens=1, adapter="poet")
    s += sgl.gen("b", max_tokens=1)
    s += sgl.select("c", ["x", "y"], adapter="team/painter")
    s += sgl.gen("d", choices=["x", "y"], adapter="poet")


@sgl.function
def other(s):
    s += sgl.gen("x", adapter="other")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    for name in ("poet", "team/painter"):
        write_adapter(folder / name)
    return folder


@pytest.fixture(scope="module")
def site(folder):
    with run_adapter_site(folder, {}) as site:
        yield site


def names(engine):
    """The adapters of all requests so far, each run of equal ones once."""
    found = [one and one.name for one in engine.adapters.values()]
    return [name for i, name in enumerate(found) if i == 0 or found[i - 1] != name]


def test_each_call_has_its_adapter_and_the_run_may_have_one_for_all(pretend):
    backend = pretend()
    program.run(backend=backend)
    assert [one.adapter or getattr(one.params, "adapter", None) for one in backend.asked] == [
        *("poet", None, "team/painter", "poet")
    ]
    backend.asked.clear()
    program.run(backend=backend, adapter="other")
    assert [one.adapter or getattr(one.params, "adapter", None) for one in backend.asked] == [
        *("poet", "other", "team/painter", "poet")
    ]


def test_an_engine_reads_adapters_by_its_paths(folder):
    built = small_engine(enable_lora=True)
    engine = AdapterNoting(built.engine)
    paths = {name: str(folder / name) for name in ("poet", "team/painter")}
    with EngineBackend(replace(built, engine=engine), lora_paths=paths) as backend:
        program.run(backend=backend)
        assert names(engine) == ["poet", None, "team/painter", "poet"]
        assert engine.read == ["poet", "team/painter"]  # each once
        with pytest.raises(RequestError, match="no adapter 'other'; lora_paths names 'poet', 'team/painter'"):
            other.run(backend=backend)["x"]


def test_adapters_of_an_engine_turn_them_on(monkeypatch):
    seen = []

    def build(options, **_more):
        seen.append(options.enable_lora)
        raise RequestError("stop")

    monkeypatch.setattr("quire.lang.backends.engine.build", build)
    for given in ({}, {"lora_paths": {"poet": "poet"}}):
        with pytest.raises(RequestError, match="stop"):
            open_engine(**given)
    assert seen == [False, True]


@pytest.mark.parametrize("api", ["server", "completions", "chat"])
def test_servers_get_the_name(site, api):
    site.engine.adapters.clear()
    if api == "server":
        backend = sgl.RuntimeEndpoint(site.url)
    else:
        backend = sgl.OpenAI(is_chat_model=api == "chat", base_url=f"{site.url}/v1", extensions=True)
    with backend:
        if api == "chat":
            chat.run(backend=backend).sync()
            assert names(site.engine) == ["poet", None, "team/painter"]
        else:
            program.run(backend=backend).sync()
            assert names(site.engine) == ["poet", None, "team/painter", "poet"]


@sgl.function
def chat(s):
    s += sgl.user("One") + sgl.assistant(sgl.gen("a", max_tokens=1, adapter="poet"))
    s += sgl.user("Two") + sgl.assistant(sgl.gen("b", max_tokens=1))
    s += sgl.user("Three") + sgl.assistant(sgl.select("c", ["x", "y"], adapter="team/painter"))


def test_a_name_must_be_text():
    for make in (lambda: sgl.gen("x", adapter=3), lambda: sgl.select("x", ["a"], adapter=3)):
        with pytest.raises(RequestError, match="adapter must be Unicode text"):
            make()
