"""Caution: how many blocks admission leaves to those who run already, so that they need not be preempted.

No constant is right: what running sequences still need depends on how long their outputs become, which nobody knows.
So it is found by trying, as TCP finds the rate of a path (Chiu and Jain, 1989): preemptions double what is left free
for every running sequence, and time without one takes it back step by step.
"""

_MOST = 0.5  # share of a pool that is kept free at most: beyond it, running fewer costs more than preempting some
_SETTLE = 32  # steps until what was changed shows: preemptions before that are of those admitted earlier
_FADE = 256  # steps without a preemption, after which each running sequence has one block less kept for it


class Caution:
    """Blocks, of each group, that are to be left when a sequence begins."""

    def __init__(self, num_blocks: list[int], watermark: float) -> None:
        self._least = [int(num * watermark) for num in num_blocks]
        self._most = [int(num * _MOST) for num in num_blocks]
        self._step = _SETTLE
        self._changed = 0  # step in which more or less was kept than before
        self._troubled = 0  # step of the last preemption
        self.blocks_each = 0  # that are kept for every running sequence

    def preempted(self, num_running: int) -> bool:
        """Somebody lost its blocks: too many were admitted. Whether more is kept now."""
        self._troubled = self._step
        before = self.blocks_each
        if self._step - self._changed >= _SETTLE:
            enough = -(-max(self._most) // max(1, num_running))  # more would change nothing, and take long to fade
            self.blocks_each = max(before, min(max(1, 2 * before), enough))
            self._changed = self._step
        return self.blocks_each != before

    def planned(self) -> bool:
        """A step is about to be planned. Whether less is kept now."""
        self._step += 1
        if not self.blocks_each or self._step - max(self._troubled, self._changed) < _FADE:
            return False
        self.blocks_each -= 1
        self._changed = self._step
        return True

    def spare(self, num_running: int) -> list[int]:
        """Blocks of each group that who begins has to leave."""
        wanted = self.blocks_each * num_running
        return [min(max(least, wanted), max(least, most)) for least, most in zip(self._least, self._most, strict=True)]
