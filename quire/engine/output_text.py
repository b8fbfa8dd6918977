"""Output processing of one request: token ids to text, stop strings, logprobs.

The caller passes the time in seconds of a monotonic clock.
"""

from collections.abc import Sequence
from math import inf

from msgspec.structs import replace

from quire.chat.answer_text import AnswerText
from quire.core.output import EndCause, Output
from quire.engine.inputs import Generation
from quire.engine.logprob_rows import LogprobRows, forced_logprob_row, logprob_rows
from quire.engine.outputs import CompletionOutput, Delta, LogprobRow, RequestMetrics, RequestOutput
from quire.engine.repetition import REPETITION_DETECTED, RepetitionDetector
from quire.engine.stop_regex import StopPatterns
from quire.params import SamplingParams
from quire.structured_outputs.fsm.search import PatternSearch
from quire.tokenizer.detokenizer import Detokenizer
from quire.tokenizer.stop_strings import Pattern, StopStrings, compile_stops
from quire.tokenizer.tokenizer import Tokenizer


class SequenceOutputProcessor:
    """Detokenizes one sequence: turns the engine's outputs into Deltas and accumulates them in `result`.

    A token's offset is the number of characters that the tokens before it completed. All tokens of a character that
    spans several tokens have the same offset. Characters of a stop string count, although they are not in the text.
    keeps_logprobs: whether `result` gets the logprobs, too. answer: where stop strings are searched; None: everywhere.
    """

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        patterns: tuple[Pattern, ...],
        stop_regex: Sequence[PatternSearch] = (),
        answer: AnswerText | None = None,
    ) -> None:
        self.result = CompletionOutput(index, "", [])
        self.keeps_logprobs = True
        if params.num_logprobs_needed is not None:
            self.result.cumulative_logprob = 0.0
        self._rows: LogprobRows[LogprobRow] | None = None
        if params.logprobs is not None:
            self.result.logprobs = self._rows = LogprobRows(params.logprobs, tokenizer)
        self._params = params
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(
            tokenizer,
            prompt,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        self._stops = StopStrings(patterns, included=params.include_stop_str_in_output)
        self._stop_patterns = StopPatterns(stop_regex) if stop_regex else None
        self._answer = answer
        detection = params.repetition_detection
        self._repetition = None if detection is None else RepetitionDetector(detection)
        self._ended_here: tuple[EndCause, str] | None = None  # the end that was found here, and the stop reason
        self._texts: list[str] = []
        self._num_characters = 0

    def process_output(self, output: Output) -> Delta:
        """Add an output and return its Delta. The sequence must not have ended."""
        text, offsets = self._detokenize(output)
        tokens = output.token_ids[: len(offsets)]
        logprobs = self._logprobs(output, len(tokens))
        end, stop_reason = self._ended_here or (output.end, self._stop_reason(output))
        result = self.result
        result.end_token = output.stop_token if self._ended_here is None else None
        drafted: list[int] = []
        if output.drafted:
            drafted = [place for place in output.drafted if place < len(tokens)]
            result.drafted += [len(result.token_ids) + place for place in drafted]
        result.token_ids += tokens
        result.token_offsets += offsets
        num_forced = sum(place < len(tokens) for place in output.forced)
        result.num_forced_tokens += num_forced
        accepted, rejected = result.num_predicted_tokens
        result.num_predicted_tokens = accepted + output.predicted[0], rejected + output.predicted[1]
        result.finish_reason, result.stop_reason = None if end is None else end.finish_reason, stop_reason
        self._texts.append(text)
        engine_knows = output.end is not None or end is None  # the engine ended the sequence itself, or it goes on
        return Delta(
            request_id=output.request_id,
            index=output.index,
            seq_id=output.seq_id,
            text=text,
            token_ids=tokens,
            token_offsets=offsets,
            num_forced_tokens=num_forced,
            num_predicted_tokens=output.predicted,
            drafted=drafted,
            logprobs=logprobs,
            end=end,
            stop_reason=stop_reason,
            end_token=result.end_token,
            stopped_after=None if engine_knows else len(result.token_ids),
        )

    def current_output(self) -> CompletionOutput:
        """The result so far."""
        self.result.text = "".join(self._texts)
        return self.result

    def _detokenize(self, output: Output) -> tuple[str, list[int]]:
        """The text of an output, and the offsets of its tokens up to an end that is found here."""
        pieces, offsets = [], []
        check_stop = self._search if self._answer is None else self._search_answer
        for token in output.token_ids:
            offsets.append(self._num_characters)
            is_last = output.end is not None and len(offsets) == len(output.token_ids)
            ends = output.stop_token is not None and is_last
            if not ends or self._params.include_stop_str_in_output:  # by default the text excludes the stop token
                pieces.append(check_stop(self._detokenizer.append_token(token), len(offsets)))
            if self._repetition is not None and self._repetition.append_token(token):
                self._end_repetition(len(offsets), may_end=not is_last)
            if self._ended_here is not None:
                break
        if output.end is not None if self._ended_here is None else self._ended_here[0] is EndCause.REPETITION:
            pieces.append(check_stop(self._detokenizer.flush(), len(offsets)))
            pieces.append(self._stops.flush())
        return "".join(pieces), offsets

    def _search_answer(self, text: str, num_tokens: int) -> str:
        """As `_search`, for text that may have reasoning, in which stop strings are not searched."""
        assert self._answer is not None, "reasoning is apart from the answer"
        found = ""
        for piece, is_answer in self._answer.split(text):
            if self._ended_here is not None:
                break
            if is_answer:
                found += self._search(piece, num_tokens)
            else:
                self._num_characters += len(piece)
                found += self._stops.restart() + piece
                if self._stop_patterns is not None:
                    self._stop_patterns.restart()
        return found

    def _search(self, text: str, num_tokens: int) -> str:
        """Search stop strings. Returns the text that is certain to be output. num_tokens: new ones up to this text."""
        self._num_characters += len(text)
        may_stop, end = self._may_end(num_tokens), None
        if self._stop_patterns is not None:
            end = self._stop_patterns.find_end(text, may_stop=may_stop)
        found = self._stops.append_text(text[:end], may_stop=may_stop)
        if self._stops.matched is not None:
            self._ended_here = EndCause.STOP, self._stops.matched
        elif self._stop_patterns is not None and self._stop_patterns.matched is not None:
            self._ended_here = EndCause.STOP, self._stop_patterns.matched
            found += self._stops.flush()  # the match is part of the text
        return found

    def _end_repetition(self, num_tokens: int, *, may_end: bool) -> None:
        """End the sequence because it repeats itself, unless it ends otherwise at this token."""
        if may_end and self._ended_here is None and self._may_end(num_tokens):
            self._ended_here = EndCause.REPETITION, REPETITION_DETECTED

    def _may_end(self, num_tokens: int) -> bool:
        """Whether the sequence has min_tokens with `num_tokens` new ones."""
        return len(self.result.token_ids) + num_tokens >= self._params.min_tokens

    def _stop_reason(self, output: Output) -> str | int | None:
        if output.finish_reason in ("error", "abort"):
            return output.error
        return output.stop_token if output.stop_token in self._params.stop_token_ids else None

    def _logprobs(self, output: Output, num_tokens: int) -> Sequence[LogprobRow] | None:
        """The requested rows of the first `num_tokens` tokens; None if there are none.

        Appends them to the result, and updates its cumulative logprob.
        """
        result, logprobs = self.result, output.logprobs
        forced = [place for place in output.forced if place < num_tokens]
        num_sampled = num_tokens - len(forced)
        if logprobs is not None and result.cumulative_logprob is not None:
            result.cumulative_logprob = sum(logprobs.values[:num_sampled, 0].tolist(), result.cumulative_logprob)
        if output.cumulative_logprob is not None and num_tokens == len(output.token_ids):
            result.cumulative_logprob = output.cumulative_logprob
        if self._rows is None or (logprobs is None and not forced):
            return None
        sampled = None if logprobs is None else logprobs.slice(0, num_sampled)
        if self.keeps_logprobs:
            kept = LogprobRows[LogprobRow](self._params.logprobs or 0, self._tokenizer)
            kept.append(sampled, [(place, output.token_ids[place]) for place in forced])
            self._rows.extend(kept)
            return kept
        added = [] if sampled is None else logprob_rows(sampled, self._params.logprobs or 0, self._tokenizer)
        for place in forced:  # ascending, so that earlier insertions do not shift later ones
            added.insert(place, forced_logprob_row(output.token_ids[place], self._tokenizer))
        return added


class RequestOutputProcessor:
    """The output of one request: text, tokens and metrics of its `params.num_sequences` sequences.

    prompt_logprobs: None if the request has none; complete when the first output token arrives. num_bytes: that
    the logprobs take so far.
    """

    def __init__(self, request_id: str, generation: Generation, tokenizer: Tokenizer, *, now: float) -> None:
        self.request_id = request_id
        self.generation = generation
        self.prompt = generation.prompt
        self.params = params = generation.params
        self.num_cached_tokens = 0
        self.num_bytes = 0
        self.metrics = RequestMetrics(now)
        num_unreported = min(params.prompt_logprobs_start + 1, len(self.prompt.ids))
        self.prompt_logprobs: LogprobRows[LogprobRow | None] | None = None
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = LogprobRows(params.prompt_logprobs, tokenizer)
            self.prompt_logprobs.append_unreported(num_unreported)
        self._tokenizer = tokenizer
        patterns = compile_stops(params.stop)
        has_stops, new_answer = bool(patterns or generation.stop_regex), generation.new_answer
        self._sequences = [
            SequenceOutputProcessor(
                i,
                params,
                tokenizer,
                self.prompt.ids,
                patterns,
                generation.stop_regex,
                new_answer() if has_stops and new_answer is not None else None,
            )
            for i in range(params.num_sequences)
        ]

    @property
    def finished(self) -> bool:
        """Whether all sequences have ended."""
        return None not in self.finish_reasons

    def process_output(self, output: Output, now: float) -> Delta | None:
        """Add `output` to its sequence and return the Delta.

        Returns None if it adds nothing, or the sequence has ended here (the engine may not have processed the stop
        string yet). If the Delta has `stopped_after`, the caller must call `Engine.finish`.
        """
        self._process_prompt_output(output)
        sequence = self._sequences[output.index]
        new = output.token_ids or output.finish_reason is not None
        if sequence.result.finish_reason is not None or not new:
            return None
        delta = sequence.process_output(output)
        if delta.logprobs is not None and isinstance(delta.logprobs, LogprobRows):  # isinstance of an ABC is slow
            self.num_bytes += delta.logprobs.num_bytes
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
        """Per sequence, also of those that are not returned; None for a sequence that has not ended."""
        return [sequence.result.finish_reason for sequence in self._sequences]

    @property
    def num_output_tokens(self) -> list[int]:
        """Per sequence, also of those that are not returned."""
        return [len(sequence.result.token_ids) for sequence in self._sequences]

    @property
    def num_values(self) -> int:
        """Number of output tokens, and of logprobs of the output and of the prompt, which each choice repeats."""
        rows = [one.result.logprobs for one in self._sequences]
        num_logprobs = sum(one.num_values for one in rows if isinstance(one, LogprobRows))
        num_of_prompt = 0 if self.prompt_logprobs is None else self.prompt_logprobs.num_values
        return sum(self.num_output_tokens) + num_logprobs + self.params.n * num_of_prompt

    def token_offsets(self, index: int) -> list[int]:
        """Per token of a sequence so far: number of characters that the tokens before it completed."""
        return self._sequences[index].result.token_offsets

    def drop_logprobs(self) -> None:
        """From now on, logprobs of output tokens are only in the Deltas, and not in the result."""
        for sequence in self._sequences:
            sequence.keeps_logprobs = False

    def sequence(self, index: int) -> CompletionOutput:
        """The result so far of the sequence with this index in the engine."""
        return self._sequences[index].current_output()

    def result(self) -> RequestOutput:
        """The result so far. If more than n sequences are generated, it has the n best ones, best first."""
        outputs = [sequence.current_output() for sequence in self._sequences]
        if self.params.is_ranked:
            best = sorted(outputs, key=_mean_logprob, reverse=True)[: self.params.n]  # the sort is stable
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

    def _process_prompt_output(self, output: Output) -> None:
        """Take the figures of the prompt from sequence 0, which computes it for all sequences."""
        if output.index == 0:
            self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        if self.prompt_logprobs is not None and output.prompt_logprobs is not None:
            before = self.prompt_logprobs.num_bytes
            self.prompt_logprobs.append(output.prompt_logprobs)
            self.num_bytes += self.prompt_logprobs.num_bytes - before


def _mean_logprob(output: CompletionOutput) -> float:
    """Mean logprob per token; minus infinity for a failed sequence."""
    if output.finish_reason == "error":
        return -inf
    return (output.cumulative_logprob or 0.0) / max(len(output.token_ids), 1)
