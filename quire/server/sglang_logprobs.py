"""Logprobs as SGLang writes them: [logprob, token, text or null]. Knows no routes."""

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from quire.engine.outputs import CompletionOutput, LogprobRow
from quire.engine.text.tokenizer import Tokenizer
from quire.engine.transcript import Transcript
from quire.server.logprobs import finite

Entry = tuple[float | None, int, str | None]


class Report(NamedTuple):
    """What is to be told about one prompt and its outputs."""

    rid: str
    logprobs: bool
    start: int  # first token of the prompt whose logprob is told; -1 tells none
    num_top: int
    token_ids: Sequence[int]


class EntryFormat:
    """How one request wants its entries written. with_text: with the text of each token by itself."""

    def __init__(self, tokenizer: Tokenizer, *, with_text: bool) -> None:
        self._tokenizer = tokenizer
        self._with_text = with_text

    def lists(self, report: Report, transcript: Transcript, output: CompletionOutput) -> dict[str, object]:
        """The fields of meta_info.

        The first entry of the prompt has no logprob, wherever it starts: SGLang computes from there on.
        """
        start = len(transcript.prompt.ids) if report.start < 0 else report.start
        tokens = transcript.prompt.ids[start:]
        rows = [None, *(transcript.prompt_logprobs or [])[start + 1 :]][: len(tokens)]
        known = output.logprobs or []
        fields = {
            **self._fields("input", report, tokens, rows),
            **self._fields("output", report, output.token_ids, known),
        }
        if report.token_ids:  # the engine reports them beside the output only
            fields["output_token_ids_logprobs"] = [self._those(row, report.token_ids) for row in known]
        return fields

    def _fields(
        self, kind: str, report: Report, tokens: Sequence[int], rows: Sequence[LogprobRow | None]
    ) -> dict[str, object]:
        pairs = zip(tokens, rows, strict=True)
        fields: dict[str, object] = {f"{kind}_token_logprobs": [self._entry(token, row) for token, row in pairs]}
        if report.num_top:
            fields[f"{kind}_top_logprobs"] = [self._top(row, report.num_top) for row in rows]
        return fields

    def _top(self, row: LogprobRow | None, count: int) -> list[Entry] | None:
        if row is None:
            return None
        likely = sorted(row, key=lambda token: (-row[token].logprob, token))
        return [self._entry(token, row) for token in islice(likely, count)]

    def _those(self, row: LogprobRow, tokens: Sequence[int]) -> list[Entry]:
        return [self._entry(token, row) for token in tokens]

    def _entry(self, token: int, row: LogprobRow | None) -> Entry:
        text = self._tokenizer.token_text(token) if self._with_text else None
        return (None if row is None else finite(row[token].logprob), token, text)
