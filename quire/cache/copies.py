"""Copies of blocks, from the decision until a step has made them. Knows pools and steps, no tables.

A copy holds its source and its target until a step that carries its Move has succeeded, so that nobody else
can have them meanwhile; the copies of a failed step go into the next one, where anybody is left who wants them.
Moves to the host and from it travel with them, in the order in which they were decided; who asks for them holds
their blocks, and where the step fails they are not made again.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from quire.cache.block_pool import BlockPool
from quire.core.step import Move


class Copies:
    """Moves, and what those within the device hold."""

    def __init__(self, pools: Sequence[BlockPool], let_go: Callable[[int, int], None]) -> None:
        """let_go(group, block): how a reference is given back while steps may be in flight."""
        self.num_tokens = 0  # copied since the start
        self._pools = pools
        self._let_go = let_go
        self._waiting: list[Move] = []  # for the next step to carry
        self._carried: dict[int, list[Move]] = {}  # by step
        self._held: list[Counter[int]] = [Counter() for _ in pools]  # references, per group
        self._last_id = 0

    def make(self, group: int, source: int, num_tokens: int) -> int:
        """A new block that gets the leading tokens of `source`, a reference to which passes to the copy."""
        target = self._pools[group].take()
        self._pools[group].hold(target)
        self._last_id += 1
        self._waiting.append(Move(self._last_id, group, "device", "device", [(source, target)], num_tokens))
        self._held[group].update((source, target))
        self.num_tokens += num_tokens
        return target

    def carry(self, group: int, source: str, target: str, pairs: list[tuple[int, int]], num_tokens: int) -> None:
        """A Move to the host or from it goes with the next step."""
        self._last_id += 1
        self._waiting.append(Move(self._last_id, group, source, target, pairs, num_tokens))

    @property
    def to_host_or_back(self) -> bool:
        """Whether the next step has such a Move to carry: it cannot wait."""
        return any(not _is_copy(move) for move in self._waiting)

    def waiting(self, group: int) -> list[int]:
        """Blocks that get their copy with the next step."""
        return [move.pairs[0][1] for move in self._waiting if move.group == group and _is_copy(move)]

    def held(self, group: int) -> Counter[int]:
        """References that copies hold, per block. To look at, not to change."""
        return self._held[group]

    def launched(self, step_id: int) -> list[Move]:
        """What this step carries."""
        moves, self._waiting = self._waiting, []
        copies = [move for move in moves if _is_copy(move)]
        if copies:
            self._carried[step_id] = copies
        return moves

    def collected(self, step_id: int) -> None:
        """The step has succeeded: its copies are made."""
        for move in self._carried.pop(step_id, ()):
            self._forget(move)

    def failed(self, step_id: int) -> list[tuple[int, int]]:
        """The step has failed: its copies are still to be made, by the next one, where anybody wants them.

        Returns (group, block) of those that somebody wants.
        """
        carried = self._carried.pop(step_id, [])
        wanted = [move for move in carried if self._pools[move.group].refs(move.pairs[0][1]) > 1]
        for move in carried:
            if move not in wanted:
                self._forget(move)
        self._waiting = wanted + self._waiting
        return [(move.group, move.pairs[0][1]) for move in wanted]

    def cancel(self, group: int, targets: Collection[int]) -> set[int]:
        """Copies that no step carries yet, into blocks whose other owner lets go of them, are not needed any more.

        Returns the blocks that stay without what was to be copied.
        """
        copies = [move for move in self._waiting if move.group == group and _is_copy(move)]
        waiting = [move for move in copies if move.pairs[0][1] in targets]
        cancelled = [move for move in waiting if self._pools[group].refs(move.pairs[0][1]) == 2]
        for move in cancelled:
            self._waiting.remove(move)
            self._forget(move)
        return {move.pairs[0][1] for move in cancelled}

    def _forget(self, move: Move) -> None:
        """A copy is made, or will not be: it lets go of both blocks."""
        for block in move.pairs[0]:
            self._held[move.group][block] -= 1
            self._let_go(move.group, block)


def _is_copy(move: Move) -> bool:
    return move.source == move.target
