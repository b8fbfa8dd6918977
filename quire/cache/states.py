"""Blocks of recurrent states: the live block of each running sequence, and snapshots, which sequences start from.

A live block stands behind the last position whose token cannot change any more, and has the inputs of later positions
beside the state (`kernels/state_contract.py`). So a draft that is rejected, or a sampled token that is replaced, costs
no copy. A forked table shares the live block of the other until one of them writes.

A snapshot belongs to a prefix in the prefix index: it is anchored at the last whole block before its position, in group
0, and leaves with this block. A prefix match can be used up to the deepest snapshot within it.

Owners of a block, by reference count: the live state of each table that has it, its snapshot (as the index of the
pool), the step that writes a snapshot, steps in flight and copies. If the pool has no free block, the snapshot of the
least value leaves: the seconds that it saves times its uses, plus the value of the last one that left (greedy dual).
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple

from quire.cache.block_pool import BlockPool
from quire.cache.block_table import ABSENT, BlockTable, LiveState, Snapshot
from quire.cache.copies import PendingMoves
from quire.cache.in_flight import InFlight
from quire.cache.prefix.eviction import RecomputeSeconds, default_recompute_seconds
from quire.cache.prefix.index import NO_MATCH, EvictionCause, PrefixIndex, PrefixMatch
from quire.config import CacheConfig
from quire.core.common_prefix import common_prefix_len
from quire.core.explanation import Miss
from quire.core.request import Namespace
from quire.core.step import StateChunks

_NUM_TURN_ENDS = 3  # of a prompt, behind which snapshots are taken, the last ones; and behind the first
_PLANNED = 2**62  # the step that is being planned
_UNMEASURED = 1e-6  # seconds of a unit of default_recompute_seconds, below those of any measured one
_USED_ONCE = 2  # uses of a snapshot from which one sequence has started
_MOST_EVICTED = 1024  # snapshots whose eviction is recorded


class _Evicted(NamedTuple):
    """An eviction of a snapshot."""

    settled: int
    rest: tuple[int, ...]
    cause: EvictionCause


class StateBlocks:
    """The pool of state blocks, the live blocks of all tables and the snapshots."""

    def __init__(
        self,
        config: CacheConfig,
        pool: BlockPool,
        kv_pool: BlockPool,
        copies: PendingMoves,
        in_flight: InFlight,
        index: Callable[[], PrefixIndex],
        seconds: RecomputeSeconds,
    ) -> None:
        """kv_pool: that of group 0. index: returns the present one. seconds: see RadixIndex."""
        assert config.states is not None, "the model has recurrent states"
        self.pool = pool
        self.max_pending = config.states.max_pending
        self.num_evicted = 0  # snapshots that left for another block
        self._group = len(config.groups)
        self._block_size = config.block_size
        self._has_index = config.prefix_index != "none"
        self._copies_partial_blocks = config.prefix_index == "radix" and config.shares_partial_blocks
        self._turn_ends = config.turn_ends
        self._kv_pool = kv_pool
        self._copies = copies
        self._in_flight = in_flight
        self._index = index
        self._seconds = seconds
        self._num_tables: Counter[int] = Counter()  # whose live block it is
        self._anchored: dict[int, list[Snapshot]] = {}  # by anchor
        self._by_block: dict[int, Snapshot] = {}
        self._order: list[tuple[float, int, Snapshot]] = []  # a heap by value; entries with another value are stale
        self._num_ordered = 0
        self._last_value = 0.0  # of the snapshot that left last
        self._now = 0.0  # seconds of the engine's clock
        self._evicted: OrderedDict[int, _Evicted] = OrderedDict()  # by anchor, its last one; the latest eviction last
        self._written: list[LiveState] = []  # by the step that is being planned
        self._taken: list[Snapshot] = []  # the same
        self._chunks: list[tuple[int, int, int]] = []  # of the planned step: block, settled, settles
        self._planned: list[tuple[BlockTable, int]] = []  # of these chunks: the table, and where the chunk starts
        self._snapshots: list[tuple[int, int, int]] = []  # of the planned step: chunk, position, block
        kv_pool.watch_index()

    @property
    def num_snapshots(self) -> int:
        """Snapshots, some of which may have lost their prefix since the last match."""
        return len(self._by_block)

    @property
    def figures(self) -> tuple[int, int, int, int]:
        """Blocks of running sequences, all blocks, snapshots, and snapshots evicted since the start."""
        pool = self.pool
        return pool.num_blocks - pool.num_available, pool.num_blocks, len(self._by_block), self.num_evicted

    @property
    def written_anchors(self) -> set[int]:
        """The anchors of snapshots that no step in flight and no planned one writes."""
        left, in_flight = self._kv_pool.left_index or (), self._in_flight
        snapshots = self._by_block.values()
        over = {one.anchor for one in snapshots if one.step != _PLANNED and not in_flight.has_step(one.step)}
        return over.difference(left)

    def advance_clock(self, now: float) -> None:
        """Advance the clock, of which evictions have their time. Seconds of the engine's clock."""
        self._now = now

    # Matches and admission

    def match(self, found: PrefixMatch, tokens: Sequence[int]) -> tuple[PrefixMatch, Snapshot | None]:
        """The part of a prefix match of `tokens` up to the deepest snapshot within it, and this snapshot."""
        self._drop_unanchored()
        if self._anchored and found.blocks:
            blocks = found.blocks[0]
            for i in range(len(blocks) - 1, -1, -1):
                there = [one for one in self._anchored.get(blocks[i], ()) if one.step != _PLANNED]
                places = [(self._start_from(one, i, found, tokens), one) for one in there]
                for position, snapshot in sorted(places, key=lambda place: -place[0]):
                    part = self._index().truncate(found, position) if position else None
                    if part is not None:
                        return part, snapshot
        return NO_MATCH._replace(num_public=found.num_public), None

    def leave_snapshot_for(self, namespace: Namespace, tokens: Sequence[int]) -> bool:
        """Whether the planned step writes a snapshot for a prefix of `tokens`, a block or more behind all others.

        If what the sequence of a chunk has in common with `tokens` ends in this chunk, it is made to leave one at the
        last end of a block before that. A few tokens more are often equal by chance, and a snapshot behind them would
        serve fewer requests.
        """
        prompts = [
            (chunk, table, start)
            for chunk, (table, start) in enumerate(self._planned)
            if self._chunks[chunk][2] - start > 1 and table.namespace == namespace
        ]
        if not (prompts or self._taken):
            return False
        found = self._index().match_prefix(namespace, tokens)
        blocks = found.blocks[0] if found.blocks else []
        end, least = len(blocks) * self._block_size, self.match(found, tokens)[0].num_tokens + self._block_size
        for chunk, table, start in prompts:
            settles = self._chunks[chunk][2]
            if not (blocks and start < end <= settles and table.blocks[0][len(blocks) - 1] == blocks[-1]):
                continue
            stop = settles + 1
            ends = table.tokens[end:stop] != tokens[end:stop]  # whether what both have in common ends in the chunk
            if ends and table.state is not None and least <= end:
                self._take_snapshot(table, table.state, end, chunk)
        places = {block: index for index, block in enumerate(blocks)} if self._taken else {}
        return any(
            one.anchor in places and self._start_from(one, places[one.anchor], found, tokens) >= least
            for one in self._taken
        )

    def explain_miss(self, table: BlockTable, found: PrefixMatch, position: int, tables: Iterable[BlockTable]) -> Miss:
        """Why a new table starts at `position`, although keys and values match further.

        found: the match of keys and values. tables: of the other sequences.
        """
        tokens, cause = table.tokens, None
        for i in range(len(found.blocks[0]) - 1, -1, -1):
            for snapshot in self._anchored.get(found.blocks[0][i], ()):
                if snapshot.step == _PLANNED and self._start_from(snapshot, i, found, tokens) > position:
                    return Miss(position, tokens[position], "state_being_computed")
            left = self._evicted.get(found.blocks[0][i])
            if cause is None and left is not None and self._start_from(left, i, found, tokens) > position:
                cause = left.cause
        if any(_will_take(other, table, position, found.num_tokens) for other in tables):
            return Miss(position, tokens[position], "state_being_computed")
        if cause is None:
            return Miss(position, tokens[position], "no_state")
        request_id = cause.request_shown_to(table.namespace.tenant)
        return Miss(position, tokens[position], "state_evicted", cause.now, request_id)

    def _start_from(self, snapshot: Snapshot | _Evicted, index: int, found: PrefixMatch, tokens: Sequence[int]) -> int:
        """The last position of a match behind which a snapshot stands, anchored at its block `index`; 0 if none is."""
        end = (index + 1) * self._block_size
        stop = min(found.num_tokens, end + len(snapshot.rest))
        position = end + common_prefix_len(snapshot.rest, tokens[end:stop])
        if not self._copies_partial_blocks:
            position -= position % self._block_size
        return position if position >= snapshot.settled else 0

    def find(self, table: BlockTable, position: int) -> Snapshot | None:
        """A snapshot for exactly this position of a table; None if there is none."""
        self._drop_unanchored()
        end, live = position - position % self._block_size, table.state
        candidates = list(self._anchored.get(self._anchor(table, position), ()))
        candidates += live.unindexed if live is not None else []
        for snapshot in candidates:
            rest = tuple(table.tokens[end:position])
            is_there = end <= snapshot.settled <= position and snapshot.rest[: len(rest)] == rest
            if is_there and snapshot.step != _PLANNED:
                return snapshot
        return None

    def can_branch(self, parent: BlockTable, position: int) -> bool:
        """Whether a table can begin behind `position` of another one: with its live block, or with a snapshot."""
        live = parent.state
        is_there = live is not None and live.settled <= position <= live.stop
        return is_there or (self.pool.num_available > 0 and self.find(parent, position) is not None)

    def begin(self, table: BlockTable, position: int, snapshot: Snapshot | None) -> None:
        """Give a new table a live block, with a copy of the snapshot behind `position`. A block must be available.

        If no other block is, the table takes that of the snapshot.
        """
        if snapshot is None:
            live = LiveState(self._allocate(table))
        else:
            block = snapshot.block
            self.pool.incr_ref(block)
            snapshot.uses += 1
            if self.pool.num_available:
                block = self._copies.plan_copy(self._group, block, 0, self._allocate(table))
                self._enter_order(snapshot)
            else:
                self._drop(snapshot)
            live = LiveState(block, snapshot.settled, position, snapshot.step, last_snapshot=position, begun=snapshot)
        self._num_tables[live.block] = 1
        table.state = live

    def want(self, table: BlockTable, *positions: int) -> None:
        """Let a table leave snapshots behind these positions when it gets there, or at the block ends before them."""
        live = table.state
        if live is None or not self._has_index:
            return
        if not self._copies_partial_blocks:
            positions = tuple(at - at % self._block_size for at in positions)
        first = max(live.stop + 1, self._block_size)
        live.wanted = tuple(sorted({*live.wanted, *(at for at in positions if at >= first)}))

    def begin_swapped(self, table: BlockTable, settled: int, position: int) -> int:
        """Give a new table a live block into which a Move from the host copies its state. Returns the block."""
        table.state = LiveState(self._allocate(table), settled, position, last_snapshot=position)
        self._num_tables[table.state.block] = 1
        self.want(table, *self.positions_of_turns(table.tokens))
        return table.state.block

    def positions_of_turns(self, tokens: Sequence[int]) -> list[int]:
        """Positions behind the first and the last turns of a prompt."""
        if not self._turn_ends:
            return []
        ends = [place + 1 for place, token in enumerate(tokens) if token in self._turn_ends]
        return ends[:1] + ends[-_NUM_TURN_ENDS:]

    # Forks, writes and release

    def fork(self, parent: BlockTable, child: BlockTable, position: int) -> None:
        """Let a forked table share the live block of the other, if that block stands behind `position`.

        Both then get a block of their own by `grow` before they write.
        """
        live = parent.state
        if live is None or not live.settled <= position <= live.stop:
            return
        self.pool.incr_ref(live.block)
        self._num_tables[live.block] += 1
        child.state = LiveState(live.block, live.settled, position, live.last_step, last_snapshot=live.last_snapshot)
        parent.limit_capacity(live.stop)
        child.limit_capacity(position)

    def lacks_block(self, table: BlockTable) -> bool:
        """Whether a table needs a block to write its state, and none is available."""
        return self._is_shared(table) and not self.pool.num_available

    def _is_shared(self, table: BlockTable) -> bool:
        live = table.state
        return live is not None and (self._num_tables[live.block] > 1 or live.block in self._by_block)

    def own(self, table: BlockTable) -> bool:
        """Make the live block of a table writable: copy it if it has another owner. False without a block for that."""
        live = table.state
        if live is None or not self._is_shared(table):
            return True
        if not self.pool.num_available:
            return False
        self._num_tables[live.block] -= 1
        live.block = self._copies.plan_copy(self._group, live.block, 0, self._allocate(table))
        self._num_tables[live.block] = 1
        return True

    def release(self, table: BlockTable, num_tokens: int) -> None:
        """Release the live block of a table that has left the index with `num_tokens` valid positions.

        The block becomes a snapshot, without a copy, if it stands behind one of these positions.
        """
        live, table.state = table.state, None
        if live is None:
            return
        self._num_tables[live.block] -= 1
        is_void = bool(self._copies.cancel(self._group, (live.block,)))
        self._enter_late(table, live)
        last = min(live.stop, num_tokens)
        if not is_void and self._has_index and self._block_size <= live.settled <= last:
            snapshot = self._new_snapshot(table, live, last, live.last_step)
            if snapshot.anchor != ABSENT and not self._is_known(snapshot):
                self._enter(snapshot)
        self._in_flight.deferred_decr_ref(self._group, live.block)

    # Steps

    def schedule(self, table: BlockTable, start: int, stop: int, num_known: int) -> None:
        """Plan the next chunk of the step, [start, stop) of a table. Tokens from `num_known` on may still change."""
        live = table.state
        assert live is not None and live.settled <= start <= live.stop, "the block does not stand behind this position"
        if live.unindexed:
            self._enter_late(table, live)
        settles = max(start, min(stop, num_known))
        assert stop - settles <= self.max_pending, "too many tokens may still change"
        while live.wanted and live.wanted[0] <= settles:
            position, *wanted = live.wanted
            live.wanted = tuple(wanted)
            if position > start:
                self._take_snapshot(table, live, position, len(self._chunks))
        self._chunks.append((live.block, live.settled, settles))
        self._planned.append((table, start))
        live.settled, live.stop = settles, stop
        if live.last_step != _PLANNED:
            live.last_step = _PLANNED
            self._written.append(live)

    def extend(self, table: BlockTable, count: int) -> None:
        """Extend the chunk of a table, planned for this step, by `count` drafts."""
        assert table.state is not None, "it has a chunk"
        table.state.stop += count

    def take_chunks(self) -> StateChunks:
        """The state blocks of all chunks of the step, which is complete."""
        chunks, self._chunks = self._chunks, []
        snapshots, self._snapshots = sorted(self._snapshots), []
        self._planned.clear()
        return StateChunks.of(chunks, snapshots)

    def launched(self, step_id: int) -> None:
        """The planned step is launched. It owns the snapshots that it writes until it is over."""
        for live in self._written:
            live.last_step = step_id
        self._written.clear()
        for snapshot in self._taken:
            snapshot.step = step_id
            self._in_flight.deferred_decr_ref(self._group, snapshot.block)
        self._taken.clear()

    def failed(self, step_id: int, tables: Mapping[int, BlockTable]) -> list[int]:
        """The step has failed: states that it or a later step was to write are void.

        Returns the sequences whose live block is void. It becomes no snapshot.
        """
        for snapshot in [one for one in self._by_block.values() if _PLANNED > one.step >= step_id]:
            self._drop(snapshot)
        void = []
        for seq_id, table in tables.items():
            live = table.state
            if live is None or live.last_step < step_id:
                continue
            live.stop = -1
            void.append(seq_id)
            for snapshot in [one for one in live.unindexed if one.step >= step_id]:
                live.unindexed.remove(snapshot)
                self._in_flight.deferred_decr_ref(self._group, snapshot.block)
        return void

    def flush(self) -> None:
        """Drop all snapshots that only the index owns."""
        for snapshot in list(self._by_block.values()):
            if self.pool.is_idle(snapshot.block):
                self._drop(snapshot)

    def clear(self) -> None:
        """Forget all snapshots, because the prefix index is replaced. `repair` frees their blocks."""
        self._by_block.clear()
        self._anchored.clear()
        self._order.clear()
        self._evicted.clear()

    # Checks

    def owners(self, tables: Iterable[BlockTable]) -> Counter[int]:
        """References of live blocks, snapshots and the planned step, per block."""
        held = [table.state for table in tables if table.state is not None]
        owners = Counter(live.block for live in held)
        owners.update(snapshot.block for live in held for snapshot in live.unindexed)
        owners.update(self._by_block.keys())
        owners.update(snapshot.block for snapshot in self._taken)
        return owners

    def check(self, tables: Iterable[BlockTable]) -> list[str]:
        """Errors of the snapshots, and tables without a live block; empty if there are none."""
        left = set(self._kv_pool.left_index or ())  # a check changes nothing, so that a journal can be replayed
        wrong = [
            f"snapshot in block {block} is anchored at block {snapshot.anchor}, which the prefix index does not have"
            for block, snapshot in self._by_block.items()
            if not self._kv_pool.is_indexed(snapshot.anchor) and snapshot.anchor not in left
        ]
        anchored = {one.block for some in self._anchored.values() for one in some}
        if anchored != self._by_block.keys():
            wrong.append(
                f"snapshots in blocks {sorted(anchored ^ self._by_block.keys())} are anchored or known, not both"
            )
        if any(table.state is None for table in tables):
            wrong.append("some tables have no state block")
        return wrong

    @property
    def snapshot_blocks(self) -> Iterable[int]:
        """The blocks of all snapshots."""
        return self._by_block.keys()

    @property
    def anchors(self) -> dict[int, int]:
        """The anchors of the snapshots whose prefix is in the index, by block of the snapshot."""
        left = set(self._kv_pool.left_index or ())
        return {block: one.anchor for block, one in self._by_block.items() if one.anchor not in left}

    # Snapshots

    def _take_snapshot(self, table: BlockTable, live: LiveState, position: int, chunk: int) -> None:
        """Let a planned chunk of a table write a snapshot, if there is none and a block is available."""
        snapshot = self._new_snapshot(table, live, position, _PLANNED)
        num_shared = sum(count - 1 for count in self._num_tables.values() if count > 1)  # each needs a block to write
        if self.pool.num_available <= num_shared or self._is_known(snapshot):
            return
        snapshot.block = self._allocate(table)
        if snapshot.anchor == ABSENT:
            self.pool.incr_ref(snapshot.block)
            live.unindexed.append(snapshot)
        else:
            self._enter(snapshot)
        live.last_snapshot, live.begun = max(live.last_snapshot, position), None
        self._taken.append(snapshot)
        self._snapshots.append((chunk, position, snapshot.block))

    def _new_snapshot(self, table: BlockTable, live: LiveState, last: int, step: int) -> Snapshot:
        """A snapshot of a live block, for positions up to `last`; a planned one, without a block, stands behind it.

        It takes the place of the one that the sequence has started from if no other sequence has done so: it then saves
        what both save. So of a chat whose turns end in snapshots, the last one stays longest.
        """
        settled = last if step == _PLANNED else live.settled
        base, begun = min(live.last_snapshot, settled), live.begun
        if begun is not None and begun.uses == _USED_ONCE:
            base = min(base, begun.base)
        seconds = self._seconds(settled - base, base)
        if not 0 < seconds < inf:
            seconds = _UNMEASURED * default_recompute_seconds(settled - base, base)
        rest = tuple(table.tokens[settled - settled % self._block_size : last])
        block = ABSENT if step == _PLANNED else live.block
        return Snapshot(block, settled, rest, seconds, base, step, self._anchor(table, settled))

    def _enter_late(self, table: BlockTable, live: LiveState) -> None:
        """Let snapshots of a table enter the index whose prefix it lacked when they were planned."""
        late, live.unindexed = live.unindexed, []
        for snapshot in late:
            whole = snapshot.settled // self._block_size
            if table.state is live and table.cursor.num_indexed < whole:
                live.unindexed.append(snapshot)
                continue
            snapshot.anchor = self._anchor(table, snapshot.settled)
            if snapshot.anchor != ABSENT and not self._is_known(snapshot):
                self._enter(snapshot)
            self._in_flight.deferred_decr_ref(self._group, snapshot.block)

    def _is_known(self, snapshot: Snapshot) -> bool:
        """Whether sequences can start from another snapshot just as well."""
        rest, last = snapshot.rest, snapshot.settled - snapshot.settled % self._block_size + len(snapshot.rest)
        there = self._anchored.get(snapshot.anchor, ())
        return any(one.rest[: len(rest)] == rest and one.settled <= last for one in there)

    def _enter(self, snapshot: Snapshot) -> None:
        """Let sequences start from a snapshot whose prefix is in the index."""
        self.pool.enter_index(snapshot.block)
        self._by_block[snapshot.block] = snapshot
        self._anchored.setdefault(snapshot.anchor, []).append(snapshot)
        self._enter_order(snapshot)

    def _anchor(self, table: BlockTable, position: int) -> int:
        """The block of the index with the last whole block before a position of a table; ABSENT if there is none."""
        self._drop_unanchored()
        whole = position // self._block_size
        if not whole:
            return ABSENT
        if table.state is not None and table.cursor.num_indexed >= whole:
            return table.blocks[0][whole - 1]
        found = self._index().match_prefix(table.namespace, table.tokens[: whole * self._block_size])
        return found.blocks[0][-1] if found.blocks and len(found.blocks[0]) == whole else ABSENT

    def _enter_order(self, snapshot: Snapshot) -> None:
        snapshot.value = self._last_value + snapshot.uses * snapshot.seconds
        self._num_ordered += 1
        heappush(self._order, (snapshot.value, self._num_ordered, snapshot))
        if len(self._order) > 2 * self.pool.num_blocks:
            self._order = [entry for entry in self._order if self._is_current(entry)]
            heapify(self._order)

    def _is_current(self, entry: tuple[float, int, Snapshot]) -> bool:
        """Whether an entry of the heap has the value of a snapshot that is there."""
        value, _, snapshot = entry
        return self._by_block.get(snapshot.block) is snapshot and value == snapshot.value

    def _allocate(self, table: BlockTable) -> int:
        """A block with one owner, on behalf of a table. One must be available."""
        if not self.pool.num_free:
            self._evict(table)
        return self.pool.allocate()

    def _evict(self, table: BlockTable) -> None:
        """Drop for a table the snapshot of the least value whose prefix no sequence and no pin has, else of all."""
        kept, found = [], None
        while self._order:
            entry = heappop(self._order)
            snapshot = entry[2]
            if not self._is_current(entry):
                continue  # a later entry has its value, or it has left
            if not self.pool.is_idle(snapshot.block):
                kept.append(entry)
            elif self._kv_pool.num_refs_without_index(snapshot.anchor):
                found = found or entry
                kept.append(entry)
            else:
                found = entry
                break
        for entry in kept:
            heappush(self._order, entry)
        assert found is not None, "a block is available"
        self._last_value = max(self._last_value, found[0])
        self._drop_for(table, found[2])

    def _drop_for(self, table: BlockTable, snapshot: Snapshot) -> None:
        """Drop a snapshot because a table needs its block, and record the eviction."""
        self.num_evicted += 1
        self._evicted.pop(snapshot.anchor, None)
        cause = EvictionCause(self._now, table.retention.request_id, table.retention.tenant)
        self._evicted[snapshot.anchor] = _Evicted(snapshot.settled, snapshot.rest, cause)
        if len(self._evicted) > _MOST_EVICTED:
            self._evicted.popitem(last=False)
        self._drop(snapshot)

    def _drop(self, snapshot: Snapshot) -> None:
        del self._by_block[snapshot.block]
        there = self._anchored[snapshot.anchor]
        there.remove(snapshot)
        if not there:
            del self._anchored[snapshot.anchor]
        self.pool.leave_index(snapshot.block)

    def _drop_unanchored(self) -> None:
        """Drop the snapshots whose prefix has left the index."""
        left = self._kv_pool.left_index
        if left:
            for block in left:
                self._evicted.pop(block, None)
                for snapshot in list(self._anchored.get(block, ())):
                    self._drop(snapshot)
            left.clear()


def _will_take(other: BlockTable, table: BlockTable, after: int, last: int) -> bool:
    """Whether another table is to leave a snapshot behind a position in (after, last] of the tokens of `table`."""
    if other.state is None or other.namespace != table.namespace:
        return False
    wanted = next((position for position in other.state.wanted if position > after), last + 1)
    return wanted <= last and common_prefix_len(other.tokens[:wanted], table.tokens[:wanted]) == wanted
