"""KVCacheManager: the protocol of the KV cache that the scheduler uses.

The scheduler decides which sequence runs; the manager decides which blocks hold its KV. `KVCache` implements the
protocol with paged blocks, a prefix index and swapping.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from quire.cache.admission_check import Admission
from quire.cache.block_pool import Pools
from quire.cache.block_table import BlockTable
from quire.cache.host_pool import SwapRecord
from quire.cache.prefix.eviction import RecomputeSeconds
from quire.cache.prefix.index import EvictionCause, EvictionRecord, PrefixIndex, PrefixMatch
from quire.cache.retention import NO_RETENTION, SequenceRetention
from quire.cache.states import StateBlocks
from quire.config import CacheConfig
from quire.core.events import Event
from quire.core.request import Namespace
from quire.core.step import Move

NO_CAUSE = EvictionCause()


class KVCacheManager(Protocol):
    """Block tables by sequence id, the pools of their blocks, and the prefix index."""

    config: CacheConfig
    block_size: int
    windowed: list[int]  # groups with a window
    pools: Pools  # device blocks, per group
    host_pools: Pools  # host blocks, per group
    states: StateBlocks | None  # of models with recurrent states
    index: PrefixIndex
    tables: Mapping[int, BlockTable]  # read-only

    # Figures

    @property
    def num_evicted(self) -> int:
        """Blocks evicted since the start."""

    @property
    def num_copied_tokens(self) -> int:
        """Tokens whose KV was copied from block to block, since the start."""

    @property
    def num_swapped_out_blocks(self) -> int:
        """Blocks copied to the host pool since the start."""

    @property
    def num_swapped_in_blocks(self) -> int:
        """Blocks copied from the host pool since the start."""

    @property
    def num_pinned(self) -> int:
        """Pinned blocks of all groups."""

    def advance_clock(self, now: float) -> None:
        """Advance the clock: expired retention no longer protects blocks."""

    def end_program(self, tenant: str, program: str, branch: str | None) -> None:
        """End a branch of a program (None: all branches): no request will continue from its KV."""

    def set_recompute_seconds(self, recompute_seconds: RecomputeSeconds) -> None:
        """Set the prediction for eviction by cost: seconds to compute so many tokens behind so many others."""

    def take_pin_events(self) -> list[Event]:
        """Events of pins since the last call."""

    def take_evictions(self) -> list[EvictionRecord]:
        """Evictions since the last call, one entry per request, in the order of their first eviction."""

    # Creation of tables

    def admit(  # noqa: PLR0913  # all but the first three are keyword-only
        self,
        seq_id: int,
        tokens: Sequence[int],
        namespace: Namespace,
        *,
        reusable: int,
        limit: int,
        max_new_positions: int,
        watermark_blocks: Sequence[int] | None = None,
        cause: EvictionCause = NO_CAUSE,
        retention: SequenceRetention = NO_RETENTION,
    ) -> Admission | None:
        """Create a table that begins with the prefix match of the leading `reusable` tokens.

        Behind the match, `max_new_positions` positions can be written, up to `limit`. Groups without a window get
        blocks for all `tokens`. `watermark_blocks` blocks of each group remain available. Whole blocks are shared, and
        the block in which the match ends is copied. Returns None if there are not enough blocks; then no table has
        changed, but blocks may have been evicted. If nothing else runs (`watermark_blocks` is None and no step is in
        flight), pins end until there are enough blocks, the weakest first.

        A swapped sequence also gets the KV that the host pool has behind the whole blocks of the match. The planned
        step copies it, so nothing may be computed from it before that Move is done.
        """

    def match_prefix(self, namespace: Namespace, tokens: Sequence[int]) -> PrefixMatch:
        """The longest prefix of `tokens` behind which a sequence can continue.

        Of a model with recurrent states it ends at a snapshot. Snapshots without their prefix leave first, so that
        calls must be replayed with a journal.
        """

    def fork(self, seq_id: int, new_id: int, num_tokens: int, tokens: Sequence[int] = ()) -> BlockTable:
        """Create a table for `new_id` that shares the blocks of the first `num_tokens` positions of `seq_id`.

        These positions are all that `seq_id` has written, or whole blocks. The first write behind them copies the block
        in which they end (copy-on-write).
        """

    def branch(
        self,
        seq_id: int,
        new_id: int,
        num_tokens: int,
        *,
        tokens: Sequence[int] = (),
        reserve: int,
        watermark_blocks: Sequence[int],
        cause: EvictionCause = NO_CAUSE,
    ) -> BlockTable | None:
        """Create a table for `new_id` with the first `num_tokens` positions of `seq_id`, which may have written more.

        Whole blocks are shared, and the last partial block is copied at once. Returns None if there are not enough
        blocks for `reserve` positions with `watermark_blocks` blocks of each group left, or if a window has passed
        blocks that the next position attends to.
        """

    # Swapping

    def swap_out(self, num_valid: Mapping[int, int]) -> bool:
        """Copy the leading positions of sequences to the host pool. Shared blocks are copied once.

        num_valid: positions per sequence. Call `release` for the sequences next: the Moves read the blocks before
        anything later in the Step writes them. Returns False if the host pool has too few blocks; then nothing has
        changed.
        """

    def swap_bytes(self, num_valid: Mapping[int, int]) -> dict[int, int]:
        """Bytes that `swap_out` would copy, by sequence. A block that several share counts for the first of them."""

    @property
    def swapped(self) -> Mapping[int, SwapRecord]:
        """Sequences whose KV is in the host pool, or is being copied there. Read-only."""

    def is_swapping_out(self, seq_id: int) -> bool:
        """Whether the KV of a sequence is being copied to the host. It cannot be admitted before that is done."""

    def drop_swapped(self, seq_id: int) -> None:
        """Free the host blocks of a sequence that will not resume."""

    # Growth and release

    def grow(
        self,
        table: BlockTable,
        num_tokens: int,
        *,
        reserve: int = 0,
        watermark_blocks: Sequence[int] | None = None,
        cause: EvictionCause = NO_CAUSE,
    ) -> list[int] | None:
        """Make positions up to `num_tokens` writable, with evictions if blocks are short. All or nothing.

        reserve: groups without a window get blocks for that many positions. watermark_blocks: blocks of each group that
        remain available. Returns per group the first table index that changed (the length of the table if none did), or
        None if there are not enough blocks.
        """

    def grow_free(self, table: BlockTable) -> list[int] | None:
        """Make the positions of one more block of each group writable, with free blocks only.

        None if none are free, or if the last block is shared. Otherwise returns what `grow` returns.
        """

    def append_slot(self, table: BlockTable, start: int) -> bool:
        """Record that the planned step writes position `start` only, if this needs no allocation and fills no block.

        Otherwise returns False, and `grow` and `cache_blocks` are needed.
        """

    def cache_blocks(self, table: BlockTable, start: int, stop: int) -> list[int] | None:
        """Record that the planned step writes [start, stop), behind positions that earlier steps wrote.

        The scheduler calls this or `append_slot` for each running sequence in each step; with a `stop` of 0 if it has
        no chunk.
        Whole blocks of known tokens enter the index. Where the index has the block already, the table takes that block
        instead of its own. Returns per group the first table index that changed, or None if none did.
        """

    def trim(self, table: BlockTable, num_tokens: int) -> None:
        """Release the blocks that no query from position `num_tokens` on attends to."""

    def release(self, seq_id: int, num_tokens: int = 0, *, ended: bool = True) -> None:
        """Delete the table of a sequence and release its blocks. Steps in flight own them until they are over.

        num_tokens: leading positions whose KV is that of the table's tokens; the index keeps them. ended: False if the
        sequence will get another table; then its retention and program hints do not apply yet.
        """

    def fits_once_collected(self, table: BlockTable, num_tokens: int) -> bool:
        """Whether `grow` will find enough blocks once the steps and Moves in flight are over."""

    def flush(self, cause: EvictionCause = NO_CAUSE) -> int:
        """End all pins and evict all idle blocks. Returns the number of freed blocks."""

    # Steps

    @property
    def has_urgent_moves(self) -> bool:
        """Whether the next step has Moves that cannot wait for a step with chunks."""

    def launched(self, step_id: int) -> list[Move]:
        """The Moves of this step, which was planned last. Blocks released from now on belong to it until it is over."""

    def collected(self, step_id: int) -> None:
        """The step has succeeded: its copies within the device are made, and it owns no blocks any more."""

    def blocks_in_flight(self, group: int) -> Iterable[int]:
        """Blocks of a group that steps, copies and Moves in flight own, beside others that own them."""

    @property
    def unwritten_blocks(self) -> set[int]:
        """Blocks of group 0 in the prefix index that the planned step and those in flight write."""

    @property
    def has_moves_in_flight(self) -> bool:
        """Whether Moves to the host, or from it, are not done."""

    def moves_done(self, move_ids: Sequence[int]) -> list[Move]:
        """Moves to or from the host are done and own no blocks. Returns them; ignores those of failed steps."""

    def is_swapping_in(self, table: BlockTable) -> bool:
        """Whether a Move in flight writes a block of a table."""

    def failed(self, step_id: int, starts: Mapping[int, int] = MappingProxyType({})) -> list[int]:
        """The step has failed: the blocks that it and later steps wrote leave the index.

        starts: by sequence, the first position that the step was to write; sequences without a table are ignored. The
        copies of the step go to the next step if their targets still have an owner. KV that it or a later step copied
        to the host is dropped. Returns the sequences that must start again, because their tables depend on KV that was
        never written or copied. With recurrent states, those of `starts` must be admitted again besides, and may go on
        from a snapshot.
        """

    # Checks

    def sharing(self, seq_ids: Sequence[int]) -> tuple[int, int]:
        """Blocks of group 0 of these sequences, counted per table, and those not from the index, counted once."""

    def check(self) -> list[str]:
        """Errors of the reference counts and of the index; empty if there are none."""

    def repair(self) -> None:
        """Replace an inconsistent index by an empty one, and set the reference counts to the number of owners."""
