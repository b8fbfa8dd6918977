"""RequestState: the record of an unfinished request in the scheduler."""

from quire.core.explanation import Explanation
from quire.core.request import Request
from quire.scheduler.beam_search import BeamSearch
from quire.scheduler.sequence import Sequence


class RequestState:
    """An unfinished request: its sequences, its beam search if it has one, and its explanation.

    It has no sequences while it waits for prerequisites. If sequences share a prompt or a beam search, only the
    first is queued. The others are held outside of the queue until the KV that they share is committed, or a beam is
    selected for them.
    """

    __slots__ = (
        "arrived",
        "beam_search",
        "explanation",
        "held",
        "is_new",
        "lengths_when_preempted",
        "num_admitted_before",
        "request",
        "sequences",
        "waits_for",
        "waits_since",
    )

    def __init__(self, request: Request, arrived: float, explanation: Explanation, num_admitted_before: int) -> None:
        """arrived: in seconds. num_admitted_before: requests of its tenant that were admitted before it arrived."""
        self.request = request
        self.arrived = arrived
        self.explanation = explanation
        self.num_admitted_before = num_admitted_before
        self.waits_for = request.waits_for  # names of its prerequisites that are not ready
        self.waits_since = arrived  # when the last of the others was ready
        self.is_new = True  # none of its sequences has run
        self.sequences: list[Sequence] = []  # unfinished
        self.held: list[Sequence] = []  # may contain finished ones
        self.beam_search: BeamSearch | None = None
        # (sequence, number of known tokens) when the request was preempted for budget sharing
        self.lengths_when_preempted: list[tuple[Sequence, int]] = []

    def begin(self, sequences: list[Sequence]) -> list[Sequence]:
        """Take the sequences, once all prerequisites are ready. Returns those to be queued; the others are held."""
        assert sequences and not self.sequences and not self.waits_for, "a request begins once"
        self.sequences = list(sequences)
        if self.request.beams is not None:
            self.beam_search = BeamSearch(self.request, sequences[0])
        shares = sequences[0].num_shared or self.request.beams is not None
        self.held = sequences[1:] if shares else []
        return sequences[:1] if shares else sequences

    def ready(self, what: str, now: float) -> float:
        """Stop waiting for a prerequisite. Returns the seconds for which it was the one that the request waited for."""
        self.waits_for.remove(what)
        seconds, self.waits_since = now - self.waits_since, now
        return seconds

    def stop_being_new(self) -> None:
        """Record that a sequence runs, or that the request has ended."""
        self.is_new = False

    def hold(self, seq: Sequence) -> None:
        """Hold a sequence."""
        assert seq.row < 0, "a held sequence has no row"
        self.held.append(seq)

    def release_held(self) -> list[Sequence]:
        """Stop holding the sequences. Returns the unfinished ones."""
        held, self.held = self.held, []
        return [seq for seq in held if not seq.finished]

    def branch_source(self, seq: Sequence) -> Sequence | None:
        """A running sequence of the request with committed KV of the positions that `seq` shares; None without one."""
        if not seq.num_shared or seq.swapped:
            return None
        return next((one for one in self.sequences if one.has_written(seq.num_shared)), None)

    def remove(self, seq: Sequence) -> Sequence | None:
        """Remove a sequence that has ended. If others are held, the next of them is held no longer and returned."""
        self.sequences.remove(seq)
        held = self.release_held()
        self.held = held[1:]
        return held[0] if held else None

    def preempt_for_sharing(self) -> None:
        """Record that the request is preempted for budget sharing."""
        self.lengths_when_preempted = [(seq, len(seq.tokens)) for seq in self.sequences]

    @property
    def has_progressed(self) -> bool:
        """Whether a sequence has a new token, or has ended, since the request was preempted for budget sharing."""
        before = self.lengths_when_preempted
        return not before or any(seq.finished or len(seq.tokens) > length for seq, length in before)
