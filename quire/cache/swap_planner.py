"""Planning of swaps: the Moves of a sequence's blocks to the host pool and back.

A Move to the host reads its blocks before later parts of its Step write them, so these blocks are free once it is
planned. A Move from the host is complete when its Step is collected; until then nothing may be computed from its KV.
"""

from collections.abc import Iterator, Mapping, Sequence

from quire.cache.block_table import ABSENT, BlockTable
from quire.cache.block_tables import Admission, AdmissionLimits, BlockTables, has_available_blocks
from quire.cache.host_pool import GroupBlock, SwapRecord
from quire.cache.prefix.index import PrefixMatch
from quire.config import CacheConfig
from quire.core.step import Move

SharedBlocks = list[dict[int, int]]  # per group: table index -> device block of another table with the same KV

_DIRECTIONS = (("device", "host"), ("host", "device"))


class SwapPlanner:
    """Plans swaps of sequences out of the device and back."""

    def __init__(self, tables: BlockTables) -> None:
        self._tables = tables
        self._config = tables.config
        self._size = tables.block_size

    # Swap out

    def swap_bytes(self, num_valid: Mapping[int, int]) -> dict[int, int]:
        """Bytes that swapping these sequences out would copy. A block that several share counts for the first one."""
        seen: set[GroupBlock] = set()
        sizes = {}
        for seq_id, num_tokens in num_valid.items():
            places = {place for place, _ in self._to_copy(self._tables.by_id[seq_id], num_tokens)} - seen
            seen |= places
            sizes[seq_id] = sum(self._config.groups[group].bytes_per_block for group, _ in places)
        return sizes

    def swap_out(self, num_valid: Mapping[int, int]) -> bool:
        """See KVCache.swap_out."""
        tables = self._tables
        lengths: list[dict[int, int]] = [{} for _ in tables.pools]  # device block -> its leading valid tokens
        for seq_id, num_tokens in num_valid.items():
            for (group, block), count in self._to_copy(tables.by_id[seq_id], num_tokens):
                lengths[group][block] = max(count, lengths[group].get(block, 0))
        if not tables.host_pool.allocate(lengths):
            return False
        for group, some in enumerate(lengths):
            pairs = [((block, self._host_block(group, block, count)), count) for block, count in some.items()]
            self._plan_moves(group, "device", "host", pairs)
        for seq_id, num_tokens in num_valid.items():
            table = tables.by_id[seq_id]
            count = self._num_complete(table, num_tokens)
            if count:
                tables.host_pool.add_record(seq_id, self._record(table, count))
        return True

    def _to_copy(self, table: BlockTable, num_tokens: int) -> Iterator[tuple[GroupBlock, int]]:
        """((group, block), valid tokens) of blocks that the next query sees and the planned step does not copy yet."""
        num_tokens = self._num_complete(table, num_tokens)
        for group, blocks in enumerate(table.blocks):
            for index in range(self._config.first_attended_block(group, num_tokens), -(-num_tokens // self._size)):
                count = min(self._size, num_tokens - index * self._size)
                if self._tables.host_pool.planned_copy((group, blocks[index]), count) is None:
                    yield (group, blocks[index]), count

    def _num_complete(self, table: BlockTable, num_tokens: int) -> int:
        """Leading positions whose KV is complete: those before the target of a pending copy.

        0 if the next query at that position would attend to blocks that a window has passed.
        """
        for group, blocks in enumerate(table.blocks):
            for target in self._tables.copies.pending_targets(group):
                if target in blocks:
                    num_tokens = min(num_tokens, blocks.index(target) * self._size)
        gone = any(table.firsts[g] > self._config.first_attended_block(g, num_tokens) for g in range(len(table.firsts)))
        return 0 if gone else num_tokens

    def _record(self, table: BlockTable, num_tokens: int) -> SwapRecord:
        whole, rest = divmod(num_tokens, self._size)
        hosts = []
        for group, blocks in enumerate(table.blocks):
            first = self._config.first_attended_block(group, num_tokens)
            some = [ABSENT] * first + [self._host_block(group, block, self._size) for block in blocks[first:whole]]
            hosts.append([*some, self._host_block(group, blocks[whole], rest)] if rest else some)
        return SwapRecord(tuple(hosts), num_tokens)

    def _host_block(self, group: int, block: int, num_tokens: int) -> int:
        """The host block to which the planned step copies `num_tokens` tokens of a block."""
        host = self._tables.host_pool.planned_copy((group, block), num_tokens)
        assert host is not None, "it was taken"
        return host

    # Swap in

    def num_swapped_tokens(self, seq_id: int, reusable: int) -> int:
        """Leading positions, at most `reusable`, that the host pool has for a sequence."""
        record = self._tables.host_pool.records.get(seq_id)
        if record is None:
            return 0
        num_tokens = min(record.num_tokens, reusable)
        for group, blocks in enumerate(record.blocks):
            if ABSENT in blocks[self._config.first_attended_block(group, num_tokens) :]:
                return 0
        return num_tokens

    def swap_in(
        self, seq_id: int, table: BlockTable, match: PrefixMatch, num_tokens: int, limits: AdmissionLimits
    ) -> Admission | None:
        """Create a table from the whole blocks of `match` and the KV that the host pool has behind them.

        num_tokens: leading positions of both together, more than `match` has. Returns None if there are not enough
        blocks; then the tables are unchanged.
        """
        tables, config = self._tables, self._config
        num_shared = len(match.blocks[0]) if match.blocks else 0
        seen = [config.first_attended_block(group, num_tokens) for group in range(len(tables.pools))]
        begins = [max(num_shared, first) for first in seen]
        homes = self._shared_blocks(seq_id, begins, num_tokens)
        needed = [
            config.num_blocks(group, num_tokens + 1, limits.num_tokens) - begins[group] - len(homes[group])
            for group in range(len(tables.pools))
        ]
        shared = [
            [*(match.blocks[group][first:] if match.blocks else ()), *homes[group].values()]
            for group, first in enumerate(seen)
        ]
        if not has_available_blocks(tables.pools, needed, shared, limits.watermark_blocks):
            return None
        tables.register(seq_id, table)
        self._share(table, match, seen, shared)
        if not tables.evict_until_free(needed, limits.cause):
            for group, some in enumerate(homes):
                for block in some.values():
                    tables.in_flight.deferred_decr_ref(group, block)
            tables.release(seq_id, 0)
            return None
        copied = self._plan_swap_in(seq_id, table, begins, homes, needed, num_tokens)
        num_bytes = sum(config.groups[group].bytes_per_block for group, _ in copied)
        tables.host_pool.swap_in(seq_id, copied)
        tables.in_flight.depend_on_planned(table)
        num_found = num_shared * self._size
        return Admission(table, num_tokens, num_shared, 0, None, num_tokens - num_found, num_bytes)

    def _shared_blocks(self, seq_id: int, begins: Sequence[int], num_tokens: int) -> SharedBlocks:
        """Whole blocks that other sequences of the request have swapped in before and still have."""
        record = self._tables.host_pool.records[seq_id]
        homes: SharedBlocks = [{} for _ in begins]
        for group, first in enumerate(begins):
            for index in range(first, num_tokens // self._size):
                arrival = self._tables.host_pool.find_swapped_in(group, record.blocks[group][index])
                block = ABSENT if arrival is None else self._tables.by_id[arrival[0]].blocks[group][arrival[1]]
                if block != ABSENT:
                    homes[group][index] = block
        return homes

    def _share(
        self, table: BlockTable, match: PrefixMatch, seen: Sequence[int], shared: Sequence[Sequence[int]]
    ) -> None:
        """Add a reference to each block of `shared`, and put the blocks of `match` into the table.

        seen: per group, the index of the first block that the next query attends to.
        """
        tables = self._tables
        num_shared = table.num_matched = len(match.blocks[0]) if match.blocks else 0
        for group, some in enumerate(shared):
            first = table.firsts[group] = min(seen[group], num_shared)
            table.blocks[group].extend([ABSENT] * first + (match.blocks[group][first:] if match.blocks else []))
            for block in some:
                tables.pools[group].incr_ref(block)
        tables.index.register(table, match._replace(num_tokens=num_shared * self._size, partial=()))
        tables.update_next_insert(table)
        if num_shared:
            tables.in_flight.add_dependency(table, match.blocks[0])

    def _plan_swap_in(
        self,
        seq_id: int,
        table: BlockTable,
        begins: Sequence[int],
        shared_blocks: SharedBlocks,
        needed: Sequence[int],
        num_tokens: int,
    ) -> dict[GroupBlock, int | None]:
        """Append the blocks behind `match` to a table and plan the Moves from the host.

        Returns the copied host blocks with their table index, or with None for a partly filled block.
        """
        tables, record = self._tables, self._tables.host_pool.records[seq_id]
        copied: dict[GroupBlock, int | None] = {}
        for group, (pool, blocks) in enumerate(zip(tables.pools, table.blocks, strict=True)):
            fresh = iter(pool.allocate_many(needed[group]))
            blocks += [ABSENT] * (begins[group] - len(blocks))
            pairs = []
            for index in range(begins[group], -(-num_tokens // self._size)):
                home = shared_blocks[group].get(index)
                block = next(fresh) if home is None else home
                blocks.append(block)
                if home is None:
                    host = record.blocks[group][index]
                    count = min(self._size, num_tokens - index * self._size)
                    pairs.append(((host, block), count))
                    copied[group, host] = index if count == self._size else None
            blocks += fresh
            table.firsts[group] = self._config.first_attended_block(group, num_tokens)
            self._plan_moves(group, "host", "device", pairs)
        table.capacity = min(map(len, table.blocks)) * self._size
        return copied

    def _plan_moves(self, group: int, source: str, target: str, pairs: Sequence[tuple[tuple[int, int], int]]) -> None:
        """Add Moves for these pairs: one Move per number of valid tokens."""
        by_count: dict[int, list[tuple[int, int]]] = {}
        for pair, count in pairs:
            by_count.setdefault(count, []).append(pair)
        for count, some in by_count.items():
            self._tables.copies.plan_swap(group, source, target, some, count)


def bytes_swapped(moves: Sequence[Move], config: CacheConfig) -> tuple[int, int]:
    """Bytes that Moves copy to the host, and from it."""
    sizes = [(move.source, move.target, len(move.pairs) * config.groups[move.group].bytes_per_block) for move in moves]
    out, back = (sum(size for source, target, size in sizes if (source, target) == way) for way in _DIRECTIONS)
    return out, back
