"""Live state blocks and snapshots of the cache, without a runner."""

from dataclasses import replace

import pytest
from scripted_engine import cache_config

from quire.cache.kv_cache import KVCache
from quire.core.request import Namespace
from quire.core.states import StateGroup, StateKind

SIZE = 4
NAMESPACE = Namespace("a")
KIND = StateKind("delta", 1, 4, 2, 1, 4)


def new_cache(num_states=8, index="radix", turn_ends=(), num_blocks=64, num_host_blocks=0) -> KVCache:
    states = StateGroup(1, KIND, "float32", num_states, 3, 64, num_host_blocks)
    config = cache_config(num_blocks, SIZE, prefix_index=index, num_host_blocks=num_host_blocks)
    return KVCache(replace(config, states=states, turn_ends=frozenset(turn_ends)))


class Steps:
    """Sequences that run one after another; `step` has the id of the next step."""

    def __init__(self, cache):
        self.cache, self.step, self.next_id = cache, 0, 0

    def launch(self):
        chunks, moves = self.cache.states.take_chunks(), self.cache.launched(self.step)
        self.step += 1
        return chunks, moves

    def admit(self, tokens, namespace=NAMESPACE, **options):
        self.next_id += 1
        limits = {"reusable": len(tokens) - 1, "limit": len(tokens), "max_new_positions": len(tokens)}
        return self.cache.admit(self.next_id, tokens, namespace, **(limits | options))

    def compute(self, tokens, namespace=NAMESPACE, stops=()):
        """Compute a sequence in chunks that end at `stops` and at its end. Returns (admission, chunks of each step)."""
        admission, planned = self.admit(tokens, namespace), []
        at = admission.num_tokens
        for stop in (*(stop for stop in stops if stop > at), len(tokens)):
            self.cache.cache_blocks(admission.table, at, stop)
            self.cache.states.schedule(admission.table, at, stop, len(tokens))
            planned.append(self.launch()[0])
            self.cache.collected(self.step - 1)
            at = stop
        return admission, planned

    def run(self, tokens, namespace=NAMESPACE, stops=()):
        """The same, and end it. Returns the tokens that it found cached."""
        admission, _ = self.compute(tokens, namespace, stops)
        self.cache.release(self.next_id, len(tokens))
        assert self.cache.check() == []
        return admission.num_tokens


def tokens_of(first, count):
    return list(range(first, first + count))


def test_a_sequence_continues_where_another_ended_exact_to_the_token():
    steps = Steps(new_cache())
    assert steps.run(tokens_of(100, 10)) == 0
    assert steps.run(tokens_of(100, 15)) == 10, "10 tokens are two and a half blocks"
    assert steps.run([*tokens_of(100, 15), 7]) == 15


def test_the_live_block_becomes_the_snapshot_without_a_copy():
    steps = Steps(new_cache())
    admission, _ = steps.compute(tokens_of(100, 9))
    block = admission.table.state.block
    steps.cache.release(steps.next_id, 9)
    assert steps.cache.states.pool.is_indexed(block)
    steps.admit(tokens_of(100, 12))
    _, moves = steps.launch()
    assert [move.pairs[0][0] for move in moves if move.group == 1] == [block]


def test_a_match_ends_at_the_deepest_snapshot_not_at_that_of_keys_and_values():
    steps = Steps(new_cache())
    steps.run(tokens_of(100, 30))
    admission = steps.admit(tokens_of(100, 20) + tokens_of(500, 9))
    assert (admission.num_tokens, admission.num_kv_tokens) == (0, 20)
    assert admission.miss.reason == "no_state" and admission.miss.position == 0


def test_the_third_prompt_with_a_common_prefix_finds_all_of_it():
    steps, common = Steps(new_cache()), tokens_of(100, 22)
    found = [steps.run(common + tokens_of(1000 * i, 11)) for i in range(1, 5)]
    assert found == [0, 0, 22, 22], "the second one leaves a snapshot where its keys and values matched"


@pytest.mark.parametrize("stops", [(), (7, 22, 23), (22,), (3, 40)])
def test_a_snapshot_is_written_within_a_chunk_whose_ends_do_not_move(stops):
    steps, common = Steps(new_cache()), tokens_of(100, 22)
    steps.run(common + tokens_of(1000, 20))
    _, planned = steps.compute(common + tokens_of(2000, 20), stops=stops)
    written = [int(one) for chunks in planned for one in chunks.snapshot_positions]
    assert written == [22]
    assert sum(len(chunks.blocks) for chunks in planned) == len({*stops, 42} - {0})


def test_snapshots_stand_behind_the_first_and_the_last_three_turns_of_a_prompt():
    end = 9
    steps = Steps(new_cache(turn_ends=[end]))
    turns = [[*tokens_of(100 * i, 6), end] for i in range(1, 8)]
    prompt = [token for turn in turns for token in turn]
    _, planned = steps.compute(prompt)
    assert planned[0].snapshot_positions.tolist() == [7, 35, 42, 49]
    steps.cache.release(steps.next_id, len(prompt))
    assert steps.run([*prompt[:35], *tokens_of(3000, 5)]) == 35, "the last turns are another's"
    assert steps.run([*prompt[:7], *tokens_of(4000, 5)]) == 7


def test_other_namespaces_read_no_snapshot():
    steps = Steps(new_cache())
    steps.run(tokens_of(100, 10))
    assert steps.run(tokens_of(100, 15), Namespace("b")) == 0
    assert steps.run(tokens_of(100, 15), Namespace("a", "salt")) == 0
    assert steps.run(tokens_of(100, 15)) == 10


def test_the_hash_index_uses_snapshots_at_ends_of_blocks():
    steps = Steps(new_cache(index="hash"))
    common = tokens_of(100, 22)
    assert [steps.run(common + tokens_of(1000 * i, 11)) for i in range(1, 4)] == [0, 0, 20]
    steps.run(tokens_of(900, 12))
    assert steps.run(tokens_of(900, 16)) == 12


def test_without_an_index_nothing_is_kept():
    steps = Steps(new_cache(index="none"))
    assert [steps.run(tokens_of(100, 10)) for _ in range(3)] == [0, 0, 0]
    assert steps.cache.states.num_snapshots == 0 and steps.cache.states.pool.num_free == 8


def test_a_snapshot_leaves_with_the_keys_and_values_of_its_prefix():
    steps = Steps(new_cache(num_blocks=8))
    steps.run(tokens_of(100, 10))
    steps.run(tokens_of(500, 30))  # evicts the first one's blocks
    assert steps.run(tokens_of(100, 12)) == 0
    assert steps.cache.check() == []


def test_the_snapshot_that_saves_least_leaves_first():
    steps = Steps(new_cache(num_states=3))
    steps.run(tokens_of(100, 60))
    steps.run(tokens_of(300, 8))
    steps.run(tokens_of(500, 40))  # needs a block; the pool has one live block and two snapshots
    steps.run(tokens_of(700, 4))
    assert steps.run(tokens_of(100, 62)) == 60
    assert steps.run(tokens_of(300, 10)) == 0


def test_uses_make_a_snapshot_worth_more():
    steps = Steps(new_cache(num_states=3))
    steps.run(tokens_of(300, 8))
    for i in range(3):
        assert steps.run([*tokens_of(300, 8), i]) == 8
    steps.run(tokens_of(100, 12))
    steps.run(tokens_of(500, 12))
    steps.run(tokens_of(700, 12))
    assert steps.run(tokens_of(300, 10)) == 8


def test_a_pool_without_a_free_block_gives_the_snapshot_itself():
    steps = Steps(new_cache(num_states=1))
    steps.run(tokens_of(100, 10))
    assert steps.run(tokens_of(100, 15)) == 10
    assert steps.cache.states.pool.num_blocks == 1


def test_no_sequence_is_admitted_without_a_state_block():
    steps = Steps(new_cache(num_states=2))
    assert steps.admit(tokens_of(100, 8)) and steps.admit(tokens_of(200, 8))
    assert steps.admit(tokens_of(300, 8)) is None
    assert sorted(steps.cache.tables) == [1, 2] and steps.cache.check() == []


def test_tokens_that_may_be_replaced_stay_beside_the_state():
    steps = Steps(new_cache())
    tokens = tokens_of(100, 9)
    admission = steps.admit(tokens)
    states, table = steps.cache.states, admission.table
    states.schedule(table, 0, 9, 9)
    assert steps.launch()[0].settles.tolist() == [9]
    states.schedule(table, 9, 10, 9)  # the token at position 9 is sampled by the step before
    states.extend(table, 2)
    first = steps.launch()[0]
    assert (first.settled.tolist(), first.settles.tolist()) == ([9], [9])
    tokens.append(1)
    states.schedule(table, 10, 11, 11)  # the drafts at 10 and 11 were rejected
    second = steps.launch()[0]
    assert (second.settled.tolist(), second.settles.tolist()) == ([9], [11])
    with pytest.raises(AssertionError, match="too many"):
        states.schedule(table, 11, 16, 11)


def test_a_fork_shares_the_block_until_one_of_both_writes():
    steps = Steps(new_cache())
    tokens = tokens_of(100, 10)
    admission, _ = steps.compute(tokens)
    parent, child = admission.table, steps.cache.fork(1, 50, 10, list(tokens))
    assert parent.state.block == child.state.block
    for table in (parent, child):
        assert steps.cache.grow(table, 11) is not None
        steps.cache.states.schedule(table, 10, 11, 11)
    assert parent.state.block != child.state.block
    chunks, moves = steps.launch()
    (move,) = [move for move in moves if move.group == 1]
    assert move.pairs == [(child.state.block, parent.state.block)], "the second one writes in place"
    assert chunks.settled.tolist() == [10, 10]
    steps.cache.collected(steps.step - 1)
    steps.cache.release(1, 11)
    steps.cache.release(50, 11)
    assert steps.cache.check() == []


def test_states_of_a_failed_step_are_void_and_leave_no_snapshot():
    steps = Steps(new_cache())
    steps.run(tokens_of(100, 12))
    admission = steps.admit(tokens_of(100, 30))
    steps.cache.cache_blocks(admission.table, 12, 30)
    steps.cache.states.schedule(admission.table, 12, 30, 30)
    steps.launch()
    other = steps.admit(tokens_of(100, 28))  # in the next step, from keys and values that the failed one writes
    steps.cache.states.schedule(other.table, other.num_tokens, 28, 28)
    steps.launch()
    again = steps.cache.failed(1, {2: 12})
    assert 2 not in again and 3 in again, "the first one is rewound by its scheduler"
    steps.cache.release(2, 12)
    steps.cache.release(3, 0)
    steps.cache.failed(2, {3: 0})
    assert steps.cache.check() == []
    assert steps.run(tokens_of(100, 14)) == 12, "the snapshot from before is still right"


def test_a_flush_drops_all_snapshots():
    steps = Steps(new_cache())
    steps.run(tokens_of(100, 10))
    steps.cache.flush()
    assert steps.cache.states.num_snapshots == 0 and steps.cache.states.pool.num_free == 8


def test_repair_frees_blocks_without_an_owner():
    steps = Steps(new_cache())
    steps.run(tokens_of(100, 10))
    lost = steps.cache.states.pool.allocate()
    assert steps.cache.check() == [f"states: block {lost} has 1 references and 0 owners"]
    steps.cache.repair()
    assert steps.cache.check() == []
    assert steps.run(tokens_of(100, 12)) == 10


def test_a_swapped_sequence_gets_its_state_back():
    steps = Steps(new_cache(num_host_blocks=16))
    cache, tokens = steps.cache, tokens_of(100, 10)
    admission, _ = steps.compute(tokens)
    block = admission.table.state.block
    assert cache.swap_bytes({1: 10})[1] == 3 * 64 * SIZE + 64
    assert cache.swap_out({1: 10})
    cache.release(1, 0)
    _, moves = steps.launch()
    (out,) = [move for move in moves if move.group == 1]
    assert (out.source, out.target, out.pairs[0][0]) == ("device", "host", block)
    cache.collected(steps.step - 1)
    cache.moves_done([move.id for move in moves])
    cache.flush()
    tokens.append(7)
    back = cache.admit(1, tokens, NAMESPACE, reusable=10, limit=11, max_new_positions=10)
    assert (back.num_swapped_tokens, back.table.state.settled, back.table.state.stop) == (10, 10, 10)
    _, moves = steps.launch()
    (home,) = [move for move in moves if move.group == 1]
    assert (home.source, home.pairs[0]) == ("host", (out.pairs[0][1], back.table.state.block))
    for move in moves:
        assert cache.is_swapping_in(back.table), "each of the copies is waited for"
        cache.moves_done([move.id])
    assert not cache.is_swapping_in(back.table)
    cache.collected(steps.step - 1)
    cache.release(1, 10)
    assert cache.check() == []


def test_a_state_beyond_the_positions_to_keep_is_not_swapped():
    cache = new_cache(num_host_blocks=16)
    Steps(cache).compute(tokens_of(100, 10))
    assert cache.swap_bytes({1: 8}) == {1: 0}


def test_a_branch_starts_from_a_snapshot_that_was_wanted():
    steps = Steps(new_cache())
    tokens = tokens_of(100, 10)
    admission = steps.admit(tokens)
    steps.cache.states.want(admission.table, 9)
    steps.cache.cache_blocks(admission.table, 0, 10)
    steps.cache.states.schedule(admission.table, 0, 10, 10)
    chunks, _ = steps.launch()
    child = steps.cache.branch(1, 50, 9, tokens=list(tokens), reserve=10, watermark_blocks=[0])
    _, moves = steps.launch()
    (move,) = [move for move in moves if move.group == 1]
    assert move.pairs == [(int(chunks.snapshot_blocks[0]), child.state.block)]
    assert (child.state.settled, child.state.stop) == (9, 9)
    assert steps.cache.branch(1, 51, 7, tokens=list(tokens), reserve=10, watermark_blocks=[0]) is None


def test_a_state_that_the_planned_step_writes_is_worth_waiting_for():
    steps = Steps(new_cache())
    common = tokens_of(100, 22)
    steps.run(common + tokens_of(1000, 11))
    second = steps.admit(common + tokens_of(2000, 11))
    third = common + tokens_of(3000, 11)
    assert not steps.cache.states.leave_snapshot_for(NAMESPACE, third)
    steps.cache.cache_blocks(second.table, 0, 33)
    steps.cache.states.schedule(second.table, 0, 33, 33)
    assert steps.cache.states.leave_snapshot_for(NAMESPACE, third)
    assert not steps.cache.states.leave_snapshot_for(Namespace("b"), third)
    assert not steps.cache.states.leave_snapshot_for(NAMESPACE, third[:21]), "the snapshot stands behind it"
    steps.launch()
    assert not steps.cache.states.leave_snapshot_for(NAMESPACE, third), "it is there"
    assert steps.admit(third).num_tokens == 22


def test_of_several_snapshots_in_one_block_the_deepest_is_used():
    end = 9
    steps = Steps(new_cache(turn_ends=[end]))
    prompt = [*tokens_of(100, 8), end, end, end]
    steps.compute([*prompt, *tokens_of(500, 3)])
    assert steps.admit([*prompt, *tokens_of(600, 3)]).num_tokens == 11
    assert steps.admit([*prompt[:10], *tokens_of(700, 3)]).num_tokens == 10


def test_a_long_common_prefix_that_is_computed_in_chunks_keeps_no_other_request_waiting():
    steps = Steps(new_cache())
    common = tokens_of(100, 41)
    first = steps.admit([*common, *tokens_of(500, 3)])
    other = [*common, *tokens_of(600, 3)]
    waited = []
    for start in (0, 16, 32):
        steps.cache.cache_blocks(first.table, start, min(start + 16, 44))
        steps.cache.states.schedule(first.table, start, min(start + 16, 44), 44)
        waited.append(steps.cache.states.leave_snapshot_for(NAMESPACE, other))
        steps.launch()
    assert waited == [False, False, True], "only the chunk that computes the end of what both have in common"
    assert steps.admit(other).num_tokens == 40, "the last end of a block in it"
