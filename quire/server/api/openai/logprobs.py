"""Response formats of logprobs (OpenAI's two and vLLM's) and usage."""

import math
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Raw
from msgspec.structs import replace

from quire.engine.logprob_rows import LogprobRows
from quire.engine.outputs import Delta, Logprob, LogprobRow
from quire.params import SamplingParams
from quire.server.api.openai.schema import StreamOptions
from quire.server.json_pieces import JsonList, json_bytes
from quire.server.reply import OutputTokens, Reply
from quire.tokenizer.tokenizer import Tokenizer

_MIN_LOGPROB = -9999.0  # JSON has no infinity


class LogprobFormat:
    """Formatter of one request's logprobs.

    A token is named by its text. In completions, a token that is part of a character is named by its bytes, such as
    `bytes:\\xf0`, so that names are distinct. as_token_ids: names are `token_id:5` instead.
    """

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer, *, as_token_ids: bool = False) -> None:
        self._top = params.logprobs or 0
        self._logprob_token_ids = params.logprob_token_ids
        self._with_forced = params.has_constraint
        self._tokenizer = tokenizer
        self._as_token_ids = as_token_ids

    def chat(self, rows: Sequence[LogprobRow] | None) -> dict[str, object] | None:
        """Chat format: one object per token, with its bytes, and the most likely tokens or those of logprob_token_ids.

        None if there is no token. The objects of LogprobRows are made as they are written.
        """
        if not rows:
            return None
        content = map(self._chat_token, rows)
        return {"content": JsonList(content) if isinstance(rows, LogprobRows) else list(content), "refusal": None}

    def completion(
        self, tokens: Sequence[int], rows: Sequence[LogprobRow | None], offsets: Iterable[int]
    ) -> dict[str, Iterable[object]]:
        """Completions format: parallel lists. `top_logprobs` always includes the token itself.

        rows: None for a prompt's first token. offsets: in the text, in characters. With a constraint there is a list
        `forced`. Each list is made as it is read, once.
        """

        def own() -> Iterator[Logprob | None]:
            chosen = rows.chosen() if isinstance(rows, LogprobRows) else rows
            return (None if row is None else row[token] for token, row in zip(tokens, chosen, strict=True))

        lists: dict[str, Iterable[object]] = {
            "tokens": map(self._name, tokens),
            "token_logprobs": (None if one is None else finite_logprob(one.logprob) for one in own()),
            "top_logprobs": (None if row is None else self._top_logprobs(row) for row in rows),
            "text_offset": offsets,
        }
        if self._with_forced:
            lists["forced"] = (one is not None and one.forced for one in own())
        return lists

    def _chat_token(self, row: LogprobRow) -> dict[str, object]:
        token, own = next(iter(row.items()))
        top = [self._chat_entry(other, row[other]) for other in self._reported(row)]
        forced = {"forced": True} if own.forced else {}
        return {**self._chat_entry(token, own), "top_logprobs": top, **forced}

    def _reported(self, row: LogprobRow) -> list[int]:
        """The most likely tokens; or with logprob_token_ids these, and the token itself."""
        if self._logprob_token_ids:
            return [token for token in dict.fromkeys([*self._logprob_token_ids, next(iter(row))]) if token in row]
        return sorted(row, key=lambda token: (-row[token].logprob, token))[: self._top]

    def _top_logprobs(self, row: LogprobRow) -> dict[str, float]:
        named: dict[str, float] = {}
        for token in self._reported(row):
            named.setdefault(self._name(token), finite_logprob(row[token].logprob))
        token, own = next(iter(row.items()))
        named[self._name(token)] = finite_logprob(own.logprob)
        return named

    def _name(self, token: int) -> str:
        if self._as_token_ids:
            return f"token_id:{token}"
        text = self._tokenizer.token_text(token)
        if "\ufffd" not in text:
            return text
        data = self._tokenizer.token_bytes(token)
        return text if text.encode() == data else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _chat_entry(self, token: int, logprob: Logprob) -> dict[str, object]:
        return {
            "token": f"token_id:{token}" if self._as_token_ids else logprob.decoded_token,
            "logprob": finite_logprob(logprob.logprob),
            "bytes": list(self._tokenizer.token_bytes(token)),
        }


def prompt_logprobs_json(rows: Sequence[LogprobRow | None]) -> Raw:
    """vLLM's format, as JSON: per prompt token, an object from reported token id to its Logprob."""
    return Raw(json_bytes(JsonList(None if row is None else _finite_row(row) for row in rows)))


def finite_logprob(value: float) -> float:
    """The logprob, or _MIN_LOGPROB if it is not finite."""
    return value if math.isfinite(value) else _MIN_LOGPROB


def _finite_row(row: LogprobRow) -> LogprobRow:
    if all(math.isfinite(logprob.logprob) for logprob in row.values()):
        return row
    return {token: replace(logprob, logprob=finite_logprob(logprob.logprob)) for token, logprob in row.items()}


class UsageFormat:
    """The usage of a stream, by its `stream_options`. `count` every delta before the chunk that has it.

    forced: each chunk has the usage, whatever the options say.
    """

    def __init__(self, options: StreamOptions | None, *, forced: bool) -> None:
        self._wanted = forced or (options is not None and bool(options.include_usage))
        self._always = forced or (self._wanted and options is not None and bool(options.continuous_usage_stats))
        self._sent = OutputTokens()

    def count(self, delta: Delta) -> None:
        """Count a delta's tokens, which the reply may have read together with later ones."""
        self._sent.add(delta)

    def of_chunk(self, reply: Reply) -> dict[str, object]:
        """The usage field of a chunk with choices; empty if usage is not requested."""
        if not self._wanted:
            return {}
        return {"usage": reply.usage(self._sent) if self._always else None}

    def at_end(self, reply: Reply) -> list[dict[str, object]]:
        """The usage of the last chunk, which has no choices; empty if usage is not requested."""
        return [reply.usage()] if self._wanted else []
