"""Prompts that are slow to tokenize, or too long, do not block other requests."""

import asyncio
import dataclasses
import gc
import json
import shutil
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest
from embedded_model_server import run_app, service_of, small_engine

from quire.chat import tools as chat_tools
from quire.hub import embedded
from quire.server import thread_pool
from quire.server.app import make_app
from quire.server.service import CHARACTERS_PER_TOKEN

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
LONG = {"prompt": [67, 68, 69], "max_tokens": 400, "ignore_eos": True, "stream": True}
TEMPLATES = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "reaches": "{{ ''.__class__.__mro__ }}",
    "raises": "{{ raise_exception('roles must alternate') }}",
}


@contextmanager
def a_stream_that_goes_on(url):
    """A running stream that must be complete in the end."""
    with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=60) as answer:
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        next(lines)
        yield lines
        got = list(lines)
        assert json.loads(got[-2])["choices"][0]["finish_reason"] == "length"


class SlowTokenizer:
    """A tokenizer whose `encode` sleeps."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.gate = threading.Event()
        self.entered = threading.Semaphore(0)

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def encode(self, *args, **more):
        self.entered.release()
        assert self.gate.wait(60)
        return self._tokenizer.encode(*args, **more)


def test_a_hanging_tokenizer_delays_no_running_stream(monkeypatch):
    monkeypatch.setattr(thread_pool, "MAX_JOBS", thread_pool.NUM_THREADS + 1)
    built = small_engine()
    slow = SlowTokenizer(built.tokenizer)
    with run_app(make_app(service_of(dataclasses.replace(built, tokenizer=slow)))) as url, ThreadPoolExecutor() as pool:
        try:
            with a_stream_that_goes_on(url):
                ask = [
                    pool.submit(httpx.post, f"{url}/v1/chat/completions", json=CHAT, timeout=60)
                    for _ in range(thread_pool.NUM_THREADS + 4)
                ]
                assert all(slow.entered.acquire(timeout=60) for _ in range(thread_pool.NUM_THREADS))
                assert httpx.get(f"{url}/live").status_code == httpx.get(f"{url}/health").status_code == 200
        finally:
            slow.gate.set()
        answers = [each.result() for each in ask]
    busy = [answer for answer in answers if answer.status_code == 429]
    assert len(busy) == 3
    assert {answer.headers["retry-after"] for answer in busy} == {"1"}
    assert {answer.json()["error"]["type"] for answer in busy} == {"rate_limit_error"}
    assert {answer.status_code for answer in answers} == {200, 429}


@pytest.mark.parametrize(
    ("body", "on_thread"),
    [
        ({"prompt": "the " * 200}, False),
        ({"prompt": "the " * 300}, True),
        ({"prompt": ["a"] * 17}, True),
        ({"prompt": [67] * 100}, False),
        ({"prompt": "a", "bad_words": ["b"]}, True),
    ],
    ids=["short", "long", "many prompts", "token ids", "bad words"],
)
def test_only_short_prompts_are_tokenized_on_the_event_loop(monkeypatch, body, on_thread):
    service, jobs = service_of(small_engine()), []
    run = service.thread_pool.run

    async def counted(tenant, work):
        jobs.append(work)
        return await run(tenant, work)

    monkeypatch.setattr(service.thread_pool, "run", counted)
    with run_app(make_app(service)) as url:
        answer = httpx.post(f"{url}/v1/completions", json={**body, "max_tokens": 1}, timeout=60)
    assert answer.status_code == 200, answer.text
    assert bool(jobs) == on_thread


FUNCTIONS = [{"name": f"f{i}", "description": "a", "parameters": {"type": "object"}} for i in range(150)]
OF_CHAT = [{"type": "function", "function": one} for one in FUNCTIONS]
WITH_TOOLS = {
    "/v1/chat/completions": {**CHAT, "tools": OF_CHAT},
    "/v1/chat/completions/batch": {"messages": [CHAT["messages"]] * 2, "tools": OF_CHAT},
    "/v1/responses": {"input": "Hello", "tools": [{"type": "function", **one} for one in FUNCTIONS]},
    "/v1/messages": {
        **CHAT,
        "tools": [{"name": one["name"], "input_schema": one["parameters"], "description": "a"} for one in FUNCTIONS],
    },
    "/v1/messages/count_tokens": {
        "messages": CHAT["messages"],
        "tools": [{"name": one["name"], "input_schema": one["parameters"]} for one in FUNCTIONS],
    },
    "/api/chat": {"messages": CHAT["messages"], "tools": OF_CHAT, "stream": False},
    "/generate": {"text": "Hello", "tools": OF_CHAT, "sampling_params": {"max_new_tokens": 1}},
}


@pytest.fixture(scope="module")
def tool_server():
    with run_app(make_app(service_of(small_engine()))) as url:
        yield url


@pytest.mark.parametrize("path", WITH_TOOLS)
def test_many_tools_are_read_on_a_thread(tool_server, monkeypatch, path):
    threads, read = [], chat_tools._tool
    monkeypatch.setattr(
        chat_tools, "_tool", lambda *args: threads.append(threading.current_thread().name) or read(*args)
    )
    answer = httpx.post(f"{tool_server}{path}", json=WITH_TOOLS[path], timeout=60)
    assert answer.status_code in (200, 400), answer.text
    assert len(threads) == len(FUNCTIONS)
    assert all(name.startswith("quire-pool") for name in threads)


def test_of_requests_that_were_given_up_nothing_waits_for_a_thread():
    class Body:
        def read(self):
            raise AssertionError("nobody wants it")

    async def run():
        threads, gate = thread_pool.ThreadPool(), threading.Event()
        busy = [asyncio.ensure_future(threads.run("", lambda: gate.wait(60))) for _ in range(thread_pool.NUM_THREADS)]
        await asyncio.sleep(0)
        bodies = weakref.WeakSet()
        for _ in range(2 * thread_pool.MAX_JOBS):
            body = Body()
            bodies.add(body)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await threads.run("", body.read)
        del body
        gc.collect()
        left = len(bodies)
        gate.set()
        assert await asyncio.gather(*busy) == [True] * thread_pool.NUM_THREADS
        threads.close()
        return left

    assert asyncio.run(run()) <= 1, "the last one may still be in a traceback"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_text_longer_than_max_model_len_is_rejected_before_tokenization(path):
    built = small_engine()
    slow = SlowTokenizer(built.tokenizer)
    text = "a" * (CHARACTERS_PER_TOKEN * built.engine.max_model_len + 1)
    body = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    with run_app(make_app(service_of(dataclasses.replace(built, tokenizer=slow)))) as url:
        slow.gate.set()
        answer = httpx.post(url + path, json=body, timeout=60)
    assert answer.status_code == 400
    assert "max_model_len" in answer.json()["error"]["message"]
    assert not slow.entered.acquire(blocking=False)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_hostile_chat_template_fails_only_its_own_requests(tmp_path, name):
    folder = tmp_path / "model"
    shutil.copytree(embedded.folder(), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATES[name])
    with run_app(make_app(service_of(small_engine(str(folder))))) as url, a_stream_that_goes_on(url):
        answer = httpx.post(f"{url}/v1/chat/completions", json=CHAT, timeout=60)
        assert answer.status_code == 400
        assert "template" in answer.json()["error"]["message"]
        assert httpx.get(f"{url}/health").status_code == 200
