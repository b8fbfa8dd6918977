"""Planning of swaps: the Moves of a sequence's blocks to the host pool and back.

A Move to the host reads its blocks before later parts of its Step write them, so these blocks are free once it is
planned. A Move from the host is complete when its Step is collected; until then nothing may be computed from its KV.
"""

from collections.abc import Iterator, Mapping, Sequence

from quire.cache.block_table import ABSENT, BlockTable
from quire.cache.block_tables import Admission, Room, Tables, is_room
from quire.cache.host_pool import Place, Record
from quire.cache.prefix.index import Found
from quire.config import CacheConfig
from quire.core.step import Move

Homes = list[dict[int, int]]  # per group: table index -> device block of another table with the same KV

_WAYS = (("device", "host"), ("host", "device"))


class Swapping:
    """Plans swaps of sequences out of the device and back."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._config = tables.config
        self._size = tables.block_size

    # Swap out

    def measure(self, num_valid: Mapping[int, int]) -> dict[int, int]:
        """Bytes that swapping these sequences out would copy. A block that several share counts for the first one."""
        seen: set[Place] = set()
        sizes = {}
        for seq_id, num_tokens in num_valid.items():
            places = {place for place, _ in self._to_copy(self._tables.by_id[seq_id], num_tokens)} - seen
            seen |= places
            sizes[seq_id] = sum(self._config.groups[group].bytes_per_block for group, _ in places)
        return sizes

    def out(self, num_valid: Mapping[int, int]) -> bool:
        """See KVCache.swap_out."""
        tables = self._tables
        lengths: list[dict[int, int]] = [{} for _ in tables.pools]  # device block -> its leading valid tokens
        for seq_id, num_tokens in num_valid.items():
            for (group, block), count in self._to_copy(tables.by_id[seq_id], num_tokens):
                lengths[group][block] = max(count, lengths[group].get(block, 0))
        if not tables.swap.take(lengths):
            return False
        for group, some in enumerate(lengths):
            pairs = [((block, self._host(group, block, count)), count) for block, count in some.items()]
            self._move(group, "device", "host", pairs)
        for seq_id, num_tokens in num_valid.items():
            table = tables.by_id[seq_id]
            count = self._settled(table, num_tokens)
            if count:
                tables.swap.put(seq_id, self._record(table, count))
        return True

    def _to_copy(self, table: BlockTable, num_tokens: int) -> Iterator[tuple[Place, int]]:
        """((group, block), valid tokens) of blocks that the next query sees and the planned step does not copy yet."""
        num_tokens = self._settled(table, num_tokens)
        for group, blocks in enumerate(table.blocks):
            for index in range(self._config.first_seen(group, num_tokens), -(-num_tokens // self._size)):
                count = min(self._size, num_tokens - index * self._size)
                if self._tables.swap.leaving((group, blocks[index]), count) is None:
                    yield (group, blocks[index]), count

    def _settled(self, table: BlockTable, num_tokens: int) -> int:
        """Leading positions whose KV is complete: those before the target of a pending copy.

        0 if the next query at that position would attend to blocks that a window has passed.
        """
        for group, blocks in enumerate(table.blocks):
            for target in self._tables.copies.waiting(group):
                if target in blocks:
                    num_tokens = min(num_tokens, blocks.index(target) * self._size)
        gone = any(table.firsts[g] > self._config.first_seen(g, num_tokens) for g in range(len(table.firsts)))
        return 0 if gone else num_tokens

    def _record(self, table: BlockTable, num_tokens: int) -> Record:
        whole, rest = divmod(num_tokens, self._size)
        hosts = []
        for group, blocks in enumerate(table.blocks):
            first = self._config.first_seen(group, num_tokens)
            some = [ABSENT] * first + [self._host(group, block, self._size) for block in blocks[first:whole]]
            hosts.append([*some, self._host(group, blocks[whole], rest)] if rest else some)
        return Record(tuple(hosts), num_tokens)

    def _host(self, group: int, block: int, num_tokens: int) -> int:
        """The host block to which the planned step copies `num_tokens` tokens of a block."""
        host = self._tables.swap.leaving((group, block), num_tokens)
        assert host is not None, "it was taken"
        return host

    # Swap in

    def reach(self, seq_id: int, reusable: int) -> int:
        """Leading positions, at most `reusable`, that the host pool has for a sequence."""
        record = self._tables.swap.records.get(seq_id)
        if record is None:
            return 0
        num_tokens = min(record.num_tokens, reusable)
        for group, blocks in enumerate(record.blocks):
            if ABSENT in blocks[self._config.first_seen(group, num_tokens) :]:
                return 0
        return num_tokens

    def back(self, seq_id: int, table: BlockTable, found: Found, num_tokens: int, room: Room) -> Admission | None:
        """Create a table from the whole blocks of `found` and the KV that the host pool has behind them.

        num_tokens: leading positions of both together, more than `found` has. Returns None if there are not enough
        blocks; then the tables are unchanged.
        """
        tables, config = self._tables, self._config
        num_shared = len(found.blocks[0]) if found.blocks else 0
        seen = [config.first_seen(group, num_tokens) for group in range(len(tables.pools))]
        begins = [max(num_shared, first) for first in seen]
        homes = self._homes(seq_id, begins, num_tokens)
        needed = [
            config.num_blocks(group, num_tokens + 1, room.num_tokens) - begins[group] - len(homes[group])
            for group in range(len(tables.pools))
        ]
        shared = [
            [*(found.blocks[group][first:] if found.blocks else ()), *homes[group].values()]
            for group, first in enumerate(seen)
        ]
        if not is_room(tables.pools, needed, shared, room.spare):
            return None
        tables.add(seq_id, table)
        self._share(table, found, seen, shared)
        if not tables.make_room(needed, room.cause):
            for group, some in enumerate(homes):
                for block in some.values():
                    tables.in_flight.let_go(group, block)
            tables.release(seq_id, 0)
            return None
        copied = self._fetch(seq_id, table, begins, homes, needed, num_tokens)
        num_bytes = sum(config.groups[group].bytes_per_block for group, _ in copied)
        tables.swap.come_back(seq_id, copied)
        tables.in_flight.base_on_planned(table)
        num_found = num_shared * self._size
        return Admission(table, num_tokens, num_shared, 0, None, num_tokens - num_found, num_bytes)

    def _homes(self, seq_id: int, begins: Sequence[int], num_tokens: int) -> Homes:
        """Whole blocks that other sequences of the request have swapped in before and still have."""
        record = self._tables.swap.records[seq_id]
        homes: Homes = [{} for _ in begins]
        for group, first in enumerate(begins):
            for index in range(first, num_tokens // self._size):
                arrival = self._tables.swap.arrival(group, record.blocks[group][index])
                block = ABSENT if arrival is None else self._tables.by_id[arrival[0]].blocks[group][arrival[1]]
                if block != ABSENT:
                    homes[group][index] = block
        return homes

    def _share(self, table: BlockTable, found: Found, seen: Sequence[int], shared: Sequence[Sequence[int]]) -> None:
        """Add a reference to each block of `shared`, and put the blocks of `found` into the table.

        seen: per group, the index of the first block that the next query attends to.
        """
        tables = self._tables
        num_shared = table.num_found = len(found.blocks[0]) if found.blocks else 0
        for group, some in enumerate(shared):
            first = table.firsts[group] = min(seen[group], num_shared)
            table.blocks[group].extend([ABSENT] * first + (found.blocks[group][first:] if found.blocks else []))
            for block in some:
                tables.pools[group].hold(block)
        tables.index.enter(table, found._replace(num_tokens=num_shared * self._size, partial=()))
        tables.note_due(table)
        if num_shared:
            tables.in_flight.base(table, found.blocks[0])

    def _fetch(
        self,
        seq_id: int,
        table: BlockTable,
        begins: Sequence[int],
        homes: Homes,
        needed: Sequence[int],
        num_tokens: int,
    ) -> dict[Place, int | None]:
        """Append the blocks behind `found` to a table and plan the Moves from the host.

        Returns the copied host blocks with their table index, or with None for a partly filled block.
        """
        tables, record = self._tables, self._tables.swap.records[seq_id]
        copied: dict[Place, int | None] = {}
        for group, (pool, blocks) in enumerate(zip(tables.pools, table.blocks, strict=True)):
            fresh = iter(pool.take_many(needed[group]))
            blocks += [ABSENT] * (begins[group] - len(blocks))
            pairs = []
            for index in range(begins[group], -(-num_tokens // self._size)):
                home = homes[group].get(index)
                block = next(fresh) if home is None else home
                blocks.append(block)
                if home is None:
                    host = record.blocks[group][index]
                    count = min(self._size, num_tokens - index * self._size)
                    pairs.append(((host, block), count))
                    copied[group, host] = index if count == self._size else None
            blocks += fresh
            table.firsts[group] = self._config.first_seen(group, num_tokens)
            self._move(group, "host", "device", pairs)
        table.capacity = min(map(len, table.blocks)) * self._size
        return copied

    def _move(self, group: int, source: str, target: str, pairs: Sequence[tuple[tuple[int, int], int]]) -> None:
        """Add Moves for these pairs: one Move per number of valid tokens."""
        by_count: dict[int, list[tuple[int, int]]] = {}
        for pair, count in pairs:
            by_count.setdefault(count, []).append(pair)
        for count, some in by_count.items():
            self._tables.copies.carry(group, source, target, some, count)


def bytes_swapped(moves: Sequence[Move], config: CacheConfig) -> tuple[int, int]:
    """Bytes that Moves copy to the host, and from it."""
    sizes = [(move.source, move.target, len(move.pairs) * config.groups[move.group].bytes_per_block) for move in moves]
    out, back = (sum(size for source, target, size in sizes if (source, target) == way) for way in _WAYS)
    return out, back
