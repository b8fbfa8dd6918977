"""What all chat dialects share: the switches of reasoning, and the count of its tokens in linear time."""

import asyncio
from types import SimpleNamespace
from weakref import WeakSet

from quire.chat.output import OutputFormat
from quire.server.api import conversation
from quire.server.api.conversation import MessageReader, num_calls, reasoning_variables
from tools.chat_transcripts import chat_format

ON, OFF = ({"enable_thinking": value, "thinking": value} for value in (True, False))


def test_an_effort_is_a_switch_as_well_unless_the_switch_is_given():
    assert reasoning_variables(None) == {}
    assert reasoning_variables("none") == {**OFF, "reasoning_effort": "none"}
    assert reasoning_variables("minimal") == {**ON, "reasoning_effort": "minimal"}
    assert reasoning_variables("high", enabled=False) == {**OFF, "reasoning_effort": "high"}
    assert reasoning_variables(None, enabled=True) == ON


def test_calls_of_a_conversation_are_counted():
    call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [{"role": "user"}, {"role": "assistant", "tool_calls": [call, call]}, {"role": "tool", "content": ""}]
    assert num_calls([*messages, {"role": "assistant", "tool_calls": None}, *messages]) == 4


class Row:
    """The logprobs of a token."""

    def __init__(self, text):
        self.text = text


class Reply:
    """A reply whose tokens are characters. rows: those that exist."""

    num_reasoning_tokens = None

    def __init__(self, pieces):
        self._pieces = pieces
        self._offsets = []
        self.rows = WeakSet()
        self.transcripts = [SimpleNamespace(token_offsets=lambda _index: self._offsets)]

    async def deltas(self):
        for place, text in enumerate(self._pieces, 1):
            first = len(self._offsets)
            self._offsets += range(first, first + len(text))
            offsets = self._offsets[first:]
            reason = "stop" if place == len(self._pieces) else None
            rows = [*map(Row, text)]
            self.rows.update(rows)
            about = {"text": text, "finish_reason": reason, "token_ids": [], "token_offsets": offsets}
            yield [SimpleNamespace(index=0, logprobs=rows, **about)]


async def num_searches(pieces, monkeypatch):
    """Number of searches for tokens, and of tokens of reasoning that are counted."""
    searched = []
    search = conversation.bisect_left
    monkeypatch.setattr(conversation, "bisect_left", lambda *given: (searched.append(1), search(*given))[1])
    format = OutputFormat(chat_format(None, "qwen3"), None, None, begun=False, may_reason=True)
    reply = Reply(pieces)
    async for _ in MessageReader(format).deltas(reply):
        pass
    monkeypatch.undo()
    return len(searched), reply.num_reasoning_tokens


def test_many_pieces_of_reasoning_are_counted_once_each(monkeypatch):
    piece = "<think>ab</think>"
    for number in (1, 200):
        searched, counted = asyncio.run(num_searches([*piece * number], monkeypatch))
        assert counted == len(piece) * number
        assert searched <= 2 * len(piece) * number + 2 * number


async def content_logprobs(reply):
    """The texts of tokens of content, and the largest number of rows that existed behind a step."""
    format = OutputFormat(chat_format(None, "qwen3"), None, None, begun=False, may_reason=True)
    reader, found, most = MessageReader(format), "", 0
    async for messages in reader.deltas(reply):
        for message in messages:
            found += "".join(row.text for row in reader.content_logprobs(message))
        most = max(most, len(reply.rows))
    return found, most


def test_logprobs_of_reasoning_are_not_kept_until_it_ends():
    text = f"<think>{'a' * 500}</think>bc"
    for pieces in ([*text], [text[place : place + 3] for place in range(0, len(text), 3)]):
        found, most = asyncio.run(content_logprobs(Reply(pieces)))
        assert found == "bc"
        assert most < 30
