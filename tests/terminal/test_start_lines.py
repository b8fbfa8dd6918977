"""The lines that `quire serve` prints while it starts."""

import sys

import pytest

from quire.terminal import start_lines
from quire.terminal.start_lines import StartLines, wrapped

ALWAYS = [
    "Qwen3ForCausalLM from /models/demo, bfloat16 on cpu",
    "chat       conversations with the template 'default' are refused: line 1",
    "kernels    reference (plain torch): the fastest that runs on cpu; not cpu: its extension is missing; 1 threads",
    "KV pool    458.11 MiB  23455 blocks x 16 tokens x 1280 B",
    "max_model_len 2048: the model's own context",
    "ready: quire-demo on http://127.0.0.1:8123 (page at http://127.0.0.1:8123/)",
    "try: curl http://127.0.0.1:8123/v1/chat/completions",
    "04:56:15   1 running, 0 waiting",
]
DETAILS = [
    "policy     fcfs: no API keys tell tenants apart",
    "model      quire's own decoder",
    "chat       tool calls: hermes, because the chat template has '<tool_call>'",
    "kernels    cpu (avx512_bf16 build): the fastest that runs on cpu; 1 threads",
    "weights      6.32 MiB  3.31 M parameters, bfloat16",
    "workspace   47.56 MiB  2048 tokens a step",
    "23455 blocks of 16 = 375280 tokens: 183 sequences of 2048 tokens",
    "prefixes   radix index, exact to the token",
    "costs      prompts 21.3 us a token",
    "tpot       target 50 ms between tokens",
]


@pytest.mark.parametrize("verbose", [False, True])
def test_the_start_has_few_lines_and_all_problems(verbose):
    shown = []
    report = StartLines(shown.append, verbose=verbose)
    for line in (*ALWAYS, *DETAILS):
        report(line)
    assert shown == ([*ALWAYS, *DETAILS] if verbose else ALWAYS)


@pytest.mark.parametrize("width", [20, 30, 80, 200])
def test_a_long_line_is_broken_at_words(monkeypatch, width):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(start_lines, "get_terminal_size", lambda: type("Size", (), {"columns": width}))
    for line in (*ALWAYS, *DETAILS):
        pieces = wrapped(line).split("\n")
        assert " ".join(line.split()) == " ".join(wrapped(line).split())
        assert all(len(piece) <= width or " " not in piece.strip() for piece in pieces)


def test_a_pipe_gets_whole_lines(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert wrapped(DETAILS[2]) == DETAILS[2]
