"""run-batch: a line gets the answer of a client; nothing is lost or done twice after an interruption."""

import asyncio
import fcntl
import io
import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import fields
from itertools import pairwise

import pytest
from embedded_model_server import CHAT, STORY, service_of, small_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner
from waiting import wait_until

from quire.cli import app as cli
from quire.config import EngineOptions
from quire.errors import ConfigError
from quire.server.batch import file_format
from quire.server.batch import run as batches
from quire.server.batch.run import Batch, BatchStopped, ResultFile, run_batch
from quire.server.batch.sender import send_lines
from quire.server.middleware import tarpit
from quire.server.observability import activity

SHORT = {"max_tokens": 6, "temperature": 0}
QUIET = {"report": lambda line: None, "progress": lambda done, total: None}


def task(name, body=None, url="/v1/completions", **more):
    return {"custom_id": name, "method": "POST", "url": url, "body": body or {"prompt": STORY, **SHORT}, **more}


def written(*lines):
    return b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)


def results(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


class App:
    """Answers every POST with its own body. Records requests and their concurrency."""

    def __init__(self, answers=()):
        self.asked, self.now, self.most = [], 0, 0
        self._answers = list(answers)

    async def __call__(self, scope, receive, send):
        body = (await receive())["body"]
        self.asked.append((scope["path"], json.loads(body)))
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(0)
            status, headers, body = self._answers.pop(0) if self._answers else (200, {}, body)
            raw = [(name.encode(), value.encode()) for name, value in headers.items()]
            await send({"type": "http.response.start", "status": status, "headers": raw})
            await send({"type": "http.response.body", "body": body})
        finally:
            self.now -= 1


def answer(app, text, path, *, resume=False, concurrency=3):
    """The counts of one run with this app."""
    output = ResultFile(path, resume=resume)
    batch = Batch(app, output, lambda done: None)
    try:
        asyncio.run(batch.run(io.BytesIO(text), concurrency))
    finally:
        output.close()
    return batch


@contextmanager
def on_a_thread(options, server, **_more):
    built = small_engine()
    yield service_of(built, model_names=server.served_model_name)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Run lines through a small engine. Returns the results."""

    def run(*lines, **more):
        monkeypatch.setattr(batches, "launched", on_a_thread)
        (tmp_path / "in").write_bytes(written(*lines))
        run_batch(EngineOptions(), tmp_path / "in", tmp_path / "out", **QUIET, **more)
        return results(tmp_path / "out")

    return run


def test_figures_are_reported_while_a_run_works(here, monkeypatch):
    """A run of one long line would be silent otherwise."""
    lines = []
    monkeypatch.setattr(activity, "INTERVAL", 0.0)
    monkeypatch.setattr(batches, "_TICK_SECONDS", 0.0)
    monkeypatch.setitem(QUIET, "report", lines.append)
    here(task("a", {"prompt": STORY, "max_tokens": 200, "ignore_eos": True}))
    assert any("1 running, 0 waiting; prompt" in line for line in lines)
    assert lines[-1].startswith("1 requests: 1 answered")


def test_a_line_gets_what_a_client_gets(here, http):
    asked = [
        task("text", {"prompt": [STORY, "Hello"], "logprobs": 2, "seed": 1, "n": 2, "max_tokens": 5}),
        task("chat", {"messages": CHAT, **SHORT}, "/v1/chat/completions"),
        task("vectors", {"input": ["Hello", "One"], "encoding_format": "base64"}, "/v1/embeddings"),
        task("ranks", {"query": "Hello", "documents": ["One", "Hello"]}, "/v1/rerank"),
        task("form", {"messages": CHAT, "structured_outputs": {"regex": "[0-9]{3}"}, **SHORT}, "/v1/chat/completions"),
        task("bad form", {"prompt": STORY, "response_format": {"type": "json_schema"}}),
        task("unknown field", {"prompt": STORY, "temprature": 1}),
        task("wrong model", {"messages": CHAT, "model": "gpt-7"}, "/v1/chat/completions"),
        task("no object", [1, 2]),
        task("no number", {"prompt": STORY, "max_tokens": "\u2028é 😀"}),
    ]
    came = {result["custom_id"]: result for result in here(*asked, concurrency=1)}  # one at a time, for equal rounding
    assert len(came) == len(asked)
    for line in asked:
        result = came[line["custom_id"]]
        expected = http.post(line["url"], json=line["body"])
        assert (result["response"]["status_code"], result["error"]) == (expected.status_code, None)
        assert result["response"]["request_id"]
        bodies = [result["response"]["body"], expected.json()]
        for body in bodies:
            body.pop("id", None)
            body.pop("created", None)
            body.get("usage", {}).pop("prompt_tokens_details", None)
        assert bodies[0] == bodies[1]
    assert len({result["id"] for result in came.values()}) == len(asked)


BAD = [
    (b"nonsense", None, "invalid_line"),
    (b'{"custom_id": "x"', None, "invalid_line"),
    (b'{"custom_id": "\xff"}', None, "invalid_line"),
    (b"[" * 100_000, None, "invalid_line"),
    (b"[]", None, "invalid_line"),
    (b'{"custom_id": "\\ud800", "method": "POST"}', None, "invalid_line"),
    (task(""), None, "invalid_line"),
    (task(7), None, "invalid_line"),
    (task("x" * 513), None, "invalid_line"),
    (task("get", method="GET"), "get", "invalid_line"),
    (task("files", url="/v1/files"), "files", "invalid_line"),
    (task("more", priority=3), "more", "invalid_line"),
    ({"custom_id": "no body", "method": "POST", "url": "/v1/completions"}, "no body", "invalid_line"),
    (task("stream", {"prompt": STORY, "stream": True}), "stream", "invalid_line"),
    (task("good 1"), "good 1", "duplicate_custom_id"),
    (b"x" * 5000, None, "line_too_long"),
]


def test_invalid_constraints_in_a_batch_are_not_delayed_by_the_tarpit(here, monkeypatch):
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    monkeypatch.setattr(tarpit, "BYTES_PER_REJECTION", tarpit.FREE_BYTES_PER_MINUTE)
    monkeypatch.setattr(tarpit, "sleep", sleep)
    came = here(*(task(f"{i}", {"prompt": STORY, "regex": "a("}) for i in range(4)))
    assert [result["response"]["status_code"] for result in came] == [400] * 4
    assert slept == []


def test_a_bad_batch_line_is_an_error_result_and_other_lines_are_served(tmp_path, monkeypatch):
    monkeypatch.setattr(file_format, "MAX_LINE", 4000)
    deep = b"[" * 3000
    bad = [(deep if isinstance(line, bytes) and len(line) > 9000 else line, *rest) for line, *rest in BAD]
    lines = [b"\xef\xbb\xbf" + written(task("good 1")).strip(), b"", b" \t"]
    for i, (line, _, _) in enumerate(bad, 2):
        lines += [line, task(f"good {i}")]
    batch = answer(App(), written(*lines)[:-1], tmp_path / "out")  # without the last newline
    came = results(tmp_path / "out")
    good = [result for result in came if result["error"] is None]
    assert {result["custom_id"] for result in good} == {f"good {i + 1}" for i in range(len(bad) + 1)}
    errors = sorted((result for result in came if result["error"]), key=lambda result: result["error"]["line"])
    assert [(result["custom_id"], result["error"]["code"]) for result in errors] == [tuple(rest) for _, *rest in bad]
    assert [result["error"]["line"] for result in errors] == [4 + 2 * i for i in range(len(bad))]
    assert all(result["response"] is None and result["error"]["message"] for result in errors)
    assert (batch.num_done, batch.num_failed) == (len(came), len(bad))
    assert batch.summary() == f"{len(good)} answered, {len(bad)} failed"


LINES = st.lists(
    st.one_of(st.sampled_from("abcdef").map(task), st.sampled_from([b"", b"{", b"null", task("a", method="GET")])),
    max_size=8,
)


@given(lines=LINES, cuts=st.lists(st.integers(0, 10_000), max_size=3), concurrency=st.integers(1, 4))
@settings(max_examples=60)
def test_a_batch_output_cut_at_any_byte_is_resumed(tmp_path_factory, lines, cuts, concurrency):
    def content_of(result):
        error, response = result["error"] or {}, result["response"] or {}
        return json.dumps([result["custom_id"], error.get("line"), response.get("body")])

    def num_good(some):
        return sum(result["error"] is None for result in some)

    folder = tmp_path_factory.mktemp("cut")
    text, disturbed = written(*lines), folder / "b"
    answer(App(), text, folder / "a", concurrency=concurrency)
    undisturbed = results(folder / "a")
    answer(App(), text, disturbed, concurrency=concurrency)
    for cut in cuts:
        os.truncate(disturbed, cut % (disturbed.stat().st_size + 1))
        kept = [json.loads(line) for line in disturbed.read_bytes().rpartition(b"\n")[0].splitlines()]
        app = App()
        batch = answer(app, text, disturbed, resume=True, concurrency=concurrency)
        assert results(disturbed)[: len(kept)] == kept
        assert batch.num_skipped == len(kept)
        assert len(app.asked) == num_good(undisturbed) - num_good(kept)
    assert sorted(map(content_of, results(disturbed))) == sorted(map(content_of, undisturbed))


@given(lines=LINES, cuts=st.lists(st.integers(0, 2000), max_size=6), ends=st.booleans())
def test_a_file_in_pieces_has_the_requests_of_the_whole_file(lines, cuts, ends):
    text = b"\xef\xbb\xbf" + written(*lines)
    text = text if ends else text.removesuffix(b"\n")
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    whole, pieces = file_format.TaskReader(), file_format.TaskReader()
    found = [one for start, stop in pairwise(places) for one in pieces.push(text[start:stop])] + pieces.finish()
    assert found == whole.push(text) + whole.finish()
    assert [one.number for one in found] == [
        number for number, line in enumerate(text[3:].split(b"\n"), 1) if line.strip()
    ]


def test_so_many_at_once_and_no_more(tmp_path):
    app = App()
    answer(app, written(*(task(str(i)) for i in range(20))), tmp_path / "out", concurrency=4)
    assert app.most == 4
    assert len(app.asked) == 20


def refusal(status, code=None, **headers):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return status, named, json.dumps({"error": {"message": "not now", "code": code}}).encode()


def test_batch_lines_are_retried_after_429_and_503(tmp_path):
    busy = [refusal(429, retry_after="0"), refusal(503, retry_after="0"), refusal(429, "queue_full", retry_after="0")]
    answer(App(busy * 100), written(task("a")), tmp_path / "out")
    assert [result["response"]["status_code"] for result in results(tmp_path / "out")] == [200]


def test_the_error_of_a_line_quotes_little_of_it():
    for line in (task("a", {}, "x" * 10**6), {**task("a", {}), "x" * 10**6: 1}):
        bad = file_format.parse(1, json.dumps(line).encode())
        assert bad.code == "invalid_line"
        assert len(bad.message) < 1000


@pytest.mark.parametrize("final", [refusal(429, "deadline_unreachable", retry_after="0"), refusal(429), refusal(500)])
def test_a_permanent_error_of_a_batch_line_is_its_result(tmp_path, final):
    app = App([final])
    answer(app, written(task("a")), tmp_path / "out")
    assert [result["response"]["status_code"] for result in results(tmp_path / "out")] == [final[0]]
    assert len(app.asked) == 1


def test_the_end_of_the_engine_is_no_result(tmp_path):
    app = App([(200, {}, b"{}"), refusal(503)])
    with pytest.raises(BatchStopped, match=r"not now.*--resume"):
        answer(app, written(*map(task, "abc")), tmp_path / "out", concurrency=1)
    assert [result["custom_id"] for result in results(tmp_path / "out")] == ["a"]
    answer(App(), written(*map(task, "abc")), tmp_path / "out", resume=True)
    assert sorted(result["custom_id"] for result in results(tmp_path / "out")) == ["a", "b", "c"]


def test_lines_that_wait_take_no_slot_from_other_batches():
    """One batch is refused for ever, with as many lines as there are slots. The other one is answered."""

    class Busy(App):
        async def __call__(self, scope, receive, send):
            self._answers = [refusal(429, retry_after="1")]
            await super().__call__(scope, receive, send)

    class Kept:
        def __init__(self):
            self.found = []

        def has(self, found):
            return False

        async def add(self, found, answer):
            self.found.append(found.custom_id)

    async def tasks():
        for one in file_format.TaskReader().push(written(*map(task, "abcd"))):
            yield one

    async def main():
        slots, kept = asyncio.Semaphore(2), Kept()
        refused = asyncio.ensure_future(send_lines(Busy(), tasks(), Kept(), concurrency=2, slots=slots))
        async with asyncio.timeout(0.9):
            await send_lines(App(), tasks(), kept, concurrency=2, slots=slots)
        refused.cancel()
        return kept.found

    assert sorted(asyncio.run(main())) == list("abcd")


def test_a_server_that_shuts_down_is_not_asked_again_and_what_it_has_is_finished(tmp_path):
    app = App([(200, {}, b"{}"), refusal(503, "draining", retry_after="0"), (200, {}, b"{}")])
    with pytest.raises(BatchStopped, match="not now"):
        answer(app, written(*map(task, "abcdef")), tmp_path / "out", concurrency=3)
    assert sorted(result["custom_id"] for result in results(tmp_path / "out")) == ["a", "c"]
    assert len(app.asked) == 3


def test_a_full_disk_ends_the_batch(tmp_path):
    class Full(ResultFile):
        def write(self, line):
            raise OSError(28, "No space left on device")

    output = Full(tmp_path / "out", resume=False)
    batch = Batch(App(), output, lambda done: None)
    with pytest.raises(OSError, match="No space"):
        asyncio.run(batch.run(io.BytesIO(written(*map(task, "abc"))), 2))
    output.close()


def test_results_are_not_written_over(tmp_path):
    path = tmp_path / "out"
    answer(App(), written(task("a")), path)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="--resume"):
        ResultFile(path, resume=False)
    (tmp_path / "in").write_bytes(written(task("a")))
    with pytest.raises(ConfigError, match="name another file for the results"):
        run_batch(EngineOptions(), tmp_path / "in", tmp_path / "in", **QUIET)
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another batch"):
            ResultFile(path, resume=True)
    path.write_bytes(before + b"notes\n")
    with pytest.raises(ConfigError, match=r"line 2 .* no result"):
        ResultFile(path, resume=True)
    assert path.read_bytes() == before + b"notes\n"
    with pytest.raises(ConfigError, match="cannot be written"):
        ResultFile(tmp_path, resume=False)
    with pytest.raises(ConfigError, match="cannot be read"):
        run_batch(EngineOptions(), tmp_path / "nothing", path, **QUIET)


def test_a_batch_that_is_killed_goes_on(tmp_path, here):
    """SIGKILL during the run, and half a line at the end of the output."""
    lines = [task(str(i), {"prompt": f"{STORY} {i}", "max_tokens": 40, "ignore_eos": True}) for i in range(120)]
    (tmp_path / "in").write_bytes(written(*lines))
    command = ["run-batch", "-i", tmp_path / "in", "-o", tmp_path / "out", "--memory", "256MiB", "--concurrency", "4"]
    process = subprocess.Popen(
        [sys.executable, "-c", "from quire.cli import main; main()", *map(str, command)],
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        out = tmp_path / "out"
        wait_until(lambda: process.poll() is not None or (out.exists() and out.read_bytes().count(b"\n") >= 3))
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = results(tmp_path / "out")
    assert 3 <= len(before) < 120
    with (tmp_path / "out").open("ab") as file:
        file.write(b'{"id": "batch_req_1", "custom_id": "119", "response": {"sta')
    came = here(*lines, resume=True)
    assert came[: len(before)] == before
    assert sorted(int(result["custom_id"]) for result in came) == list(range(120))
    assert {result["response"]["body"]["usage"]["completion_tokens"] for result in came} == {40}


def test_the_command(tmp_path, here, monkeypatch):
    here(task("a"))
    (tmp_path / "in").write_bytes(written(task("a"), task("b", {"prompt": STORY, "model": "mine", **SHORT})))
    args = ["run-batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--served-model-name", "mine"]
    assert isinstance(CliRunner().invoke(cli, args).exception, ConfigError)
    done = CliRunner().invoke(cli, [*args, "--resume"], catch_exceptions=False)
    assert "2 requests: 1 answered, 1 before, 0 failed" in done.output
    help = CliRunner().invoke(cli, ["run-batch", "--help-all"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    assert [field.name for field in fields(EngineOptions) if f"--{field.name.replace('_', '-')} " not in help] == []
