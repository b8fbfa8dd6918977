"""A tokenizer whose parts panic: the requests that meet the panic fail alone, and the server goes on."""

import json
import shutil

import httpx
import pytest
from embedded_model_server import run_app, service_of, small_engine

from quire.hub import embedded
from quire.llm import LLM
from quire.params import SamplingParams
from quire.server.app import make_app

SPLIT = {"type": "Split", "pattern": {"Regex": "(ö+)+$"}, "behavior": "Isolated", "invert": False}
STRIP = {"type": "Strip", "content": "W", "start": 1, "stop": 1}  # panics with the token "W"
BAD_TEXT = "ö" * 60 + "b"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("panics") / "model"
    shutil.copytree(embedded.folder(), folder)
    file = folder / "tokenizer.json"
    core = json.loads(file.read_text())
    core["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [SPLIT, core["pre_tokenizer"]]}
    core["decoder"] = {"type": "Sequence", "decoders": [STRIP, {"type": "Fuse"}]}
    file.write_text(json.dumps(core))
    return folder


@pytest.fixture(scope="module")
def http(folder):
    with run_app(make_app(service_of(small_engine(str(folder))))) as url, httpx.Client(base_url=url, timeout=60) as one:
        yield one


def token_of(http, text):
    return http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"][0]


def check_others_are_served(http):
    answer = http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 2, "allowed_token_ids": [300]})
    assert answer.status_code == 200, answer.text
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/v1/embeddings"])
def test_a_text_that_makes_the_tokenizer_panic_fails_alone(http, path):
    body = {"input": BAD_TEXT} if path == "/v1/embeddings" else {"prompt": BAD_TEXT}
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert "pre_tokenizer failed" in answer.json()["error"]["message"]
    check_others_are_served(http)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_token_that_makes_the_decoder_panic_fails_alone(http, path, stream):
    token = token_of(http, "W")
    asked = {"prompt": "Hello"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hello"}]}
    body = {**asked, "max_tokens": 4, "allowed_token_ids": [token], "ignore_eos": True, "stream": stream}
    answer = http.post(path, json=body)
    assert answer.status_code == (200 if stream else 400)
    assert "decoder failed" in answer.text
    check_others_are_served(http)


def test_an_engine_in_this_process_goes_on(folder):
    llm = LLM(str(folder), memory="256MiB", max_model_len=512)
    try:
        token = llm.get_tokenizer().encode("W", add_special_tokens=False)[0]
        with pytest.raises(Exception, match="the tokenizer's decoder failed"):
            llm.generate(["Hello"], SamplingParams(max_tokens=3, allowed_token_ids=[token]))
        assert llm.generate(["Hello"], SamplingParams(max_tokens=3, allowed_token_ids=[300]))
    finally:
        llm.close()
