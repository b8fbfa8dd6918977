"""Admission watermark: the number of blocks that admission leaves free for growth of running sequences.

No constant is right, because the need depends on output lengths, which are not known in advance. So the watermark
adapts, similar to congestion control in TCP (Chiu and Jain, 1989): a preemption doubles the blocks left free per
running sequence, and every 256 steps without one remove one block.
"""

_MAX_SHARE = 0.5  # largest share of a pool: beyond it, running fewer sequences costs more than preemptions
_INCREASE_INTERVAL = (
    32  # steps between increases: earlier preemptions are caused by sequences admitted before the increase
)
_DECREASE_INTERVAL = (
    256  # steps without a preemption or adjustment, after which one block per running sequence is removed
)


class AdmissionWatermark:
    """The adaptive admission watermark."""

    def __init__(self, num_blocks: list[int], watermark: float) -> None:
        self._min_blocks = [int(num * watermark) for num in num_blocks]
        self._max_blocks = [int(num * _MAX_SHARE) for num in num_blocks]
        self._step = _INCREASE_INTERVAL
        self._last_adjustment = 0  # step of the last adjustment, or of an increase that was at its limit
        self._last_preemption = 0  # step of the last preemption
        self.blocks_per_sequence = 0  # blocks left free per running sequence

    def preempted(self, num_running: int) -> bool:
        """Double the blocks per running sequence after a preemption. Returns whether they changed."""
        self._last_preemption = self._step
        before = self.blocks_per_sequence
        if self._step - self._last_adjustment >= _INCREASE_INTERVAL:
            enough = -(-max(self._max_blocks) // max(1, num_running))  # more has no effect, and is removed slowly
            self.blocks_per_sequence = max(before, min(max(1, 2 * before), enough))
            self._last_adjustment = self._step
        return self.blocks_per_sequence != before

    def planned(self) -> bool:
        """Count a step before it is planned. Returns whether a block per running sequence was removed."""
        self._step += 1
        if (
            not self.blocks_per_sequence
            or self._step - max(self._last_preemption, self._last_adjustment) < _DECREASE_INTERVAL
        ):
            return False
        self.blocks_per_sequence -= 1
        self._last_adjustment = self._step
        return True

    def watermark_blocks(self, num_running: int) -> list[int]:
        """Blocks per group that an admission has to leave free."""
        wanted = self.blocks_per_sequence * num_running
        return [
            min(max(least, wanted), max(least, most))
            for least, most in zip(self._min_blocks, self._max_blocks, strict=True)
        ]
