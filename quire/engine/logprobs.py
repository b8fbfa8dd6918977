"""Rows of logprobs, with the text of each token, from the engine's arrays. Knows no sequence and no format."""

from quire.core.step import Logprobs
from quire.engine.outputs import Logprob, LogprobRow
from quire.tokenizer.tokenizer import Tokenizer


def read_rows(logprobs: Logprobs, num_most_likely: int, tokenizer: Tokenizer) -> list[LogprobRow]:
    """One row per token. num_most_likely: how many columns behind the token itself are the most likely ones."""
    columns = zip(logprobs.ids.tolist(), logprobs.values.tolist(), logprobs.ranks.tolist(), strict=True)
    return [_row(ids, values, rank, num_most_likely, tokenizer) for ids, values, rank in columns]


def forced_row(token: int, tokenizer: Tokenizer) -> LogprobRow:
    """Of a token that a constraint left no choice about."""
    return {token: Logprob(0.0, 1, tokenizer.token_text(token), forced=True)}


def _row(ids: list[int], values: list[float], rank: int, num_most_likely: int, tokenizer: Tokenizer) -> LogprobRow:
    row = {ids[0]: Logprob(values[0], rank, tokenizer.token_text(ids[0]))}
    for place, (token, value) in enumerate(zip(ids[1:], values[1:], strict=True), 1):
        if token >= 0 and token not in row:  # what is negative pads
            row[token] = Logprob(value, place if place <= num_most_likely else None, tokenizer.token_text(token))
    return row
