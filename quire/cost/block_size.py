"""Block size advice from the lengths of finished sequences.

Large blocks waste slots at the end of each sequence. Small blocks take longer to find in the prefix index. Wasted
memory and lookup time are both expressed as shares; the size with the least sum is recommended if it clearly saves
something. The speed of kernels at other block sizes is not included.
"""

from collections.abc import Mapping

import msgspec

MODULUS = 256  # lengths are counted modulo this: the waste is exact for block sizes that divide it


class BlockFigures(msgspec.Struct, frozen=True):
    """Block use of all sequences so far."""

    block_size: int
    num_samples: int  # samples that were taken while sequences ran
    mean_slots: float  # slots of group 0 in all tables, without absent blocks; a shared block counts for each table
    mean_empty: float  # of these slots, those behind the last known token
    num_ended: int  # sequences that ended
    num_tokens: int  # tokens of these sequences, prompts included
    residues: tuple[int, ...]  # number of these sequences by length modulo 256

    @property
    def internal_waste(self) -> float:
        """Share of slots that held no token, averaged over the samples."""
        return self.mean_empty / self.mean_slots if self.mean_slots else 0.0

    def empty_slots(self, block_size: int) -> float:
        """Slots that the ended sequences would have left empty with this block size.

        Exact if the size divides 256. Otherwise (block_size - 1) / 2 per sequence, the mean for lengths that are
        independent of the block size.
        """
        if MODULUS % block_size:
            return self.num_ended * (block_size - 1) / 2
        return sum(count * (-length % block_size) for length, count in enumerate(self.residues))

    def predicted_waste(self, block_size: int) -> float:
        """Share of slots that would be empty at the end of sequences with this block size."""
        empty = self.empty_slots(block_size)
        return empty / (self.num_tokens + empty) if self.num_tokens else 0.0


class BlockUse:
    """Counters of block use. Their size does not depend on the number of sequences."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._num_samples = self._slots = self._empty = 0
        self._num_ended = self._num_tokens = 0
        self._residues = [0] * MODULUS

    def sample(self, num_slots: int, num_tokens: int) -> None:
        """Add a sample: the slots of all tables, and how many of them hold a known token. Ignored without slots."""
        if num_slots:
            self._num_samples += 1
            self._slots += num_slots
            self._empty += num_slots - num_tokens

    def record_finished(self, length: int) -> None:
        """Count a sequence that ended with `length` tokens."""
        self._num_ended += 1
        self._num_tokens += length
        self._residues[length % MODULUS] += 1

    def figures(self) -> BlockFigures:
        """The current figures."""
        samples = max(1, self._num_samples)
        return BlockFigures(
            self._block_size,
            self._num_samples,
            self._slots / samples,
            self._empty / samples,
            self._num_ended,
            self._num_tokens,
            tuple(self._residues),
        )


CANDIDATES = (8, 16, 32, 64, 128)
_MIN_ENDED_SEQUENCES = 32  # ended sequences that a recommendation needs
_MIN_SAVING = 0.01  # least saving, as a share of memory plus time, that a change needs


class Candidate(msgspec.Struct, frozen=True):
    """The prediction for one block size."""

    block_size: int
    predicted_waste: float  # share of slots that sequences leave empty
    half_block_waste: float  # the same with (block_size - 1) / 2 empty slots per sequence
    lookup_us: float | None  # microseconds to look up one prompt in the prefix index; None without an index
    lookup_share: float  # lookup time divided by the time to compute that prompt


class BlockAdvice(msgspec.Struct, frozen=True):
    """The recommended block size and the reason."""

    current: int
    internal_waste: float  # share of slots in tables that held no token, averaged over the samples
    lookup_us: float | None
    candidates: tuple[Candidate, ...]
    recommended: int
    reason: str


def advise(
    figures: BlockFigures, lookup_seconds: Mapping[int, float], prompt_seconds: float, *, whole_blocks: bool = False
) -> BlockAdvice:
    """The recommendation for `figures`.

    lookup_seconds: seconds to look up one prompt, by block size; empty without a prefix index. prompt_seconds: seconds
    to compute that prompt; 0 if unknown. whole_blocks: the index finds whole blocks only, so that half a block per
    sequence is computed again.
    """
    current = figures.block_size
    sizes = sorted({*CANDIDATES, current})
    candidates = tuple(_candidate(figures, size, lookup_seconds.get(size), prompt_seconds) for size in sizes)
    now = candidates[sizes.index(current)]
    totals = {one.block_size: _total(one, figures, whole_blocks=whole_blocks) for one in candidates}
    best = min(sizes, key=lambda size: (totals[size], size))
    saved = totals[current] - totals[best]
    if figures.num_ended < _MIN_ENDED_SEQUENCES:
        best, reason = (
            current,
            f"only {figures.num_ended} sequences have ended; {_MIN_ENDED_SEQUENCES} are needed to say more",
        )
    elif saved < _MIN_SAVING:
        best = current
        reason = f"no other size would save {_MIN_SAVING:.0%} of memory and time: {_describe(now, figures)}"
    else:
        other = candidates[sizes.index(best)]
        reason = f"{_describe(other, figures)}, where {_describe(now, figures)}"
    return BlockAdvice(current, figures.internal_waste, now.lookup_us, candidates, best, reason)


def _candidate(figures: BlockFigures, size: int, lookup: float | None, prompt_seconds: float) -> Candidate:
    half = figures.num_ended * (size - 1) / 2
    return Candidate(
        size,
        figures.predicted_waste(size),
        half / (figures.num_tokens + half) if figures.num_tokens else 0.0,
        None if lookup is None else 1e6 * lookup,
        lookup / prompt_seconds if lookup is not None and prompt_seconds > 0 else 0.0,
    )


def _total(one: Candidate, figures: BlockFigures, *, whole_blocks: bool) -> float:
    """The share of memory and time that this block size wastes."""
    again = (one.block_size - 1) / 2 * figures.num_ended / max(1, figures.num_tokens) if whole_blocks else 0.0
    return one.predicted_waste + one.lookup_share + again


def _describe(one: Candidate, figures: BlockFigures) -> str:
    mean = figures.num_tokens / max(1, figures.num_ended)
    lookup = "" if one.lookup_us is None else f" and finding a prompt takes {one.lookup_us:.0f} us"
    return (
        f"with blocks of {one.block_size} tokens, sequences of {mean:.0f} tokens on average leave "
        f"{one.predicted_waste:.1%} of their slots empty{lookup}"
    )
