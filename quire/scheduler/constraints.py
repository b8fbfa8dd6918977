"""Verdicts of constraints, applied to sequences.

A request waits until its constraint is compiled (`Scheduler.ready`). Forced tokens are appended to a sequence as soon
as the verdict is known. They are computed in one chunk like a prompt, and the next token is sampled behind the last
one. A token that an in-flight step samples in place of a forced one is ignored.
"""

from collections.abc import Sequence as Listing

import numpy as np

from quire.core.constraint import NO_DRAFTS, AllowedDrafts, Constraints, Verdict
from quire.core.output import EndCause
from quire.core.request import Request
from quire.core.step import SamplingMasks, Step
from quire.errors import RequestError
from quire.scheduler.lifecycle import InFlightStep
from quire.scheduler.sequence import Sequence
from quire.speculation.drafters import Proposal

_DEAD_END = "the constraint on the output allows nothing here: "
NO_ALLOWED_TOKEN = (
    _DEAD_END + "no token that it allows could be sampled; other parameters may ban the tokens that it requires"
)


class StructuredOutputManager:
    """Passes tokens to the constraints and applies their verdicts to sequences."""

    def __init__(self, constraints: Constraints | None) -> None:
        self.constraints = constraints
        self._constrained_ids: set[int] = set()  # ids of sequences with a matcher

    def check(self, request: Request) -> None:
        """Raises RequestError for a constrained request if there are no constraints, or if it is a beam search."""
        if not request.is_constrained:
            return
        field = "reasoning" if request.params.structured_outputs is None else "structured_outputs"
        if self.constraints is None:
            raise RequestError(f"this engine cannot constrain outputs; leave {field} out", field)
        if request.beams is not None:
            raise RequestError(f"a beam search takes no {field}; leave one of them out", field)

    def begin(self, seq: Sequence) -> tuple[EndCause | None, str]:
        """Start a matcher for a sequence behind its known output tokens, and append the forced tokens.

        Returns the cause of the end or None, and the error or "".
        """
        assert self.constraints is not None, "checked in `check`"
        self._constrained_ids.add(seq.id)
        known = seq.tokens[len(seq.request.prompt) :]
        kept, cause, error = self._apply_verdict(seq, self.constraints.begin(seq.id, seq.request, known))
        seq.hold_back(kept)
        return cause, error

    def advance(self, seq: Sequence, tokens: Listing[int]) -> tuple[list[int], EndCause | None, str]:
        """Pass sampled tokens to the matcher, and append the forced tokens behind them.

        Returns the appended tokens, the cause of the end or None, and the error or "".
        """
        assert self.constraints is not None, "checked in `check`"
        verdict = self.constraints.advance(seq.id, tokens)
        if len(seq.tokens) == seq.max_length:  # the output may be complete for the grammar, too
            return [], EndCause.STOP if verdict.is_over and not verdict.forced else EndCause.LENGTH, ""
        return self._apply_verdict(seq, verdict)

    def no_token_error(self, seq: Sequence, accepted: list[int]) -> str:
        """The error of a constrained sequence for which no token could be sampled: its matcher's, if that failed.

        accepted: the drafts before it. The masks behind drafts come from a fork, so the matcher computes this one.
        """
        assert self.constraints is not None, "checked in `check`"
        self.constraints.advance(seq.id, accepted)
        self.constraints.masks([seq.id], [NO_DRAFTS])
        error = self.constraints.advance(seq.id, []).error
        return _DEAD_END + error if error else NO_ALLOWED_TOKEN

    def allowed_drafts(self, seq: Sequence, drafts: Listing[int], most: int) -> AllowedDrafts:
        """The drafts of a constrained sequence that are allowed, up to `most` tokens with those that are forced."""
        assert self.constraints is not None, "checked in `check`"
        return self.constraints.allowed_drafts(seq.id, drafts, most)

    def end(self, seq: Sequence) -> None:
        """Drop the matcher of a sequence. Ignores a sequence without one."""
        if seq.id in self._constrained_ids and self.constraints is not None:
            self._constrained_ids.discard(seq.id)
            self.constraints.end(seq.id)

    def sampling_masks(self, step: Step, launched: InFlightStep) -> SamplingMasks:
        """The sampling masks for the constrained rows of the newest step whose next token is not forced."""
        if not self._constrained_ids:
            return SamplingMasks.empty()
        assert self.constraints is not None, "a sequence is constrained"
        samples = step.chunks.samples.tolist()
        asking = [
            (row, chunk)
            for row, chunk, is_sampled in zip(step.chunks.rows.tolist(), launched.scheduled, samples, strict=True)
            if is_sampled and chunk.seq.constrained and chunk.is_valid and not chunk.seq.num_ignored_samples
        ]
        if not asking:
            return SamplingMasks.empty()
        rows = [row for row, chunk in asking for _ in range(1 + len(chunk.drafts))]
        positions = [at for _, chunk in asking for at in range(chunk.stop - len(chunk.drafts), chunk.stop + 1)]
        masks = self.constraints.masks(
            [chunk.seq.id for _, chunk in asking], [_allowed(chunk.proposal) for _, chunk in asking]
        )
        return SamplingMasks(np.array(rows, np.int32), np.array(positions, np.int32), masks)

    def _apply_verdict(self, seq: Sequence, verdict: Verdict) -> tuple[list[int], EndCause | None, str]:
        kept, cause = seq.append_forced(verdict.forced) if verdict.forced else ([], None)
        if verdict.is_over and cause != EndCause.STOP and len(kept) == len(verdict.forced):
            cause = EndCause.STOP
        if verdict.error and cause is None:
            return kept, EndCause.DEAD_END, _DEAD_END + verdict.error
        return kept, cause, ""


def _allowed(proposal: Proposal | None) -> AllowedDrafts:
    return NO_DRAFTS if proposal is None else AllowedDrafts(list(proposal.tokens), list(proposal.forced))
