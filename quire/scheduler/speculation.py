"""Speculation: which running sequences of a step verify drafts, and what came of them.

A sequence that decodes has one chunk of one token. Drafts extend this chunk: its next tokens are computed as if they
were known, and a token is sampled after each. Sampling depends on the position alone, so each sampled token is the one
that an engine without speculation would have sampled, as long as the drafts before it were right. Drafts are accepted
while they equal the sampled tokens (Daliri, Musco and Suresh, "Coupling without Communication and Drafter-Invariant
Speculative Decoding", 2024).

Drafts get blocks that are free. Nothing is evicted or preempted for them.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Listing
from itertools import chain, takewhile

from quire.cache.manager import KVCacheManager
from quire.config import SchedulerConfig
from quire.core.common_prefix import common_prefix_len
from quire.core.explanation import SkipReason
from quire.cost.step_time import CostModel
from quire.scheduler.constraints import StructuredOutputManager
from quire.scheduler.lifecycle import InFlightStep
from quire.scheduler.request_stats import RequestStats
from quire.scheduler.sequence import Sequence
from quire.scheduler.step_builder import ScheduledChunk, StepBuilder
from quire.speculation.drafters import Proposal, RunnerDrafter
from quire.speculation.governor import Candidate, Chances, Drafting, Governor, OwnCounts
from quire.speculation.sources import SOURCES, DrafterSource

_SKIPPED = 1.0  # tokens that a sequence loses by a step that it skips beside others
_SKIPPED_BY_ALL = 0.3  # the same if all skip it: no step runs, but the next one is planned later
_MOST_PROPOSALS = 32  # in one step; sequences take turns
_MOST_OF_MANY = 16  # the same for a step with more than _MANY sequences, so that its planning stays below a millisecond
_MANY = 128
_INDEXED_PER_STEP = 4096  # tokens that all sequences together add to their indexes in one step
_MOST_TENANTS = 4096  # whose chances are kept
_MOST_INDEXED = 2**20  # tokens in the indexes of all running sequences, about 100 bytes each


def _most_proposals(num_sequences: int) -> int:
    """How many of the sequences of a step have proposals."""
    return _MOST_OF_MANY if num_sequences > _MANY else min(num_sequences, _MOST_PROPOSALS)


def _before_end(proposal: Proposal, stop_ids: Collection[int]) -> Proposal | None:
    """The drafts before the first stop token, which needs no draft: the token sampled behind them is it."""
    tokens = list(takewhile(lambda token: token not in stop_ids, proposal.tokens))
    return proposal._replace(tokens=tokens) if tokens else None


class _SequenceDrafters:
    """The drafters of one running sequence, in the order in which they propose."""

    __slots__ = ("drafters", "of_runner", "own_counts", "unverified", "unverified_at")

    def __init__(self, seq: Sequence, sources: Iterable[DrafterSource]) -> None:
        about = seq.request, seq.tokens, seq.num_prompt_tokens
        self.drafters = [one for source in sources if (one := source.begin(*about)) is not None]
        self.of_runner: RunnerDrafter | None = None
        self.own_counts = OwnCounts()
        self.unverified: list[Proposal] = []  # the last proposals, without the one that was verified
        self.unverified_at = 0  # position of their first drafts

    def receive(self, seq: Sequence, tokens: Listing[int]) -> None:
        """Take a proposal of the runner."""
        if self.of_runner is None:
            self.of_runner = RunnerDrafter(seq.tokens)
            self.drafters.insert(0, self.of_runner)
        self.of_runner.receive(tokens)

    def extend(self, most: int) -> int:
        """Index up to `most` more tokens, the last drafter first. Returns their number."""
        number = 0
        for drafter in reversed(self.drafters):
            number += drafter.extend(most - number)
        return number


class Speculator:
    """Adds drafts to the chunks of a step, and learns from their verification."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCacheManager,
        costs: CostModel,
        structured_outputs: StructuredOutputManager,
        request_stats: RequestStats,
    ) -> None:
        self._sources = tuple(make() for name, make in SOURCES.items() if name in config.speculation)
        self._max_drafts = config.num_speculative_tokens
        self._cache = cache
        self._structured_outputs = structured_outputs
        self._request_stats = request_stats
        self.governor = Governor(costs.step_curve.seconds, lambda: costs.row_time.per_row)
        self.keeps_answers = True  # whether sources learn from sequences that have ended
        self.governs = config.governs_speculation  # whether drafts are verified only if they are expected to save time
        self._chances: OrderedDict[str, Chances] = OrderedDict()  # by tenant, least recently used first
        self._sequences: dict[int, _SequenceDrafters] = {}  # by id, of sequences that have decoded
        self._num_indexed = 0
        self._next_place = 0  # in the step, of the chunk whose sequence has the next turn
        self._overlaps = config.steps_in_flight > 1
        self._last_commit: float | None = None  # of a decode step, if no other step was committed behind it
        self._skipping: set[int] = set()  # ids of sequences that skip the next step
        self._skipped: set[int] = set()  # ids of sequences that have skipped a step since the last proposals

    def end(self, seq: Sequence) -> None:
        """Forget a sequence that has ended. The sources learn from it."""
        if seq.is_generation and self.keeps_answers:
            for source in self._sources:
                source.ended(seq.request, seq.tokens, seq.num_prompt_tokens)
        self._skipping.discard(seq.id)
        drafters = self._sequences.pop(seq.id, None)
        if drafters is not None:
            self._num_indexed -= sum(drafter.close() for drafter in drafters.drafters)

    def add_drafts(self, builder: StepBuilder, most: int) -> None:
        """Add up to `most` drafts to the chunks of the planned step that sample behind a known token."""
        num_tokens, num_samples = builder.num_tokens, len(builder.scheduled)
        if not num_samples:
            return
        skipped, self._skipped = self._skipped, set()
        may_pay = not self.governs or self.governor.may_pay(num_tokens, num_samples, _most_proposals(num_samples))
        if not (may_pay or skipped):
            return
        found, later = self._proposals(builder, most, skipped)
        if self.governs:
            self.governor.proposed(builder.num_proposals, builder.num_indexed_tokens, num_samples)
        selected = self._selected([candidate for _, candidate in later], num_tokens, num_samples, most, tries=False)
        self._skipping |= {seq.id for (seq, _), count in zip(later, selected, strict=True) if count}
        counts = self._selected([candidate for _, candidate in found], num_tokens, num_samples, most)
        for (place, candidate), wanted in zip(found, counts, strict=True):
            chunk = builder.scheduled[place]
            proposal = self._allowed(builder, chunk, candidate.proposal, min(wanted, most)) if wanted else "cost"
            if isinstance(proposal, Proposal):
                most -= len(proposal.tokens)
                builder.add_drafts(place, proposal)
                drafters = self._sequences[chunk.seq.id]
                drafters.unverified = [one for one in drafters.unverified if one is not candidate.proposal]
            else:
                self._request_stats.skipped(chunk.seq, proposal)

    def _selected(
        self, candidates: list[Candidate], num_tokens: int, num_samples: int, most: int, *, tries: bool = True
    ) -> list[int]:
        """The number of drafts to verify of each candidate."""
        price = 0.0
        if self._overlaps:
            price = _SKIPPED if len(candidates) < num_samples else _SKIPPED_BY_ALL
        if self.governs and candidates:
            about = {"num_tokens": num_tokens, "num_samples": num_samples, "most": most}
            return self.governor.select(candidates, **about, price=price, tries=tries)
        return [len(one.proposal.tokens) if sum(one.gains) >= price else 0 for one in candidates]

    def _proposals(
        self, builder: StepBuilder, most: int, skipped: set[int]
    ) -> tuple[list[tuple[int, Candidate]], list[tuple[Sequence, Candidate]]]:
        """Proposals of up to `most` drafts, each with the place of its chunk; and those for later steps.

        The latter are of sequences whose chunk is behind a token that is still sampled. Sequences take turns. Those
        that skipped a step for drafts are first.
        """
        found: list[tuple[int, Candidate]] = []
        later: list[tuple[Sequence, Candidate]] = []
        number = len(builder.scheduled)
        index_budget, left, turn = _INDEXED_PER_STEP, _most_proposals(number), self._next_place % number
        places: Iterable[int] = chain(range(turn, number), range(turn))
        if skipped:
            places = sorted(places, key=lambda place: builder.scheduled[place].seq.id not in skipped)
        for place in places:
            chunk = builder.scheduled[place]
            seq = chunk.seq
            num_unknown = chunk.stop - len(seq.tokens)  # tokens of the chunk that steps in flight sample
            if not (seq.num_computed == chunk.stop and num_unknown >= 0 and self._may_draft(seq, 1 + num_unknown)):
                continue
            drafters = self._drafters_of(seq)
            may_index = index_budget > 0 and self._num_indexed < _MOST_INDEXED
            num_indexed = drafters.extend(index_budget) if may_index else 0
            index_budget -= num_indexed
            self._num_indexed += num_indexed
            builder.count_proposal(num_indexed)
            self._learn(seq, drafters)
            unknown = num_unknown + 1 if num_unknown else 0  # tokens before drafts could follow: those, and the chunk's
            length = min(self._max_drafts, most, seq.limit - chunk.stop) + unknown
            candidate = self._candidate(seq, drafters, length) if length > unknown else None
            if candidate is None:
                continue
            left -= 1
            self._next_place = place + 1
            if unknown:
                later.append((seq, candidate._replace(gains=candidate.gains[unknown:])))
            else:
                found.append((place, candidate))
            if left == 0:
                break
        return found, later

    def _drafters_of(self, seq: Sequence) -> _SequenceDrafters:
        drafters = self._sequences.get(seq.id)
        if drafters is None:
            drafters = self._sequences[seq.id] = _SequenceDrafters(seq, self._sources)
        return drafters

    def observe_step(self, launched: InFlightStep, seconds: float | None, now: float) -> None:
        """Learn from a committed step how long the host took for it. seconds: of the device; None if they say nothing.

        Only decode steps behind decode steps count: between other steps an engine may have waited for requests.
        """
        first = launched.scheduled[0] if launched.scheduled else None
        decodes = first is not None and not launched.num_pairs and first.stop > first.seq.num_prompt_tokens
        before, self._last_commit = self._last_commit, now if decodes else None
        if decodes and before is not None and seconds is not None:
            drafting = Drafting.PROPOSED if launched.num_proposals else Drafting.NONE
            self.governor.host_time.observe(
                Drafting.VERIFIED if launched.num_drafts else drafting,
                len(launched.scheduled),
                now - before - seconds,
                num_proposals=launched.num_proposals,
                num_indexed=launched.num_indexed_tokens,
            )

    def receive(self, launched: InFlightStep, proposals: Listing[Listing[int]]) -> None:
        """Take the proposals of the runner for each chunk of a step whose tokens have been appended."""
        for chunk, tokens in zip(launched.scheduled, proposals, strict=True):
            if tokens and chunk.is_valid and not chunk.seq.finished:
                self._drafters_of(chunk.seq).receive(chunk.seq, tokens)

    def step_failed(self) -> None:
        """Learn nothing from the time up to the next commit."""
        self._last_commit = None

    def skips(self, seq: Sequence) -> bool:
        """Whether a sequence has no chunk in this step, because its last token is pending and drafts may follow it.

        While a chunk with drafts is in flight, it is not known which token is the next. So a sequence with drafts is in
        every other step if two are in flight. It yields more tokens only if more than one draft is accepted.
        """
        if seq.id not in self._skipping:
            return False
        self._skipping.remove(seq.id)
        if seq.num_pending == 0:
            return False
        self._skipped.add(seq.id)
        return True

    def verified(self, chunk: ScheduledChunk, num_accepted: int) -> None:
        """Learn from a committed chunk with drafts. Those behind the first rejected one say nothing."""
        seq, proposal = chunk.seq, chunk.proposal
        assert proposal is not None, "the chunk has no drafts"
        self._request_stats.verified(seq, proposal.drafter, len(proposal.tokens), num_accepted)
        self._chances_of(seq).observe(proposal, num_accepted)
        if self.governs:
            self.governor.accepted(num_accepted)
        drafters = self._sequences.get(seq.id)
        if drafters is not None:
            drafters.own_counts.observe(proposal, num_accepted)

    def _learn(self, seq: Sequence, drafters: _SequenceDrafters) -> None:
        """Compare proposals that were not verified with the tokens that came instead.

        Not if the sequence is constrained: some of its tokens may be forced, and say nothing about the drafter.
        """
        if drafters.unverified and not seq.constrained and (known := seq.tokens[drafters.unverified_at :]):
            for proposal in drafters.unverified:
                compared = proposal._replace(tokens=proposal.tokens[: len(known)])
                num_right = common_prefix_len(compared.tokens, known[: len(compared.tokens)])
                self._chances_of(seq).observe(compared, num_right)
                drafters.own_counts.observe(compared, num_right)
        drafters.unverified, drafters.unverified_at = [], len(seq.tokens)

    def _may_draft(self, seq: Sequence, num_pending: int) -> bool:
        """Whether so many tokens of a sequence are pending, and nothing else depends on them."""
        return (
            seq.num_pending == num_pending
            and seq.num_ignored_samples == 0
            and seq.is_generation
            and not (seq.is_beam or seq.runs_alone)
            and seq.num_reported >= seq.num_to_report
            and seq.request.params.speculation
        )

    def flush(self) -> None:
        """Forget what ended sequences have left."""
        for source in self._sources:
            source.clear()

    def _chances_of(self, seq: Sequence) -> Chances:
        """The chances of a tenant's drafts. Those of other tenants would reveal how well these predict theirs."""
        tenant = seq.request.namespace.tenant
        chances = self._chances.get(tenant)
        if chances is None:
            chances = self._chances[tenant] = Chances()
            if len(self._chances) > _MOST_TENANTS:
                self._chances.popitem(last=False)
        self._chances.move_to_end(tenant)
        return chances

    def _candidate(self, seq: Sequence, drafters: _SequenceDrafters, length: int) -> Candidate | None:
        """The proposal of a sequence with the most expected tokens; None if no drafter has one."""
        best: Candidate | None = None
        most, chances = 0.0, self._chances_of(seq)
        for drafter in drafters.drafters:
            proposal = drafter.propose(length)
            if proposal is not None and not seq.stop_ids.isdisjoint(proposal.tokens):
                proposal = _before_end(proposal, seq.stop_ids)
            if proposal is None:
                continue
            drafters.unverified.append(proposal)
            gains = drafters.own_counts.gains(proposal.drafter, chances.of(proposal))
            if best is None or sum(gains) > most:
                best, most = Candidate(proposal, gains), sum(gains)
        return best

    def _allowed(
        self, builder: StepBuilder, chunk: ScheduledChunk, proposal: Proposal, wanted: int
    ) -> Proposal | SkipReason:
        """Up to `wanted` drafts that have a block and that the constraint allows, or why there are none."""
        if (count := min(wanted, self._capacity(builder, chunk, wanted))) <= 0:
            return "blocks"
        if not chunk.seq.constrained:
            return Proposal(proposal.drafter, proposal.tokens[:count], proposal.match_length)
        allowed = self._structured_outputs.allowed_drafts(chunk.seq, proposal.tokens, count)
        return proposal._replace(tokens=allowed.tokens, forced=allowed.forced) if allowed.tokens else "constraint"

    def _capacity(self, builder: StepBuilder, chunk: ScheduledChunk, wanted: int) -> int:
        """How many drafts have a block. Allocates one if one is free."""
        table = chunk.seq.table
        assert table is not None, "the sequence runs"
        if table.capacity < chunk.stop + wanted:
            firsts = self._cache.grow_free(table)
            if firsts is not None:
                builder.update_table(chunk.seq, firsts)
        count = table.capacity - chunk.stop
        return count if self._cache.states is None else min(count, self._cache.states.max_pending)
