"""The host pool: KV of swapped sequences in host memory.

A host block has these owners, by reference count as on the device:
  a record   the leading positions of a swapped sequence; sequences that shared blocks share them here too
  a Move     a block that it writes or reads, until it is done

Device blocks are only recorded, so that sequences of one request share copies when they are swapped out and in.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from quire.cache.block_pool import BlockPool, Pools
from quire.cache.block_table import ABSENT
from quire.config import CacheConfig
from quire.core.step import Move

GroupBlock = tuple[int, int]  # a group, and a block of it

_UNSHARED_REFS = 2  # owners of a host block that no other sequence shares


@dataclass(slots=True, eq=False)
class SwapRecord:
    """Where the first `num_tokens` positions of a sequence are in host memory."""

    blocks: tuple[list[int], ...]  # per group, by table index; ABSENT before the window of the next query
    num_tokens: int
    settled: int = 0  # position that its state stands behind; its block is that of the last group
    step: int | None = None  # the step that writes them; None while it is being planned
    moves: set[int] = field(default_factory=set)  # Moves in flight that write them

    def host_blocks(self) -> Iterator[GroupBlock]:
        """Its host blocks."""
        return ((group, block) for group, some in enumerate(self.blocks) for block in some if block != ABSENT)


class HostPool:
    """Records of swapped sequences, and the pools of host blocks."""

    def __init__(self, config: CacheConfig) -> None:
        self.pools = Pools(BlockPool(group.num_host_blocks) for group in config.pools)
        self.num_blocks_out = 0  # copied to the host since the start
        self.num_blocks_in = 0  # copied from the host since the start
        self.records: dict[int, SwapRecord] = {}  # by sequence id; read-only for other classes
        self._planned: list[GroupBlock] = []  # host blocks of the Moves of the step that is being planned
        self._planned_copies: dict[
            GroupBlock, tuple[int, int]
        ] = {}  # device block that this step copies -> host block, tokens
        self._in_flight: dict[int, list[GroupBlock]] = {}  # host blocks of each Move in flight
        self._swapped_in: dict[
            GroupBlock, tuple[int, int]
        ] = {}  # shared host block -> sequence that has it back, table index

    def planned_copy(self, place: GroupBlock, num_tokens: int) -> int | None:
        """The host block to which the planned step copies at least `num_tokens` tokens of a device block, or None."""
        host, count = self._planned_copies.get(place, (0, 0))
        return host if count >= num_tokens else None

    def allocate(self, lengths: Sequence[Mapping[int, int]]) -> bool:
        """Allocate a host block for each device block. Returns False, and allocates none, if there are too few.

        lengths: per group, device block -> leading tokens to copy. The step that is being planned owns the host blocks.
        """
        if any(len(some) > pool.num_free for pool, some in zip(self.pools, lengths, strict=True)):
            return False
        for group, some in enumerate(lengths):
            hosts = self.pools[group].allocate_many(len(some))
            for (block, count), host in zip(some.items(), hosts, strict=True):
                self._planned_copies[group, block] = (host, count)
                self._planned.append((group, host))
            self.num_blocks_out += len(some)
        return True

    def add_record(self, seq_id: int, record: SwapRecord) -> None:
        """Store the record of a sequence as an owner of its host blocks, which the planned step writes."""
        self.drop_record(seq_id)
        for group, block in record.host_blocks():
            self.pools[group].incr_ref(block)
        self.records[seq_id] = record

    def drop_record(self, seq_id: int) -> None:
        """Delete the record of a sequence, if it has one."""
        record = self.records.pop(seq_id, None)
        if record is not None:
            for place in record.host_blocks():
                self._decr_ref(place)

    def swap_in(self, seq_id: int, copied: Mapping[GroupBlock, int | None]) -> None:
        """A swapped sequence has a table again, to which the planned step copies host blocks. Deletes its record.

        copied: host block -> its index in the table if the block is whole, so that other sequences can share it; else
        None.
        """
        for (group, block), index in copied.items():
            self.pools[group].incr_ref(block)
            self._planned.append((group, block))
            if index is not None and self.pools[group].num_refs(block) > _UNSHARED_REFS:
                self._swapped_in[group, block] = (seq_id, index)
        self.num_blocks_in += len(copied)
        self.drop_record(seq_id)

    def find_swapped_in(self, group: int, block: int) -> tuple[int, int] | None:
        """(sequence, table index) of the device block to which a host block was copied back; None if there is none."""
        return self._swapped_in.get((group, block))

    def forget_swapped_in(self, seq_id: int) -> None:
        """The table of a sequence is released: its blocks cannot be shared any more."""
        if self._swapped_in:
            self._swapped_in = {place: at for place, at in self._swapped_in.items() if at[0] != seq_id}

    def is_swapping_out(self, seq_id: int) -> bool:
        """Whether the KV of a sequence is still being copied to the host."""
        record = self.records.get(seq_id)
        return record is not None and (record.step is None or bool(record.moves))

    # Steps and Moves

    def launched(self, step_id: int, moves: Iterable[Move]) -> None:
        """The step that was being planned is launched, with these Moves, which take over its host blocks."""
        writers: dict[GroupBlock, int] = {}
        for move in moves:
            if "host" in (move.source, move.target):
                is_out = move.target == "host"
                self._in_flight[move.id] = hosts = [(move.group, pair[is_out]) for pair in move.pairs]
                if is_out:
                    writers.update(dict.fromkeys(hosts, move.id))
        self._planned.clear()
        self._planned_copies.clear()
        if writers:
            for record in self.records.values():
                if record.step is None:
                    record.step = step_id
                    record.moves.update(writers[place] for place in record.host_blocks())

    def end_moves(self, moves: Iterable[Move]) -> None:
        """Moves to or from the host are over: release their host blocks."""
        for move in moves:
            for place in self._in_flight.pop(move.id):
                self._decr_ref(place)
            if move.target == "host":
                for record in self.records.values():
                    record.moves.discard(move.id)

    def failed(self, step_id: int) -> None:
        """The step failed: drop the records that it or a later step writes."""
        for seq_id, record in list(self.records.items()):
            if record.step is None or record.step >= step_id:
                self.drop_record(seq_id)

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
            for group, block in record.host_blocks():
                owners[group][block] += 1
        for group, block in [*self._planned, *(place for some in self._in_flight.values() for place in some)]:
            owners[group][block] += 1
        return owners

    def _decr_ref(self, place: GroupBlock) -> None:
        group, block = place
        self.pools[group].decr_ref(block)
        if not self.pools[group].num_refs(block):
            self._swapped_in.pop(place, None)
