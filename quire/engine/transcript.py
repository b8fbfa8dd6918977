"""Transcript: turns what the engine says about one request into text. Knows one request, no engine and no clock."""

import math
from collections.abc import Sequence

from quire.core.output import Output
from quire.core.step import Logprobs
from quire.engine.detokenizer import Detokenizer
from quire.engine.outputs import CompletionOutput, Delta, Logprob, RequestMetrics, RequestOutput
from quire.engine.stops import Pattern, StopStrings, compile_stops
from quire.engine.tokenizer import Tokenizer
from quire.params import SamplingParams


class Transcript:
    """The sequences of one request while they grow."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
        *,
        now: float,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.num_cached_tokens = 0
        self.metrics = RequestMetrics(now)
        patterns = compile_stops(params.stop)
        self._sequences = [_Sequence(index, params, tokenizer, prompt_token_ids, patterns) for index in range(params.n)]

    @property
    def finished(self) -> bool:
        """Whether all sequences have ended."""
        return all(sequence.result.finish_reason is not None for sequence in self._sequences)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all sequences so far."""
        return sum(len(sequence.result.token_ids) for sequence in self._sequences)

    def add(self, output: Output, now: float) -> Delta | None:
        """What `output` adds; None for a sequence that has ended, which the engine may not know yet.

        Where the Delta has `stopped_after`, the caller tells the engine.
        """
        sequence = self._sequences[output.index]
        if sequence.result.finish_reason is not None:
            return None
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        delta = sequence.add(output)
        if output.token_ids:
            if self.metrics.first_token_time is None:
                self.metrics.first_token_time = now
            self.metrics.last_token_time = now
        if self.finished:
            self.metrics.finished_time = now
        return delta

    def result(self) -> RequestOutput:
        """Everything so far."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[sequence.collected() for sequence in self._sequences],
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.metrics,
        )


class _Sequence:
    def __init__(
        self,
        index: int,
        params: SamplingParams,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        patterns: tuple[Pattern, ...],
    ) -> None:
        logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.result = CompletionOutput(index, "", [], None if logprobs is None else 0.0, logprobs)
        self._params = params
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._stops = StopStrings(patterns)
        self._texts: list[str] = []

    def add(self, output: Output) -> Delta:
        text, num_tokens = self._read(output)
        tokens = output.token_ids[:num_tokens]
        logprobs = self._logprobs(output.logprobs, num_tokens)
        reason, cause = output.finish_reason, self._cause(output)
        if self._stops.matched is not None:
            reason, cause = "stop", self._stops.matched
        result = self.result
        result.token_ids += tokens
        result.finish_reason, result.stop_reason = reason, cause
        self._texts.append(text)
        told = output.finish_reason is not None or reason is None  # the engine knows already
        stopped_after = None if told else len(result.token_ids)
        return Delta(
            output.request_id, output.index, output.seq_id, text, tokens, logprobs, reason, cause, stopped_after
        )

    def collected(self) -> CompletionOutput:
        self.result.text = "".join(self._texts)
        return self.result

    def _read(self, output: Output) -> tuple[str, int]:
        """The text of an output, and how many of its tokens there are up to a stop string."""
        pieces = []
        for num_tokens, token in enumerate(output.token_ids, 1):
            if output.stop_token is None or num_tokens < len(output.token_ids):  # a stop token is not text
                pieces.append(self._pass(self._detokenizer.add(token), num_tokens))
            if self._stops.matched is not None:
                return "".join(pieces), num_tokens
        if output.finish_reason is not None:
            pieces.append(self._pass(self._detokenizer.close(), len(output.token_ids)))
            pieces.append(self._stops.close())
        return "".join(pieces), len(output.token_ids)

    def _pass(self, text: str, num_tokens: int) -> str:
        enough = len(self.result.token_ids) + num_tokens >= self._params.min_tokens
        return self._stops.add(text, may_stop=enough)

    def _cause(self, output: Output) -> str | int | None:
        if output.finish_reason == "error":
            return output.error
        return output.stop_token if output.stop_token in self._params.stop_token_ids else None

    def _logprobs(self, logprobs: Logprobs | None, num_tokens: int) -> list[dict[int, Logprob]] | None:
        if self.result.logprobs is None or logprobs is None:
            return None
        rows = zip(logprobs.ids.tolist(), logprobs.values.tolist(), logprobs.ranks.tolist(), strict=True)
        added = [self._row(*row) for row in list(rows)[:num_tokens]]
        self.result.logprobs += added
        sampled = (next(iter(row.values())).logprob for row in added)
        self.result.cumulative_logprob = sum(sampled, self.result.cumulative_logprob or 0.0)
        return added

    def _row(self, ids: list[int], values: list[float], rank: int) -> dict[int, Logprob]:
        text = self._tokenizer.token_text
        row = {ids[0]: Logprob(values[0], rank, text(ids[0]))}
        for place, (token, value) in enumerate(zip(ids[1:], values[1:], strict=True), 1):
            if value != -math.inf and token not in row:  # -inf pads
                row[token] = Logprob(value, place, text(token))
        return row
