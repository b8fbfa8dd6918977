"""Response format of SGLang's logprobs: [logprob, token, text or null].

Each event of a stream has all entries so far, so each entry is encoded once and kept.
"""

from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import NamedTuple

from msgspec import Raw
from msgspec.json import encode

from quire.engine.logprob_rows import LogprobRows
from quire.engine.output_text import RequestOutputProcessor
from quire.engine.outputs import CompletionOutput, LogprobRow
from quire.server.api.openai.logprobs import finite_logprob
from quire.server.json_pieces import JsonList, json_bytes
from quire.tokenizer.tokenizer import Tokenizer

Entry = tuple[float | None, int, str | None]


class Report(NamedTuple):
    """The requested logprobs of one prompt and its outputs."""

    rid: str
    logprobs: bool
    start: int  # first prompt token that is reported; -1: none
    num_top: int
    token_ids: Sequence[int]


class EntryFormat:
    """Formatter of one request's entries. with_text: whether they have the text of the token."""

    def __init__(self, tokenizer: Tokenizer, *, with_text: bool) -> None:
        self._tokenizer = tokenizer
        self._with_text = with_text

    def of_prompt(self, report: Report, transcript: RequestOutputProcessor) -> dict[str, Raw]:
        """The fields of meta_info for a computed prompt.

        The first entry has no logprob, for any `start`: SGLang computes logprobs from there on.
        """
        start = len(transcript.prompt.ids) if report.start < 0 else report.start
        tokens = transcript.prompt.ids[start:]
        rows = transcript.prompt_logprobs

        def reported(all_rows: Iterable[LogprobRow | None]) -> Iterable[LogprobRow | None]:
            return islice(chain((None,), islice(all_rows, start + 1, None)), len(tokens))

        fields = self._fields("input", report, tokens, reported(rows.chosen() if rows else ()), reported(rows or ()))
        return {name: Raw(json_bytes(JsonList(entries))) for name, entries in fields.items()}

    def of_output(
        self, report: Report, tokens: Sequence[int], rows: Sequence[LogprobRow]
    ) -> dict[str, Iterable[object]]:
        """The fields of meta_info for output tokens. Entries are made as they are read, once."""
        chosen = rows.chosen() if isinstance(rows, LogprobRows) else rows
        fields = self._fields("output", report, tokens, chosen, rows)
        if report.token_ids:  # the engine reports them for output tokens only
            fields["output_token_ids_logprobs"] = (self._selected(row, report.token_ids) for row in rows)
        return fields

    def _fields(
        self,
        kind: str,
        report: Report,
        tokens: Sequence[int],
        chosen: Iterable[LogprobRow | None],
        rows: Iterable[LogprobRow | None],
    ) -> dict[str, Iterable[object]]:
        """chosen: the rows, with the token itself at least."""
        pairs = zip(tokens, chosen, strict=True)
        fields: dict[str, Iterable[object]] = {
            f"{kind}_token_logprobs": (self._entry(token, row) for token, row in pairs)
        }
        if report.num_top:
            fields[f"{kind}_top_logprobs"] = (self._top(row, report.num_top) for row in rows)
        return fields

    def _top(self, row: LogprobRow | None, count: int) -> list[Entry] | None:
        if row is None:
            return None
        likely = sorted(row, key=lambda token: (-row[token].logprob, token))
        return [self._entry(token, row) for token in islice(likely, count)]

    def _selected(self, row: LogprobRow, tokens: Sequence[int]) -> list[Entry]:
        return [self._entry(token, row) for token in tokens if token in row]  # the row of a forced token has no others

    def _entry(self, token: int, row: LogprobRow | None) -> Entry:
        text = self._tokenizer.token_text(token) if self._with_text else None
        return (None if row is None else finite_logprob(row[token].logprob), token, text)


class OutputEntries:
    """The encoded entries of one sequence during generation."""

    def __init__(self, entries: EntryFormat, report: Report) -> None:
        self._entries = entries
        self._report = report
        self._num_tokens = 0
        self._written: dict[str, list[Raw]] = {}

    def upto(self, output: CompletionOutput) -> dict[str, list[Raw]]:
        """The fields of meta_info for the whole output so far."""
        rows = (output.logprobs or [])[self._num_tokens :]
        more = self._entries.of_output(self._report, output.token_ids[self._num_tokens :], rows)
        self._num_tokens += len(rows)
        for name, entries in more.items():
            self._written.setdefault(name, []).extend(Raw(encode(entry)) for entry in entries)
        return self._written
