"""The host pool: what preempted sequences left in host memory, until they come back for it or end.

Who owns a host block, by reference count as on the device:
  a record   the leading positions of a sequence that waits; sequences that shared blocks share them here, too
  a step     a block that one of its Moves writes or reads, until it is over
Knows host blocks and steps. Device blocks are only noted, for members of a family that come back one after another.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from quire.cache.block_pool import BlockPool, Pools
from quire.cache.block_table import ABSENT
from quire.config import CacheConfig

Place = tuple[int, int]  # a group, and a block of it

_RECORD_AND_STEP = 2  # owners of a host block that only one sequence comes back for


@dataclass(slots=True, eq=False)
class Record:
    """Where the first `num_tokens` positions of a sequence lie in host memory."""

    blocks: tuple[list[int], ...]  # per group, by table index; ABSENT before the window of the next query
    num_tokens: int
    step: int | None = None  # that writes them; None while it is being planned

    def places(self) -> Iterator[Place]:
        """Its host blocks."""
        return ((group, block) for group, some in enumerate(self.blocks) for block in some if block != ABSENT)


class SwapSpace:
    """Records of sequences whose KV is in host memory, and the pools of host blocks."""

    def __init__(self, config: CacheConfig) -> None:
        self.pools = Pools(BlockPool(group.num_host_blocks) for group in config.groups)
        self.num_blocks_out = 0  # copied to the host since the start, and from it
        self.num_blocks_in = 0
        self.records: dict[int, Record] = {}  # by sequence. To look at, not to change
        self._planned: list[Place] = []  # that Moves of the step being planned need
        self._leaving: dict[Place, tuple[int, int]] = {}  # device blocks that it copies -> host block, tokens
        self._carried: dict[int, list[Place]] = {}  # the same of steps in flight
        self._arrivals: dict[Place, tuple[int, int]] = {}  # host blocks that others wait for -> sequence, table index

    def leaving(self, place: Place, num_tokens: int) -> int | None:
        """The host block that the step being planned copies so much of a device block to, if it does."""
        host, count = self._leaving.get(place, (0, 0))
        return host if count >= num_tokens else None

    def take(self, lengths: Sequence[Mapping[int, int]]) -> bool:
        """A host block for each device block of each group, whose leading tokens are copied; False where there is none.

        The step that is being planned owns each once: it writes them.
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
        """A sequence's KV is in host blocks that the step being planned owns; so does the record from now on."""
        self.drop(seq_id)
        for group, block in record.places():
            self.pools[group].hold(block)
        self.records[seq_id] = record

    def drop(self, seq_id: int) -> None:
        """Nobody comes back for what a sequence left, if it did."""
        record = self.records.pop(seq_id, None)
        if record is not None:
            for place in record.places():
                self._let_go(place)

    def come_back(self, seq_id: int, copied: Mapping[Place, int | None]) -> None:
        """A sequence has a table again, for which the step being planned copies some of its host blocks.

        copied: where in its table they lie that are whole, and that relatives may share; None of others.
        """
        for (group, block), index in copied.items():
            self.pools[group].hold(block)
            self._planned.append((group, block))
            if index is not None and self.pools[group].refs(block) > _RECORD_AND_STEP:
                self._arrivals[group, block] = (seq_id, index)
        self.num_blocks_in += len(copied)
        self.drop(seq_id)

    def arrival(self, group: int, block: int) -> tuple[int, int] | None:
        """The sequence whose table has what a host block holds, and where in its table; None where nobody has."""
        return self._arrivals.get((group, block))

    def forget_arrival(self, seq_id: int) -> None:
        """A table is given up: nobody can have blocks from it."""
        if self._arrivals:
            self._arrivals = {place: at for place, at in self._arrivals.items() if at[0] != seq_id}

    def is_leaving(self, seq_id: int) -> bool:
        """Whether a sequence's KV is still on its way to the host."""
        record = self.records.get(seq_id)
        return record is not None and (record.step is None or record.step in self._carried)

    # Steps

    def launched(self, step_id: int) -> None:
        """The step that was being planned begins."""
        self._carried[step_id], self._planned = self._planned, []
        self._leaving.clear()
        for record in self.records.values():
            if record.step is None:
                record.step = step_id

    def ended(self, step_id: int) -> None:
        """A step is over: it owns nothing any more."""
        for place in self._carried.pop(step_id, ()):
            self._let_go(place)

    def failed(self, step_id: int) -> None:
        """A step failed: what it was to bring to the host is void, and what later ones bring may be."""
        for seq_id, record in list(self.records.items()):
            if record.step is None or record.step >= step_id:
                self.drop(seq_id)
        self.ended(step_id)

    # Looking

    def check(self) -> list[str]:
        """Complaints where reference counts and owners do not add up; empty when all is well."""
        return [
            f"host group {group}: {wrong}"
            for group, (pool, owners) in enumerate(zip(self.pools, self._owners(), strict=True))
            for wrong in pool.check(owners)
        ]

    def repair(self) -> None:
        """Make the reference counts what the owners say."""
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
