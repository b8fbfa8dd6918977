"""SequenceText: one sequence while it grows: text, stop strings, logprobs. Knows tokens and their text, no request."""

from collections.abc import Sequence

from quire.core.output import Output
from quire.engine.logprobs import forced_row, read_rows
from quire.engine.outputs import CompletionOutput, Delta, LogprobRow
from quire.params import SamplingParams
from quire.tokenizer.detokenizer import Detokenizer
from quire.tokenizer.stop_strings import Pattern, StopStrings
from quire.tokenizer.tokenizer import Tokenizer


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
