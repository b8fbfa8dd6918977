"""Planning of swaps: the Moves of a sequence's blocks to the host pool and back.

A Move to the host reads its blocks before later parts of its Step write them, so these blocks are free once it is
planned. A Move from the host is done when a StepResult has its id; until then nothing may be computed from its KV.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from quire.cache.block_table import ABSENT, BlockTable
from quire.cache.copies import PendingMoves
from quire.cache.host_pool import GroupBlock, HostPool, SwapRecord
from quire.cache.prefix.index import PrefixMatch
from quire.cache.states import StateBlocks
from quire.config import CacheConfig
from quire.core.step import Move

SharedBlocks = list[dict[int, int]]  # per group: table index -> device block of another table with the same KV


class SwapInNeeds(NamedTuple):
    """Blocks of a swapped sequence that gets its KV back, per group."""

    firsts: list[int]  # table index of the first block that its next query attends to
    begins: list[int]  # table index of the first block that is copied or shared
    homes: SharedBlocks
    needed: list[int]  # new blocks
    shared: list[list[int]]  # blocks of the prefix match and of `homes`


_WHOLE = 1  # tokens of a Move of a state block, which is always copied as a whole
_DIRECTIONS = (("device", "host"), ("host", "device"))


class SwapPlanner:
    """Plans swaps of sequences out of the device and back."""

    def __init__(
        self, config: CacheConfig, tables: Mapping[int, BlockTable], host_pool: HostPool, copies: PendingMoves
    ) -> None:
        """tables: by sequence id, of all sequences that have one."""
        self._config = config
        self._size = config.block_size
        self._tables = tables
        self._host_pool = host_pool
        self._copies = copies

    # Swap out

    def swap_bytes(self, num_valid: Mapping[int, int]) -> dict[int, int]:
        """Bytes that swapping these sequences out would copy. A block that several share counts for the first one."""
        seen: set[GroupBlock] = set()
        sizes = {}
        for seq_id, num_tokens in num_valid.items():
            places = {place for place, _ in self._to_copy(self._tables[seq_id], num_tokens)} - seen
            seen |= places
            sizes[seq_id] = sum(self._config.pools[group].bytes_per_block for group, _ in places)
        return sizes

    def swap_out(self, num_valid: Mapping[int, int]) -> bool:
        """See KVCache.swap_out."""
        lengths: list[dict[int, int]] = [{} for _ in self._host_pool.pools]  # device block -> its leading valid tokens
        for seq_id, num_tokens in num_valid.items():
            for (group, block), count in self._to_copy(self._tables[seq_id], num_tokens):
                lengths[group][block] = max(count, lengths[group].get(block, 0))
        if not self._host_pool.allocate(lengths):
            return False
        for group, some in enumerate(lengths):
            pairs = [((block, self._host_block(group, block, count)), count) for block, count in some.items()]
            self._plan_moves(group, "device", "host", pairs)
        for seq_id, num_tokens in num_valid.items():
            table = self._tables[seq_id]
            count = self._num_complete(table, num_tokens)
            if count:
                self._host_pool.add_record(seq_id, self._record(table, count))
        return True

    def _to_copy(self, table: BlockTable, num_tokens: int) -> Iterator[tuple[GroupBlock, int]]:
        """((group, block), valid tokens) of blocks that the next query sees and the planned step does not copy yet."""
        num_tokens = self._num_complete(table, num_tokens)
        for group, blocks in enumerate(table.blocks):
            for index in range(self._config.first_attended_block(group, num_tokens), -(-num_tokens // self._size)):
                count = min(self._size, num_tokens - index * self._size)
                if self._host_pool.planned_copy((group, blocks[index]), count) is None:
                    yield (group, blocks[index]), count
        if table.state is not None and num_tokens:
            place = (len(table.blocks), table.state.block)
            if self._host_pool.planned_copy(place, _WHOLE) is None:
                yield place, _WHOLE

    def _num_complete(self, table: BlockTable, num_tokens: int) -> int:
        """Leading positions whose KV is complete: those before the target of a pending copy.

        0 if the next query at that position would attend to blocks that a window has passed, or lack its state.
        """
        for group, blocks in enumerate(table.blocks):
            for target in self._copies.pending_targets(group):
                if target in blocks:
                    num_tokens = min(num_tokens, blocks.index(target) * self._size)
        gone = any(table.firsts[g] > self._config.first_attended_block(g, num_tokens) for g in range(len(table.firsts)))
        state = table.state
        if state is not None and not gone:
            is_copied = state.block in self._copies.pending_targets(len(table.blocks))
            gone = is_copied or not state.settled <= num_tokens <= state.stop
        return 0 if gone else num_tokens

    def _record(self, table: BlockTable, num_tokens: int) -> SwapRecord:
        whole, rest = divmod(num_tokens, self._size)
        hosts = []
        for group, blocks in enumerate(table.blocks):
            first = self._config.first_attended_block(group, num_tokens)
            some = [ABSENT] * first + [self._host_block(group, block, self._size) for block in blocks[first:whole]]
            hosts.append([*some, self._host_block(group, blocks[whole], rest)] if rest else some)
        if table.state is None:
            return SwapRecord(tuple(hosts), num_tokens)
        hosts.append([self._host_block(len(table.blocks), table.state.block, _WHOLE)])
        return SwapRecord(tuple(hosts), num_tokens, table.state.settled)

    def _host_block(self, group: int, block: int, num_tokens: int) -> int:
        """The host block to which the planned step copies `num_tokens` tokens of a block."""
        host = self._host_pool.planned_copy((group, block), num_tokens)
        assert host is not None, "it was taken"
        return host

    # Swap in

    def num_swapped_tokens(self, seq_id: int, reusable: int) -> int:
        """Leading positions, at most `reusable`, that the host pool has for a sequence."""
        record = self._host_pool.records.get(seq_id)
        if record is None:
            return 0
        num_tokens = min(record.num_tokens, reusable)
        if num_tokens < record.settled:
            return 0
        for group, blocks in enumerate(record.blocks[: len(self._config.groups)]):
            if ABSENT in blocks[self._config.first_attended_block(group, num_tokens) :]:
                return 0
        return num_tokens

    def shared_blocks(self, seq_id: int, begins: Sequence[int], num_tokens: int) -> SharedBlocks:
        """Whole blocks that other sequences of the request have swapped in before and still have."""
        record = self._host_pool.records[seq_id]
        homes: SharedBlocks = [{} for _ in begins]
        for group, first in enumerate(begins):
            for index in range(first, num_tokens // self._size):
                arrival = self._host_pool.find_swapped_in(group, record.blocks[group][index])
                block = ABSENT if arrival is None else self._tables[arrival[0]].blocks[group][arrival[1]]
                if block != ABSENT:
                    homes[group][index] = block
        return homes

    def needs(self, seq_id: int, match: PrefixMatch, num_tokens: int, reserve: int) -> SwapInNeeds:
        """The blocks with which a sequence gets `num_tokens` leading positions back, and has room for `reserve`."""
        num_shared = len(match.blocks[0]) if match.blocks else 0
        firsts = [self._config.first_attended_block(group, num_tokens) for group in range(len(self._config.groups))]
        begins = [max(num_shared, first) for first in firsts]
        homes = self.shared_blocks(seq_id, begins, num_tokens)
        needed = [
            self._config.num_blocks(group, num_tokens + 1, reserve) - begins[group] - len(homes[group])
            for group in range(len(firsts))
        ]
        shared = [
            [*(match.blocks[group][first:] if match.blocks else ()), *homes[group].values()]
            for group, first in enumerate(firsts)
        ]
        return SwapInNeeds(firsts, begins, homes, needed, shared)

    def swap_in(
        self,
        seq_id: int,
        table: BlockTable,
        num_shared: int,
        begins: Sequence[int],
        homes: SharedBlocks,
        fresh: Sequence[Sequence[int]],
        num_tokens: int,
        states: StateBlocks | None,
    ) -> tuple[list[list[int]], int]:
        """Plan the Moves from the host for the first `num_tokens` positions of a sequence, and delete its record.

        Gives its table a state block, if there are states.

        num_shared: blocks of the prefix match. begins: per group, the table index of the first block to be copied or
        shared. homes: see `shared_blocks`. fresh: per group, new blocks. Returns per group the blocks behind the match,
        and the bytes to copy.
        """
        record = self._host_pool.records[seq_id]
        blocks: list[list[int]] = []
        copied: dict[GroupBlock, int | None] = {}  # host block -> table index; None for a partly filled block
        for group, (first, some) in enumerate(zip(begins, fresh, strict=True)):
            new, pairs = iter(some), []
            blocks.append([ABSENT] * (first - num_shared))
            for index in range(first, -(-num_tokens // self._size)):
                home = homes[group].get(index)
                block = next(new) if home is None else home
                blocks[group].append(block)
                if home is None:
                    host = record.blocks[group][index]
                    count = min(self._size, num_tokens - index * self._size)
                    pairs.append(((host, block), count))
                    copied[group, host] = index if count == self._size else None
            blocks[group] += new
            self._plan_moves(group, "host", "device", pairs)
        if states is not None:
            group, (host,) = len(begins), record.blocks[-1]
            block = states.begin_swapped(table, record.settled, num_tokens)
            self._plan_moves(group, "host", "device", [((host, block), _WHOLE)])
            copied[group, host] = None
        self._host_pool.swap_in(seq_id, copied)
        return blocks, sum(self._config.pools[group].bytes_per_block for group, _ in copied)

    def _plan_moves(self, group: int, source: str, target: str, pairs: Sequence[tuple[tuple[int, int], int]]) -> None:
        """Add Moves for these pairs: one Move per number of valid tokens."""
        by_count: dict[int, list[tuple[int, int]]] = {}
        for pair, count in pairs:
            by_count.setdefault(count, []).append(pair)
        for count, some in by_count.items():
            self._copies.plan_swap(group, source, target, some, count)


def bytes_swapped(moves: Sequence[Move], config: CacheConfig) -> tuple[int, int]:
    """Bytes that Moves copy to the host, and from it."""
    sizes = [(move.source, move.target, len(move.pairs) * config.pools[move.group].bytes_per_block) for move in moves]
    out, back = (sum(size for source, target, size in sizes if (source, target) == way) for way in _DIRECTIONS)
    return out, back
