"""Openings: what a completion tells about its prompt, with the beginning of each choice. Knows OpenAI's format.

A prompt may have many choices and many rows of logprobs: they are written once.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec import Raw
from msgspec.json import encode

from quire.engine.output_text import Transcript
from quire.server.api.openai.echo import Echo
from quire.server.api.openai.logprobs import LogprobFormat, plain_rows
from quire.server.api.openai.schema import CompletionBody


class Opening(NamedTuple):
    """One prompt's part of its choices.

    text: the echo. lists: what the choice's `logprobs` begin with; None for nothing. fields: others of the choice.
    """

    text: str
    lists: Mapping[str, Sequence[object]] | None
    fields: Mapping[str, object]


class Openings:
    """Those of one request. echoes: of each prompt, where they are wanted."""

    def __init__(self, body: CompletionBody, logprobs: LogprobFormat, echoes: Sequence[Echo] | None) -> None:
        self._with_ids = bool(body.return_token_ids)
        self._with_rows = body.prompt_logprobs is not None
        self._with_lists = body.logprobs is not None
        self._logprobs = logprobs
        self._echoes = echoes
        self._written: dict[int, Opening] = {}
        self.wanted = bool(echoes) or self._with_ids or self._with_rows

    def num_characters(self, place: int) -> int:
        """Of the text that comes before the output of this prompt."""
        return len(self._echoes[place].text) if self._echoes else 0

    def of(self, place: int, transcript: Transcript) -> Opening:
        """That of a prompt which is computed."""
        if place not in self._written:
            self._written[place] = self._write(place, transcript)
        return self._written[place]

    def _write(self, place: int, transcript: Transcript) -> Opening:
        rows, ids = transcript.prompt_logprobs, transcript.prompt.ids
        lists, fields = None, {}
        if self._echoes and self._with_lists and rows is not None:
            lists = self._logprobs.completion(ids, rows, self._echoes[place].offsets)
            lists["top_logprobs"] = [Raw(encode(row)) for row in lists["top_logprobs"]]
        if self._with_rows and rows is not None:
            fields["prompt_logprobs"] = plain_rows(rows)
        if self._with_ids:
            fields["prompt_token_ids"] = Raw(encode(ids))
        return Opening(self._echoes[place].text if self._echoes else "", lists, fields)
