"""Block pools, block tables and KVCache, against plain dictionaries and the documents' worked examples."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from scripted_engine import cache_config

from quire.cache.block_pool import BlockPool
from quire.cache.block_table import ABSENT
from quire.cache.kv_cache import KVCache
from quire.core.kv_groups import kv_kind
from quire.core.step import Move


def append(cache: KVCache, seq_id: int, num_tokens: int) -> tuple[int, int]:
    """Grow a table by one token after `num_tokens`. Returns the token's block and slot."""
    table = cache.tables[seq_id]
    assert cache.grow(table, num_tokens + 1) is not None
    return table.resolve(num_tokens, cache.block_size)


def test_a_pool_counts_owners():
    pool = BlockPool(2)
    block = pool.allocate()
    pool.incr_ref(block)
    pool.decr_ref(block)
    assert (pool.num_refs(block), pool.num_free) == (1, 1)
    pool.decr_ref(block)
    assert pool.num_free == 2
    with pytest.raises(ValueError, match="free already"):
        pool.decr_ref(block)
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.incr_ref(block)
    assert pool.allocate() == block, "the block given back last is taken first"


def test_check_sees_a_leak_and_repair_mends_it():
    cache = KVCache(cache_config(4))
    cache.new_table(1)
    cache.grow(cache.tables[1], 5)
    cache.pools[0].incr_ref(cache.tables[1].blocks[0][0])
    assert cache.check() == ["group 0: block 3 has 2 references and 1 owners"]
    cache.repair()
    assert cache.check() == []


def test_document_002_two_requests_on_twenty_blocks_of_four():
    cache = KVCache(cache_config(20))
    cache.new_table(0)
    assert [append(cache, 0, i) for i in range(5)] == [(19, 0), (19, 1), (19, 2), (19, 3), (18, 0)]
    cache.new_table(1)
    assert append(cache, 1, 0) == (17, 0)
    cache.release(0)
    assert cache.pools.num_free == 19


def test_document_000_algorithm_1_five_tokens_take_two_blocks_and_free_returns_both():
    cache = KVCache(cache_config(8))
    cache.new_table(0)
    cache.grow(cache.tables[0], 5)
    assert cache.pools.num_free == 6
    cache.release(0)
    assert cache.pools.num_free == 8


def test_document_004_figure_4_a_prompt_of_seven_grows_to_sixteen():
    cache = KVCache(cache_config(10))
    table = cache.new_table(0)
    cache.grow(table, 7)
    assert len(table) == 2
    sizes = []
    for num_tokens in range(7, 16):
        append(cache, 0, num_tokens)
        sizes.append(len(table))
    assert sizes == [2, 3, 3, 3, 3, 4, 4, 4, 4]


def test_document_004_figure_5_the_first_write_to_a_shared_half_full_block_copies_it():
    cache = KVCache(cache_config(10))
    first = cache.new_table(0)
    cache.grow(first, 7)
    second = cache.fork(0, 1, 7)
    shared = first.blocks[0][1]
    assert [cache.pools[0].num_refs(block) for block in first.blocks[0]] == [2, 2]
    assert cache.grow(second, 8) == [1]
    (move,) = cache.launched(0)
    assert (move.pairs, move.num_tokens) == ([(shared, second.blocks[0][1])], 3)
    assert second.blocks[0][0] == first.blocks[0][0]
    assert cache.pools[0].num_refs(shared) == 2, "the first sequence, and the copy until it is made"
    assert cache.grow(first, 8) == [2], "the last sequence writes in place"
    assert cache.launched(1) == []
    cache.collected(0)
    cache.collected(1)
    assert first.blocks[0][1] == shared
    assert cache.pools[0].num_refs(shared) == 1


def test_document_001_life_of_a_request_of_45_tokens_that_ends_at_112():
    cache = KVCache(cache_config(200, block_size=16))
    table = cache.new_table(0)
    cache.grow(table, 45)
    assert len(table) == 3
    fourth = next(n for n in range(45, 113) if append(cache, 0, n) and len(table) == 4)
    assert fourth + 1 == 49, "the document takes it at 48, when three blocks are exactly full"
    cache.grow(table, 112)
    assert len(table) == 7
    assert round(100 * (1 - 7 * 16 / 2048), 1) == 94.5


def test_blocks_let_go_belong_to_the_steps_in_flight_until_they_are_collected():
    cache = KVCache(cache_config(4))
    cache.new_table(0)
    cache.grow(cache.tables[0], 8)
    cache.launched(7)
    cache.launched(8)
    other = cache.new_table(1)
    assert cache.grow(other, 12) is None
    assert not cache.fits_once_collected(other, 12)
    cache.release(0)
    assert cache.pools.num_free == 2
    assert cache.fits_once_collected(other, 12)
    assert not cache.fits_once_collected(other, 20)
    cache.collected(7)
    assert cache.pools.num_free == 2
    assert cache.check() == []
    cache.failed(8)
    assert cache.pools.num_free == 4


def test_a_copy_that_a_failed_step_carried_is_made_by_the_next_one():
    cache = KVCache(cache_config(6))
    cache.grow(cache.new_table(0), 7)
    cache.grow(cache.fork(0, 1, 7), 8)
    (move,) = cache.launched(0)
    cache.failed(0)
    cache.release(0)
    ((source, _),) = move.pairs
    assert cache.pools[0].num_refs(source) == 1, "the copy still needs it"
    assert cache.launched(1) == [move]
    cache.collected(1)
    assert cache.pools[0].num_refs(source) == 0
    assert cache.check() == []


def test_growth_is_all_or_nothing():
    cache = KVCache(cache_config(3, windows=(0, 0)))
    table = cache.new_table(0)
    assert cache.grow(table, 13) is None
    assert (len(table), cache.pools.num_free) == (0, 6)
    assert cache.grow(table, 12, watermark_blocks=[1, 0]) is None
    assert cache.grow(table, 12) == [0, 0]
    assert [len(blocks) for blocks in table.blocks] == [3, 3]


def test_a_copy_of_a_released_table_is_dropped():
    cache = KVCache(cache_config(6))
    cache.grow(cache.new_table(0), 10)
    assert cache.branch(0, 1, 7, reserve=7, watermark_blocks=[0]) is not None
    cache.release(1)
    assert cache.launched(0) == []
    assert cache.branch(0, 2, 7, reserve=7, watermark_blocks=[0]) is not None
    assert len(cache.launched(1)) == 1
    cache.release(2)
    cache.release(0)
    cache.failed(1)
    cache.collected(0)
    assert (cache.launched(2), cache.pools.num_free) == ([], 6)


def test_a_branch_shares_whole_blocks_and_copies_the_one_it_ends_in():
    cache = KVCache(cache_config(8))
    parent = cache.new_table(0)
    cache.grow(parent, 14)
    child = cache.branch(0, 1, 10, reserve=10, watermark_blocks=[3])
    assert child is not None and cache.pools.num_free == 3
    assert cache.branch(0, 2, 10, reserve=10, watermark_blocks=[3]) is None, "one must be left"
    assert child.blocks[0][:2] == parent.blocks[0][:2] and child.blocks[0][2] != parent.blocks[0][2]
    (move,) = cache.launched(0)
    assert (move.pairs, move.num_tokens) == ([(parent.blocks[0][2], child.blocks[0][2])], 2)
    assert cache.grow(parent, 15) == [4] and cache.grow(child, 12) == [3], "both write in place"


def test_a_window_keeps_the_blocks_that_its_next_query_sees():
    cache = KVCache(cache_config(10, windows=(0, 6)))
    table = cache.new_table(0)
    cache.grow(table, 8, reserve=20)
    assert [len(blocks) for blocks in table.blocks] == [5, 2], "only groups without a window take blocks ahead"
    cache.grow(table, 20)
    for num_tokens, absent in ((0, 0), (5, 0), (8, 0), (9, 1), (12, 1), (13, 2), (20, 3)):
        cache.trim(table, num_tokens)
        assert table.blocks[1].count(ABSENT) == table.firsts[1] == absent, num_tokens
    assert ABSENT not in table.blocks[0]
    assert cache.branch(0, 1, 10, reserve=10, watermark_blocks=[0, 0]) is None, "what its next query sees is gone"
    child = cache.branch(0, 1, 19, reserve=19, watermark_blocks=[0, 0])
    assert child is not None and child.firsts == [0, 3]
    assert cache.check() == []
    cache.launched(0)
    cache.collected(0)
    cache.release(0)
    cache.release(1)
    assert cache.pools.num_free == 20


def test_a_lone_sequence_never_has_more_blocks_of_a_window_than_it_is_promised():
    for window, step_tokens, length in ((6, 5, 40), (1, 1, 9), (16, 3, 50), (5, 40, 30)):
        cache = KVCache(cache_config(kv_kind(1, 8, window).max_blocks(length, step_tokens, 4), windows=(window,)))
        table, rng = cache.new_table(0), random.Random(window)
        written = 0
        while written < length:
            written = min(length, written + rng.randint(1, step_tokens))
            assert cache.grow(table, written) is not None
            cache.trim(table, written)
        cache.release(0)


WINDOWS = (0, 6)  # of the machine's groups


class CacheMachine(RuleBasedStateMachine):
    """Open, grow, fork, branch, release, and steps that succeed or fail, in any order, beside a model of the memory.

    A sequence that grows stamps its new positions. Stamps and Moves reach the model's memory as they would in a runner:
    at the launch of a step, Moves first, and not at all if the step fails. In any order of operations, every sequence
    must read back the stamps of successful steps, from the window of its first position that may still be computed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCache(cache_config(12, windows=WINDOWS))
        self.memory: list[dict[tuple[int, int], int]] = [{}, {}]  # per group: (block, slot) -> stamp
        self.sequences: dict[int, list[int]] = {}  # stamps by position
        self.unwritten: dict[int, int] = {}  # sequence -> first position that no step has written
        self.committed: dict[int, int] = {}  # sequence -> leading positions whose steps are committed
        self.in_flight: list[tuple[int, bool, dict[int, int]]] = []  # step, whether it fails, `unwritten` after it
        self.next_id = 0
        self.stamp = 0

    def sequence(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.sequences)))

    def run(self, moves: list[Move]) -> None:
        for move in moves:
            memory = self.memory[move.group]
            for source, target in move.pairs:
                for slot in range(move.num_tokens):
                    memory[target, slot] = memory[source, slot]
        for seq_id, stamps in self.sequences.items():
            for position in range(self.unwritten[seq_id], len(stamps)):
                for group in range(2):
                    place = self.cache.tables[seq_id].resolve(position, 4, group)
                    self.memory[group][place] = stamps[position]
            self.unwritten[seq_id] = len(stamps)

    @rule()
    def open(self) -> None:
        self.cache.new_table(self.next_id)
        self.sequences[self.next_id] = []
        self.unwritten[self.next_id] = self.committed[self.next_id] = 0
        self.next_id += 1

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), more=st.integers(1, 9))
    def grow(self, data: st.DataObject, more: int) -> None:
        seq_id = self.sequence(data)
        stamps, table = self.sequences[seq_id], self.cache.tables[seq_id]
        needed, free = self.cache.num_needed_blocks(table, len(stamps) + more), self.num_free()
        if self.cache.grow(table, len(stamps) + more) is None:
            assert any(blocks > left for blocks, left in zip(needed, free, strict=True))
            return
        assert [before - after for before, after in zip(free, self.num_free(), strict=True)] == needed
        for _ in range(more):
            self.stamp += 1
            stamps.append(self.stamp)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = self.sequence(data)
        stamps = self.sequences[parent]
        num_tokens = data.draw(st.integers(0, len(stamps)))
        if num_tokens < len(stamps) and num_tokens % 4:
            return  # only a whole sequence, or full blocks of it, can be shared
        if num_tokens > self.unwritten[parent]:
            return  # unwritten positions cannot
        if self.seen(num_tokens, 1) < 4 * self.cache.tables[parent].firsts[1]:
            return  # nor blocks behind the window
        self.cache.fork(parent, self.next_id, num_tokens)
        self.sequences[self.next_id] = stamps[:num_tokens]
        self.unwritten[self.next_id] = num_tokens
        self.committed[self.next_id] = min(num_tokens, self.committed[parent])
        self.next_id += 1

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), reserve=st.integers(0, 20))
    def branch(self, data: st.DataObject, reserve: int) -> None:
        parent = self.sequence(data)
        num_tokens = data.draw(st.integers(0, self.committed[parent]))
        gone = self.seen(num_tokens, 1) < 4 * self.cache.tables[parent].firsts[1]
        child = self.cache.branch(parent, self.next_id, num_tokens, reserve=reserve, watermark_blocks=[0, 0])
        if child is None:
            assert gone or min(self.num_free()) <= -(-max(reserve, num_tokens) // 4) - num_tokens // 4
            return
        assert not gone
        self.sequences[self.next_id] = self.sequences[parent][:num_tokens]
        self.unwritten[self.next_id] = self.committed[self.next_id] = num_tokens
        self.next_id += 1

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        seq_id = self.sequence(data)
        self.cache.release(seq_id)
        del self.sequences[seq_id], self.unwritten[seq_id], self.committed[seq_id]

    @precondition(lambda self: not self.in_flight)
    @rule(fails=st.booleans(), then=st.booleans())
    def launch(self, *, fails: bool, then: bool) -> None:
        """Launch one step, or two of which the second is launched before the first is committed."""
        for failing in [fails] if fails or not then else [fails, False]:
            moves = self.cache.launched(self.next_id)
            if not failing:
                self.run(moves)
            self.in_flight.append((self.next_id, failing, dict(self.unwritten)))
            self.next_id += 1

    @precondition(lambda self: self.in_flight)
    @rule()
    def collect(self) -> None:
        step_id, failed, written = self.in_flight.pop(0)
        if failed:
            self.cache.failed(step_id)
            return
        self.cache.collected(step_id)
        for seq_id in written.keys() & self.sequences.keys():
            self.committed[seq_id] = written[seq_id]
            self.cache.trim(self.cache.tables[seq_id], written[seq_id])

    def num_free(self) -> list[int]:
        return [pool.num_free for pool in self.cache.pools]

    def seen(self, position: int, group: int) -> int:
        """First position that a query attends to."""
        return max(0, position - WINDOWS[group] + 1) if WINDOWS[group] else 0

    @invariant()
    def adds_up(self) -> None:
        assert self.cache.check() == []

    @invariant()
    def reads_back(self) -> None:
        for seq_id, stamps in self.sequences.items():
            table = self.cache.tables[seq_id]
            for group in range(2):
                if self.copies_wait():
                    continue  # pending copies have not been made
                first, written = self.seen(self.committed[seq_id], group), self.unwritten[seq_id]
                read = [self.memory[group][table.resolve(p, 4, group)] for p in range(first, written)]
                assert read == stamps[first:written]

    def copies_wait(self) -> bool:
        return bool(self.cache.copies.pending) or any(failing for _, failing, _ in self.in_flight)

    def teardown(self) -> None:
        for seq_id in self.sequences:
            self.cache.release(seq_id)
        self.sequences.clear()
        while self.in_flight:
            self.collect()
        self.cache.launched(self.next_id)  # with the pending copies
        self.cache.collected(self.next_id)
        assert self.cache.pools.num_free == 24


CacheMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestBlocksEqualAModelOfTheCache = CacheMachine.TestCase


@pytest.mark.parametrize("prefix_index", ["radix", "hash"])
@pytest.mark.parametrize(("num_blocks", "num_ahead"), [(255, 0), (256, 1), (1024, 4)])
def test_an_eviction_frees_a_part_of_a_large_pool_ahead(prefix_index, num_blocks, num_ahead):
    cache = KVCache(cache_config(num_blocks, prefix_index=prefix_index))
    num_tokens = num_blocks * cache.block_size
    table = cache.new_table(0, list(range(num_tokens)))
    assert cache.grow(table, num_tokens) is not None
    cache.release(0, num_tokens)
    assert (cache.pools.num_free, cache.pools.num_idle) == (0, num_blocks)
    table = cache.new_table(1)
    for num_allocated in range(1, num_ahead + 2):
        assert cache.grow(table, num_allocated * cache.block_size) is not None
        assert cache.num_evicted == 1 + num_ahead
        assert cache.pools.num_free == num_ahead + 1 - num_allocated
    assert cache.check() == []
