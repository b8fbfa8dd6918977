"""CPU time of the front end per streamed token of a chat, with tools and reasoning parsed, by that without.

    python -m benchmarks.chat_parsing [--tokens 400] [--pairs 15] [--json FILE]

The tokens of a message with reasoning, content and a tool call go through the classes that write the events of a
stream, one token in each step. Nothing is computed by a model, and nothing is sent. Without parsing the same tokens are
content. Both run in turns; the ratio is that of the medians, with the least and most of the pairs.
"""

import argparse
import asyncio
import gc
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import cast

from benchmarks.result_file import write_result
from quire.chat.detect import chat_format
from quire.chat.formats import ChatFormat
from quire.chat.output import OutputFormat, output_format
from quire.chat.tools import toolbox
from quire.config import CacheConfig
from quire.core.kv_groups import KVGroup, kv_kind
from quire.core.output import EndCause, Output
from quire.engine.inputs import Generation, TokenizedPrompt
from quire.engine.output_text import RequestOutputProcessor
from quire.fleet.fleet import ReplicaStatus
from quire.hub import embedded
from quire.params import SamplingParams
from quire.server.api.conversation import MessageReader
from quire.server.api.openai.chat import ChatAnswer
from quire.server.api.openai.schema import ChatBody
from quire.server.observability.metrics import Metrics
from quire.server.reply import Reply
from quire.tokenizer.load import open_tokenizer
from quire.tokenizer.tokenizer import Tokenizer

_TOOL = {
    "type": "function",
    "function": {
        "name": "send_note",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}, "text": {"type": "string"}}},
    },
}
_WORDS = "the tall lamp is ready and "


class _Stream:
    """The outputs of one sequence, one token at a time."""

    def __init__(self, request_id: str, tokens: list[int]) -> None:
        self._outputs = [
            Output(request_id, 0, 0, [token], end=EndCause.STOP if i == len(tokens) else None)
            for i, token in enumerate(tokens, 1)
        ]

    async def __anext__(self) -> list[Output]:
        return [self._outputs.pop(0)]

    def __aiter__(self) -> AsyncIterator[list[Output]]:
        return self

    def close(self) -> None:
        """End the stream."""


def message(num_tokens: int, tokenizer: Tokenizer) -> list[int]:
    """About `num_tokens` tokens: a third each is reasoning, content and the arguments of a call."""
    third = _WORDS * max(1, num_tokens // (3 * len(tokenizer.encode(_WORDS, add_special_tokens=False))))
    call = json.dumps({"name": "send_note", "arguments": {"name": "Uma", "text": third}})
    text = f"<think>\n{third}\n</think>\n\n{third}<tool_call>\n{call}\n</tool_call>"
    return tokenizer.encode(text, add_special_tokens=False)


def seconds_per_token(tokens: list[int], tokenizer: Tokenizer, format: OutputFormat, metrics: Metrics) -> float:
    """CPU seconds of one stream by its tokens."""
    params = SamplingParams(max_tokens=len(tokens))
    body = ChatBody(messages=[{"role": "user", "content": "a"}], stream=True)
    prompt = Generation(TokenizedPrompt("a", [1]), params)
    transcript = RequestOutputProcessor("0", prompt, tokenizer, now=time.monotonic())
    reply = Reply([transcript], _Stream("0", tokens), lambda *_: None, metrics)  # type: ignore[arg-type]
    service = SimpleNamespace(model_name="quire", tokenizer=tokenizer, always_reports_usage=False)
    chat = SimpleNamespace(messages=[], params=params)
    answer = ChatAnswer("0", service, body, chat, MessageReader(format))  # type: ignore[arg-type]

    async def drain() -> None:
        async for _ in answer.events(reply):
            pass

    gc.collect()
    start = time.process_time()
    asyncio.run(drain())
    return (time.process_time() - start) / len(tokens)


def main() -> None:
    """Measure, print, and write the JSON file."""
    parser = argparse.ArgumentParser(prog="benchmarks.chat_parsing", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, default=400, help="of one stream")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args()
    tokenizer = open_tokenizer(Path(embedded.folder()))
    no_statuses = cast(Callable[[], list[ReplicaStatus]], lambda: [])
    cache = CacheConfig(16, (KVGroup((0,), kv_kind(1, 16), "bfloat16", 8, 1024),))
    metrics = Metrics("quire", no_statuses, caches=[cache], max_model_len=2048)
    tokens, tools = message(args.tokens, tokenizer), toolbox([_TOOL])
    special = tokenizer.special_texts
    formats = {
        "parsed": output_format(chat_format(tokenizer.tool_template), tools, "", reasons=True, special_texts=special),
        "plain": output_format(ChatFormat(None, None, ""), None, "", reasons=False, special_texts=special),
    }
    pairs = [
        {name: seconds_per_token(tokens, tokenizer, format, metrics) for name, format in formats.items()}
        for _ in range(args.pairs + 1)
    ][1:]
    ratios = [pair["parsed"] / pair["plain"] for pair in pairs]
    result = {
        "tokens": len(tokens),
        **{f"{name}, us per token": round(1e6 * median(pair[name] for pair in pairs), 1) for name in formats},
        "ratio": round(median(ratios), 3),
        "least": round(min(ratios), 3),
        "most": round(max(ratios), 3),
    }
    print(json.dumps(result, indent=2))
    if args.json is not None:
        write_result(args.json, result)


if __name__ == "__main__":
    main()
