"""Every format of a trace is read, and a broken line is named."""

import json
from dataclasses import replace
from math import inf

import pytest

from quire.errors import ConfigError
from quire.planner import traces
from quire.planner.simulation import Simulation
from quire.planner.traces import DEFAULT_OUTPUT, PAUSE, approximate_tokens, read_trace
from quire.planner.workloads import context_lengths, make_workload, num_requests, tokens_of, with_arrivals
from tests.planner.test_simulation import setup_of


def read(tmp_path, *lines, name="trace.jsonl"):
    path = tmp_path / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return read_trace(path)


def test_a_conversation_is_a_session_whose_turns_continue_each_other(tmp_path):
    text = {"human": "a" * 40, "gpt": "b" * 80}
    talk = [{"from": who, "value": text[who]} for who in ("gpt", "human", "gpt", "human", "gpt", "human")]
    (session,) = read(tmp_path, [{"id": "1", "conversations": talk}, {"id": "2", "conversations": talk[:1]}])
    assert context_lengths(session) == [(10, 20), (40, 20)]
    assert session.turns[1].pause == PAUSE
    assert session.turns[0].output == tuple(approximate_tokens("b" * 80))


def test_custom_data_sets_of_vllm_and_sglang(tmp_path):
    first, second, third, fourth = read(
        tmp_path,
        {"prompt": "x" * 20, "output_tokens": 7},
        {"prompt": [1, 2, 3], "output_len": 9},
        {"prompt": "x" * 20},
        {"conversations": [{"content": "q" * 8}, {"content": "w" * 12}]},
    )
    lengths = [context_lengths(one)[0] for one in (first, second, third, fourth)]
    assert lengths == [(5, 7), (3, 9), (5, DEFAULT_OUTPUT), (2, 3)]


def test_detailed_results_of_benchmarks(tmp_path):
    result = {"input_lens": [10, 20, 30], "output_lens": [1, 2, 0], "ttfts": [0.1, 0.2, 0.0]}
    sessions = read(tmp_path, result, result)
    assert [context_lengths(one)[0] for one in sessions] == [(10, 1), (20, 2)] * 2
    assert num_requests(read(tmp_path, json.dumps(result, indent=1), name="result.json")) == 2


def test_mooncake_blocks_with_one_hash_are_one_prefix(tmp_path):
    first, second = read(
        tmp_path,
        {"timestamp": 3000, "input_length": 1300, "output_length": 5, "hash_ids": [46, 47, 48]},
        {"timestamp": 5000, "input_length": 1600, "output_length": 6, "hash_ids": [46, 47, 49]},
    )
    assert (first.at, second.at) == (0.0, 2.0)
    prompts = [[token for part in one.turns[0].new for token in tokens_of(part, 9999)] for one in (first, second)]
    assert list(map(len, prompts)) == [1300, 1600]
    assert prompts[0][:1024] == prompts[1][:1024]
    assert prompts[0][1024:1300] != prompts[1][1024:1300]


def test_openai_logs_and_batches(tmp_path):
    messages = [{"role": "user", "content": [{"type": "text", "text": "hello there"}]}]
    sessions = read(
        tmp_path,
        {
            "timestamp": "2026-01-01T00:00:05+00:00",
            "request": {"model": "m", "messages": messages, "max_tokens": 99},
            "response": {
                "choices": [{"message": {"content": "fine, and you?"}}],
                "usage": {"prompt_tokens": 9, "completion_tokens": 4},
            },
        },
        {"custom_id": "1", "body": {"messages": messages, "max_tokens": 12}},
        {"time": "2026-01-01T00:00:07+00:00", "prompt_tokens": 50, "completion_tokens": 6, "tenant": "a"},
        {"time": "2026-01-01T00:00:08+00:00", "prompt_tokens": None, "completion_tokens": None, "route": "/health"},
    )
    logged, counted, batched = sorted(sessions, key=lambda one: one.turns[0].num_output)
    assert [context_lengths(one)[0][1] for one in (logged, counted, batched)] == [4, 6, 12]
    assert logged.turns[0].output == tuple(approximate_tokens("fine, and you?"))
    assert counted.tenant == "a"
    assert counted.at - logged.at == 2.0


def test_a_journal_has_the_requests_and_the_outputs_of_its_engine(tmp_path):
    path = tmp_path / "journal"
    workload = with_arrivals(make_workload("sharegpt", 20, max_model_len=512), rate=30.0)
    with path.open("wb") as file:
        result = Simulation(setup_of(), journals=[file]).run(workload)
    sessions = read_trace(path)
    assert [context_lengths(one)[0] for one in sessions] == [
        (one.num_prompt, one.num_output) for one in result.requests
    ]
    again = Simulation(setup_of()).run(sessions)
    assert max(one.latency for one in again.requests) < inf
    assert again.num_step_tokens == pytest.approx(result.num_step_tokens, rel=0.02)


@pytest.mark.parametrize("sampled", [{"num_samples": 4}, {"beam_width": 4}])
def test_samples_of_a_request_in_a_journal_are_samples_of_the_trace(tmp_path, sampled):
    path = tmp_path / "journal"
    workload = with_arrivals(make_workload("sharegpt", 12, max_model_len=512), rate=30.0)
    with path.open("wb") as file:
        result = Simulation(replace(setup_of(), **sampled), journals=[file]).run(workload)
    sessions = read_trace(path)
    assert [one.turns[0].num_samples for one in sessions] == [4] * 12
    again = Simulation(setup_of()).run(sessions)
    assert [one.num_output for one in again.requests] == [one.num_output for one in result.requests]
    assert {one.num_sequences for one in again.requests} == {4}
    twice = Simulation(replace(setup_of(), num_samples=2)).run(sessions)
    assert {one.num_sequences for one in twice.requests} == {2}


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (['{"prompt": "x"}', '{"prompt": '], "line 2: not valid JSON"),
        (['{"prompt": "x"}', "[1]"], "line 2: expected an object"),
        (['{"prompt": "x", "output_tokens": -3}'], "line 1: a request with prompt .* -3 is not a whole number"),
        (['{"prompt": "x", "output_tokens": 0}'], "a number of tokens is 0"),
        (['{"prompt": "x"}', '{"text": 1}'], "line 2: unknown format with the fields text; known: .*input_lens"),
        (['[{"conversations": 3}]'], "entry 1: a request with conversations"),
        (['{"timestamp": "x", "input_length": 5, "output_length": 3}'], "'x' is not a number"),
        (["not json at all"], "neither JSON nor a journal"),
        (["[]"], "has no requests"),
        (['{"request": {"model": "m"}}'], "it has neither messages nor prompt nor input"),
    ],
)
def test_a_broken_trace_is_refused_with_its_line(tmp_path, lines, error):
    with pytest.raises(ConfigError, match=error):
        read(tmp_path, *lines)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none")


def test_a_trace_file_may_have_multi_line_objects_and_a_byte_order_mark(tmp_path):
    result = {"input_lens": [10], "output_lens": [1]}
    (session,) = read(tmp_path, "\ufeff\n" + json.dumps(result, indent=1), name="result.json")
    assert context_lengths(session) == [(10, 1)]
    with pytest.raises(ConfigError, match=r"line 1: not valid JSON.*in its line 3"):
        read(tmp_path, '{\n "input_lens": [10],\n "output_lens": ]}')
    with pytest.raises(ConfigError, match=r"not valid JSON.*in its line 2"):
        read(tmp_path, '[{"prompt": "x"},\n{"prompt" "y"}]')


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ('{"input_length": 1000000000000, "output_length": 3}', "more than the 16777216"),
        ('{"prompt": "x", "output_tokens": 1' + "0" * 400 + "}", "line 1"),
        ('{"timestamp": 1' + "0" * 400 + ', "input_length": 5, "output_length": 3}', "line 1"),
        ('{"time": "0001-01-01", "prompt_tokens": 5, "completion_tokens": 3}', "out of range"),
        ('{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}", "line 1: not valid JSON"),
        ('{"request": {"messages": [{"content": "x"}]}}', "no field 'role'"),
        ('{"request": 3}', "line 1: a request with request"),
    ],
)
def test_hostile_lines_are_refused_and_not_expanded(tmp_path, line, error):
    with pytest.raises(ConfigError, match=error):
        read(tmp_path, line)


def test_reading_stops_after_the_requests_that_are_wanted(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"prompt": "x"}\n' * 3 + "broken")
    assert len(read_trace(path, most=3)) == 3
    with pytest.raises(ConfigError, match="line 4"):
        read_trace(path)


def test_a_file_beyond_the_limit_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(traces, "MAX_BYTES", 10)
    with pytest.raises(ConfigError, match="at most 10 B are read; split it"):
        read(tmp_path, {"prompt": "x" * 20})
