"""Transcript: turns what the engine says about one request into text. Knows one request, no engine and no clock."""

from math import inf

from msgspec.structs import replace

from quire.core.output import Output
from quire.engine.generations import Generation
from quire.engine.logprobs import read_rows
from quire.engine.outputs import CompletionOutput, Delta, LogprobRow, RequestMetrics, RequestOutput
from quire.engine.sequence_text import SequenceText
from quire.tokenizer.stop_strings import compile_stops
from quire.tokenizer.tokenizer import Tokenizer


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
