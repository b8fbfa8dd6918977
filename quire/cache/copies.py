"""Pending Moves of blocks, from the decision until a step has made them.

A copy within the device owns its source and its target until a step with its Move has succeeded, so that neither block
is allocated to another owner. The copies of a failed step go into the next step, unless no table needs them any more.
Moves to and from the host are in the same order as they were decided. They are in flight until a result has their ids,
which may be later than the end of their step. Their blocks have other owners (see HostPool and InFlight), and they are
not repeated after a failed step.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from quire.cache.block_pool import BlockPool
from quire.core.step import Move


class PendingMoves:
    """Pending Moves, and the references of copies within the device."""

    def __init__(self, pools: Sequence[BlockPool], deferred_decr_ref: Callable[[int, int], None]) -> None:
        """deferred_decr_ref(group, block): drops a reference once no step in flight needs the block."""
        self.num_tokens = 0  # copied since the start
        self._pools = pools
        self._deferred_decr_ref = deferred_decr_ref
        self.pending: list[Move] = []  # Moves of the next step
        self._in_flight: dict[int, list[Move]] = {}  # copies within the device, by step in flight
        self._swaps: dict[int, tuple[int, Move]] = {}  # Moves to and from the host in flight: id -> step, Move
        self._held: list[Counter[int]] = [Counter() for _ in pools]  # references, per group
        self._last_id = 0

    def plan_copy(self, group: int, source: int, num_tokens: int, target: int | None = None) -> int:
        """Plan the copy of the leading tokens of `source` to `target`, or to a new block. Returns the target.

        target: a block of the caller. The caller's reference to `source` passes to the copy.
        """
        target = self._pools[group].allocate() if target is None else target
        self._pools[group].incr_ref(target)
        self._last_id += 1
        self.pending.append(Move(self._last_id, group, "device", "device", [(source, target)], num_tokens))
        self._held[group].update((source, target))
        self.num_tokens += num_tokens
        return target

    def plan_swap(self, group: int, source: str, target: str, pairs: list[tuple[int, int]], num_tokens: int) -> None:
        """Add a Move to the host, or from it, to the next step."""
        self._last_id += 1
        self.pending.append(Move(self._last_id, group, source, target, pairs, num_tokens))

    @property
    def has_swaps(self) -> bool:
        """Whether the next step has a Move to the host, or from it. It is launched even if it computes nothing."""
        return any(not _is_copy(move) for move in self.pending)

    def pending_targets(self, group: int) -> list[int]:
        """Targets of the copies that the next step makes."""
        return [move.pairs[0][1] for move in self.pending if move.group == group and _is_copy(move)]

    def held_refs(self, group: int) -> Counter[int]:
        """References of copies, per block. Read-only."""
        return self._held[group]

    def launched(self, step_id: int) -> list[Move]:
        """The Moves of this step, which was planned last."""
        moves, self.pending = self.pending, []
        copies = [move for move in moves if _is_copy(move)]
        if copies:
            self._in_flight[step_id] = copies
        if len(copies) < len(moves):
            self._swaps.update((move.id, (step_id, move)) for move in moves if not _is_copy(move))
        return moves

    @property
    def has_swaps_in_flight(self) -> bool:
        """Whether Moves to the host, or from it, are not done."""
        return bool(self._swaps)

    def end_swaps(self, move_ids: Iterable[int]) -> list[Move]:
        """Moves to or from the host are done. Returns them, without those of failed steps."""
        return [self._swaps.pop(one)[1] for one in move_ids if one in self._swaps]

    def fail_swaps(self, step_id: int) -> list[Move]:
        """A step has failed: its Moves to and from the host are not in flight any more. Returns them."""
        return self.end_swaps([one for one, (step, _) in self._swaps.items() if step == step_id])

    def collected(self, step_id: int) -> None:
        """The step has succeeded: release the blocks of its copies."""
        for move in self._in_flight.pop(step_id, ()):
            self._release(move)

    def failed(self, step_id: int) -> list[tuple[int, int]]:
        """The step has failed: move its copies to the next step, except those whose target has no other owner.

        Returns (group, block) of the targets that are kept.
        """
        carried = self._in_flight.pop(step_id, [])
        wanted = [move for move in carried if self._pools[move.group].num_refs(move.pairs[0][1]) > 1]
        for move in carried:
            if move not in wanted:
                self._release(move)
        self.pending = wanted + self.pending
        return [(move.group, move.pairs[0][1]) for move in wanted]

    def cancel(self, group: int, targets: Collection[int]) -> set[int]:
        """Drop the next step's copies to those `targets` that have one owner besides the copy.

        That owner is about to release them. Returns the targets of the dropped copies, which stay without content.
        """
        if not self.pending:
            return set()
        copies = [move for move in self.pending if move.group == group and _is_copy(move)]
        waiting = [move for move in copies if move.pairs[0][1] in targets]
        cancelled = [move for move in waiting if self._pools[group].num_refs(move.pairs[0][1]) == 2]
        for move in cancelled:
            self.pending.remove(move)
            self._release(move)
        return {move.pairs[0][1] for move in cancelled}

    def _release(self, move: Move) -> None:
        """Release both blocks of a copy that is made or dropped."""
        for block in move.pairs[0]:
            self._held[move.group][block] -= 1
            self._deferred_decr_ref(move.group, block)


def _is_copy(move: Move) -> bool:
    return move.source == move.target
