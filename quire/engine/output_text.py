"""Transcript: turns what the engine says about one request into text. Knows one request, no engine and no clock."""

from collections.abc import Sequence
from math import inf

from msgspec.structs import replace

from quire.core.output import Output
from quire.core.step import Logprobs
from quire.engine.inputs import Generation
from quire.engine.outputs import CompletionOutput, Delta, Logprob, LogprobRow, RequestMetrics, RequestOutput
from quire.params import SamplingParams
from quire.tokenizer.detokenizer import Detokenizer
from quire.tokenizer.stop_strings import Pattern, StopStrings, compile_stops
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


class SequenceText:
    """Makes Deltas of the engine's outputs, and adds them up in `result`.

    A token's offset is the number of characters that the tokens before it completed: the later bytes of a
    character have the offset of the first. Characters of a stop string count, though they are not in the text.
    """

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        patterns: tuple[Pattern, ...],
    ) -> None:
        self.result = CompletionOutput(index, "", [])
        if params.num_logprobs_needed is not None:
            self.result.cumulative_logprob = 0.0
        if params.logprobs is not None:
            self.result.logprobs = []
        self._params = params
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(
            tokenizer,
            prompt,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        self._stops = StopStrings(patterns, included=params.include_stop_str_in_output)
        self._texts: list[str] = []
        self._num_characters = 0

    def add(self, output: Output) -> Delta:
        """What an output adds; nothing may be added once the sequence has ended."""
        text, offsets = self._read(output)
        tokens = output.token_ids[: len(offsets)]
        logprobs = self._logprobs(output, len(tokens))
        reason, cause = output.finish_reason, self._cause(output)
        if self._stops.matched is not None:
            reason, cause = "stop", self._stops.matched
        result = self.result
        result.end_token = output.stop_token if self._stops.matched is None else None
        result.token_ids += tokens
        result.token_offsets += offsets
        result.num_forced_tokens += sum(place < len(tokens) for place in output.forced)
        result.finish_reason, result.stop_reason = reason, cause
        self._texts.append(text)
        told = output.finish_reason is not None or reason is None  # the engine knows already
        return Delta(
            request_id=output.request_id,
            index=output.index,
            seq_id=output.seq_id,
            text=text,
            token_ids=tokens,
            token_offsets=offsets,
            logprobs=logprobs,
            finish_reason=reason,
            stop_reason=cause,
            stopped_after=None if told else len(result.token_ids),
        )

    def collected(self) -> CompletionOutput:
        """Everything so far."""
        self.result.text = "".join(self._texts)
        return self.result

    def _read(self, output: Output) -> tuple[str, list[int]]:
        """The text of an output, and the offsets of its tokens up to a stop string."""
        pieces, offsets = [], []
        for token in output.token_ids:
            offsets.append(self._num_characters)
            ends = output.stop_token is not None and len(offsets) == len(output.token_ids)
            if not ends or self._params.include_stop_str_in_output:  # a stop token is not text otherwise
                pieces.append(self._pass(self._detokenizer.add(token), len(offsets)))
            if self._stops.matched is not None:
                return "".join(pieces), offsets
        if output.finish_reason is not None:
            pieces.append(self._pass(self._detokenizer.close(), len(offsets)))
            pieces.append(self._stops.close())
        return "".join(pieces), offsets

    def _pass(self, text: str, num_tokens: int) -> str:
        self._num_characters += len(text)
        enough = len(self.result.token_ids) + num_tokens >= self._params.min_tokens
        return self._stops.add(text, may_stop=enough)

    def _cause(self, output: Output) -> str | int | None:
        if output.finish_reason in ("error", "abort"):
            return output.error
        return output.stop_token if output.stop_token in self._params.stop_token_ids else None

    def _logprobs(self, output: Output, num_tokens: int) -> list[LogprobRow] | None:
        """The rows that were asked for; what they, or the engine, say of the whole sequence goes to its result."""
        result, logprobs = self.result, output.logprobs
        forced = [place for place in output.forced if place < num_tokens]
        num_sampled = num_tokens - len(forced)
        if logprobs is not None and result.cumulative_logprob is not None:
            result.cumulative_logprob = sum(logprobs.values[:num_sampled, 0].tolist(), result.cumulative_logprob)
        if output.cumulative_logprob is not None and num_tokens == len(output.token_ids):
            result.cumulative_logprob = output.cumulative_logprob
        if result.logprobs is None or (logprobs is None and not forced):
            return None
        added: list[LogprobRow] = []
        if logprobs is not None:
            added = read_rows(logprobs.slice(0, num_sampled), self._params.logprobs or 0, self._tokenizer)
        for place in forced:  # in order, so that each is put behind those before it
            added.insert(place, forced_row(output.token_ids[place], self._tokenizer))
        result.logprobs += added
        return added


class Transcript:
    """The sequences of one request while they grow: `params.num_sequences` of them.

    prompt_logprobs: None where nobody asks; it is complete when the first token comes.
    """

    def __init__(self, request_id: str, generation: Generation, tokenizer: Tokenizer, *, now: float) -> None:
        self.request_id = request_id
        self.generation = generation
        self.prompt = generation.prompt
        self.params = params = generation.params
        self.num_cached_tokens = 0
        self.metrics = RequestMetrics(now)
        num_untold = min(params.prompt_logprobs_start + 1, len(self.prompt.ids))
        asked = params.prompt_logprobs is not None
        self.prompt_logprobs: list[LogprobRow | None] | None = [None] * num_untold if asked else None
        self._tokenizer = tokenizer
        patterns = compile_stops(params.stop)
        self._sequences = [
            SequenceText(i, params, tokenizer, self.prompt.ids, patterns) for i in range(params.num_sequences)
        ]

    @property
    def finished(self) -> bool:
        """Whether all sequences have ended."""
        return None not in self.finish_reasons

    def add(self, output: Output, now: float) -> Delta | None:
        """What `output` adds to its sequence; None for nothing, as for one that has ended, which the engine
        may not know yet.

        Where the Delta has `stopped_after`, the caller tells the engine.
        """
        self._read_prompt(output)
        sequence = self._sequences[output.index]
        new = output.token_ids or output.finish_reason is not None
        if sequence.result.finish_reason is not None or not new:
            return None
        delta = sequence.add(output)
        if output.token_ids:
            if self.metrics.first_token_time is None:
                self.metrics.first_token_time = now
                self.metrics.queue_seconds = output.queue_seconds
            self.metrics.last_token_time = now
        if self.finished:
            self.metrics.finished_time = now
        return delta

    @property
    def finish_reasons(self) -> list[str | None]:
        """Of all sequences, also those that are not returned; None for one that has not ended."""
        return [sequence.result.finish_reason for sequence in self._sequences]

    @property
    def num_output_tokens(self) -> list[int]:
        """Of all sequences, also those that are not returned."""
        return [len(sequence.result.token_ids) for sequence in self._sequences]

    def sequence(self, index: int) -> CompletionOutput:
        """Everything so far of one sequence, by the engine's index."""
        return self._sequences[index].collected()

    def result(self) -> RequestOutput:
        """Everything so far. Where there are more than n sequences: of the n best ones, best first."""
        outputs = [sequence.collected() for sequence in self._sequences]
        if self.params.is_ranked:
            best = sorted(outputs, key=_mean_logprob, reverse=True)[: self.params.n]  # of equals the first
            outputs = [replace(output, index=i) for i, output in enumerate(best)]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.ids,
            outputs=outputs,
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.metrics,
            prompt_logprobs=self.prompt_logprobs,
        )

    def _read_prompt(self, output: Output) -> None:
        """What is said about the prompt comes with the first sequence; the others share what it computed."""
        if output.index == 0:
            self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        if self.prompt_logprobs is not None and output.prompt_logprobs is not None:
            self.prompt_logprobs += read_rows(output.prompt_logprobs, self.params.prompt_logprobs or 0, self._tokenizer)


def _mean_logprob(output: CompletionOutput) -> float:
    """Per token; what failed comes last."""
    if output.finish_reason == "error":
        return -inf
    return (output.cumulative_logprob or 0.0) / max(len(output.token_ids), 1)
