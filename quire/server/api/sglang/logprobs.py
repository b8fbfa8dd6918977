"""Logprobs as SGLang writes them: [logprob, token, text or null]. Knows no routes.

Every event of a stream has them all, so each is written once.
"""

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from msgspec import Raw
from msgspec.json import encode

from quire.engine.output_text import Transcript
from quire.engine.outputs import CompletionOutput, LogprobRow
from quire.server.api.openai.logprobs import finite
from quire.tokenizer.tokenizer import Tokenizer

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

    def of_prompt(self, report: Report, transcript: Transcript) -> dict[str, Raw]:
        """The fields of meta_info about the prompt, once it is computed.

        The first entry of the prompt has no logprob, wherever it starts: SGLang computes from there on.
        """
        start = len(transcript.prompt.ids) if report.start < 0 else report.start
        tokens = transcript.prompt.ids[start:]
        rows = [None, *(transcript.prompt_logprobs or [])[start + 1 :]][: len(tokens)]
        return {name: Raw(encode(entries)) for name, entries in self._fields("input", report, tokens, rows).items()}

    def of_output(
        self, report: Report, tokens: Sequence[int], rows: Sequence[LogprobRow]
    ) -> dict[str, Sequence[object]]:
        """The fields of meta_info about tokens of the output."""
        fields = self._fields("output", report, tokens, rows)
        if report.token_ids:  # the engine reports them beside the output only
            fields["output_token_ids_logprobs"] = [self._those(row, report.token_ids) for row in rows]
        return fields

    def _fields(
        self, kind: str, report: Report, tokens: Sequence[int], rows: Sequence[LogprobRow | None]
    ) -> dict[str, Sequence[object]]:
        pairs = zip(tokens, rows, strict=True)
        fields: dict[str, Sequence[object]] = {
            f"{kind}_token_logprobs": [self._entry(token, row) for token, row in pairs]
        }
        if report.num_top:
            fields[f"{kind}_top_logprobs"] = [self._top(row, report.num_top) for row in rows]
        return fields

    def _top(self, row: LogprobRow | None, count: int) -> list[Entry] | None:
        if row is None:
            return None
        likely = sorted(row, key=lambda token: (-row[token].logprob, token))
        return [self._entry(token, row) for token in islice(likely, count)]

    def _those(self, row: LogprobRow, tokens: Sequence[int]) -> list[Entry]:
        return [self._entry(token, row) for token in tokens if token in row]  # a forced one has no others beside it

    def _entry(self, token: int, row: LogprobRow | None) -> Entry:
        text = self._tokenizer.token_text(token) if self._with_text else None
        return (None if row is None else finite(row[token].logprob), token, text)


class OutputEntries:
    """Those of one sequence while it grows."""

    def __init__(self, entries: EntryFormat, report: Report) -> None:
        self._entries = entries
        self._report = report
        self._num_tokens = 0
        self._written: dict[str, list[Raw]] = {}

    def upto(self, output: CompletionOutput) -> dict[str, list[Raw]]:
        """The fields of meta_info about everything that the sequence has by now."""
        rows = (output.logprobs or [])[self._num_tokens :]
        more = self._entries.of_output(self._report, output.token_ids[self._num_tokens :], rows)
        self._num_tokens += len(rows)
        for name, entries in more.items():
            self._written.setdefault(name, []).extend(Raw(encode(entry)) for entry in entries)
        return self._written
