"""Adapters over HTTP: the model names of all routes, who may use and list them, loading, unloading, batches."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from adapter_folders import BROKEN, run_adapter_site, write_adapter
from embedded_model_server import CHAT, MODEL
from multi_tenant_server import GENERATING, error_of, refused
from waiting import wait_until

from quire.server.openapi import EXAMPLES
from quire.server.options import ServerOptions

KEYS = {
    "ann": {"tenant": "ann", "role": "user"},
    "limited": {"tenant": "ann", "role": "user", "adapters": ["json", "mine"]},
    "none": {"tenant": "ann", "role": "user", "adapters": []},
    "root": {"tenant": "root", "role": "admin"},
}
# of routes that return no vectors, with a model's name in the field `model`
TEXTS = {path: body for path, body in GENERATING.items() if path not in ("/generate", "/api/embeddings")}
LOADS = ("/v1/load_lora_adapter", "/load_lora_adapter")
UNLOADS = ("/v1/unload_lora_adapter", "/unload_lora_adapter")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "adapters"
    for name in ("pirate", "json", "poet", "team/poet"):
        write_adapter(folder / name)
    write_adapter(folder / "bad", BROKEN)
    return folder


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return tmp_path_factory.mktemp("log") / "access.jsonl"


@pytest.fixture(scope="module")
def site(folder, log):
    options = ServerOptions(lora_modules=(f"first={folder}/pirate",), access_log=str(log))
    with run_adapter_site(folder, KEYS, options) as site:
        yield site


@pytest.fixture
def mine(site):
    """A name that is loaded for one test."""
    assert site.post("root", LOADS[0], lora_name="mine", lora_path="pirate").status_code == 200
    yield "mine"
    site.post("root", UNLOADS[0], lora_name="mine")


def model_ids(site, who):
    return [one["id"] for one in site.ask(who, "GET", "/v1/models").json()["data"]]


@pytest.mark.parametrize("path", TEXTS)
@pytest.mark.parametrize("name", ["first", "team/poet"])
def test_each_route_takes_an_adapter_as_its_model(site, path, name):
    answer = site.post("ann", path, **{**TEXTS[path], "model": name})
    assert answer.status_code == 200
    assert answer.json()["model"] == name
    assert set(site.engine.last()) == {name}
    answer = site.post("ann", path, **{**TEXTS[path], "model": MODEL})
    assert answer.json()["model"] == MODEL
    assert set(site.engine.last()) == {None}


def test_ollamas_older_embeddings_and_its_tags(site):
    assert site.post("ann", "/api/embeddings", model="json:latest", prompt="Hello").status_code == 200
    assert site.engine.last() == ["json"]
    body = {"messages": CHAT, "stream": False, "options": {"num_predict": 1}}
    assert site.post("ann", "/api/chat", model="first:latest", **body).json()["model"] == "first"
    assert site.post("ann", "/api/chat", model="first", messages=[]).json()["model"] == "first"
    assert site.post("ann", "/api/show", model="first:latest").json()["details"]["parent_model"] == MODEL
    assert site.post("ann", "/api/show", model=MODEL).json()["details"]["parent_model"] == ""
    for path in ("/api/tags", "/api/ps"):
        models = {one["name"]: one for one in site.ask("ann", "GET", path).json()["models"]}
        assert models["first:latest"]["details"]["parent_model"] == MODEL
        assert models["first:latest"]["size"] < models[f"{MODEL}:latest"]["size"]
        assert models["first:latest"]["digest"] != models[f"{MODEL}:latest"]["digest"]


def test_sglangs_generate_names_an_adapter_for_each_prompt(site):
    body = {"text": ["Hello", "Hello", "Hello"], "sampling_params": {"max_new_tokens": 1}}
    assert site.post("ann", "/generate", **body, lora_path=["first", None, "json"]).status_code == 200
    assert site.engine.last() == ["first", None, "json"]
    assert site.post("ann", "/generate", **body, lora_path="json").status_code == 200
    assert site.engine.last() == ["json"] * 3
    assert site.post("ann", "/generate", **body, lora_path=None).status_code == 200
    assert site.engine.last() == [None] * 3
    wrong = refused(site.post("ann", "/generate", **body, lora_path=["first"]), 400, "invalid_value")
    assert wrong["param"] == "lora_path"
    unknown = refused(site.post("ann", "/generate", **body, lora_path=["first", None, "other"]), 404, "model_not_found")
    assert unknown["param"] == "lora_path"


def test_the_access_log_has_the_adapter_as_the_model(site, log):
    ids = []
    for model in ("first", MODEL, None, "other"):
        answer = site.post("ann", "/v1/completions", model=model, prompt="Hello", max_tokens=1)
        ids.append(answer.headers["x-request-id"])
    found = {}

    def is_written():
        found.update({line["request_id"]: line["model"] for line in map(json.loads, log.read_text().splitlines())})
        return set(ids) <= found.keys()

    wait_until(is_written)
    assert [found[id] for id in ids] == ["first", MODEL, MODEL, MODEL]


def test_a_stream_names_the_adapter(site):
    answer = site.post("ann", "/v1/completions", model="first", prompt="Hello", max_tokens=2, stream=True)
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert chunks
    assert {chunk["model"] for chunk in chunks} == {"first"}


def test_a_stored_response_goes_on_with_another_adapter(site):
    begun = site.post("ann", "/v1/responses", model="first", input="Hello", max_output_tokens=1).json()
    stored = site.ask("ann", "GET", f"/v1/responses/{begun['id']}").json()
    assert stored["model"] == "first"
    more = {"input": "And?", "max_output_tokens": 1, "previous_response_id": begun["id"]}
    assert site.post("ann", "/v1/responses", model="json", **more).json()["model"] == "json"
    assert site.engine.last() == ["json"]


def test_tokens_are_counted_for_an_adapter(site):
    assert site.post("ann", "/tokenize", model="first", prompt="Hello").json()["count"] > 0
    assert site.post("ann", "/detokenize", model="first", tokens=[5]).status_code == 200
    body = {"messages": CHAT, "model": "first"}
    assert site.post("ann", "/v1/messages/count_tokens", **body).json()["input_tokens"] > 0


def test_models_are_listed_with_their_parents(site, folder):
    listed = {one["id"]: one for one in site.ask("ann", "GET", "/v1/models").json()["data"]}
    assert (listed[MODEL]["root"], listed[MODEL]["parent"]) == (MODEL, None)
    assert (listed["first"]["root"], listed["first"]["parent"]) == (f"{folder}/pirate", MODEL)
    assert site.ask("ann", "GET", "/v1/models/first").json() == listed["first"]
    assert site.ask("ann", "GET", "/v1/models/team/poet").json()["parent"] == MODEL
    assert site.ask("ann", "GET", "/v1/models/other").status_code == 404


def of_unknown(site, who, path, body, name):
    answer = site.post(who, path, **{**body, "model": name})
    assert name in error_of(answer)["message"]
    return answer.status_code, answer.text.replace(name, "NAME")


@pytest.mark.parametrize("path", [*TEXTS, "/tokenize", "/detokenize", "/v1/messages/count_tokens", "/api/show"])
def test_an_adapter_that_a_key_may_not_use_is_an_unknown_model(site, path):
    more = {
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [5]},
        "/v1/messages/count_tokens": {"messages": CHAT},
        "/api/show": {},
    }
    body = {**TEXTS, **more}[path]
    unknown = of_unknown(site, "ann", path, body, "other")
    assert unknown[0] == 404
    assert "first" not in unknown[1]
    for who, name in (("limited", "first"), ("limited", "team/poet"), ("none", "json"), ("limited", "other")):
        assert of_unknown(site, who, path, body, name) == unknown
    assert site.post("limited", path, **{**body, "model": "json"}).status_code == 200


def test_a_limited_key_sees_its_adapters_only(site, mine):
    site.post("ann", "/v1/completions", model="json", prompt="a", max_tokens=1)
    assert {"first", "json", mine} <= set(model_ids(site, "ann"))
    assert set(model_ids(site, "limited")) == {MODEL, "json", mine}
    assert model_ids(site, "none") == [MODEL]
    assert [one["name"] for one in site.ask("none", "GET", "/api/tags").json()["models"]] == [f"{MODEL}:latest"]
    assert site.ask("none", "GET", "/lora-adapters").json() == []
    assert site.ask("none", "GET", "/v1/models/first").status_code == 404
    generate = {"text": "a", "sampling_params": {"max_new_tokens": 1}, "lora_path": "first"}
    assert site.post("none", "/generate", **generate).status_code == 404


@pytest.mark.parametrize("path", [*LOADS, *UNLOADS])
@pytest.mark.parametrize("who", ["ann", "limited"])
def test_only_an_admin_loads_and_unloads(site, path, who):
    body = {"lora_name": "first"} if path in UNLOADS else {"lora_name": "new", "lora_path": "pirate"}
    refused(site.post(who, path, **body), 403, "insufficient_permissions")
    assert "first" in model_ids(site, "root")
    assert "new" not in model_ids(site, "root")


@pytest.mark.parametrize("path", [*LOADS, *UNLOADS])
def test_a_page_of_another_site_loads_nothing(site, path):
    headers = {"authorization": f"Bearer {site.keys['root']}", "origin": "https://elsewhere.example"}
    body = {"lora_name": "first", **({"lora_path": "json"} if path in LOADS else {})}
    answer = httpx.post(site.url + path, headers=headers, json=body)
    refused(answer, 403, "cross_site_request")


def test_vllms_routes_load_repoint_and_unload(site, folder):
    load, unload = LOADS[0], UNLOADS[0]
    answer = site.post("root", load, lora_name="new", lora_path="pirate", lora_int_id=None)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'new' added successfully.")
    taken = refused(site.post("root", load, lora_name="new", lora_path="json"), 400, "invalid_value")
    assert "has already been loaded" in taken["message"]
    listed = {one["name"]: one for one in site.ask("ann", "GET", "/lora-adapters").json()}
    assert (listed["new"]["path"], listed["new"]["scale"]) == (f"{folder}/pirate", 1.0)
    body = {"lora_name": "new", "lora_path": f"{folder}/json", "load_inplace": True}
    assert site.post("root", load, **body).status_code == 200
    assert site.ask("ann", "GET", "/v1/models/new").json()["root"] == f"{folder}/json"
    answer = site.post("root", unload, lora_name="new", lora_int_id=listed["new"]["id"])
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'new' removed successfully.")
    assert site.post("ann", "/v1/completions", model="new", prompt="a", max_tokens=1).status_code == 404
    assert "cannot be found" in refused(site.post("root", unload, lora_name="new"), 404, "adapter_not_found")["message"]
    refused(site.post("root", unload), 400, "invalid_value")


def test_sglangs_routes_load_and_unload(site, folder):
    answer = site.post("root", "/load_lora_adapter", lora_name="new", lora_path="json", pinned=True).json()
    assert answer["success"] is True
    assert answer["loaded_adapters"]["new"] == f"{folder}/json"
    assert site.engine.pins[-1] == ("new", True)
    answer = site.post("root", "/unload_lora_adapter", lora_name="new").json()
    assert "new" not in answer["loaded_adapters"]
    assert site.engine.pins[-1] == ("new", False)


@pytest.mark.parametrize(("load", "unload"), list(zip(LOADS, UNLOADS, strict=True)))
def test_examples_in_the_document_work(site, load, unload):
    for path in (load, unload):
        (example,) = EXAMPLES[path].values()
        assert site.post("root", path, **example["value"]).status_code == 200


@pytest.mark.parametrize("path", LOADS)
@pytest.mark.parametrize(
    ("lora_path", "status", "code"),
    [("..", 403, "path_not_allowed"), ("/etc", 403, "path_not_allowed"), ("none", 400, "invalid_value")],
)
def test_paths_are_checked(site, path, lora_path, status, code):
    error = refused(site.post("root", path, lora_name="new", lora_path=lora_path), status, code)
    assert error["param"] == "lora_path"


def test_only_an_admin_learns_why_an_adapter_is_broken(site, folder):
    error = refused(site.post("root", LOADS[0], lora_name="new", lora_path="bad"), 400, "invalid_value")
    assert "holds no matrices" in error["message"]
    error = refused(site.post("ann", "/v1/completions", model="bad", prompt="a"), 400, "invalid_value")
    assert "holds no matrices" not in error["message"]
    assert str(folder) not in error["message"]
    assert "bad" not in model_ids(site, "root")


def test_running_requests_keep_the_adapter_of_a_name_that_is_repointed(site, mine):
    with ThreadPoolExecutor() as pool:
        body = {"model": mine, "prompt": "Hello", "max_tokens": 60, "ignore_eos": True}
        before = len(site.engine.adapters)
        running = pool.submit(site.post, "ann", "/v1/completions", **body)
        while len(site.engine.adapters) == before:
            time.sleep(0.01)
        old = list(site.engine.adapters.values())[-1]
        body = {"lora_name": mine, "lora_path": "json", "load_inplace": True}
        assert site.post("root", LOADS[0], **body).status_code == 200
        assert running.result().status_code == 200
    site.post("ann", "/v1/completions", model=mine, prompt="Hello", max_tokens=1)
    new = list(site.engine.adapters.values())[-1]
    assert (old.path.rpartition("/")[2], new.path.rpartition("/")[2]) == ("pirate", "json")


def test_llama_cpps_scales_are_refused_with_what_to_do(site):
    error = refused(site.ask("root", "POST", "/lora-adapters", content="[]"), 405, None)
    assert "as the model of the request" in error["message"]


def test_a_batch_uses_the_adapters_of_its_lines_and_of_its_key(site):
    def line(name):
        body = {"model": name, "prompt": "Hello", "max_tokens": 1}
        return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body})

    text = "\n".join(map(line, ("json", "first", MODEL)))
    file = {"purpose": (None, "batch"), "file": ("lines.jsonl", text)}
    headers = {"authorization": f"Bearer {site.keys['limited']}"}
    source = httpx.post(f"{site.url}/v1/files", headers=headers, files=file).json()["id"]
    asked = {"input_file_id": source, "endpoint": "/v1/completions", "completion_window": "24h"}
    id = site.post("limited", "/v1/batches", **asked).json()["id"]
    end = time.monotonic() + 60
    while (batch := site.ask("limited", "GET", f"/v1/batches/{id}").json())["status"] != "completed":
        assert time.monotonic() < end
        time.sleep(0.05)
    assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    (failed,) = site.ask("limited", "GET", f"/v1/files/{batch['error_file_id']}/content").text.splitlines()
    assert json.loads(failed)["custom_id"] == "first"


def test_the_self_test_uses_the_model_alone(site):
    assert site.ask("ann", "GET", "/health_generate").status_code == 200
    assert site.engine.last() == [None]
