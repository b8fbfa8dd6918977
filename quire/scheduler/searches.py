"""Searches: beam searches of the scheduler. Beams are sequences; which of them live on is `beams.select`'s to say.

All live beams of a search have to be heard before the next ones are chosen. Of those that share a parent the
first goes on in its place; each other one takes over a sequence that is not needed any more, or was held, and forks
the parent's table: nothing is copied before it is written.
"""

from dataclasses import dataclass, field

import numpy as np
from msgspec import structs

from quire.cache.kv_cache import KVCache
from quire.config import CacheConfig, SchedulerConfig, blocks_alone
from quire.core.output import Output
from quire.core.request import Request
from quire.core.step import Logprobs
from quire.errors import RequestError
from quire.scheduler.beam_search import Beam, Hypothesis, Rules, Search
from quire.scheduler.lifecycle import Lives, ask_nothing
from quire.scheduler.sequence import Sequence


@dataclass(slots=True)
class _Open:
    """A search and the sequences that are its live beams."""

    search: Search
    live: list[Sequence]
    heard: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)  # candidates: ids, logprobs


class Searches:
    """Beam searches by request."""

    def __init__(self, cache: KVCache, lives: Lives) -> None:
        self._cache = cache
        self._lives = lives
        self._open: dict[str, _Open] = {}

    def add(self, first: Sequence) -> None:
        """A search begins with the sequence that computes the prompt."""
        self._open[first.request.id] = _Open(Search(Rules.of(first.request)), [first])

    def drop(self, request_id: str) -> None:
        """A request has ended."""
        self._open.pop(request_id, None)

    def hear(self, seq: Sequence, logprobs: Logprobs, now: float) -> list[Output]:
        """A beam has its candidates; the results once the search is over, best first."""
        one = self._open[seq.request.id]
        seq.num_pending = 0
        if seq in one.live:
            one.heard[seq.id] = (logprobs.ids[0, 1:], logprobs.values[0, 1:])
        if len(one.heard) < len(one.live):
            return []
        num_prompt = len(seq.request.prompt)
        ids, values = zip(*(one.heard[beam.id] for beam in one.live), strict=True)
        width = min(map(len, ids))
        outputs = [beam.tokens[num_prompt:] for beam in one.live]
        selection = one.search.advance(
            outputs, np.stack([a[:width] for a in ids]), np.stack([a[:width] for a in values]).astype(np.float64)
        )
        if selection.over:
            self.drop(seq.request.id)
            return _results(seq, one.search.hypotheses, self._lives.families.members(seq.request.id))
        for beam in one.live:
            if self._lives.is_in_flight(beam):  # computed a second time, after a preemption: what is under way is void
                self._lives.requeue(beam, beam.num_written, now)
        self._choose(one, selection.live, now)
        return []

    def _choose(self, one: _Open, beams: list[Beam], now: float) -> None:
        """Let the chosen beams live on."""
        parents = one.live
        bases = [list(parent.tokens) for parent in parents]
        spare = [seq for i, seq in enumerate(parents) if all(beam.parent != i for beam in beams)]
        spare += self._lives.families.release(parents[0].request.id)
        one.live = []
        begun: set[int] = set()
        for beam in beams:
            parent = parents[beam.parent]
            seq = parent if beam.parent not in begun else spare.pop(0)
            begun.add(beam.parent)
            if seq is not parent:
                seq.tokens = bases[beam.parent]
                bases[beam.parent] = list(seq.tokens)
                self._take_over(seq, parent, now)
            one.live.append(seq)
        for beam, seq in zip(beams, one.live, strict=True):
            seq.tokens.append(beam.token)
            seq.limit = len(seq.tokens)
            seq.epoch += 1
            if seq.row < 0 and seq not in self._lives.queue:
                seq.num_written = 0
                self._lives.requeue(seq, 0, now)
            if seq.row >= 0 and seq not in self._lives.rows.unmet:
                self._lives.rows.corrected.append((seq, len(seq.tokens) - 1))
        one.heard.clear()
        for seq in spare:
            self._park(seq)

    def _take_over(self, seq: Sequence, parent: Sequence, now: float) -> None:
        """A sequence goes on from where its parent stands: with its blocks, or from the queue where there is no row."""
        was_held = seq.row < 0 and seq not in self._lives.queue
        if parent.row < 0 or (seq.row < 0 and not self._lives.rows.has_free):
            if seq.row >= 0 or was_held:
                self._lives.requeue(seq, seq.num_valid, now)
            return
        if seq.row >= 0:
            ask_nothing(seq)
            self._cache.release(seq.id)
        elif not was_held:
            self._lives.queue.remove(seq)
        table = self._cache.fork(parent.id, seq.id, parent.num_computed, seq.tokens)
        if seq.row >= 0:
            self._lives.rows.hold(seq, table, parent.num_computed)
        else:
            self._lives.rows.take(seq, table, parent.num_computed)
            self._lives.accounts.branched(seq, parent.num_computed, now)
        self._lives.rows.meet(seq)

    def _park(self, seq: Sequence) -> None:
        """A sequence that no beam needs now."""
        if seq.row >= 0:
            ask_nothing(seq)
            self._lives.rows.give_up(seq, 0)
        elif seq in self._lives.queue:
            self._lives.queue.remove(seq)
        seq.epoch += 1
        self._lives.accounts.parked(seq)
        self._lives.families.hold(seq)


def _results(seq: Sequence, hypotheses: list[Hypothesis], members: list[Sequence]) -> list[Output]:
    """The best `n`, one for each of the request's first sequences."""
    outputs = []
    for index, member in enumerate(members[: seq.request.params.n]):
        output = Output(seq.request.id, index, member.id, [], "error", num_cached_tokens=seq.num_cached or 0)
        if index >= len(hypotheses):
            outputs.append(structs.replace(output, error=f"the search ended with {len(hypotheses)} sequences"))
            continue
        tokens, total, _, reason = hypotheses[index]
        stop = tokens[-1] if reason == "stop" else None
        outputs.append(
            structs.replace(output, token_ids=tokens, finish_reason=reason, stop_token=stop, cumulative_logprob=total)
        )
    return outputs


def check_search(request: Request, limits: SchedulerConfig, cache: CacheConfig) -> None:
    """Raises RequestError for a beam search that could not run to its end even alone."""
    if request.beams is None:
        return
    width = request.beams.width
    if width > limits.max_num_seqs:
        raise RequestError(
            f"a beam search of width {width} needs as many rows, and max_num_seqs is {limits.max_num_seqs}; lower the "
            "width or raise max_num_seqs",
            "beam_width",
        )
    length = len(request.prompt) + request.max_tokens
    shared = len(request.prompt) // cache.block_size
    for group in cache.groups:
        alone = blocks_alone(group.window, cache.block_size, length, limits.max_num_batched_tokens)
        needed = width * (alone + 1) if group.window else shared + width * (alone - shared + 1)
        if needed > group.num_blocks:
            raise RequestError(
                f"a beam search of width {width} over up to {length} tokens needs {needed} KV blocks, and there are "
                f"{group.num_blocks}; lower the width or max_tokens",
                "beam_width",
            )
