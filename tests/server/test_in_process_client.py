"""Answers to the lines of a batch, which are kept in memory until they are stored."""

import asyncio
import json

import pytest

from quire.server.batch import in_process_client
from quire.server.batch.in_process_client import post
from quire.server.json_pieces import PieceReader
from quire.server.sse import PiecewiseResponse

MOST = 1000


def answered(num_pieces, monkeypatch):
    """The response to a body in pieces of 100 bytes, the number of pieces that were made, and whether it was closed."""
    monkeypatch.setattr(in_process_client, "MAX_ANSWER", MOST)
    made, closed = [], []

    def make():
        for i in range(num_pieces):
            made.append(i)
            yield b"x" * 100

    async def on_thread(work):
        return work()

    async def app(scope, receive, send):
        pieces = PieceReader(make, on_thread)
        await pieces.begin()
        await PiecewiseResponse(pieces, lambda: closed.append(True))(scope, receive, send)

    return asyncio.run(post(app, "/v1/completions", b"{}")), len(made), closed


def test_an_answer_within_the_bound_is_whole(monkeypatch):
    answer, _, closed = answered(MOST // 100, monkeypatch)
    assert (answer.status, answer.body, closed) == (200, b"x" * MOST, [True])


@pytest.mark.parametrize("num_pieces", [11, 10_000])
def test_an_answer_beyond_the_bound_is_an_error_and_its_work_ends(num_pieces, monkeypatch):
    answer, num_made, closed = answered(num_pieces, monkeypatch)
    error = json.loads(answer.body)["error"]
    assert (answer.status, error["code"], closed) == (400, "answer_too_long", [True])
    assert "lower n, max_tokens, logprobs or prompts" in error["message"]
    assert num_made <= 11
