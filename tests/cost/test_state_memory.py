"""Recurrent states in the memory plan: live states before KV, snapshots in proportion to KV, and the host pool."""

from dataclasses import replace

import pytest
from hybrid_shape import BLOCK_BYTES, state_group
from hypothesis import given
from hypothesis import strategies as st

from quire.core.kv_groups import kv_kind
from quire.cost.memory_plan import KVProfile, MemoryProfile, format_bytes, plan_host_pool, plan_memory
from quire.errors import ConfigError, DoesNotFit

MIB, GIB = 2**20, 2**30
WEIGHTS = 800 * MIB
KV = KVProfile(12288, kv_kind(2, 256), "6 layers x 2 x 2 heads x 256 x 2 B")


def demand(**changes):
    values = {
        "weight_bytes": WEIGHTS,
        "weight_reason": "",
        "kv": (KV,),
        "block_size": 16,
        "model_max_len": 8192,
        "max_model_len": None,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 1024,
        "workspace_bytes_per_token": 0,
        "workspace_bytes_per_seq": 0,
        "scratch_bytes": 0,
        "states": state_group(),
        "has_snapshots": True,
    }
    return MemoryProfile(**(values | changes))


def planned(limit, *, fill=True, **changes):
    return plan_memory(demand(**changes), available=64 * GIB, default_share=0.5, limit=limit, fill_budget=fill)


def num_snapshots(plan):
    return plan.states.num_blocks - plan.profile.max_num_seqs


def test_a_plan_has_a_state_for_each_row_and_says_how_many_snapshots_fit():
    plan = planned("4GiB")
    (line,) = (line for line in plan.lines if line.name == "states")
    assert line.bytes == plan.states.num_blocks * BLOCK_BYTES
    blocks, size = plan.states.num_blocks, format_bytes(BLOCK_BYTES)
    assert f"{blocks} blocks x {size} (18 layers of delta state, float32)" in line.reason
    assert line.reason.endswith(f"one for each of 8 rows, {blocks - 8} snapshots")
    assert sum(line.bytes for line in plan.lines) <= 4 * GIB < sum(line.bytes for line in plan.lines) + 2 * BLOCK_BYTES
    assert planned("4GiB", states=None).states is None
    assert "states" not in str(planned("4GiB", states=None))


def test_without_a_prefix_cache_there_are_no_snapshots():
    plan = planned("4GiB", has_snapshots=False)
    assert plan.states == state_group(8)
    assert plan.lines[2].reason.endswith("one for each of 8 rows, 0 snapshots")


def test_snapshots_are_in_proportion_to_kv_but_take_at_most_half():
    room = 4 * GIB - WEIGHTS - 8 * BLOCK_BYTES - 8192 * 12288
    assert num_snapshots(planned("4GiB")) == room // 2 // BLOCK_BYTES, "1024 tokens of KV take 12 MiB, a state 24 MB"
    small = replace(state_group(), bytes_per_block=MIB)
    plan = planned("4GiB", states=small)
    assert plan.num_blocks[0] * 16 / 1024 == pytest.approx(num_snapshots(plan) + 8, rel=0.01), "one for 1024 tokens"


def test_unless_the_budget_is_filled_rows_have_a_limited_number_of_snapshots():
    small = replace(state_group(), bytes_per_block=MIB)
    assert num_snapshots(planned("8GiB", fill=False, states=small)) == 8 * 8
    assert num_snapshots(planned("8GiB", fill=False, states=small, max_model_len=500)) == 8 * 1
    long = {"model_max_len": 2**15, "max_num_seqs": 2}
    assert num_snapshots(planned("8GiB", fill=False, states=small, **long)) == 2 * 16


def test_states_come_before_kv_and_kv_of_one_sequence_before_snapshots():
    fixed = WEIGHTS + 8 * BLOCK_BYTES
    exact = planned(str(fixed + 8192 * 12288))
    assert (exact.num_blocks, num_snapshots(exact), exact.max_model_len) == ((512,), 0, 8192)
    shorter = planned(str(fixed + 4096 * 12288))
    assert (shorter.num_blocks, num_snapshots(shorter), shorter.max_model_len) == ((256,), 0, 4096)
    with pytest.raises(DoesNotFit, match=rf"recurrent states {format_bytes(8 * BLOCK_BYTES)}, the rest KV"):
        planned(str(fixed + 4096 * 12288), max_model_len=8192)


def test_states_that_do_not_fit_are_named_with_their_size_and_what_to_lower():
    with pytest.raises(DoesNotFit) as error:
        planned(str(WEIGHTS + 3 * BLOCK_BYTES))
    assert f"8 sequences have recurrent states of {format_bytes(BLOCK_BYTES)} each" in str(error.value)
    assert str(error.value).endswith("Raise memory, or lower max_num_seqs: 3 states fit, without any KV")
    with pytest.raises(DoesNotFit, match="one sequence of 8192 tokens needs"):
        planned("100MiB")


def test_a_sequence_needs_a_state_to_run():
    plan = planned("16GiB", fill=False, max_num_seqs=2, has_snapshots=False)
    assert plan.concurrency(16) == 2 < plan.num_blocks[0]


@given(
    budget=st.integers(900, 9000),
    rows=st.integers(1, 100),
    block=st.integers(1, 60 * MIB),
    window=st.integers(0, 9000),
    fill=st.booleans(),
    length=st.sampled_from([None, 100, 8192]),
)
def test_a_budget_is_never_exceeded(budget, rows, block, window, fill, length):
    kv = (KV, KVProfile(6144, kv_kind(1, 8, window), "window"))
    changes = {
        "kv": kv,
        "max_num_seqs": rows,
        "max_model_len": length,
        "states": replace(state_group(), bytes_per_block=block),
    }
    try:
        plan = planned(f"{budget}MiB", fill=fill, **changes)
    except ConfigError as error:
        assert "Raise memory" in str(error)
        return
    assert sum(line.bytes for line in plan.lines) <= budget * MIB
    assert plan.states.num_blocks >= rows
    assert all(
        have >= need for have, need in zip(plan.num_blocks, plan.profile.blocks_alone(plan.max_model_len), strict=True)
    )


def test_a_host_pool_has_states_in_proportion_and_at_least_one():
    plan = planned("4GiB")
    pool = plan_host_pool(plan, asked="1GiB", default=0, available=4 * GIB)
    device = plan.num_blocks[0] * 16 * 12288 + plan.states.num_blocks * BLOCK_BYTES
    assert pool.num_state_blocks == plan.states.num_blocks * GIB // device > 0
    assert pool.num_blocks == (plan.num_blocks[0] * GIB // device,)
    assert pool.line.bytes == pool.num_blocks[0] * 16 * 12288 + pool.num_state_blocks * BLOCK_BYTES <= GIB
    assert f"16 tokens and {pool.num_state_blocks} recurrent states in host memory" in pool.line.reason
    with pytest.raises(ConfigError, match="holds no block"):
        plan_host_pool(plan, asked="20MiB", default=0, available=4 * GIB)
    assert plan_host_pool(plan, asked=None, default=20 * MIB, available=4 * GIB) == ((0,), None, 0)
