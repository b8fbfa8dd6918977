"""/monitor over a real server: who sees what, how often, and that nothing is left behind."""

import json
import re
import socket
import threading
import time
from contextlib import ExitStack, contextmanager
from itertools import pairwise

import httpx
from embedded_model_server import run_app, service_of, small_engine
from multi_tenant_server import refused, run_site
from viewer_state import ViewerState
from waiting import wait_until

from quire.server.api_keys import Keys, new_key
from quire.server.app import make_app
from quire.server.middleware import http_protocol
from quire.server.middleware.drain import Drain
from quire.server.viewers import MOST_PER_TENANT, MOST_VIEWERS
from quire.supervisor import engine_loop

SECRETS = {
    "ann": "Mira mended the yellow kite before the harbour feast",
    "bob": "Otto counted seven copper kettles behind the old mill",
}


@contextmanager
def watching(site, who, **query):
    """The updates of a viewer, decoded; its raw bytes are in the list that comes with them."""
    raw = []
    headers = {} if who is None else {"authorization": f"Bearer {site.keys[who]}"}
    with httpx.stream("GET", f"{site.url}/monitor", params=query, headers=headers, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")

        def updates():
            for line in answer.iter_lines():
                raw.append(line)
                if line:
                    yield json.loads(line.removeprefix("data: "))

        yield updates(), raw


def complete(site, who, text, *, request_id=None, **more):
    headers = {
        "authorization": f"Bearer {site.keys[who]}",
        **({} if request_id is None else {"x-request-id": request_id}),
    }
    body = {"prompt": text, "max_tokens": 40, "temperature": 0, "ignore_eos": True, **more}
    return httpx.post(f"{site.url}/v1/completions", json=body, headers=headers, timeout=60).json()


def test_a_request_is_seen_from_its_arrival_to_its_cached_blocks(site):
    site.ask("root", "POST", "/flush_cache")
    state = ViewerState()
    with watching(site, "root") as (updates, _):
        state.apply(next(updates))
        assert state.last["full"] and state.last["sees"] == "all"
        asking = threading.Thread(target=complete, args=(site, "ann", SECRETS["ann"]), kwargs={"max_tokens": 300})
        asking.start()
        owners, rows = set(), {}
        for update in updates:
            assert not update["full"]
            state.apply(update)
            owners |= set(state.blocks[0])
            rows |= {row["seq"]: row for row in update["requests"]}
            if rows and not update["requests"]:
                break
        asking.join()
    (row,) = rows.values()
    assert (row["tenant"], row["mine"], row["state"]) == ("ann", False, "running")
    assert {"F", "U:1", "C"} <= owners
    steps = state.whole["steps"]
    assert sum(step[5] + step[7] for step in steps) > 200, "decoded tokens and accepted drafts"
    assert all(step[3] > 0 for step in steps[:-2])
    roots = [node for node in state.nodes.values() if node[1] == -1]
    assert "ann" in {node[9] for node in roots}


def test_no_byte_of_another_tenant_reaches_a_viewer():
    """While both tenants work, everything that ann can ask for is searched for what is bob's."""
    with run_site("ann", "bob", "root") as site, ExitStack() as stack:
        seen, ended = [], threading.Event()

        def look():
            with watching(site, "ann") as (updates, lines):
                seen.append(lines)
                for _ in updates:
                    if ended.is_set():
                        break

        viewer = threading.Thread(target=look)
        viewer.start()
        stack.callback(ended.set)
        answers = {}
        num_rounds = 0
        while num_rounds < 3 or not seen or (len(seen[0]) <= 10 and num_rounds < 100):
            round_, num_rounds = num_rounds, num_rounds + 1
            for who in ("bob", "ann"):
                more = {"request_id": f"{who}-asks-{round_}"}
                answers[who, round_] = complete(site, who, f"{SECRETS[who]} {round_}", **more)
                answers[who, "salt"] = complete(site, who, SECRETS[who], cache_salt=f"salt of {who}")
        ended.set()
        complete(site, "bob", "the last one")
        viewer.join(60)
        (raw,) = seen
        details = {number: site.ask("ann", "GET", f"/monitor/nodes/{number}") for number in range(1, 60)}
        shown = "\n".join([*raw, *(answer.text for answer in details.values())])
        assert {answer.status_code for answer in details.values()} == {200, 404}
        assert len(raw) > 10 and SECRETS["ann"].split()[3] in shown
        texts = {who: [SECRETS[who]] for who in SECRETS}
        for (who, _), answer in answers.items():
            texts[who].append(answer["choices"][0]["text"])
        words = {who: set(re.findall(r"\w{4,}", " ".join(some))) for who, some in texts.items()}
        tokens = {who: site.post(who, "/tokenize", prompt=SECRETS[who]).json()["tokens"] for who in SECRETS}
        foreign = {"bob", "bob-asks", "salt of bob", *(words["bob"] - words["ann"])}
        foreign |= {answers["bob", i]["id"] for i in range(3)}
        assert len(foreign) > 10
        assert not [word for word in foreign if re.search(rf"\b{re.escape(word)}\b", shown)]
        joined = ",".join(map(str, tokens["bob"][3:7]))
        assert joined not in shown.replace(" ", "")
        assert ",".join(map(str, tokens["ann"][3:7])) in shown.replace(" ", ""), "the search finds what is there"
        everything = "\n".join(site.ask("root", "GET", f"/monitor/nodes/{number}").text for number in range(1, 60))
        assert joined in everything.replace(" ", "") and SECRETS["bob"].split()[3] in everything
        updates = [json.loads(line.removeprefix("data: ")) for line in raw if line]
        for update in updates:
            assert update["sees"] == "own" and all(row["mine"] for row in update["requests"])
            assert all(step[2] is None and step[3] is None for step in update["steps"])
        assert updates[-1]["totals"]["finished"] <= 2 * num_rounds


def test_the_monitor_needs_a_key_and_refuses_bad_parameters(site):
    refused(site.ask(None, "GET", "/monitor"), 401, "invalid_api_key")
    refused(site.ask(None, "GET", "/monitor/nodes/1"), 401, "invalid_api_key")
    refused(site.ask("ann", "GET", "/monitor/nodes/999999"), 404, "not_found")
    for value in ("0.01", "61", "x"):
        assert refused(site.ask("ann", "GET", f"/monitor?interval={value}"), 400, "invalid_value")["param"]
    assert site.ask("ann", "GET", "/monitor/nodes/-1").status_code == 400


def test_without_keys_every_caller_of_this_machine_sees_all(keyless):
    with watching(keyless, None) as (updates, _):
        assert next(updates)["sees"] == "all"
    away = httpx.get(f"{keyless.url}/monitor", headers={"host": "rebound.example"})
    refused(away, 403, "host_not_allowed")


def test_updates_come_at_the_interval_of_the_viewer(site):
    for interval in (0.1, 0.3):
        begun = time.monotonic()
        with watching(site, "root", interval=interval) as (updates, _):
            for _ in range(3):
                next(updates)
            assert time.monotonic() - begun >= 2 * interval


def test_updates_take_one_percent_of_the_engine(monkeypatch):
    """Several viewers together, however slow an update is."""
    with run_site("ann", "bob", "root") as site:
        seconds, moments = 0.002, []
        update = site.engine._engine.monitor_update

        def slow(*args):
            moments.append(time.monotonic())
            end = time.thread_time() + seconds
            while time.thread_time() < end:
                pass
            return update(*args)

        monkeypatch.setattr(site.engine, "monitor_update", slow, raising=False)
        with ExitStack() as stack:
            views = [stack.enter_context(watching(site, who))[0] for who in ("ann", "bob", "root")]
            threads = [threading.Thread(target=lambda view=view: [next(view) for _ in range(2)]) for view in views]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
        gaps = [after - before for before, after in pairwise(moments)]
        assert len(gaps) >= 5 and min(gaps) >= 100 * seconds


def test_no_more_viewers_than_allowed_and_a_place_is_free_again(monkeypatch):
    monkeypatch.setattr(engine_loop, "_PAUSE_PER_MONITOR_CALL", 0)
    names = [*(f"t{i}" for i in range(4)), "root"]
    with run_site(*names) as site, ExitStack() as stack:
        views = []
        for name in ("t0", "t1", "t2", "root"):  # the places of tenants, and those that are kept for admins
            if name == "root":
                answer = site.ask("t3", "GET", "/monitor")
                assert answer.status_code == 429 and f"{MOST_VIEWERS - 4} pages" in answer.json()["error"]["message"]
            for _ in range(MOST_PER_TENANT):
                views.append(stack.enter_context(watching(site, name))[0])
                next(views[-1])
            answer = site.ask(name, "GET", "/monitor")
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_viewers")
            assert "close one" in answer.json()["error"]["message"]
        stack.close()
        wait_until(lambda: site.engine._engine._monitor is None)
        with watching(site, "t3") as (updates, _):
            assert next(updates)["full"]


def test_nothing_is_computed_when_the_last_viewer_has_left(site):
    engine = site.engine._engine
    with watching(site, "root") as (updates, _):
        next(updates)
        assert engine._monitor is not None and engine.scheduler.step_log is not None
    wait_until(lambda: engine._monitor is None)
    assert engine.scheduler.step_log is None
    complete(site, "ann", "Hello")
    assert engine._monitor is None


def test_a_viewer_that_does_not_read_is_disconnected(monkeypatch):
    monkeypatch.setattr(http_protocol, "WRITE_SECONDS", 1.0)
    built = small_engine()
    row = "x" * 2**16
    monkeypatch.setattr(built.engine, "monitor_update", lambda *args: json.dumps(row).encode())
    looks = []
    forget = built.engine.forget_viewer
    monkeypatch.setattr(built.engine, "forget_viewer", lambda viewer: looks.append(viewer) or forget(viewer))
    with run_app(make_app(service_of(built)), send_buffer=2**14) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((host, int(port)))
            client.sendall(f"GET /monitor HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
            wait_until(lambda: looks)


def test_a_drain_ends_the_stream():
    drain = Drain()
    built = small_engine()
    with (
        run_app(make_app(service_of(built), drain=drain)) as url,
        httpx.stream("GET", f"{url}/monitor?interval=60", timeout=60) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        drain.begin()  # without it the next line comes after 60 s, behind the time limit of the client
        assert [line for line in lines if line] == [], "it ends without an error"


def test_a_monitor_call_counts_as_a_request_of_the_key():
    key, entry = new_key("ann", "user", requests_per_minute=1)
    keys = Keys([entry])
    with run_app(make_app(service_of(small_engine()), keys)) as url:
        headers = {"authorization": f"Bearer {key}"}
        assert httpx.get(f"{url}/monitor/nodes/1", headers=headers).status_code == 404
        assert httpx.get(f"{url}/monitor/nodes/1", headers=headers).status_code == 429
        assert httpx.get(f"{url}/monitor", headers=headers).status_code == 429


def test_an_error_of_the_engine_ends_the_stream_with_an_error_object(monkeypatch):
    built = small_engine()

    def broken(*_args):
        raise ValueError("a bug")

    with run_app(make_app(service_of(built))) as url:
        with httpx.stream("GET", f"{url}/monitor", timeout=60) as answer:
            lines = (line for line in answer.iter_lines() if line)
            assert json.loads(next(lines).removeprefix("data: "))["full"]
            monkeypatch.setattr(built.engine, "monitor_update", broken)
            *_, line = lines
        assert json.loads(line.removeprefix("data: "))["error"]["type"] == "server_error"
        assert "a bug" not in line
        answer = httpx.get(f"{url}/monitor", timeout=60)
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
        wait_until(lambda: built.engine._monitor is None)
