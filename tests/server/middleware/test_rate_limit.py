"""Limits of keys, origins and queues over HTTP: headers of answers, and errors."""

import asyncio
import json

import httpx
import pytest
from embedded_model_server import run_app, service_of, small_engine

from quire.errors import ConfigError, QueueFull
from quire.server.api_keys import Keys, new_key
from quire.server.app import make_app
from quire.server.errors import response_to
from quire.server.options import ServerOptions

pytestmark = pytest.mark.usefixtures("no_refills")

ORIGIN = "https://chat.example"
LIMITS = {"free": {}, "requests": {"requests_per_minute": 3}}
BODY = {"prompt": [67] * 10, "max_tokens": 5, "ignore_eos": True, "temperature": 0}


class Site:
    def __init__(self, url, keys):
        self.url, self.keys = url, keys

    def post(self, who, path="/v1/completions", **body):
        return httpx.post(self.url + path, json=body, headers=self.of(who), timeout=60)

    def get(self, who, path):
        return httpx.get(self.url + path, headers=self.of(who))

    def of(self, who):
        return {"authorization": f"Bearer {self.keys[who]}"}


@pytest.fixture(scope="module")
def serve():
    """A server with a key for each limit, and one allowed origin."""
    made = {who: new_key(who, "user", **limits) for who, limits in LIMITS.items()}
    keys = Keys([entry for _, entry in made.values()])
    with run_app(make_app(service_of(small_engine()), keys, ServerOptions(cors_origins=(ORIGIN,)))) as url:
        yield Site(url, {who: key for who, (key, _) in made.items()})


def test_requests_beyond_the_rate_limit_are_a_429_until_retry_after(serve):
    left = []
    for _ in range(3):
        answer = serve.post("requests", **BODY)
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-limit-requests"] == "3"
        left.append(answer.headers["x-ratelimit-remaining-requests"])
        assert "x-ratelimit-limit-tokens" not in answer.headers
    assert left == ["2", "1", "0"]
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/generate", "/tokenize", "/nothing"):
        answer = serve.post("requests", path, **BODY)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"]) == (429, "rate_limit_error", "rate_limit_exceeded")
        assert "3 requests per minute" in error["message"]
        assert 1 <= int(answer.headers["retry-after"]) <= 20
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"
    assert serve.get("requests", "/v1/models").status_code == 200  # this route is free
    free = serve.post("free", **BODY)
    assert free.status_code == 200
    assert not [name for name in free.headers if name.startswith("x-ratelimit")]


async def never(_requests):
    """A stream without outputs."""

    class Stream:
        close = staticmethod(lambda: None)

        async def __anext__(self):
            await asyncio.sleep(60)

    return Stream()


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_prompts_and_outputs_count(stream, monkeypatch):
    key, entry = new_key("spender", "user", tokens_per_minute=60)
    service = service_of(small_engine())
    with run_app(make_app(service, Keys([entry]))) as url:
        mine = Site(url, {"tokens": key})
        with monkeypatch.context() as patch:
            patch.setattr(service.engine, "generate", never)
            late = mine.post("tokens", "/v1/embeddings", input=[67] * 10, timeout=1.0)
        assert late.status_code == 408  # it was accepted, and counts in full
        assert late.headers["x-ratelimit-remaining-tokens"] == "50"
        answer = mine.post("tokens", **BODY, n=2, stream=stream)
        assert answer.status_code == 200
        asked = mine.get("tokens", "/v1/models")
        assert "x-ratelimit-remaining-tokens" not in asked.headers
        answer = mine.post("tokens", **{**BODY, "max_tokens": 0})
        # two answers of 5 tokens after a prompt of 10 tokens, and then the prompt alone
        assert answer.headers["x-ratelimit-remaining-tokens"] == "20"
        answer = mine.post("tokens", "/v1/embeddings", input=[67] * 20)
        assert answer.status_code == 200
        refused = mine.post("tokens", "/v1/embeddings", input=[67] * 50)
        assert refused.status_code == 429
        assert "60 tokens per minute" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"] == "50"
        assert refused.headers["x-ratelimit-limit-tokens"] == "60"


def test_bytes_of_refused_bodies_count_as_tokens():
    key, entry = new_key("spender", "user", requests_per_minute=6, tokens_per_minute=6000)
    with run_app(make_app(service_of(small_engine()), Keys([entry]))) as url:
        mine = Site(url, {"tokens": key})
        refused = mine.post("tokens", prompt=[67] * 600)  # 1.8 kB of JSON, beyond the context
        assert refused.status_code == 400
        assert 5400 < int(mine.post("tokens", **BODY).headers["x-ratelimit-remaining-tokens"]) < 5800
        large = {"messages": [{"role": "user", "content": "a" * 2**17}]}
        assert mine.post("tokens", "/v1/chat/completions", **large).status_code == 400  # counts one minute at most
        again = mine.post("tokens", "/v1/chat/completions", **large)  # refused before it is read
        assert again.status_code == 429
        assert "6,000 tokens per minute" in again.json()["error"]["message"]
        assert again.headers["x-ratelimit-remaining-requests"] == "3"  # a refusal by a rate limit does not count


def test_uploads_and_downloads_count_as_tokens():
    limits = {"free": {}, "sends": {"tokens_per_minute": 1}, "reads": {"tokens_per_minute": 1}}
    made = {who: new_key("ann", "user", **more) for who, more in limits.items()}
    with run_app(make_app(service_of(small_engine()), Keys([entry for _, entry in made.values()]))) as url:
        mine = Site(url, {who: key for who, (key, _) in made.items()})

        def upload(who, purpose="user_data"):
            form = {"data": {"purpose": purpose}, "files": {"file": b"x" * 1000}}
            return httpx.post(f"{url}/v1/files", headers=mine.of(who), **form)

        file = upload("free").json()["id"]
        assert mine.get("free", f"/v1/files/{file}/content").status_code == 200
        assert upload("sends", "nonsense").status_code == 400, "also a form that is refused"
        assert upload("sends").status_code == 429
        for path in ("/v1/files", "/v1/batches", f"/v1/files/{file}/content"):
            assert mine.get("sends", path).status_code == 429
        assert mine.get("sends", f"/v1/files/{file}").status_code == 200, "a description is free"
        assert mine.get("reads", f"/v1/files/{file}/content").content == b"x" * 1000
        refused = mine.get("reads", f"/v1/files/{file}/content")
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert upload("reads").status_code == 429


def test_a_full_queue_says_when_to_come_back():
    answer = response_to(QueueFull("128 requests wait, as many as may", 3.2))
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "4")
    error = json.loads(answer.body)["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    assert response_to(QueueFull("full", 0.0)).headers["retry-after"] == "1"


def test_pages_of_named_origins_may_ask(serve):
    asks = {"origin": ORIGIN, "access-control-request-method": "POST"}
    asks["access-control-request-headers"] = "authorization, content-type, x-stainless-lang"  # of OpenAI's client
    answer = httpx.options(f"{serve.url}/v1/completions", headers=asks)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "access-control-allow-credentials" not in answer.headers
    for headers, status in (({}, 401), (serve.of("free"), 200)):
        answer = httpx.get(f"{serve.url}/v1/models", headers={"origin": ORIGIN, **headers})
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert "retry-after" in answer.headers["access-control-expose-headers"]


def test_pages_of_other_origins_may_not_ask(serve, site):
    asks = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    for url in (serve.url, site.url):
        for method in ("OPTIONS", "GET"):
            answer = httpx.request(method, f"{url}/v1/models", headers=asks)
            assert answer.status_code >= 400
            assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("origin", ["chat.example", "https://chat.example/", "https://a b", "ftp://a", "https://", ""])
def test_origins_that_no_browser_sends(origin):
    with pytest.raises(ConfigError, match=r"cors_origins: .*is not an origin"):
        ServerOptions(cors_origins=(ORIGIN, origin)).check()


def test_origins_that_browsers_send():
    ServerOptions(cors_origins=("*", ORIGIN, "http://127.0.0.1:3000", "http://[::1]:3000")).check()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"port": 65536}, "port: .*65535"),
        ({"drain_timeout": -1}, "drain_timeout"),
        ({"watchdog": float("nan")}, "watchdog"),
        ({"metrics_prefix": "a-b"}, "metrics_prefix"),
        ({"host": 3}, "host"),
    ],
)
def test_options_of_a_server_are_checked(options, says):
    with pytest.raises(ConfigError, match=says):
        ServerOptions(**options).check()
    with pytest.raises(ConfigError, match="did you mean 'port'"):
        ServerOptions(prot=1)
