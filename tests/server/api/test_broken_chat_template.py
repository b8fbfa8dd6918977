"""A model whose chat template does not compile: completions and embeddings are served, conversations are refused."""

import shutil

import httpx
import pytest
from embedded_model_server import run_app, service_of, small_engine

from quire.errors import RequestError
from quire.hub import embedded
from quire.llm import LLM
from quire.params import SamplingParams
from quire.server.app import make_app

MESSAGES = [{"role": "user", "content": "Hello"}]
REFUSED = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/chat/completions/batch": {"messages": [MESSAGES]},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/api/chat": {"messages": MESSAGES},
    "/api/generate": {"prompt": "Hello"},
    "/tokenize": {"messages": MESSAGES},
}
SERVED = {
    "/v1/completions": {"prompt": "Hello", "max_tokens": 2},
    "/generate": {"text": "Hello", "sampling_params": {"max_new_tokens": 2}},
    "/api/generate": {"prompt": "Hello", "raw": True, "options": {"num_predict": 2}, "stream": False},
    "/v1/embeddings": {"input": "Hello"},
    "/tokenize": {"prompt": "Hello"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("broken") / "model"
    shutil.copytree(embedded.folder(), folder)
    (folder / "chat_template.jinja").write_text("a\n{{ messages | from_json }}<tool_call>")
    return folder


@pytest.fixture(scope="module")
def http(folder):
    with run_app(make_app(service_of(small_engine(str(folder))))) as url, httpx.Client(base_url=url, timeout=60) as one:
        yield one


def with_model(http, path, body):
    model = http.get("/v1/models").json()["data"][0]["id"]
    return {"model": model, **body} if path.startswith(("/v1", "/api")) else body


@pytest.mark.parametrize(("path", "body"), REFUSED.items(), ids=REFUSED.keys())
def test_conversations_are_refused_with_the_line_of_the_template(http, path, body):
    answer = http.post(path, json=with_model(http, path, body))
    assert answer.status_code == 400, answer.text
    assert "line 2: No filter named 'from_json'" in answer.text
    assert "correct chat_template.jinja" in answer.text


@pytest.mark.parametrize(("path", "body"), SERVED.items(), ids=SERVED.keys())
def test_prompts_are_served(http, path, body):
    answer = http.post(path, json=with_model(http, path, body))
    assert answer.status_code == 200, answer.text


def test_an_engine_in_this_process_generates_and_refuses_a_chat(folder):
    llm = LLM(str(folder), memory="256MiB", max_model_len=512)
    try:
        assert llm.generate(["Hello"], SamplingParams(max_tokens=1))
        with pytest.raises(RequestError, match="line 2: No filter named 'from_json'"):
            llm.chat(MESSAGES, SamplingParams(max_tokens=1))
    finally:
        llm.close()
