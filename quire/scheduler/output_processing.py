"""Output processing: from a StepResult to the Outputs of its sequences."""

from typing import NamedTuple

import numpy as np

from quire.cache.manager import KVCacheManager
from quire.core.common_prefix import common_prefix_len
from quire.core.output import NOTHING_PREDICTED, EndCause, Output
from quire.core.step import Logprobs, StepResult
from quire.scheduler.beam_sequences import BeamSequences
from quire.scheduler.constraints import StructuredOutputManager
from quire.scheduler.lifecycle import InFlightStep, SchedulerState
from quire.scheduler.queue_limit import QueueLimit
from quire.scheduler.sequence import Sequence
from quire.scheduler.speculation import Speculator
from quire.scheduler.step_builder import ScheduledChunk
from quire.scheduler.step_log import StepLog
from quire.speculation.drafters import Proposal


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

    def next_chunk(self, chunk: ScheduledChunk, token: int, count: int) -> ChunkData:
        """The data of the next chunk that has any. Its `count` sampled tokens start at index `token` of the result."""
        result, seq, num_prompt_outputs = self._result, chunk.seq, chunk.num_prompt_outputs
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


def _num_kept(scheduled: list[ScheduledChunk], counts: np.ndarray, tokens: list[int]) -> list[int]:
    """How many tokens each chunk yields: its accepted drafts, and the token sampled behind them.

    A draft is accepted if all before it are, and it equals the token sampled at its position or is forced.
    """
    kept: list[int] = np.minimum(counts, 1).tolist()
    drafted = np.flatnonzero(counts > 1)
    begins = counts.cumsum()[drafted] - counts[drafted]
    for i, begin in zip(drafted.tolist(), begins.tolist(), strict=True):
        proposal = scheduled[i].proposal
        assert proposal is not None, "it has several tokens"
        sampled = tokens[begin : begin + len(proposal.tokens)]
        kept[i] += _num_right(proposal, sampled) if proposal.forced else common_prefix_len(proposal.tokens, sampled)
    return kept


def _num_right(proposal: Proposal, sampled: list[int]) -> int:
    """How many leading drafts equal the tokens sampled at their positions, or are forced."""
    pairs = enumerate(zip(proposal.tokens, sampled, strict=True))
    wrong = (place for place, (draft, token) in pairs if draft != token and place not in proposal.forced)
    return next(wrong, len(proposal.tokens))


def _num_predicted(proposal: Proposal | None, num_accepted: int) -> tuple[int, int]:
    """The accepted and rejected drafts from the prediction of the request."""
    if proposal is None or proposal.drafter != "prediction":
        return NOTHING_PREDICTED
    return num_accepted, len(proposal.tokens) - num_accepted


class OutputProcessor:
    """Applies step results to sequences: tokens, constraints, beam searches, ends."""

    def __init__(
        self,
        cache: KVCacheManager,
        state: SchedulerState,
        beams: BeamSequences,
        structured_outputs: StructuredOutputManager,
        queue_limit: QueueLimit,
        speculator: Speculator | None,
    ) -> None:
        self._cache = cache
        self._state = state
        self._beams = beams
        self._structured_outputs = structured_outputs
        self._queue_limit = queue_limit
        self._speculator = speculator
        self.step_log: StepLog | None = None

    def process(self, launched: InFlightStep, result: StepResult, now: float) -> list[Output]:
        """Apply the result of a successful step. Returns the outputs."""
        outputs = []
        tokens, counts, extras, at = result.tokens.tolist(), result.counts.tolist(), ResultSlices(result), 0
        has_plain = not (self._cache.windowed or extras.has_logprobs)
        kept = counts if not launched.num_drafts else _num_kept(launched.scheduled, result.counts, tokens)
        self._record(launched, kept, result.seconds)
        for chunk, count, num_kept in zip(launched.scheduled, counts, kept, strict=True):
            seq, num_prompt_outputs = chunk.seq, chunk.num_prompt_outputs
            if has_plain and count == 1 and seq.is_plain and not num_prompt_outputs and tokens[at] >= 0:
                if seq.epoch == chunk.epoch:
                    token = tokens[at]
                    cause = seq.append_decoded(chunk.stop, token)
                    if cause is None and chunk.start >= seq.num_prompt_tokens:
                        num_cached = seq.num_cached or 0
                        outputs.append(
                            Output(seq.request.id, seq.index, seq.id, [token], None, None, None, None, None, num_cached)
                        )
                    else:
                        outputs.append(self._first_or_last(chunk, token, cause, now))
                at += 1
                continue
            data = extras.next_chunk(chunk, at, count) if num_prompt_outputs or extras.has_logprobs else NO_DATA
            if seq.epoch == chunk.epoch:
                stop = chunk.stop
                if count > 1:
                    stop = self._accept_drafts(chunk, num_kept - 1)
                    self._state.running_queue.correct_tokens(seq, stop)  # the runner may have another draft there
                self._commit_chunk(chunk, stop, now)
                if seq.is_beam:
                    outputs += self._process_beam(seq, tokens[at : at + count], data, now)
                elif count or num_prompt_outputs or seq.is_over:
                    yielded = tokens[at : at + num_kept]
                    if num_kept > 1:
                        yielded[:-1] = chunk.drafts[: num_kept - 1]  # forced ones may differ from the sampled tokens
                    output = self._process_chunk(chunk, yielded, data, now)
                    if output is not None:
                        outputs.append(output)
            at += count
        return outputs

    def _record(self, launched: InFlightStep, kept: list[int], seconds: float) -> None:
        """Tell the queue, and the step log if there is one, what a step has yielded: tokens per chunk."""
        self._state.queue.served(launched.scheduled, kept)
        if self.step_log is not None:
            self.step_log.committed(launched.id, seconds, kept)

    def _accept_drafts(self, chunk: ScheduledChunk, num_accepted: int) -> int:
        """Accept the leading drafts of a chunk. Returns the position behind the last one with the right token."""
        assert self._speculator is not None, "there are drafts"
        self._speculator.verified(chunk, num_accepted)
        stop = chunk.stop - len(chunk.drafts) + num_accepted
        chunk.seq.accept_drafts(stop)
        return stop

    def _first_or_last(self, chunk: ScheduledChunk, token: int, cause: EndCause | None, now: float) -> Output:
        """The Output of a decoded token whose chunk begins in the prompt, or that ends its sequence with `cause`."""
        seq, queued, stop_token = chunk.seq, None, None
        if chunk.start < seq.num_prompt_tokens:
            self._state.prompt_computed(seq, chunk.stop)
        if seq.num_generated == 1:
            queued = self._state.request_stats.queue_seconds(seq.request.id)
        if cause is not None:
            self.record_length(seq)
            self._state.end(seq, cause, now)
            stop_token = token if cause is EndCause.STOP else None
        about = (seq.request.id, seq.index, seq.id, [token], cause, stop_token, None, None, None)
        return Output(*about, seq.num_cached or 0, queue_seconds=queued)

    def record_length(self, seq: Sequence) -> None:
        """Record the length of a sequence that ends, for the length statistics of the queue limit."""
        self._queue_limit.ended(seq)

    def fail_search(self, seq: Sequence, cause: EndCause, error: str, now: float) -> list[Output]:
        """End a beam search with an error, because one of its beams failed. Returns one output per result."""
        request = seq.request
        self._state.end_all(request.id, cause, now)
        return [Output(request.id, i, seq.id, [], cause, error=error) for i in range(request.params.n)]

    def _commit_chunk(self, chunk: ScheduledChunk, stop: int, now: float) -> None:
        """Commit a chunk up to position `stop`.

        Branches held sequences from its sequence once their shared prompt is committed, and trims its windows.
        """
        seq = chunk.seq
        seq.commit_chunk(stop, chunk.num_prompt_outputs)
        if chunk.start < seq.num_prompt_tokens:
            self._state.prompt_computed(seq, stop)
        if seq.row < 0:
            return
        if seq.num_written >= seq.num_shared > 0:
            self._state.branch_held(seq, now)
        if self._cache.windowed:
            assert seq.table is not None
            self._cache.trim(seq.table, seq.num_written)

    def _process_chunk(self, chunk: ScheduledChunk, tokens: list[int], data: ChunkData, now: float) -> Output | None:
        """Append the sampled and forced tokens of a chunk, and end the sequence if it is complete.

        Returns None without anything to output, for example if the sampled token had been forced before.
        """
        seq, num_prompt_outputs, num_kept = chunk.seq, chunk.num_prompt_outputs, len(tokens)
        kept, cause, error = seq.append_sampled(tokens) if tokens else (tokens, None, "")
        logprobs, scored, pooled = data
        forced = [place for place in chunk.forced if place < len(kept)]
        num_drafted = min(len(kept), num_kept - 1) - len(forced)  # the token behind a whole chain is no draft
        if logprobs is not None:
            logprobs = logprobs.without(forced, len(kept)) if kept else None
        total = seq.add_logprobs(logprobs) if kept and seq.is_ranked else None
        if seq.constrained and tokens:
            kept, forced, cause, error = self._apply_constraint(seq, kept, forced, cause, error)
        if not (kept or cause or num_prompt_outputs or seq.is_over):
            return None
        if seq.deferred_end[0] is not None and seq.is_over:
            (cause, error), kept = seq.deferred_end, seq.take_unreported()
            forced = list(range(len(kept)))
        sampled = [place for place in range(len(kept)) if place not in forced] if forced else range(len(kept))
        begins = kept and len(kept) == seq.num_generated
        queued = self._state.request_stats.queue_seconds(seq.request.id) if begins else None
        if cause is None and not seq.is_generation and seq.is_over:
            cause = EndCause.STOP if seq.is_pooling else EndCause.LENGTH
        stop_token = None
        if cause is not None:
            self.record_length(seq)
            self._state.end(seq, cause, now)
            if cause is EndCause.STOP and kept and kept[-1] in seq.stop_ids:
                stop_token = kept[-1]
        return Output(
            seq.request.id,
            seq.index,
            seq.id,
            kept,
            cause,
            stop_token,
            logprobs,
            scored,
            pooled,
            seq.num_cached or 0,
            total,
            error,
            queued,
            tuple(forced),
            _num_predicted(chunk.proposal, num_kept - 1),
            tuple(sampled[: max(num_drafted, 0)]),
        )

    def _apply_constraint(
        self, seq: Sequence, sampled: list[int], forced: list[int], cause: EndCause | None, error: str
    ) -> tuple[list[int], list[int], EndCause | None, str]:
        """Pass new tokens to the constraint. Returns (tokens to output, indices of forced ones, cause, error).

        forced: indices of forced drafts among `sampled`.
        """
        if cause is EndCause.NO_TOKEN:
            cause, error = EndCause.DEAD_END, self._structured_outputs.no_token_error(seq, sampled)
        behind: list[int] = []
        if sampled and cause in (None, EndCause.LENGTH):
            behind, cause, error = self._structured_outputs.advance(seq, sampled)
            if behind:
                self._state.running_queue.correct_tokens(seq, len(seq.tokens) - len(behind))
        before = seq.take_unreported() if sampled or cause else []
        reported = before + sampled + behind
        among = (len(before) + place for place in forced)
        return reported, [*range(len(before)), *among, *range(len(before) + len(sampled), len(reported))], cause, error

    def _process_beam(self, seq: Sequence, tokens: list[int], data: ChunkData, now: float) -> list[Output]:
        """Pass the candidates of a beam's chunk, if it has any, to its search. Returns outputs if the search ends."""
        if not tokens:
            return []
        if tokens[0] < 0 or data.logprobs is None:
            return self.fail_search(seq, EndCause.NO_TOKEN, "no token could be sampled: the logits are not finite", now)
        outputs = self._beams.add_candidates(seq, data.logprobs, now)
        if outputs:
            self._state.end_all(seq.request.id, EndCause.STOP, now)
        return outputs
