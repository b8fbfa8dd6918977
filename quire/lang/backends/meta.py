"""SGLang's meta_info of a variable, from the outputs of the engine."""

from collections.abc import Sequence
from typing import Any

from quire.engine.output_text import RequestOutputProcessor
from quire.engine.outputs import LogprobRow
from quire.lang.params import GenParams
from quire.lang.select import TokenLogprob
from quire.tokenizer.tokenizer import Tokenizer


def meta_info(
    transcript: RequestOutputProcessor, index: int, params: GenParams, tokenizer: Tokenizer
) -> dict[str, Any]:
    """The meta info of one sequence so far."""
    output = transcript.sequence(index)
    meta: dict[str, Any] = {
        "id": transcript.request_id,
        "finish_reason": output.finish_info,
        "prompt_tokens": len(transcript.prompt.ids),
        "completion_tokens": len(output.token_ids),
        "cached_tokens": transcript.num_cached_tokens,
        "token_offsets": list(output.token_offsets),
    }
    if params.constraint is not None:
        meta["forced_tokens"] = output.num_forced_tokens
    if params.return_logprob:
        meta |= _logprobs("output", output.token_ids, output.logprobs or [], params, tokenizer)
    if params.returns_prompt_logprobs:
        start = max(params.logprob_start_len or 0, 0)
        rows = (transcript.prompt_logprobs or [])[start:]
        meta |= _logprobs("input", transcript.prompt.ids[start : start + len(rows)], rows, params, tokenizer)
    return meta


def token_logprobs(
    tokens: Sequence[int], rows: Sequence[LogprobRow | None], tokenizer: Tokenizer
) -> list[TokenLogprob]:
    """(logprob, token id, text) of each token; the logprob is None where the row is None."""
    pairs = zip(tokens, rows, strict=True)
    return [(None if row is None else row[token].logprob, token, tokenizer.token_text(token)) for token, row in pairs]


def _logprobs(
    kind: str,
    tokens: Sequence[int],
    rows: Sequence[LogprobRow | None],
    params: GenParams,
    tokenizer: Tokenizer,
) -> dict[str, object]:
    entries = token_logprobs(tokens[: len(rows)], rows, tokenizer)
    meta: dict[str, object] = {f"{kind}_token_logprobs": [_shown(entry, params) for entry in entries]}
    if params.top_logprobs_num:
        meta[f"{kind}_top_logprobs"] = [_top(row, params, tokenizer) for row in rows]
    return meta


def _top(row: LogprobRow | None, params: GenParams, tokenizer: Tokenizer) -> list[TokenLogprob] | None:
    if row is None:
        return None
    likely = sorted(row, key=lambda token: (-row[token].logprob, token))[: params.top_logprobs_num]
    return [_shown((row[token].logprob, token, tokenizer.token_text(token)), params) for token in likely]


def _shown(entry: TokenLogprob, params: GenParams) -> TokenLogprob:
    return entry if params.return_text_in_logprobs else (entry[0], entry[1], None)
