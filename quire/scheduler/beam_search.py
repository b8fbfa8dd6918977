"""Beam search over the sequences of a request.

The rules are those of Hugging Face transformers (`generate` with `num_beams`). Candidates are ranked by the sum of the
model's own logprobs. Finished hypotheses are ranked by score: that sum divided by `num_tokens ** length_penalty`, where
num_tokens counts generated tokens with the end token, without the prompt. `select` is a pure function;
`scheduler.beam_sequences` applies its result to sequences and block tables.
"""

from typing import Literal, NamedTuple

import numpy as np

from quire.config import CacheConfig, SchedulerConfig
from quire.core.request import Beams, Request
from quire.core.step import Logprobs
from quire.errors import RequestError
from quire.params import BeamSearchParams
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


class BeamSearch:
    """The search of a request, with the sequences of its live beams."""

    __slots__ = ("candidates", "live", "search")

    def __init__(self, request: Request, first: Sequence) -> None:
        """first: the sequence that computes the prompt."""
        self.search = Search(Rules.of(request))
        self.live = [first]
        self.candidates: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by sequence id: ids, logprobs

    def add_candidates(self, seq: Sequence, logprobs: Logprobs) -> bool:
        """Record the candidates of a beam. Returns whether all live beams have theirs."""
        seq.take_candidates()
        if seq in self.live:
            self.candidates[seq.id] = (logprobs.ids[0, 1:], logprobs.values[0, 1:])
        return len(self.candidates) == len(self.live)

    def select(self) -> Selection:
        """Select the next beams among the candidates of all live beams."""
        num_prompt = len(self.live[0].request.prompt)
        ids, values = zip(*(self.candidates[beam.id] for beam in self.live), strict=True)
        width = min(map(len, ids))
        outputs = [beam.tokens[num_prompt:] for beam in self.live]
        return self.search.advance(
            outputs, np.stack([a[:width] for a in ids]), np.stack([a[:width] for a in values]).astype(np.float64)
        )

    def continue_with(self, live: list[Sequence]) -> None:
        """Set the sequences of the selected beams, which have no candidates yet."""
        assert len(live) == len(self.search.live), "each live beam has a sequence"
        self.live = live
        self.candidates.clear()


def check_search(request: Request, limits: SchedulerConfig, cache: CacheConfig) -> None:
    """Raises RequestError for a beam search that cannot finish even if nothing else runs."""
    if request.beams is None:
        return
    width = request.beams.width
    if not cache.shares_partial_blocks:
        raise RequestError("the beams of this model cannot share blocks; leave beam search out", "beam_width")
    if width > limits.max_num_seqs:
        raise RequestError(
            f"a beam search of width {width} needs as many rows, and max_num_seqs is {limits.max_num_seqs}; lower the "
            "width or raise max_num_seqs",
            "beam_width",
        )
    length = len(request.prompt) + request.max_tokens
    shared = len(request.prompt) // cache.block_size
    for group in cache.groups:
        alone = group.kind.max_blocks(length, limits.max_num_batched_tokens, cache.block_size)
        needed = width * (alone + 1) if group.kind.drops_blocks else shared + width * (alone - shared + 1)
        if needed > group.num_blocks:
            raise RequestError(
                f"a beam search of width {width} over up to {length} tokens needs {needed} KV blocks, and there are "
                f"{group.num_blocks}; lower the width or max_tokens",
                "beam_width",
            )
