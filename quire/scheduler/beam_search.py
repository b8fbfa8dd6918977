"""Beam search over the sequences of a request.

The rules are those of Hugging Face transformers (`generate` with `num_beams`). Candidates are ranked by the sum of the
model's own logprobs. Finished hypotheses are ranked by score: that sum divided by `num_tokens ** length_penalty`, where
num_tokens counts generated tokens with the end token, without the prompt. `select` is a pure function; `BeamSearches`
applies its result to sequences and block tables.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from msgspec import structs

from quire.cache.kv_cache import KVCache
from quire.config import CacheConfig, SchedulerConfig, max_blocks_of_sequence
from quire.core.output import Output
from quire.core.request import Beams, Request
from quire.core.step import Logprobs
from quire.errors import RequestError
from quire.params import BeamSearchParams
from quire.scheduler.lifecycle import SchedulerState, clear_retention
from quire.scheduler.sequence import Sequence


class Rules(NamedTuple):
    """The parameters of a search.

    min_tokens: an end token is allowed after so many tokens. max_tokens: all live beams end at this length.
    early_stopping, once `width` hypotheses have ended: True stops at once; False stops when the best live beam, scored
    at its present length, is no better than the worst of them; "never" stops when it could not be better at any length
    up to max_tokens.
    """

    width: int
    max_tokens: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    stop_ids: frozenset[int] = frozenset()
    min_tokens: int = 0

    @classmethod
    def of(cls, request: Request) -> "Rules":
        """The parameters of a request that has `beams`."""
        beams = request.beams
        assert beams is not None
        return cls(
            width=beams.width,
            max_tokens=request.max_tokens,
            length_penalty=beams.length_penalty,
            early_stopping=beams.early_stopping,
            stop_ids=request.stop_ids,
            min_tokens=request.params.min_tokens,
        )

    def score(self, cumulative_logprob: float, num_tokens: int) -> float:
        """The score of a hypothesis with `num_tokens` generated tokens, the end token included; higher is better."""
        return float(cumulative_logprob / num_tokens**self.length_penalty)


class Beam(NamedTuple):
    """A beam that continues: the index of its parent among the live beams, and its new token."""

    parent: int
    token: int
    cumulative_logprob: float


class Ending(NamedTuple):
    """A beam that ended with its new token: an end token ("stop"), or the last one at max_tokens ("length")."""

    parent: int
    token: int
    cumulative_logprob: float
    score: float
    reason: Literal["stop", "length"]


class Selection(NamedTuple):
    """The result of one step. live: best first, at most `width`; unused if the search is over."""

    live: list[Beam]
    ended: list[Ending]  # most likely first; only those that were among the `width` most likely candidates
    over: bool


class Hypothesis(NamedTuple):
    """A finished result. token_ids: the generated tokens, the end token included."""

    token_ids: list[int]
    cumulative_logprob: float
    score: float
    finish_reason: Literal["stop", "length"]


def select(
    live: list[float],
    ids: np.ndarray,
    logprobs: np.ndarray,
    finished: list[float],
    rules: Rules,
    num_tokens: int,
) -> Selection:
    """One step of the search.

    live: cumulative logprobs of the live beams. ids and logprobs, (num_live, num_candidates): the next tokens of
    each, most likely first, with the model's own logprobs. Negative ids are padding; a token without a finite logprob
    is no candidate. finished: the scores of the `width` best hypotheses so far, in any order. num_tokens: tokens that
    a beam has generated, the one selected now included.

    A candidate that ends becomes a hypothesis only if it is among the `width` most likely of all candidates. Of
    those that do not end, the `width` most likely continue. An end token before min_tokens is no candidate. For an
    exact result, each beam needs its `width` most likely candidates and as many more as there are end tokens.
    Equally likely candidates are taken in the order of their parents, then of the columns.
    """
    ends = np.isin(ids, list(rules.stop_ids))
    cumulative = np.asarray(live, np.float64)[:, None] + logprobs
    allowed = (ids >= 0) & np.isfinite(cumulative)
    if num_tokens <= rules.min_tokens:
        allowed &= ~ends
    beams: list[Beam] = []
    ended: list[Ending] = []
    at_limit = num_tokens >= rules.max_tokens
    most = rules.width + int(ends.sum())  # at least `width` of these do not end
    for rank, (parent, column) in enumerate(_most_likely(cumulative, allowed, most)):
        token, total = int(ids[parent, column]), float(cumulative[parent, column])
        if not (at_limit or ends[parent, column]):
            if len(beams) < rules.width:
                beams.append(Beam(parent, token, total))
        elif rank < rules.width:
            reason: Literal["stop", "length"] = "stop" if ends[parent, column] else "length"
            ended.append(Ending(parent, token, total, rules.score(total, num_tokens), reason))
    scores = sorted([*finished, *(one.score for one in ended)], reverse=True)[: rules.width]
    return Selection(beams, ended, not beams or _is_over(beams[0].cumulative_logprob, scores, rules, num_tokens))


def _most_likely(cumulative: np.ndarray, allowed: np.ndarray, most: int) -> list[tuple[int, int]]:
    """(row, column) of at most `most` allowed candidates, most likely first; equal ones in row-major order."""
    places = np.flatnonzero(allowed)
    values = cumulative.reshape(-1)[places]
    if len(places) > most:  # partition first, to sort few
        near = values >= np.partition(values, -most)[-most]
        places, values = places[near], values[near]
    order = places[np.argsort(-values, kind="stable")[:most]]
    width = cumulative.shape[1]
    return [divmod(place, width) for place in order.tolist()]


def _is_over(best: float, scores: list[float], rules: Rules, num_tokens: int) -> bool:
    """Whether the search ends. best: cumulative logprob of the best beam. scores: of the hypotheses, best first."""
    if len(scores) < rules.width:
        return False
    if rules.early_stopping is True:
        return True
    gains_by_length = rules.early_stopping == "never" and rules.length_penalty > 0
    return rules.score(best, rules.max_tokens if gains_by_length else num_tokens) <= scores[-1]


def plan_beams(params: BeamSearchParams, *, vocab_size: int, num_end_tokens: int, num_stop_ids: int = 0) -> Beams:
    """The Beams of a request with these parameters.

    num_end_tokens: the model's eos tokens. num_stop_ids: other tokens that end a sequence of this request.
    Raises RequestError if the vocabulary is too small for beam_width, which would give fewer results.
    """
    width, num_ends = params.beam_width, num_stop_ids + (0 if params.ignore_eos else num_end_tokens)
    if width + num_ends > vocab_size:
        raise RequestError(f"beam_width ({width}) is too large for a vocabulary of {vocab_size} tokens", "beam_width")
    return Beams(
        width=width,
        num_candidates=min(width + max(width, num_ends), vocab_size),
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
    )


class Search:
    """State of one search: cumulative logprobs of the live beams, and the best `width` hypotheses so far.

    At first the only live beam is the prompt. The caller maps live beams to sequences.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.live = [0.0]  # cumulative logprobs, in the order of the last selection
        self.num_tokens = 0  # generated tokens of each live beam
        self.hypotheses: list[Hypothesis] = []  # best first; of equal ones, the earlier first
        self.is_over = False

    def advance(self, outputs: list[list[int]], ids: np.ndarray, logprobs: np.ndarray) -> Selection:
        """Apply one step. outputs: the generated tokens of each live beam; ids and logprobs: as in `select`."""
        self.num_tokens += 1
        finished = [one.score for one in self.hypotheses]
        selection = select(self.live, ids, logprobs, finished, self.rules, self.num_tokens)
        for parent, token, total, score, reason in selection.ended:
            self.hypotheses.append(Hypothesis([*outputs[parent], token], total, score, reason))
        self.hypotheses.sort(key=lambda one: -one.score)
        del self.hypotheses[self.rules.width :]
        self.live = [beam.cumulative_logprob for beam in selection.live]
        self.is_over = selection.over
        return selection


@dataclass(slots=True)
class _OpenSearch:
    """A search with the sequences of its live beams."""

    search: Search
    live: list[Sequence]
    candidates: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)  # by sequence id: ids, logprobs


class BeamSearches:
    """The open beam searches, by request id."""

    def __init__(self, cache: KVCache, state: SchedulerState) -> None:
        self._cache = cache
        self._state = state
        self._open: dict[str, _OpenSearch] = {}

    def start(self, first: Sequence) -> None:
        """Start a search with the sequence that computes the prompt."""
        self._open[first.request.id] = _OpenSearch(Search(Rules.of(first.request)), [first])

    def drop(self, request_id: str) -> None:
        """Remove the search of a request that has ended. Ignores an unknown one."""
        self._open.pop(request_id, None)

    def add_candidates(self, seq: Sequence, logprobs: Logprobs, now: float) -> list[Output]:
        """Record the candidates of a beam; advance the search once all have theirs. Returns the results at its end."""
        one = self._open[seq.request.id]
        seq.num_pending = 0
        if seq in one.live:
            one.candidates[seq.id] = (logprobs.ids[0, 1:], logprobs.values[0, 1:])
        if len(one.candidates) < len(one.live):
            return []
        num_prompt = len(seq.request.prompt)
        ids, values = zip(*(one.candidates[beam.id] for beam in one.live), strict=True)
        width = min(map(len, ids))
        outputs = [beam.tokens[num_prompt:] for beam in one.live]
        selection = one.search.advance(
            outputs, np.stack([a[:width] for a in ids]), np.stack([a[:width] for a in values]).astype(np.float64)
        )
        if selection.over:
            self.drop(seq.request.id)
            return _results(seq, one.search.hypotheses, self._state.sequence_groups.members(seq.request.id))
        for beam in one.live:
            if self._state.is_in_flight(beam):  # recomputed after a preemption: discard its in-flight chunk
                self._state.requeue(beam, beam.num_written, now)
        self._assign_beams(one, selection.live, now)
        return []

    def _assign_beams(self, one: _OpenSearch, beams: list[Beam], now: float) -> None:
        """Assign the selected beams to sequences, and hold the sequences that have no beam."""
        parents = one.live
        bases = [list(parent.tokens) for parent in parents]
        spare = [seq for i, seq in enumerate(parents) if all(beam.parent != i for beam in beams)]
        spare += self._state.sequence_groups.release_held(parents[0].request.id)
        one.live = []
        begun: set[int] = set()
        for beam in beams:
            parent = parents[beam.parent]
            seq = parent if beam.parent not in begun else spare.pop(0)
            begun.add(beam.parent)
            if seq is not parent:
                seq.tokens = bases[beam.parent]
                bases[beam.parent] = list(seq.tokens)
                self._fork_or_requeue(seq, parent, now)
            one.live.append(seq)
        for beam, seq in zip(beams, one.live, strict=True):
            seq.tokens.append(beam.token)
            seq.limit = len(seq.tokens)
            seq.epoch += 1
            if seq.row < 0 and seq not in self._state.queue:
                seq.num_written = 0
                self._state.requeue(seq, 0, now)
            if seq.row >= 0 and seq not in self._state.running_queue.unsent:
                self._state.running_queue.corrected.append((seq, len(seq.tokens) - 1))
        one.candidates.clear()
        for seq in spare:
            self._hold(seq)

    def _fork_or_requeue(self, seq: Sequence, parent: Sequence, now: float) -> None:
        """Fork the parent's block table for a sequence, or requeue it if the parent has no row or none is free."""
        was_held = seq.row < 0 and seq not in self._state.queue
        if parent.row < 0 or (seq.row < 0 and not self._state.running_queue.has_free_row):
            if seq.row >= 0 or was_held:
                self._state.requeue(seq, seq.num_valid, now)
            return
        if seq.row >= 0:
            clear_retention(seq)
            self._cache.release(seq.id)
        elif not was_held:
            self._state.queue.remove(seq)
        table = self._cache.fork(parent.id, seq.id, parent.num_computed, seq.tokens)
        if seq.row >= 0:
            self._state.running_queue.set_table(seq, table, parent.num_computed)
        else:
            self._state.running_queue.allocate_row(seq, table, parent.num_computed)
            self._state.request_stats.branched(seq, parent.num_computed, now)
        self._state.running_queue.mark_unsent(seq)

    def _hold(self, seq: Sequence) -> None:
        """Hold a sequence that has no beam; take its row and blocks."""
        if seq.row >= 0:
            clear_retention(seq)
            self._state.running_queue.free(seq, 0)
        elif seq in self._state.queue:
            self._state.queue.remove(seq)
        seq.epoch += 1
        self._state.request_stats.held(seq)
        self._state.sequence_groups.hold(seq)


def _results(seq: Sequence, hypotheses: list[Hypothesis], members: list[Sequence]) -> list[Output]:
    """Outputs of the best `n` hypotheses, one for each of the request's first sequences."""
    outputs = []
    for index, member in enumerate(members[: seq.request.params.n]):
        output = Output(seq.request.id, index, member.id, [], "error", num_cached_tokens=seq.num_cached or 0)
        if index >= len(hypotheses):
            outputs.append(structs.replace(output, error=f"the beam search found only {len(hypotheses)} sequences"))
            continue
        tokens, total, _, reason = hypotheses[index]
        stop = tokens[-1] if reason == "stop" else None
        outputs.append(
            structs.replace(output, token_ids=tokens, finish_reason=reason, stop_token=stop, cumulative_logprob=total)
        )
    return outputs


def check_search(request: Request, limits: SchedulerConfig, cache: CacheConfig) -> None:
    """Raises RequestError for a beam search that cannot finish even if nothing else runs."""
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
        alone = max_blocks_of_sequence(group.window, cache.block_size, length, limits.max_num_batched_tokens)
        needed = width * (alone + 1) if group.window else shared + width * (alone - shared + 1)
        if needed > group.num_blocks:
            raise RequestError(
                f"a beam search of width {width} over up to {length} tokens needs {needed} KV blocks, and there are "
                f"{group.num_blocks}; lower the width or max_tokens",
                "beam_width",
            )
