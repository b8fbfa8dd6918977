"""A KV cache without paging: each sequence owns one run of consecutive blocks for its greatest possible length.

There is no prefix index, no sharing and no host pool. A fork copies the whole run.
"""

from quire.cache.admission_check import Admission
from quire.cache.block_pool import BlockPool, Pools
from quire.cache.block_table import BlockTable
from quire.cache.prefix.index import NO_MATCH, NoIndex
from quire.core.explanation import Miss
from quire.core.request import NO_NAMESPACE
from quire.core.step import Move


class RunPool(BlockPool):
    """Blocks that are allocated in runs of equal length."""

    def __init__(self, num_runs, run_length):
        super().__init__(num_runs * run_length)
        self.run_length = run_length

    def allocate_run(self):
        """The first free run, or None."""
        for first in range(0, self.num_blocks, self.run_length):
            run = list(range(first, first + self.run_length))
            if not any(self.num_refs(block) for block in run):
                for block in run:
                    self._free.remove(block)
                    self._refs[block] = 1
                return run
        return None


class ContiguousCache:
    """See KVCacheManager. It has room for `num_runs` sequences of `max_model_len` tokens."""

    windowed = ()
    unwritten_blocks: frozenset[int] = frozenset()
    num_evicted = num_copied_tokens = num_swapped_out_blocks = num_swapped_in_blocks = num_pinned = 0
    has_urgent_moves = has_moves_in_flight = False
    states = None

    def __init__(self, config, num_runs, max_model_len):
        self.config = config
        self.block_size = config.block_size
        self.pool = RunPool(num_runs, -(-max_model_len // self.block_size))
        self.pools, self.host_pools = Pools([self.pool]), Pools([BlockPool(0)])
        assert self.pool.num_blocks <= config.groups[0].num_blocks
        self.index = NoIndex()
        self.tables, self.swapped = {}, {}
        self._moves, self._num_moves = [], 0
        self._forked = {}  # step -> sequences whose run it copies; None: the step that is being planned
        self._retired = {}  # step in flight -> runs that were released since its launch

    def admit(self, seq_id, tokens, namespace, *, reusable, cause=None, retention=None, **limits):
        run = self.pool.allocate_run()
        return None if run is None else Admission(self._table(seq_id, run, tokens), 0, 0, 0, Miss(0, tokens[0], "off"))

    def match_prefix(self, namespace, tokens):
        return NO_MATCH

    def fork(self, seq_id, new_id, num_tokens, tokens=()):
        source, run = self.tables[seq_id].blocks[0], self.pool.allocate_run()
        assert run is not None, "there are too few runs"
        for i, (ours, theirs) in enumerate(zip(source, run, strict=True)):
            if (count := min(self.block_size, num_tokens - i * self.block_size)) > 0:
                self._num_moves += 1
                self._moves.append(Move(self._num_moves, 0, "device", "device", [(ours, theirs)], count))
        self._forked.setdefault(None, set()).add(new_id)
        return self._table(new_id, run, tokens)

    def branch(self, *_, **__):
        return None  # each sequence computes its own prompt

    def _table(self, seq_id, run, tokens):
        table = BlockTable(1, tokens, NO_NAMESPACE)
        table.append([run], self.block_size)
        self.index.register(table, NO_MATCH)
        self.tables[seq_id] = table
        return table

    def grow(self, table, num_tokens, **_):
        assert num_tokens <= table.capacity, "its run has room for the longest sequence"
        return [len(table)]

    def grow_free(self, table):
        return None

    def append_slot(self, table, start):
        return start < table.capacity

    def release(self, seq_id, num_tokens=0, *, ended=True):
        run = self.tables.pop(seq_id).blocks[0]
        self._moves = [move for move in self._moves if move.pairs[0][1] not in run]
        if self._retired:
            self._retired[max(self._retired)].append(run)
        else:
            self._free(run)

    def _free(self, run):
        for block in run:
            self.pool.decr_ref(block)

    def launched(self, step_id):
        self._retired[step_id] = []
        self._forked[step_id] = self._forked.pop(None, set())
        moves, self._moves = self._moves, []
        return moves

    def collected(self, step_id):
        self._forked.pop(step_id, None)
        for run in self._retired.pop(step_id):
            self._free(run)

    def blocks_in_flight(self, group):
        return [block for runs in self._retired.values() for run in runs for block in run]

    def failed(self, step_id, starts=()):
        again = set().union(*(ids for step, ids in self._forked.items() if step is not None and step >= step_id))
        self.collected(step_id)
        return [seq_id for seq_id in again if seq_id in self.tables]

    def cache_blocks(self, table, start, stop):
        return None

    def fits_once_collected(self, table, num_tokens):
        return False

    def sharing(self, seq_ids):
        num_blocks = len(seq_ids) * self.pool.run_length
        return num_blocks, num_blocks

    def check(self):
        owned = [run for runs in self._retired.values() for run in runs] + [t.blocks[0] for t in self.tables.values()]
        blocks = [block for run in owned for block in run]
        return [] if len(blocks) == self.pool.num_blocks - self.pool.num_free == len(set(blocks)) else ["runs overlap"]

    def is_swapping_out(self, seq_id):
        return False

    def swap_bytes(self, num_valid):
        return dict.fromkeys(num_valid, 0)

    def swap_out(self, num_valid):
        return False

    def moves_done(self, move_ids):
        return []

    def is_swapping_in(self, table):
        return False

    def flush(self, cause=None):
        return 0

    def take_pin_events(self):
        return []

    take_evictions = take_pin_events

    def do_nothing(self, *_):
        """For what only a paged cache has."""

    advance_clock = end_program = set_recompute_seconds = drop_swapped = trim = repair = do_nothing
