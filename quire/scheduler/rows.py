"""Rows: the sequences that run. Each has a row of the runner and a block table; the others wait."""

from bisect import insort

from quire.cache.block_table import BlockTable
from quire.cache.kv_cache import KVCache
from quire.scheduler.queue.waiting_queue import RANK
from quire.scheduler.sequence import Sequence


class Rows:
    """`running` is sorted by rank; `unmet` are those of it that the runner has not met, or knows wrongly."""

    def __init__(self, num_rows: int, cache: KVCache) -> None:
        self.running: list[Sequence] = []
        self.unmet: list[Sequence] = []
        self.corrected: list[tuple[Sequence, int]] = []  # from this position on its tokens are not what the runner has
        self._cache = cache
        self._free = list(range(num_rows))[::-1]

    @property
    def has_free(self) -> bool:
        """Whether one more sequence could run."""
        return bool(self._free)

    def take(self, seq: Sequence, table: BlockTable, num_computed: int) -> None:
        """A sequence that waited has a block table and gets a row."""
        seq.row = self._free.pop()
        insort(self.running, seq, key=RANK)
        self.hold(seq, table, num_computed)

    def hold(self, seq: Sequence, table: BlockTable, num_computed: int) -> None:
        """A sequence goes on with this table, of which so many positions are computed."""
        seq.table = table
        seq.num_computed = seq.num_written = num_computed

    def meet(self, seq: Sequence) -> None:
        """The runner has to be told all that a running sequence's row holds."""
        if seq not in self.unmet:
            self.unmet.append(seq)

    def told(self) -> None:
        """A step is planned that tells the runner what it did not know."""
        self.unmet.clear()
        self.corrected.clear()

    def give_up(self, seq: Sequence, num_valid: int) -> None:
        """A sequence's row and blocks are free as soon as no step in flight needs them.

        num_valid: leading positions whose KV is what its tokens say; it may be found again.
        """
        self.running.remove(seq)
        self.unmet = [one for one in self.unmet if one is not seq]
        self.corrected = [one for one in self.corrected if one[0] is not seq]
        self._cache.release(seq.id, num_valid)
        self._free.append(seq.row)
        seq.row, seq.table, seq.arriving = -1, None, -1

    def slots(self) -> tuple[int, int]:
        """Of the tables of group 0: how many slots they have, and how many of them hold a known token."""
        slots = tokens = 0
        for seq in self.running:
            table = seq.table
            assert table is not None, "it runs"
            num_slots = len(table.blocks[0]) * self._cache.block_size
            gone = table.firsts[0] * self._cache.block_size  # behind the window
            slots += num_slots - gone
            tokens += min(num_slots, len(seq.tokens)) - gone
        return slots, tokens
