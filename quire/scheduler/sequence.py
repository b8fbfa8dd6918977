"""A sequence: the tokens known so far, how many of them have KV, and where it stands."""

from collections import OrderedDict

from quire.cache.block_table import BlockTable
from quire.core.output import NO_TOKEN
from quire.core.request import Known, Request
from quire.core.step import Logprobs, Pooling

LEAD = 10.0  # seconds: a request counts as that much older than it is, at most
MOST_PROGRAMS = 4096  # that are remembered

Place = tuple[float, int]  # when it counts as arrived, and the sequence that came then


class Programs:
    """Programs that have begun, by tenant and id. Knows no sequences.

    Nobody is passed by a request that came more than LEAD seconds later, so nobody starves.
    """

    def __init__(self) -> None:
        self._begun: OrderedDict[tuple[str, str], Place] = OrderedDict()  # who asked last is last
        self._now = 0.0

    def place(self, request: Request, first_id: int, now: float) -> Place:
        """Where a request stands that comes now. first_id: of its sequences. Without a program: by its arrival."""
        now = self._now = max(self._now, now)
        key = program_of(request)
        if key is None:
            return now, first_id
        began, number = self._begun.setdefault(key, (now, first_id))
        self._begun.move_to_end(key)
        if len(self._begun) > MOST_PROGRAMS:
            self._begun.popitem(last=False)
        return max(began, now - LEAD), number

    def end(self, tenant: str, program: str) -> None:
        """It asks nothing more. One that is unknown is ignored."""
        self._begun.pop((tenant, program), None)


def program_of(request: Request) -> tuple[str, str] | None:
    """Tenant and id of the program that a request is a part of."""
    program = request.terms.program
    return None if program is None else (request.namespace.tenant, program.id)


_NOTHING_KNOWN = Known()

Rank = tuple[int, float, int, int]  # class, place, id


class Sequence:
    """One of the `n` continuations of a request.

    Known tokens are the prompt, output tokens that the request brought along, and what commits brought;
    `num_pending` more have been sampled, or will be, by steps in flight. What a constraint forces is known before it is
    sampled: `num_foreseen` samples in flight say nothing new. `num_computed` counts leading positions
    whose KV is written by steps that were launched, `num_written` those whose steps are committed. There are no
    phases: a sequence has work as long as `num_computed` lies below the smaller of `len(tokens) + num_pending` and
    `limit`.

    What is told about positions besides sampled tokens (logprobs of the prompt, pooled states) is told
    once, although they may be computed several times: `num_told` of `to_tell` leading ones are committed.
    """

    __slots__ = (
        "arriving",
        "constrained",
        "cumulative_logprob",
        "end",
        "epoch",
        "finished",
        "id",
        "index",
        "last_step",
        "limit",
        "min_length",
        "num_cached",
        "num_computed",
        "num_foreseen",
        "num_logprobs",
        "num_pending",
        "num_shared",
        "num_told",
        "num_written",
        "pools",
        "rank",
        "request",
        "row",
        "samples",
        "since",
        "stop_ids",
        "suspect",
        "swapped",
        "table",
        "to_tell",
        "tokens",
        "told_end",
        "unsaid",
    )

    def __init__(
        self, seq_id: int, request: Request, index: int, now: float, of_class: int = 0, place: Place | None = None
    ) -> None:
        """now: when it came. place: when it counts as arrived; None: by its id alone."""
        self.id = seq_id
        # less goes first; the last one that runs is the first to lose its blocks
        self.rank = (of_class, *(place or (0.0, seq_id)), seq_id)
        self.request = request
        self.index = index
        known = request.known[index] if request.known else _NOTHING_KNOWN
        self.tokens = [*request.prompt, *known.token_ids]
        self.cumulative_logprob = known.cumulative_logprob  # kept up where sequences are compared
        self.end = len(request.prompt) + request.max_tokens
        self.stop_ids = request.stop_ids
        self.min_length = len(request.prompt) + request.params.min_tokens  # no stop token ends it before
        self.samples = request.max_tokens > 0  # whether it gets new tokens at all
        self.pools = request.pooling is not Pooling.NONE
        self.constrained = request.is_constrained
        # nobody needs the KV of the last token, nor, where none is sampled, the logits of the prompt's last one
        self.limit = self.end if self.pools else max(self.end - 1, 1)
        if request.beams is not None:
            self.limit = len(request.prompt)  # what comes next is chosen among all beams
        # positions that all n sequences have in common; the prompt's last token is computed by each, for its logits
        shares = request.params.num_sequences > 1 and self.samples and request.beams is None
        self.num_shared = len(request.prompt) - 1 if shares else 0
        self.num_logprobs = _num_logprobs(request)
        self.to_tell = _positions_to_tell(request, index)
        self.num_cached: int | None = None  # tokens of the prompt that were not computed; None before it runs
        self.num_computed = 0
        self.num_pending = 0
        self.num_foreseen = 0
        self.num_written = 0
        self.unsaid: list[int] = []  # tokens at the end that were forced before anything was sampled, and not told yet
        # of hidden states the last is all that is wanted, or all are
        self.num_told = len(request.prompt) - 1 if request.pooling is Pooling.LAST else 0
        if not self.pools and self.to_tell:
            self.num_told = min(request.params.prompt_logprobs_start, self.to_tell)
        if known.token_ids:  # all about the prompt was told before the first of them
            self.num_told = self.to_tell
        self.told_end: tuple[str | None, str] = (None, "")  # how it ends once all is told, where all is forced
        self.row = -1  # none while it waits
        self.arriving = -1  # the step that brings its KV from the host: nothing is computed before it is committed
        self.swapped = False  # whether its KV is in the host pool
        self.table: BlockTable | None = None
        self.last_step = -1  # the newest step that it has a chunk in
        self.epoch = 0  # rises when steps in flight become void for it
        self.since = now  # when it arrived, or went back to the queue
        self.finished = False
        self.suspect = False  # was part of a failed step: runs alone until it is cleared

    @property
    def num_generated(self) -> int:
        """Output tokens that are known."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def has_begun(self) -> bool:
        """Whether it has run before, in this engine or another, or the one that computed what they share."""
        is_held_back = self.num_shared > 0 or self.request.beams is not None
        is_known = self.num_generated > len(self.unsaid)
        return self.num_cached is not None or is_known or (self.index > 0 and is_held_back)

    @property
    def known_end(self) -> tuple[str, int | None] | None:
        """Why it ends with the tokens that were known when it came, and its stop token; None where it goes on."""
        for length, token in enumerate(self.tokens[len(self.request.prompt) :], len(self.request.prompt) + 1):
            if token in self.stop_ids and length > self.min_length:
                return "stop", token
        return ("length", None) if self.samples and len(self.tokens) == self.end else None

    def extend(self, tokens: list[int]) -> tuple[list[int], str | None, str]:
        """Append what was sampled: the tokens kept, why the sequence ends with them, and what went wrong."""
        if self.num_foreseen:
            self.num_foreseen -= 1
            return [], None, ""
        self.num_pending -= 1
        if -1 in tokens:
            kept, reason = self._append(tokens[: tokens.index(-1)])
            return kept, reason or "error", "" if reason else NO_TOKEN
        return *self._append(tokens), ""

    def force(self, tokens: list[int]) -> tuple[list[int], str | None]:
        """Append what has to come, as far as there is room: the tokens kept, and why the sequence ends with them."""
        self.num_foreseen += self.num_pending
        self.num_pending = 0
        return self._append(tokens)

    def _append(self, tokens: list[int]) -> tuple[list[int], str | None]:
        if len(self.tokens) >= self.end:
            return [], "length"
        for num_kept, token in enumerate(tokens, 1):
            self.tokens.append(token)
            if token in self.stop_ids and len(self.tokens) > self.min_length:
                return tokens[:num_kept], "stop"
            if len(self.tokens) == self.end:
                return tokens[:num_kept], "length"
        return tokens, None

    def add_up(self, logprobs: Logprobs | None) -> float:
        """The sum of the logprobs of all output tokens, once these are added to it."""
        if logprobs is not None:
            self.cumulative_logprob = sum(logprobs.values[:, 0].tolist(), self.cumulative_logprob)
        return self.cumulative_logprob

    @property
    def reusable(self) -> int:
        """Leading positions that need not be computed if their KV is there.

        The last known token is, for its logits; and so is what something is still to be told about.
        """
        told = self.num_told if self.num_told < self.to_tell else len(self.tokens)
        return min(told, len(self.tokens) - 1, self.limit - 1)

    @property
    def num_valid(self) -> int:
        """Leading positions whose KV, once the steps in flight are over, is that of its tokens."""
        return 0 if self.arriving >= 0 else min(self.num_computed, len(self.tokens))

    @property
    def num_kept(self) -> int:
        """Those of them that it would not compute again if it had them back."""
        return min(self.num_valid, self.num_told) if self.num_told < self.to_tell else self.num_valid

    def has_written(self, num_tokens: int) -> bool:
        """Whether it runs, and the KV of so many leading positions is there."""
        return self.row >= 0 and self.arriving < 0 and self.num_written >= num_tokens

    @property
    def is_over(self) -> bool:
        """Whether it gets no tokens and all else is done."""
        return not self.samples and self.num_written >= self.limit


def _positions_to_tell(request: Request, index: int) -> int:
    """Leading positions about which something besides sampled tokens is told."""
    if request.pooling is not Pooling.NONE:
        return len(request.prompt)
    if request.params.prompt_logprobs is not None and index == 0:
        return len(request.prompt) - 1  # each says how likely the next token of the prompt was
    return 0


def _num_logprobs(request: Request) -> int:
    """Alternatives whose logprobs are told beside each sampled token; -1: nothing is told."""
    if request.beams is not None:
        return request.beams.num_candidates
    needed = request.params.num_logprobs_needed
    return -1 if needed is None else needed
