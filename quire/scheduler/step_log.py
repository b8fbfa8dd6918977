"""The step log: the latest steps with their tokens by tenant, recorded only while there are viewers."""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import repeat

import msgspec

from quire.scheduler.lifecycle import InFlightStep
from quire.scheduler.step_builder import ScheduledChunk

MOST_STEPS = 256


class StepTokens(msgspec.Struct):
    """Tokens and sequences of one tenant in a step.

    A decode token is a single one of its sequence, behind the prompt. All others but drafts count as prompt tokens.
    """

    prompt: int = 0
    decode: int = 0
    drafts: int = 0
    accepted: int = 0
    num_seqs: int = 0

    def add_all(self, other: "StepTokens") -> None:
        """Add the counts of another tenant."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class LoggedStep(msgspec.Struct):
    """One step. measured: seconds; None before its commit, and for a failed step."""

    id: int
    at: float
    predicted: float
    num_waiting: int
    preemptions: int
    evicted_blocks: int
    measured: float | None = None
    is_over: bool = False
    scheduled: Sequence[ScheduledChunk] = ()  # until the tokens of the committed step are counted
    kept: Sequence[int] = ()  # tokens that each chunk yielded
    tokens: dict[str, StepTokens] = {}  # by tenant

    def count(self) -> None:
        """Bring `tokens` up to date. Chunks are not kept any longer than needed."""
        if not self.scheduled:
            return
        counts: dict[str, list[int]] = {}
        for chunk, num_kept in zip(self.scheduled, self.kept or repeat(0), strict=False):
            seq, proposal = chunk.seq, chunk.proposal
            tenant = seq.request.namespace.tenant
            some = counts.get(tenant)
            if some is None:
                some = counts[tenant] = [0] * len(StepTokens.__struct_fields__)
            num_drafts = 0 if proposal is None else len(proposal.tokens)
            num_tokens = chunk.stop - chunk.start - num_drafts
            some[num_tokens == 1 and chunk.start >= seq.num_prompt_tokens] += num_tokens
            some[-1] += 1
            if num_drafts:
                some[2] += num_drafts
                some[3] += max(0, num_kept - 1)
        self.tokens = {tenant: StepTokens(*some) for tenant, some in counts.items()}
        if self.is_over:
            self.scheduled = self.kept = ()


class StepLog:
    """The latest MOST_STEPS steps. Of the scheduler's counters each step has its part."""

    def __init__(self, num_preemptions: int, num_evicted: int) -> None:
        self._steps: deque[LoggedStep] = deque(maxlen=MOST_STEPS)
        self._counters = num_preemptions, num_evicted

    def planned(
        self, step: InFlightStep, now: float, predicted: float, num_waiting: int, counters: tuple[int, int]
    ) -> None:
        """Record a step. counters: preemptions and evicted blocks since the start."""
        before, self._counters = self._counters, counters
        parts = (counters[0] - before[0], counters[1] - before[1])
        self._steps.append(LoggedStep(step.id, now, predicted, num_waiting, *parts, scheduled=step.scheduled))

    def committed(self, step_id: int, seconds: float | None, kept: Sequence[int] = ()) -> None:
        """Record the end of a step; seconds: None if it failed. Ignores a step that is not in the log."""
        for step in reversed(self._steps):
            if step.id <= step_id:
                if step.id == step_id:
                    step.measured, step.kept, step.is_over = seconds, kept, True
                return

    @property
    def newest(self) -> LoggedStep | None:
        """The step planned last; None before the first."""
        return self._steps[-1] if self._steps else None

    def steps(self) -> Iterator[LoggedStep]:
        """The steps, oldest first, with their tokens counted."""
        for step in self._steps:
            step.count()
            yield step
