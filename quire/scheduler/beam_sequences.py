"""The sequences and block tables of beam searches: forks, and sequences that no beam needs for now."""

from msgspec import structs

from quire.cache.manager import KVCacheManager
from quire.core.output import EndCause, Output
from quire.core.step import Logprobs
from quire.scheduler.beam_search import Beam, BeamSearch, Hypothesis
from quire.scheduler.lifecycle import SchedulerState
from quire.scheduler.sequence import Sequence


class BeamSequences:
    """Applies the selections of beam searches to the sequences of their requests."""

    def __init__(self, cache: KVCacheManager, state: SchedulerState) -> None:
        self._cache = cache
        self._state = state

    def add_candidates(self, seq: Sequence, logprobs: Logprobs, now: float) -> list[Output]:
        """Record the candidates of a beam; advance the search once all have theirs. Returns the results at its end."""
        request = self._state.requests[seq.request.id]
        search = request.beam_search
        assert search is not None, "a sequence with candidates is a beam"
        if not search.add_candidates(seq, logprobs):
            return []
        selection = search.select()
        if selection.over:
            return _results(seq, search.search.hypotheses, request.sequences)
        for beam in search.live:
            if self._state.is_in_flight(beam):  # recomputed after a preemption: discard its in-flight chunk
                self._state.requeue(beam, beam.num_written, now)
        self._assign_beams(search, selection.live, now)
        return []

    def _assign_beams(self, search: BeamSearch, beams: list[Beam], now: float) -> None:
        """Assign the selected beams to sequences, and hold the sequences that have no beam."""
        parents = search.live
        bases = [list(parent.tokens) for parent in parents]
        spare = [seq for i, seq in enumerate(parents) if all(beam.parent != i for beam in beams)]
        spare += self._state.requests[parents[0].request.id].release_held()
        live: list[Sequence] = []
        begun: set[int] = set()
        for beam in beams:
            parent = parents[beam.parent]
            seq = parent if beam.parent not in begun else spare.pop(0)
            begun.add(beam.parent)
            if seq is not parent:
                seq.copy_beam(bases[beam.parent])
                bases[beam.parent] = list(seq.tokens)
                self._fork_or_requeue(seq, parent, now)
            live.append(seq)
        for beam, seq in zip(beams, live, strict=True):
            seq.extend_beam(beam.token)
            if seq.row < 0 and seq not in self._state.queue:
                self._state.requeue(seq, 0, now)
            self._state.running_queue.correct_tokens(seq, len(seq.tokens) - 1)
        search.continue_with(live)
        for seq in spare:
            self.hold(seq)

    def _fork_or_requeue(self, seq: Sequence, parent: Sequence, now: float) -> None:
        """Fork the parent's block table for a sequence, or requeue it if the parent has no row or none is free."""
        was_held = seq.row < 0 and seq not in self._state.queue
        if parent.row < 0 or (seq.row < 0 and not self._state.running_queue.num_free_rows):
            if seq.row >= 0 or was_held:
                self._state.requeue(seq, seq.num_valid, now)
            return
        if seq.row >= 0:
            self._cache.release(seq.id, ended=False)
        elif not was_held:
            self._state.queue.remove(seq)
        table = self._cache.fork(parent.id, seq.id, parent.num_computed, seq.tokens)
        if seq.row >= 0:
            seq.replace_table(table, parent.num_computed)
            self._state.running_queue.mark_unsent(seq)
        else:
            self._state.start_copy(seq, table, parent.num_computed, now)

    def hold(self, seq: Sequence) -> None:
        """Hold a sequence that has no beam; take its row and blocks."""
        if seq.row >= 0:
            self._state.running_queue.free(seq, 0)
        elif seq in self._state.queue:
            self._state.queue.remove(seq)
        seq.discard_in_flight()
        self._state.request_stats.held(seq)
        self._state.requests[seq.request.id].hold(seq)


def _results(seq: Sequence, hypotheses: list[Hypothesis], members: list[Sequence]) -> list[Output]:
    """Outputs of the best `n` hypotheses, one for each of the request's first sequences."""
    outputs = []
    for index, member in enumerate(members[: seq.request.params.n]):
        output = Output(
            seq.request.id, index, member.id, [], EndCause.NO_HYPOTHESIS, num_cached_tokens=seq.num_cached or 0
        )
        if index >= len(hypotheses):
            outputs.append(structs.replace(output, error=f"the beam search found only {len(hypotheses)} sequences"))
            continue
        tokens, total, _, reason = hypotheses[index]
        end, stop = EndCause(reason), tokens[-1] if reason == "stop" else None
        outputs.append(structs.replace(output, token_ids=tokens, end=end, stop_token=stop, cumulative_logprob=total))
    return outputs
