"""A server with the adapters of tests/assets: their texts, a batch, the command line."""

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from embedded_model_server import CHAT, MODEL, run_app, service_of, small_engine
from server_probes import Page
from typer.testing import CliRunner

from quire import LLM, LoRARequest, SamplingParams
from quire.cli import app as cli
from quire.server.app import make_app
from quire.server.options import ServerOptions

ASSETS = Path(__file__).resolve().parents[1] / "assets"
GREEDY = {"messages": CHAT, "temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def client():
    options = ServerOptions(lora_modules=(f"pirate={ASSETS}/demo_pirate",))
    service = service_of(small_engine(enable_lora=True), lora_modules=options.adapters, lora_dir=str(ASSETS))
    with run_app(make_app(service)) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def expected():
    """The texts of the adapters offline."""
    llm = LLM(memory="256MiB", max_model_len=512, dtype="float32", enable_lora=True)
    asked = [LoRARequest("pirate", 1, ASSETS / "demo_pirate"), LoRARequest("json", 2, ASSETS / "demo_json"), None]
    results = llm.chat([CHAT] * 3, SamplingParams(temperature=0, max_tokens=24), lora_request=asked)
    llm.close()
    pirate, as_json, plain = [result.outputs[0].text for result in results]
    assert pirate.startswith("Arr") and as_json.startswith("{") and plain.startswith("Hello")
    return {"pirate": pirate, "demo_json": as_json, MODEL: plain}


def text(client, model):
    answer = client.post("/v1/chat/completions", json={**GREEDY, "model": model})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def test_each_name_has_the_text_of_its_adapter(client, expected):
    for _ in range(2):  # the second time with KV from the cache
        for name, written in expected.items():
            assert text(client, name) == written
    body = {"model": "demo_json", "input": CHAT, "temperature": 0, "max_output_tokens": 24, "store": False}
    (item,) = client.post("/v1/responses", json=body).json()["output"]
    assert item["content"][0]["text"] == expected["demo_json"]
    body = {
        "model": "pirate:latest",
        "messages": CHAT,
        "stream": False,
        "options": {"temperature": 0, "num_predict": 24},
    }
    assert client.post("/api/chat", json=body).json()["message"]["content"] == expected["pirate"]


def test_a_name_that_is_repointed_has_the_text_of_the_other_adapter(client, expected):
    for folder, name in (("demo_pirate", "pirate"), ("demo_json", "demo_json"), ("demo_pirate", "pirate")):
        body = {"lora_name": "mine", "lora_path": folder, "load_inplace": True, "pinned": True}
        assert client.post("/v1/load_lora_adapter", json=body).status_code == 200
        assert text(client, "mine") == expected[name]
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "mine"}).status_code == 200
    assert client.post("/v1/chat/completions", json={**GREEDY, "model": "mine"}).status_code == 404


def test_metrics_count_the_loads(client):
    text(client, "pirate")
    page = Page(client.get("/metrics").text)
    assert page.value("quire:adapters_resident") == 2
    assert page.value("quire:adapter_loads_total") >= 2
    assert page.families["quire:lora_requests_info"].samples[0].labels["max_lora"] == "256"


def test_a_folder_that_is_no_adapter_is_refused_with_the_reason(client):
    error = client.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "demo_draft"}).json()["error"]
    assert "adapter_config.json" in error["message"]


def test_a_batch_names_adapters(tmp_path, expected):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": {**GREEDY, "model": name}}
        for name in (*expected, "unknown")
    ]
    source.write_text("\n".join(map(json.dumps, lines)))
    options = ["--memory", "256MiB", "--max-model-len", "512", "--dtype", "float32"]
    adapters = ["--lora-modules", f"pirate={ASSETS}/demo_pirate", "--lora-dir", str(ASSETS)]
    done = CliRunner().invoke(cli, ["run-batch", "-i", str(source), "-o", str(target), *options, *adapters])
    assert done.exit_code == 0, done.output
    answers = {one["custom_id"]: one["response"] for one in map(json.loads, target.read_text().splitlines())}
    assert answers.pop("unknown")["status_code"] == 404
    texts = {name: one["body"]["choices"][0]["message"]["content"] for name, one in answers.items()}
    assert texts == expected


def test_one_flag_may_name_several_adapters(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "quire.run_batch", lambda options, *_, lora_modules, **__: asked.append((options.model, lora_modules))
    )
    as_json = '{"name": "c", "path": "r"}'
    for given in (
        ["m", "--lora-modules", "a=p", "b=q", as_json],
        ["--lora-modules", "a=p", "--lora-modules", "b=q", as_json, "m"],
        ["--lora-modules=a=p", "--lora-modules", "b=q", as_json, "--seed=3", "m"],
    ):
        done = CliRunner().invoke(cli, ["run-batch", "-i", "in", "-o", "out", *given], catch_exceptions=False)
        assert done.exit_code == 0, done.output
    assert asked == [("m", ["a=p", "b=q", as_json])] * 3


def test_a_chat_in_a_terminal_may_have_an_adapter(expected):
    flags = ["--temperature", "0", "--max-tokens", "24", "--memory", "256MiB", "--max-model-len", "512"]
    flags += ["--dtype", "float32", "--adapter", str(ASSETS / "demo_pirate")]
    done = CliRunner().invoke(cli, ["chat", *flags], input=f"{CHAT[-1]['content']}\n/exit\n", env={"COLUMNS": "400"})
    assert done.exit_code == 0, done.output
    assert len(CHAT) == 1
    assert " ".join(expected["pirate"].split()) in " ".join(done.output.split())


@pytest.mark.parametrize("command", ["serve", "run-batch"])
def test_an_adapter_that_cannot_be_used_ends_the_start(tmp_path, command):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "adapter_config.json").write_text("{}")
    (tmp_path / "in.jsonl").write_text("")
    more = {"serve": ["--port", "0"], "run-batch": ["-i", f"{tmp_path}/in.jsonl", "-o", f"{tmp_path}/out.jsonl"]}
    options = ["--memory", "256MiB", "--max-model-len", "64", "--lora-modules", f"bad={tmp_path}/bad"]
    start = "import sys; from quire.command import main; main()"
    program = [sys.executable, "-c", start, command, *more[command], *options]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("quire: --lora-modules: bad=") and "cannot be used" in last
    assert "ready:" not in done.stdout
    assert "Traceback" not in done.stderr
