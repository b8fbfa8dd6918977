"""Block use: how full the blocks of running sequences are, and how long sequences became. Only counts."""

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
