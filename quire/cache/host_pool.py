"""The host pool: KV of swapped sequences in host memory.

A host block has these owners, by reference count as on the device:
  a record   the leading positions of a swapped sequence; sequences that shared blocks share them here too
  a step     a block that one of its Moves writes or reads, until the step is over

Device blocks are only recorded, so that sequences of one request share copies when they are swapped out and in.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from quire.cache.block_pool import BlockPool, Pools
from quire.cache.block_table import ABSENT
from quire.config import CacheConfig

Place = tuple[int, int]  # a group, and a block of it

_RECORD_AND_STEP = 2  # owners of a host block that no other sequence shares


@dataclass(slots=True, eq=False)
class Record:
    """Where the first `num_tokens` positions of a sequence are in host memory."""

    blocks: tuple[list[int], ...]  # per group, by table index; ABSENT before the window of the next query
    num_tokens: int
    step: int | None = None  # the step that writes them; None while it is being planned

    def places(self) -> Iterator[Place]:
        """Its host blocks."""
        return ((group, block) for group, some in enumerate(self.blocks) for block in some if block != ABSENT)


class SwapSpace:
    """Records of swapped sequences, and the pools of host blocks."""

    def __init__(self, config: CacheConfig) -> None:
        self.pools = Pools(BlockPool(group.num_host_blocks) for group in config.groups)
        self.num_blocks_out = 0  # copied to the host since the start
        self.num_blocks_in = 0  # copied from the host since the start
        self.records: dict[int, Record] = {}  # by sequence id; read-only for other classes
        self._planned: list[Place] = []  # host blocks of the Moves of the step that is being planned
        self._leaving: dict[Place, tuple[int, int]] = {}  # device block that this step copies -> host block, tokens
        self._carried: dict[int, list[Place]] = {}  # host blocks of the Moves of steps in flight
        self._arrivals: dict[Place, tuple[int, int]] = {}  # shared host block -> sequence that has it back, table index

    def leaving(self, place: Place, num_tokens: int) -> int | None:
        """The host block to which the planned step copies at least `num_tokens` tokens of a device block, or None."""
        host, count = self._leaving.get(place, (0, 0))
        return host if count >= num_tokens else None

    def take(self, lengths: Sequence[Mapping[int, int]]) -> bool:
        """Allocate a host block for each device block. Returns False, and allocates none, if there are too few.

        lengths: per group, device block -> leading tokens to copy. The step that is being planned owns the host blocks.
        """
        if any(len(some) > pool.num_free for pool, some in zip(self.pools, lengths, strict=True)):
            return False
        for group, some in enumerate(lengths):
            hosts = self.pools[group].take_many(len(some))
            for (block, count), host in zip(some.items(), hosts, strict=True):
                self._leaving[group, block] = (host, count)
                self._planned.append((group, host))
            self.num_blocks_out += len(some)
        return True

    def put(self, seq_id: int, record: Record) -> None:
        """Store the record of a sequence as an owner of its host blocks, which the planned step writes."""
        self.drop(seq_id)
        for group, block in record.places():
            self.pools[group].hold(block)
        self.records[seq_id] = record

    def drop(self, seq_id: int) -> None:
        """Delete the record of a sequence, if it has one."""
        record = self.records.pop(seq_id, None)
        if record is not None:
            for place in record.places():
                self._let_go(place)

    def come_back(self, seq_id: int, copied: Mapping[Place, int | None]) -> None:
        """A swapped sequence has a table again, to which the planned step copies host blocks. Deletes its record.

        copied: host block -> its index in the table if the block is whole, so that other sequences can share it; else
        None.
        """
        for (group, block), index in copied.items():
            self.pools[group].hold(block)
            self._planned.append((group, block))
            if index is not None and self.pools[group].refs(block) > _RECORD_AND_STEP:
                self._arrivals[group, block] = (seq_id, index)
        self.num_blocks_in += len(copied)
        self.drop(seq_id)

    def arrival(self, group: int, block: int) -> tuple[int, int] | None:
        """(sequence, table index) of the device block to which a host block was copied back; None if there is none."""
        return self._arrivals.get((group, block))

    def forget_arrival(self, seq_id: int) -> None:
        """The table of a sequence is released: its blocks cannot be shared any more."""
        if self._arrivals:
            self._arrivals = {place: at for place, at in self._arrivals.items() if at[0] != seq_id}

    def is_leaving(self, seq_id: int) -> bool:
        """Whether the KV of a sequence is still being copied to the host."""
        record = self.records.get(seq_id)
        return record is not None and (record.step is None or record.step in self._carried)

    # Steps

    def launched(self, step_id: int) -> None:
        """The step that was being planned is launched."""
        self._carried[step_id], self._planned = self._planned, []
        self._leaving.clear()
        for record in self.records.values():
            if record.step is None:
                record.step = step_id

    def ended(self, step_id: int) -> None:
        """The step is over: release its host blocks."""
        for place in self._carried.pop(step_id, ()):
            self._let_go(place)

    def failed(self, step_id: int) -> None:
        """The step failed: drop the records that it or a later step writes."""
        for seq_id, record in list(self.records.items()):
            if record.step is None or record.step >= step_id:
                self.drop(seq_id)
        self.ended(step_id)

    # Checks

    def check(self) -> list[str]:
        """Errors of the reference counts; empty if there are none."""
        return [
            f"host group {group}: {wrong}"
            for group, (pool, owners) in enumerate(zip(self.pools, self._owners(), strict=True))
            for wrong in pool.check(owners)
        ]

    def repair(self) -> None:
        """Set the reference counts to the number of owners."""
        for pool, owners in zip(self.pools, self._owners(), strict=True):
            pool.repair(owners)

    def _owners(self) -> list[Counter[int]]:
        owners: list[Counter[int]] = [Counter() for _ in self.pools]
        for record in self.records.values():
            for group, block in record.places():
                owners[group][block] += 1
        for group, block in [*self._planned, *(place for some in self._carried.values() for place in some)]:
            owners[group][block] += 1
        return owners

    def _let_go(self, place: Place) -> None:
        group, block = place
        self.pools[group].drop(block)
        if not self.pools[group].refs(block):
            self._arrivals.pop(place, None)
