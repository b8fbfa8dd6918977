"""A sequence: its known tokens, its computed positions, its place in queue or batch."""

from collections import OrderedDict

from quire.cache.block_table import BlockTable
from quire.core.output import EndCause
from quire.core.request import KnownOutput, Request
from quire.core.step import Logprobs, Pooling

PROGRAM_LEAD_SECONDS = 10.0  # seconds: a request of a program counts as at most that much older than it is
MOST_PROGRAMS = 4096  # whose arrival is kept

NO_TOKEN_ERROR = "no token could be sampled: the request allows none, or the logits are not finite"

Arrival = tuple[float, int]  # effective arrival in seconds, and the first sequence id of that arrival


class Programs:
    """Arrivals of programs, by tenant and id. A request counts as arrived when its program began.

    No request is overtaken by one that arrived more than PROGRAM_LEAD_SECONDS later, so none starves.
    """

    def __init__(self) -> None:
        self._arrivals: OrderedDict[tuple[str, str], Arrival] = OrderedDict()  # least recently used first
        self._now = 0.0

    def arrival(self, request: Request, first_id: int, now: float) -> Arrival:
        """The effective arrival of a request that arrives now. first_id: the id of its sequence 0."""
        now = self._now = max(self._now, now)
        key, arrived = program_of(request), now - request.waited
        if key is None:
            return arrived, first_id
        began, number = self._arrivals.setdefault(key, (arrived, first_id))
        self._arrivals.move_to_end(key)
        if len(self._arrivals) > MOST_PROGRAMS:
            self._arrivals.popitem(last=False)
        return max(began, arrived - PROGRAM_LEAD_SECONDS), number

    def end(self, tenant: str, program: str) -> None:
        """Forget a program that has ended. Ignores an unknown one."""
        self._arrivals.pop((tenant, program), None)


def program_of(request: Request) -> tuple[str, str] | None:
    """(tenant, id) of a request's program; None without one."""
    program = request.scheduling_params.program
    return None if program is None else (request.namespace.tenant, program.id)


_NOTHING_KNOWN = KnownOutput()

Rank = tuple[int, float, int, int]  # class, effective arrival (2 numbers), sequence id


class Sequence:
    """One of the `n` continuations of a request.

    Known tokens are the prompt, output tokens given in the request, and tokens from commits. In-flight steps sample
    `num_pending` more tokens. The results of `num_ignored_samples` in-flight samples are ignored, because the
    constraint has forced these tokens meanwhile. `num_computed` counts leading positions whose KV launched steps write,
    `num_written` those whose steps are committed. There are no phases: a sequence has work while `num_computed` is
    below min(`len(tokens) + num_pending`, `limit`).

    Prompt logprobs and pooled states are output once per position, even if the position is computed again. Those of
    `num_reported` of `num_to_report` leading positions are committed.
    """

    __slots__ = (
        "alone_until",
        "constrained",
        "cumulative_logprob",
        "deferred_end",
        "epoch",
        "finished",
        "id",
        "index",
        "is_beam",
        "is_generation",
        "is_plain",
        "is_pooling",
        "is_ranked",
        "is_swapping_in",
        "last_step",
        "limit",
        "max_length",
        "min_length",
        "num_cached",
        "num_computed",
        "num_ignored_samples",
        "num_logprobs",
        "num_pending",
        "num_prompt_tokens",
        "num_reported",
        "num_shared",
        "num_to_report",
        "num_written",
        "queued_at",
        "rank",
        "request",
        "row",
        "runs_alone",
        "stop_ids",
        "swapped",
        "table",
        "tokens",
        "unreported_tokens",
    )

    def __init__(
        self,
        seq_id: int,
        request: Request,
        index: int,
        now: float,
        priority_class: int = 0,
        arrival: Arrival | None = None,
    ) -> None:
        """now: arrival in seconds. arrival: effective arrival; None orders by id alone."""
        self.id = seq_id
        # the lowest is scheduled first; the highest running one is preempted first
        self.rank = (priority_class, *(arrival or (0.0, seq_id)), seq_id)
        self.request = request
        self.index = index
        known = request.known_outputs[index] if request.known_outputs else _NOTHING_KNOWN
        self.tokens = [*request.prompt, *known.token_ids]
        self.num_prompt_tokens = len(request.prompt)
        self.cumulative_logprob = known.cumulative_logprob  # updated only with best_of above n
        self.max_length = len(request.prompt) + request.max_tokens
        self.stop_ids = request.stop_ids
        self.min_length = len(request.prompt) + request.params.min_tokens  # a stop token ends it above this length only
        self.is_generation = request.max_tokens > 0  # whether tokens are sampled
        self.is_pooling = request.pooling is not Pooling.NONE
        self.is_beam = request.beams is not None
        self.is_ranked = request.params.is_ranked
        self.constrained = request.is_constrained
        # the KV of the last token is never read; if none is sampled, neither are the logits of the last prompt token
        self.limit = self.max_length if self.is_pooling else max(self.max_length - 1, 1)
        if request.beams is not None:
            self.limit = len(request.prompt)  # the next token is selected among all beams
        # positions shared by all n sequences; each computes the last prompt token itself, for its logits
        shares = request.params.num_sequences > 1 and self.is_generation and request.beams is None
        self.num_shared = len(request.prompt) - 1 if shares else 0
        self.num_logprobs = _num_logprobs(request)
        # whether nothing but an append follows a sampled token: no branch, selection of beams, forced token or sum
        self.is_plain = not (self.num_shared or self.is_beam or self.constrained or self.is_ranked)
        self.num_to_report = _num_to_report(request, index)
        self.num_cached: int | None = None  # prompt tokens of the prefix match at the first admission; None before
        self.num_computed = 0
        self.num_pending = 0
        self.num_ignored_samples = 0
        self.num_written = 0
        self.unreported_tokens: list[int] = []  # last tokens: forced before the first sample, not output yet
        self.num_reported = len(request.prompt) - 1 if request.pooling.is_of_last_position else 0
        if not self.is_pooling and self.num_to_report:
            self.num_reported = min(request.params.prompt_logprobs_start, self.num_to_report)
        if known.token_ids:  # prompt data was output before the first output token
            self.num_reported = self.num_to_report
        self.deferred_end: tuple[EndCause | None, str] = (None, "")  # after the prompt data, if all tokens are forced
        self.row = -1  # -1 without a row
        self.is_swapping_in = False  # whether its KV is being copied from the host; until then it computes nothing
        self.swapped = False  # whether its KV is in the host pool
        self.table: BlockTable | None = None
        self.last_step = -1  # the newest step with a chunk of it
        self.epoch = 0  # incremented to invalidate its chunks in in-flight steps
        self.queued_at = now  # seconds: when it arrived or was queued last
        self.finished = False
        self.runs_alone = False  # part of a failed step: it runs alone until a chunk of it succeeds
        self.alone_until = 0  # position that this chunk has to reach

    @property
    def num_generated(self) -> int:
        """Number of known output tokens."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def has_run(self) -> bool:
        """Whether it has run, in this or an earlier engine, or another sequence of its request computes its prompt."""
        is_held_back = self.num_shared > 0 or self.request.beams is not None
        is_known = self.num_generated > len(self.unreported_tokens)
        return self.num_cached is not None or is_known or (self.index > 0 and is_held_back)

    @property
    def known_end(self) -> tuple[EndCause, int | None] | None:
        """(cause, stop token) if the known output tokens complete the sequence, else None."""
        for length, token in enumerate(self.tokens[len(self.request.prompt) :], len(self.request.prompt) + 1):
            if token in self.stop_ids and length > self.min_length:
                return EndCause.STOP, token
        return (EndCause.LENGTH, None) if self.is_generation and len(self.tokens) == self.max_length else None

    # Transitions. Each changes all fields that its invariant couples; other files assign no field of a sequence.

    def wait(self, now: float) -> None:
        """Queue it at `now` seconds. Invariant: a queued sequence has no row and no computed positions."""
        assert self.row < 0 and not self.finished, "it runs or has ended"
        assert self.num_computed == 0, "a waiting sequence has no computed positions"
        self.queued_at = now

    def start_running(self, row: int, table: BlockTable, num_computed: int, num_cached: int) -> None:
        """Give it a row and a block table, of which `num_computed` positions are computed.

        num_cached: prompt tokens of its prefix match, kept if this is its first admission. Invariant: a sequence has a
        row if and only if it has a block table, and its KV is not in the host pool only.
        """
        assert self.row < 0 and not self.finished, "it runs or has ended"
        self.row, self.swapped = row, False
        if self.num_cached is None:
            self.num_cached = num_cached
        self.replace_table(table, num_computed)

    def replace_table(self, table: BlockTable, num_computed: int) -> None:
        """Replace its block table by one of which `num_computed` positions are computed and committed."""
        assert self.row >= 0, "it has no row"
        self.table = table
        self.num_computed = self.num_written = num_computed

    def stop_running(self, *, swapped: bool) -> None:
        """Take its row and block table. swapped: whether its KV is in the host pool, or is being copied there.

        Invariant: a sequence without a row has no computed positions, and is no suspect of a failed step.
        """
        assert self.row >= 0, "it has no row"
        self.row, self.table, self.is_swapping_in = -1, None, False
        self.num_computed = self.num_written = 0
        self.runs_alone, self.swapped = False, swapped

    def drop_swapped(self) -> None:
        """Record that its KV is not in the host pool any more."""
        self.swapped = False

    def begin_swap_in(self) -> None:
        """Record that the planned step copies its KV from the host. It computes nothing before the Moves are done."""
        assert self.row >= 0 and self.num_pending == 0, "it is admitted by the same step"
        self.is_swapping_in = True

    def end_swap_in(self) -> None:
        """Record that its KV is on the device."""
        assert self.is_swapping_in, "it has its KV"
        self.is_swapping_in = False

    def schedule(self, stop: int, step_id: int) -> bool:
        """Schedule a chunk up to position `stop`. Returns whether the chunk samples a token.

        Invariant: the next token is sampled behind the last known or pending token, by one chunk only.
        """
        self.num_computed, self.last_step = stop, step_id
        if stop == len(self.tokens) + self.num_pending and self.is_generation:
            self.num_pending += 1
            return True
        return False

    def schedule_drafts(self, count: int) -> None:
        """Extend its chunk, scheduled just now, by `count` drafts. Invariant: `limit` bounds computed positions."""
        assert self.num_pending == 1 and self.num_computed == len(self.tokens), "its last token is not known"
        assert self.num_computed + count <= self.limit, "drafts reach beyond the last position to compute"
        self.num_computed += count

    def accept_drafts(self, stop: int) -> None:
        """Record that of a chunk with drafts the positions before `stop` hold the right tokens.

        Invariant: when tokens are appended, and the sequence may end, no rejected draft counts as computed.
        """
        self.num_computed = stop

    def commit_chunk(self, stop: int, num_prompt_outputs: int) -> None:
        """Record that a chunk up to position `stop` has succeeded, with `num_prompt_outputs` outputs of the prompt.

        Invariant: only positions of its present block table count as written.
        """
        self.runs_alone = self.runs_alone and stop < self.alone_until
        if self.row >= 0:
            self.num_written = stop
        if num_prompt_outputs:
            self.num_reported = min(stop, self.num_to_report)

    def roll_back(self, start: int, *, alone_until: int = 0) -> None:
        """Undo its chunks from position `start` on, because their step failed. It becomes a suspect: see `run_alone`.

        Invariant: committed positions are computed.
        """
        self.discard_in_flight()  # its chunks in later steps depend on this one
        self.num_computed = min(self.num_computed, start)
        assert self.num_written <= self.num_computed or self.row < 0, "a committed chunk has failed"
        if self.row >= 0:
            self.run_alone(alone_until)

    def run_alone(self, until: int) -> None:
        """Make it a suspect of a failed step: it runs alone until a chunk of it to position `until` succeeds."""
        self.runs_alone, self.alone_until = True, until

    def finish(self) -> None:
        """End it. Invariant: a sequence ends once, and results of its chunks in flight are ignored."""
        assert not self.finished, "it has ended before"
        self.finished = True
        self.discard_in_flight()

    def finish_after_prompt(self, cause: EndCause, error: str) -> None:
        """Sample no tokens: all output tokens are forced, and it ends after the data of its prompt are output."""
        assert self.num_reported < self.num_to_report, "no data of the prompt are outstanding"
        self.deferred_end = cause, error
        self.is_generation, self.limit = False, self.num_to_report

    def discard_in_flight(self) -> None:
        """Discard its chunks in flight: their results are ignored, and no sample of theirs is pending any more.

        Invariant: pending and ignored samples belong to chunks in flight that were planned in the present epoch.
        """
        self.epoch += 1
        self.num_pending = self.num_ignored_samples = 0

    def take_candidates(self) -> None:
        """Record that the pending sample of a beam has arrived: it consists of candidates, and no token is appended."""
        assert self.request.beams is not None and self.num_pending == 1, "one chunk of a beam samples its candidates"
        self.num_pending = 0

    def copy_beam(self, tokens: list[int]) -> None:
        """Continue from the known tokens of another beam, instead of its own."""
        assert self.request.beams is not None, "only beams exchange their tokens"
        self.tokens = tokens

    def extend_beam(self, token: int) -> None:
        """Append the selected token of a beam. Its next candidates are computed behind this token."""
        assert self.request.beams is not None, "other sequences append sampled tokens"
        self.tokens.append(token)
        self.limit = len(self.tokens)
        self.discard_in_flight()

    def truncate(self, num_generated: int) -> None:
        """Drop known output tokens behind the first `num_generated`, because a stop string ends there."""
        del self.tokens[len(self.request.prompt) + num_generated :]

    def hold_back(self, tokens: list[int]) -> None:
        """Keep forced tokens for the next output. Invariant: they are its last known tokens."""
        assert self.tokens[len(self.tokens) - len(tokens) :] == tokens, "they are not its last known tokens"
        self.unreported_tokens = tokens

    def take_unreported(self) -> list[int]:
        """The tokens held back by `hold_back`, which are output now."""
        tokens, self.unreported_tokens = self.unreported_tokens, []
        return tokens

    def append_sampled(self, tokens: list[int]) -> tuple[list[int], EndCause | None, str]:
        """Append sampled tokens. Returns the appended tokens, the cause of the end or None, and the error or ""."""
        if self.num_ignored_samples:
            self.num_ignored_samples -= 1
            return [], None, ""
        self.num_pending -= 1
        if -1 in tokens:
            kept, cause = self._append(tokens[: tokens.index(-1)])
            return kept, cause or EndCause.NO_TOKEN, "" if cause else NO_TOKEN_ERROR
        kept, cause = self._append(tokens)
        return kept, cause, ""

    def append_forced(self, tokens: list[int]) -> tuple[list[int], EndCause | None]:
        """Append forced tokens up to the end. Returns the appended tokens, and the cause of the end or None."""
        self.num_ignored_samples += self.num_pending
        self.num_pending = 0
        return self._append(tokens)

    def _append(self, tokens: list[int]) -> tuple[list[int], EndCause | None]:
        if len(self.tokens) >= self.max_length:
            return [], EndCause.LENGTH
        if len(self.tokens) + len(tokens) < self.max_length and self.stop_ids.isdisjoint(tokens):
            self.tokens += tokens
            return tokens, None
        for num_kept, token in enumerate(tokens, 1):
            self.tokens.append(token)
            if token in self.stop_ids and len(self.tokens) > self.min_length:
                return tokens[:num_kept], EndCause.STOP
            if len(self.tokens) == self.max_length:
                return tokens[:num_kept], EndCause.LENGTH
        return tokens, None

    def append_decoded(self, stop: int, token: int) -> EndCause | None:
        """Commit a chunk up to position `stop`, and append the token that it sampled. Returns the cause of the end.

        The same as `commit_chunk` and `append_sampled`, for a sequence that `is_plain` and a valid token.
        """
        if self.runs_alone:
            self.runs_alone = stop < self.alone_until
        if self.row >= 0:
            self.num_written = stop
        self.num_pending -= 1
        self.tokens.append(token)
        length = len(self.tokens)
        if token in self.stop_ids and length > self.min_length:
            return EndCause.STOP
        return EndCause.LENGTH if length >= self.max_length else None

    def add_logprobs(self, logprobs: Logprobs | None) -> float:
        """Add the logprobs of new tokens (column 0). Returns the sum over all output tokens."""
        if logprobs is not None:
            self.cumulative_logprob = sum(logprobs.values[:, 0].tolist(), self.cumulative_logprob)
        return self.cumulative_logprob

    @property
    def reusable(self) -> int:
        """Number of leading positions that are not computed if they have KV.

        The last known token is always computed for its logits, and positions with outstanding prompt data, too.
        """
        num_complete = self.num_reported if self.num_reported < self.num_to_report else len(self.tokens)
        return min(num_complete, len(self.tokens) - 1, self.limit - 1)

    @property
    def num_valid(self) -> int:
        """Number of leading positions whose KV is valid once the in-flight steps are committed."""
        return 0 if self.is_swapping_in else min(self.num_computed, len(self.tokens))

    @property
    def num_resumable(self) -> int:
        """Number of valid positions that a resumed sequence would not compute again."""
        return min(self.num_valid, self.num_reported) if self.num_reported < self.num_to_report else self.num_valid

    def has_written(self, num_tokens: int) -> bool:
        """Whether it runs and the KV of `num_tokens` leading positions is committed."""
        return self.row >= 0 and not self.is_swapping_in and self.num_written >= num_tokens

    @property
    def num_lacking(self) -> int:
        """Number of known and pending positions that are still to be computed; 0 while its KV is being copied."""
        if self.is_swapping_in:
            return 0
        return min(len(self.tokens) + self.num_pending, self.limit) - self.num_computed

    @property
    def decodes(self) -> bool:
        """Whether its next token is sampled in a step in flight or by a chunk of one position."""
        return (self.num_lacking == 1 or self.num_pending > 0) and not self.is_swapping_in

    @property
    def is_over(self) -> bool:
        """Whether no tokens are sampled and all positions up to `limit` are committed."""
        return not self.is_generation and self.num_written >= self.limit


def _num_to_report(request: Request, index: int) -> int:
    """Number of leading positions with prompt logprobs or pooled states in the output."""
    if request.pooling is not Pooling.NONE:
        return len(request.prompt)
    if request.params.prompt_logprobs is not None and index == 0:
        return len(request.prompt) - 1  # each yields the logprob of the next prompt token
    return 0


def _num_logprobs(request: Request) -> int:
    """Number of alternatives with logprobs per sampled token; -1: no logprobs at all."""
    if request.beams is not None:
        return request.beams.num_candidates
    needed = request.params.num_logprobs_needed
    return -1 if needed is None else needed
