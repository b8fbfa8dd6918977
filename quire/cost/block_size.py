"""Block advice: which block size suits the sequences that were seen. Pure: figures in, a recommendation out.

Large blocks leave slots empty at the end of each sequence, small ones take longer to be found and listed. Both are
shares of something that runs out, memory and time, and the block size with the least sum of them is recommended,
where that is clearly less than now. How fast kernels read blocks of another size is not known here.
"""

from collections.abc import Mapping

import msgspec

MODULUS = 256  # slots that a block of a size that divides it leaves empty are known exactly


class BlockFigures(msgspec.Struct, frozen=True):
    """What was seen so far, all sequences of all requests together."""

    block_size: int
    num_samples: int  # times that all tables were looked at while something ran
    mean_slots: float  # of all tables, those of blocks behind a window left out; shared blocks count for each table
    mean_empty: float  # of these, behind the last token that is known
    num_ended: int  # sequences that came to their end
    num_tokens: int  # that these had, prompts included
    residues: tuple[int, ...]  # how many of them had a length of 0, 1, 2 ... modulo 256

    @property
    def internal_waste(self) -> float:
        """Share of the slots that held nothing, averaged over time."""
        return self.mean_empty / self.mean_slots if self.mean_slots else 0.0

    def empty_slots(self, block_size: int) -> float:
        """That all sequences that ended would have left in blocks of this size: exact where it divides 256.

        Otherwise the (block_size - 1) / 2 that are expected of lengths that know nothing of blocks.
        """
        if MODULUS % block_size:
            return self.num_ended * (block_size - 1) / 2
        return sum(count * (-length % block_size) for length, count in enumerate(self.residues))

    def predicted_waste(self, block_size: int) -> float:
        """Share of the slots that would be empty when sequences end, with blocks of this size."""
        empty = self.empty_slots(block_size)
        return empty / (self.num_tokens + empty) if self.num_tokens else 0.0


class BlockUse:
    """The counters. Bounded: as many for a million sequences as for one."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._num_samples = self._slots = self._empty = 0
        self._num_ended = self._num_tokens = 0
        self._residues = [0] * MODULUS

    def sample(self, num_slots: int, num_tokens: int) -> None:
        """All tables have so many slots now, and tokens for so many of them."""
        if num_slots:
            self._num_samples += 1
            self._slots += num_slots
            self._empty += num_slots - num_tokens

    def ended(self, length: int) -> None:
        """A sequence ended with so many tokens."""
        self._num_ended += 1
        self._num_tokens += length
        self._residues[length % MODULUS] += 1

    def figures(self) -> BlockFigures:
        """As they stand."""
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
_ENOUGH = 32  # sequences that have to have ended
_CLEARLY = 0.01  # of memory and time, that a change has to save


class Candidate(msgspec.Struct, frozen=True):
    """What is expected of one block size."""

    block_size: int
    predicted_waste: float  # share of slots that sequences leave empty
    half_block_waste: float  # the same by (block_size - 1) / 2 for each
    lookup_us: float | None  # to find a prompt of the mean length in the prefix index; None where there is none
    lookup_share: float  # of the time that computing that prompt takes


class BlockAdvice(msgspec.Struct, frozen=True):
    """What is recommended and why."""

    current: int
    internal_waste: float  # share of slots in tables that held nothing, averaged over time
    lookup_us: float | None
    candidates: tuple[Candidate, ...]
    recommended: int
    reason: str


def advise(
    figures: BlockFigures, lookup_seconds: Mapping[int, float], prompt_seconds: float, *, whole_blocks: bool = False
) -> BlockAdvice:
    """What to make of `figures`.

    lookup_seconds: of one prompt by block size, empty without a prefix index. prompt_seconds: that computing it
    takes; 0 where that is not known. whole_blocks: the index finds nothing smaller, so that half a block is computed
    again each time.
    """
    current = figures.block_size
    sizes = sorted({*CANDIDATES, current})
    candidates = tuple(_candidate(figures, size, lookup_seconds.get(size), prompt_seconds) for size in sizes)
    now = candidates[sizes.index(current)]
    totals = {one.block_size: _total(one, figures, whole_blocks=whole_blocks) for one in candidates}
    best = min(sizes, key=lambda size: (totals[size], size))
    saved = totals[current] - totals[best]
    if figures.num_ended < _ENOUGH:
        best, reason = current, f"only {figures.num_ended} sequences have ended; {_ENOUGH} are needed to say more"
    elif saved < _CLEARLY:
        best = current
        reason = f"no other size would save {_CLEARLY:.0%} of memory and time: {_about(now, figures)}"
    else:
        other = candidates[sizes.index(best)]
        reason = f"{_about(other, figures)}, where {_about(now, figures)}"
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
    """Of memory and time, what this block size wastes."""
    again = (one.block_size - 1) / 2 * figures.num_ended / max(1, figures.num_tokens) if whole_blocks else 0.0
    return one.predicted_waste + one.lookup_share + again


def _about(one: Candidate, figures: BlockFigures) -> str:
    mean = figures.num_tokens / max(1, figures.num_ended)
    lookup = "" if one.lookup_us is None else f" and finding a prompt takes {one.lookup_us:.0f} us"
    return (
        f"with blocks of {one.block_size} tokens, sequences of {mean:.0f} tokens on average leave "
        f"{one.predicted_waste:.1%} of their slots empty{lookup}"
    )
