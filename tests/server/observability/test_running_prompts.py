"""A prompt that takes several steps, on a server: what metrics, the activity line and `quire top` say after each."""

import threading
from dataclasses import replace
from io import StringIO

import httpx
import pytest
from embedded_model_server import run_app, service_of, small_engine
from rich.console import Console
from scripted_engine import Rig
from server_probes import Page
from waiting import wait_until

from quire.server.app import make_app
from quire.server.observability.activity import INTERVAL, ActivityLine
from quire.terminal.top import compare, fetch, read_sample, render

PROMPT = [i % 50 for i in range(90)]


class Stepping:
    """A server whose engine has the scripted runner, of 32 tokens a step, and begins a step when it may."""

    def __init__(self):
        engine = Rig(max_num_batched_tokens=32, prefix_index="radix").engine
        self.may_begin, launch = threading.Semaphore(0), engine.runner.launch

        def wait_and_launch(step):
            self.may_begin.acquire()
            launch(step)

        engine.runner.launch = wait_and_launch
        self.service = service_of(replace(small_engine(), engine=engine))
        self.lines, self.now = [], 0.0
        self.activity = ActivityLine(lambda: self.service.engine.health().stats, self.lines.append, lambda: self.now)

    def figures(self, url):
        """Prompt tokens, those of them that were computed, and the progress that metrics tell."""
        page = Page(httpx.get(f"{url}/metrics").text)
        progress = [page.value(f"quire:prompts_running{more}") for more in ("", "_tokens_done", "_tokens")]
        computed = page.value("quire:prompt_tokens_by_source_total", source="local_compute")
        return page.value("quire:prompt_tokens_total"), computed, progress

    def line(self):
        """The activity line of the ten seconds since the last one."""
        self.now += INTERVAL
        self.activity.update()
        return self.lines.pop() if self.lines else ""


def screen_of(before, after):
    screen = StringIO()
    Console(file=screen, width=100).print(render(compare(before, after), [], ""))
    return screen.getvalue()


@pytest.fixture
def stepping():
    made = Stepping()
    yield made
    made.may_begin.release(1000)


def test_each_step_of_a_prompt_is_seen(stepping):
    with run_app(make_app(stepping.service)) as url:
        body = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        asking = threading.Thread(target=lambda: httpx.post(f"{url}/v1/completions", json=body, timeout=60))
        asking.start()
        wait_until(lambda: stepping.service.engine.health().stats.num_running)
        assert stepping.figures(url) == (0, 0, [0, 0, 0])
        assert "1 running, 0 waiting; prompt 0 tokens/s" in stepping.line()
        before = read_sample(fetch(url, None), 0.0)
        for done in (32, 64):
            stepping.may_begin.release()
            wait_until(lambda done=done: stepping.figures(url) == (done, done, [1, done, 90]))
            assert f"prompt {done} of 90, 3 tokens/s" in stepping.line()
            screen = screen_of(before, read_sample(fetch(url, None), done / 10))
            assert f"prompt {done} of 90" in " ".join(screen.split()) and "10 tokens/s" in screen
        stepping.may_begin.release()
        wait_until(lambda: stepping.figures(url) == (90, 90, [0, 0, 0]))
        assert "1 running, 0 waiting; prompt 3 tokens/s" in stepping.line()
        stepping.may_begin.release(10)
        asking.join(60)
        assert stepping.figures(url) == (90, 90, [0, 0, 0])
        stepping.line()  # of the output
        assert stepping.line() == "", "nothing runs"
