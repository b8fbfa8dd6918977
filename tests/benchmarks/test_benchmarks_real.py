"""benchmarks.real with short texts: which figures the parts report. Without the model they are skipped."""

import asyncio
import json

import pytest
from real_model import model_file

from benchmarks.real import __main__, chats, drafts, forced, schemes, servers


def test_schemes_report_exactness_and_speed():
    model_file()
    exact, stored = schemes.schemes((schemes.EXACT, "stored:int8"), 256, rounds=1)
    assert (exact["GPL-3: over exact"], exact["GPL-3: KL"]) == (1, 0)
    assert 0 < stored["Python's reference: KL"] < 0.5
    assert stored["weights MB"] < exact["weights MB"] / 4
    assert stored["decode 8 tok/s"] > 0


def test_larger_groups_of_x_are_less_exact():
    model_file()
    cases = (schemes.EXACT, "int8:auto", "int8:auto@32", "int8:auto@65536")
    _, usual, small, row = schemes.schemes(cases, 256, rounds=0)
    assert small["GPL-3: KL"] < usual["GPL-3: KL"] < row["GPL-3: KL"]


def test_an_expanded_checkpoint_can_be_rounded_to_fp8():
    model_file()
    (row,) = schemes.schemes(("fp8:auto",), 32, rounds=0)
    assert row["GPL-3: perplexity"] > 1


def test_drafts_change_no_token(monkeypatch):
    model_file()
    tasks = drafts.tasks
    monkeypatch.setattr(drafts, "tasks", lambda tokenizer: {"list": tasks(tokenizer)["list"][:1]})
    rows = drafts.drafts(rounds=1, most_tokens=12)
    assert [row["task"] for row in rows] == ["list, 0", "list, 0.8"]
    assert all(row["same tokens"] for row in rows)


def test_records_and_chats_report_forced_and_found_tokens():
    model_file()
    by_way = {row["way"]: row for row in forced.forced(rounds=1, count=4)}
    assert by_way["fast-forward"]["forced"] > 0
    assert by_way["fast-forward"]["steps"] < by_way["token by token"]["steps"]
    by_cache = {row["cache"]: row for row in chats.chats(num_turns=2)}
    assert by_cache["no cache"]["all turns, %"] == 0
    assert by_cache["radix, all fit"]["turn 2, %"] > 50


def test_peers_need_an_interpreter(capsys):
    with pytest.raises(SystemExit):
        __main__.main(["--only", "peers"])
    assert "--llama-cpp PYTHON" in capsys.readouterr().err


def test_a_stream_is_read_to_its_end():
    events = [
        {"choices": [{"text": "One "}]},
        {"choices": [{"delta": {"content": "day"}}]},
        {"choices": [], "usage": {"completion_tokens": 7}},
    ]
    body = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + body)
        writer.close()

    async def run():
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await servers.stream(f"http://127.0.0.1:{port}", "/v1/completions", {"prompt": "x"})

    found = asyncio.run(run())
    assert (found.text, found.num_tokens) == ("One day", 7)
    assert 0 < found.first <= found.seconds
