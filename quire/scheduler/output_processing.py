"""Output processing: from a StepResult to the Outputs of its sequences."""

from typing import NamedTuple

import numpy as np

from quire.cache.kv_cache import KVCache
from quire.core.output import Output
from quire.core.step import Logprobs, StepResult
from quire.cost.block_size import BlockUse
from quire.scheduler.beam_search import BeamSearches
from quire.scheduler.constraints import StructuredOutputManager, no_token_error
from quire.scheduler.lifecycle import InFlightStep, SchedulerState
from quire.scheduler.queue_limit import QueueLimit
from quire.scheduler.sequence import Sequence
from quire.scheduler.step_builder import Entry


class ChunkData(NamedTuple):
    """Logprobs, prompt logprobs and pooled state of one chunk, as far as its request asked for them."""

    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    pooled: np.ndarray | None = None


NO_DATA = ChunkData()


class ResultSlices:
    """Slices the logprobs, prompt logprobs and pooled states of a StepResult by chunk, in order."""

    def __init__(self, result: StepResult) -> None:
        self._result = result
        self.has_logprobs = result.logprobs is not None
        self._prompt_offset = self._pooled_offset = 0  # rows of earlier chunks

    def next_chunk(self, entry: Entry, token: int, count: int) -> ChunkData:
        """The data of the next chunk that has any. Its `count` sampled tokens start at index `token` of the result."""
        result, (seq, _, _, _, num_prompt_outputs) = self._result, entry
        logprobs = scored = pooled = None
        if count and result.logprobs is not None and seq.num_logprobs >= 0:
            logprobs = result.logprobs.slice(token, token + count)
        if num_prompt_outputs and seq.is_pooling:
            pooled = None if result.pooled is None else result.pooled[self._pooled_offset]
            self._pooled_offset += 1
        elif num_prompt_outputs:
            if result.prompt_logprobs is not None:
                scored = result.prompt_logprobs.slice(self._prompt_offset, self._prompt_offset + num_prompt_outputs)
            self._prompt_offset += num_prompt_outputs
        return ChunkData(logprobs, scored, pooled)


class OutputProcessor:
    """Applies step results to sequences: tokens, constraints, beam searches, ends."""

    def __init__(
        self,
        cache: KVCache,
        state: SchedulerState,
        searches: BeamSearches,
        structured_outputs: StructuredOutputManager,
        block_use: BlockUse,
        queue_limit: QueueLimit,
    ) -> None:
        self._cache = cache
        self._state = state
        self._searches = searches
        self._structured_outputs = structured_outputs
        self._block_use = block_use
        self._queue_limit = queue_limit

    def process(self, launched: InFlightStep, result: StepResult, now: float) -> list[Output]:
        """Apply the result of a successful step. Returns the outputs."""
        outputs = []
        tokens, counts, extras, at = result.tokens.tolist(), result.counts.tolist(), ResultSlices(result), 0
        self._state.queue.served(launched.entries, counts)
        for entry, count in zip(launched.entries, counts, strict=True):
            seq, _, stop, epoch, num_prompt_outputs = entry
            data = extras.next_chunk(entry, at, count) if num_prompt_outputs or extras.has_logprobs else NO_DATA
            if not seq.finished and seq.epoch == epoch:
                seq.runs_alone = False
                self._mark_written(seq, stop, now)
                if seq.request.beams is not None:
                    outputs += self._process_beam(seq, tokens[at : at + count], data, now)
                elif count or num_prompt_outputs or seq.is_over:
                    output = self._process_chunk(entry, tokens[at : at + count], data, now)
                    if output is not None:
                        outputs.append(output)
            at += count
        return outputs

    def record_length(self, seq: Sequence) -> None:
        """Record the length of a sequence that ends, for block use and length statistics."""
        self._block_use.record_finished(len(seq.tokens))
        self._queue_limit.ended(seq)

    def fail_search(self, seq: Sequence, error: str, now: float) -> list[Output]:
        """End a beam search with an error, because one of its beams failed. Returns one output per result."""
        request = seq.request
        self._searches.drop(request.id)
        self._state.end_all(request.id, "error", now)
        return [Output(request.id, i, seq.id, [], "error", error=error) for i in range(request.params.n)]

    def _mark_written(self, seq: Sequence, num_tokens: int, now: float) -> None:
        """Record that the KV of the first `num_tokens` positions is committed; branch held sequences, trim windows."""
        if seq.row < 0:
            return
        seq.num_written = num_tokens
        if num_tokens >= seq.num_shared > 0:
            self._state.branch_held(seq, now)
        if self._cache.windowed:
            assert seq.table is not None
            self._cache.trim(seq.table, num_tokens)

    def _process_chunk(self, entry: Entry, tokens: list[int], data: ChunkData, now: float) -> Output | None:
        """Append the sampled and forced tokens of a chunk, and end the sequence if it is complete.

        Returns None without anything to output, for example if the sampled token had been forced before.
        """
        seq, _, stop, _, num_prompt_outputs = entry
        if num_prompt_outputs:
            seq.num_reported = min(stop, seq.num_to_report)
        kept, reason, error = seq.append_sampled(tokens) if tokens else (tokens, None, "")
        logprobs, scored, pooled = data
        if logprobs is not None:
            logprobs = logprobs.slice(0, len(kept)) if kept else None
        total = seq.add_logprobs(logprobs) if kept and seq.request.params.is_ranked else None
        forced: list[int] = []
        if seq.constrained and tokens:
            kept, forced, reason, error = self._apply_constraint(seq, kept, reason, error)
        if not (kept or reason or num_prompt_outputs or seq.is_over):
            return None
        if seq.deferred_finish[0] is not None and seq.is_over:
            (reason, error), kept, seq.unreported_tokens = seq.deferred_finish, seq.unreported_tokens, []
            forced = list(range(len(kept)))
        begins = kept and len(kept) == seq.num_generated
        queued = self._state.request_stats.queue_seconds(seq.request.id) if begins else None
        if reason is None and not seq.is_generation and seq.is_over:
            reason = "stop" if seq.is_pooling else "length"
        if reason is not None:
            self.record_length(seq)
            self._state.end(seq, reason, now)
        stop_token = kept[-1] if kept and reason == "stop" and kept[-1] in seq.stop_ids else None
        about = (seq.request.id, seq.index, seq.id, kept, reason, stop_token)
        return Output(*about, logprobs, scored, pooled, seq.num_cached or 0, total, error, queued, forced)

    def _apply_constraint(
        self, seq: Sequence, sampled: list[int], reason: str | None, error: str
    ) -> tuple[list[int], list[int], str | None, str]:
        """Pass sampled tokens to the constraint. Returns (tokens to output, indices of forced ones, reason, error)."""
        if reason == "error":
            error = no_token_error(seq, error)
        behind: list[int] = []
        if sampled and reason in (None, "length"):
            behind, reason, error = self._structured_outputs.advance(seq, sampled)
        before, seq.unreported_tokens = (
            seq.unreported_tokens if sampled or reason else [],
            [] if sampled or reason else seq.unreported_tokens,
        )
        reported = before + sampled + behind
        return reported, [*range(len(before)), *range(len(before) + len(sampled), len(reported))], reason, error

    def _process_beam(self, seq: Sequence, tokens: list[int], data: ChunkData, now: float) -> list[Output]:
        """Pass the candidates of a beam's chunk, if it has any, to its search. Returns outputs if the search ends."""
        if not tokens:
            return []
        if tokens[0] < 0 or data.logprobs is None:
            return self.fail_search(seq, "no token could be sampled: the logits are not finite", now)
        outputs = self._searches.add_candidates(seq, data.logprobs, now)
        if outputs:
            self._state.end_all(seq.request.id, "stop", now)
        return outputs
