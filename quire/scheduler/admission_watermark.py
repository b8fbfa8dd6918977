"""Admission watermark: the number of blocks that admission leaves free for growth of running sequences.

No constant is right, because the need depends on output lengths, which are not known in advance. So the watermark
adapts, similar to congestion control in TCP (Chiu and Jain, 1989): a preemption doubles the blocks left free per
running sequence, and every 256 steps without one remove one block.
"""

_MOST = 0.5  # largest share of a pool: beyond it, running fewer sequences costs more than preemptions
_SETTLE = 32  # steps between increases: earlier preemptions are caused by sequences admitted before the increase
_FADE = 256  # steps without a preemption or adjustment, after which one block per running sequence is removed


class Caution:
    """The adaptive admission watermark."""

    def __init__(self, num_blocks: list[int], watermark: float) -> None:
        self._least = [int(num * watermark) for num in num_blocks]
        self._most = [int(num * _MOST) for num in num_blocks]
        self._step = _SETTLE
        self._changed = 0  # step of the last adjustment, or of an increase that was at its limit
        self._troubled = 0  # step of the last preemption
        self.blocks_each = 0  # blocks left free per running sequence

    def preempted(self, num_running: int) -> bool:
        """Double the blocks per running sequence after a preemption. Returns whether they changed."""
        self._troubled = self._step
        before = self.blocks_each
        if self._step - self._changed >= _SETTLE:
            enough = -(-max(self._most) // max(1, num_running))  # more has no effect, and is removed slowly
            self.blocks_each = max(before, min(max(1, 2 * before), enough))
            self._changed = self._step
        return self.blocks_each != before

    def planned(self) -> bool:
        """Count a step before it is planned. Returns whether a block per running sequence was removed."""
        self._step += 1
        if not self.blocks_each or self._step - max(self._troubled, self._changed) < _FADE:
            return False
        self.blocks_each -= 1
        self._changed = self._step
        return True

    def spare(self, num_running: int) -> list[int]:
        """Blocks per group that an admission has to leave free."""
        wanted = self.blocks_each * num_running
        return [min(max(least, wanted), max(least, most)) for least, most in zip(self._least, self._most, strict=True)]
