"""Logprobs in OpenAI's two formats. Knows no routes."""

import math
from collections.abc import Sequence

from quire.engine.outputs import Logprob
from quire.engine.tokenizer import Tokenizer

_LEAST = -9999.0  # JSON has no infinity

Row = dict[int, Logprob]  # the sampled token first


def chat_logprobs(rows: Sequence[Row] | None, top: int, tokenizer: Tokenizer) -> dict[str, object] | None:
    """For chat: one object per token, with its bytes and the `top` most likely ones."""
    if rows is None:
        return None
    content = []
    for row in rows:
        entries = [_chat_entry(token, logprob, tokenizer) for token, logprob in row.items()]
        content.append(
            {**entries[0], "top_logprobs": [_chat_entry(*pair, tokenizer) for pair in _most_likely(row, top)]}
        )
    return {"content": content, "refusal": None}


def completion_logprobs(rows: Sequence[Row] | None, top: int, offset: int) -> tuple[dict[str, object] | None, int]:
    """For completions: parallel lists, in which the sampled token is always among the most likely ones.

    `offset` is where the first token begins in the text, in characters; with the lists comes that of the next.
    """
    if rows is None:
        return None, offset
    sampled = [next(iter(row.values())) for row in rows]
    offsets = []
    for logprob in sampled:
        offsets.append(offset)
        offset += len(logprob.decoded_token)
    best = [
        {each.decoded_token: _finite(each.logprob) for each in (*(pair[1] for pair in _most_likely(row, top)), own)}
        for row, own in zip(rows, sampled, strict=True)
    ]
    lists: dict[str, object] = {
        "tokens": [logprob.decoded_token for logprob in sampled],
        "token_logprobs": [_finite(logprob.logprob) for logprob in sampled],
        "top_logprobs": best,
        "text_offset": offsets,
    }
    return lists, offset


def _most_likely(row: Row, top: int) -> list[tuple[int, Logprob]]:
    return sorted(row.items(), key=lambda pair: (-pair[1].logprob, pair[0]))[:top]


def _chat_entry(token: int, logprob: Logprob, tokenizer: Tokenizer) -> dict[str, object]:
    return {
        "token": logprob.decoded_token,
        "logprob": _finite(logprob.logprob),
        "bytes": list(tokenizer.token_bytes(token)),
    }


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _LEAST
