"""Check and repair of the reference counts of the block pools."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from quire.cache.block_pool import BlockPool
from quire.cache.block_table import ABSENT, BlockTable
from quire.cache.copies import PendingMoves
from quire.cache.in_flight import InFlight
from quire.cache.prefix.index import PrefixIndex
from quire.cache.states import StateBlocks


class RefCountAudit:
    """Counts the owners of all blocks from scratch and compares them with the pools."""

    def __init__(
        self,
        pools: Sequence[BlockPool],
        tables: Mapping[int, BlockTable],
        in_flight: InFlight,
        copies: PendingMoves,
        states: StateBlocks | None,
    ) -> None:
        self._pools = pools
        self._tables = tables
        self._in_flight = in_flight
        self._copies = copies
        self._states = states

    def index_errors(self, index: PrefixIndex) -> list[str]:
        """Errors of the index itself. An index that raises an exception when it is read has one error."""
        try:
            wrong = index.check()
            for group in range(len(self._pools)):
                index.owners(group)
        except Exception as error:  # an inconsistent structure can raise anything
            return [f"the prefix index cannot be read: {error!r}"]
        strangers = [seq_id for seq_id, table in self._tables.items() if not index.is_registered(table)]
        return [*wrong, f"sequences {strangers} are not registered in the prefix index"] if strangers else wrong

    def check(self, index: PrefixIndex) -> list[str]:
        """Errors of the index or, if it has none, of the reference counts. Empty if there are none."""
        wrong = self.index_errors(index) or [
            f"group {group}: {wrong}"
            for group, (pool, owners) in enumerate(zip(self._pools, self._owners(index), strict=True))
            for wrong in pool.check(owners, index.owners(group))
        ]
        if self._states is not None:
            errors = self._states.pool.check(self._state_owners(self._states), set(self._states.snapshot_blocks))
            wrong += [f"states: {error}" for error in errors]
        return wrong

    def repair(self, index: PrefixIndex) -> None:
        """Set the reference counts to the number of owners."""
        for group, (pool, owners) in enumerate(zip(self._pools, self._owners(index), strict=True)):
            pool.repair(owners, index.owners(group))
        if self._states is not None:
            self._states.pool.repair(self._state_owners(self._states), set(self._states.snapshot_blocks))

    def _state_owners(self, states: StateBlocks) -> Counter[int]:
        owners = states.owners(self._tables.values())
        owners.update(self._in_flight.retired(len(self._pools)))
        owners.update(self._copies.held_refs(len(self._pools)))
        return owners

    def _owners(self, index: PrefixIndex) -> Iterator[Counter[int]]:
        for group in range(len(self._pools)):
            owners: Counter[int] = Counter()
            for table in self._tables.values():
                owners.update(table.blocks[group][table.firsts[group] :])
            owners.update(self._in_flight.retired(group))
            owners.update(self._copies.held_refs(group))
            owners.update(index.owners(group))
            if index.retention is not None:
                owners.update(index.retention.pin_refs(group))
            yield owners


def count_shared_blocks(tables: Sequence[BlockTable]) -> tuple[int, int]:
    """Blocks of group 0 in these tables, counted per table, and those that are not from the index, counted once."""
    found = {block for table in tables for block in table.blocks[0][: table.num_matched]}
    own = {block for table in tables for block in table.blocks[0]} - found - {ABSENT}
    return sum(len(table.blocks[0]) for table in tables), len(own)
