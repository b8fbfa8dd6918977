"""The memory plan, the step-time fit, and unused slots in last blocks."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_groups import kv_group

from quire.config import CacheConfig
from quire.core.kv_groups import kv_kind
from quire.cost.memory_plan import (
    DEFAULT_LORA_MEMORY,
    KVProfile,
    MemoryProfile,
    format_bytes,
    parse_memory,
    plan_memory,
)
from quire.cost.step_time import StepTime
from quire.errors import ConfigError

GIB = 2**30


def demand(**changes):
    values = {
        "weight_bytes": GIB,
        "weight_reason": "0.5 G parameters x 2 B",
        "kv": (KVProfile(12288, kv_kind(1, 8, 0), "24 layers x 2 heads x 64 x 2 x 2 B"),),
        "block_size": 16,
        "model_max_len": 8192,
        "max_model_len": None,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 1024,
        "workspace_bytes_per_token": 40_000,
        "workspace_bytes_per_seq": 500_000,
        "scratch_bytes": 10_000_000,
    }
    return MemoryProfile(**(values | changes))


def test_a_pool_that_is_never_larger_than_useful():
    plan = plan_memory(demand(), available=64 * GIB, default_share=0.5, limit=None)
    assert plan.num_blocks == (8 * 8192 // 16,)
    assert plan.concurrency(8192) == 8
    assert plan.max_model_len == 8192
    assert "enough for 8 sequences" in str(plan)


def test_a_pool_that_keeps_what_was_computed_takes_all_that_is_left():
    plan = plan_memory(demand(), available=64 * GIB, default_share=0.5, limit="16GiB", fill_budget=True)
    assert plan.num_blocks[0] > 8 * 8192 // 16
    assert 16 * GIB - 12288 * 16 < sum(line.bytes for line in plan.lines) <= 16 * GIB
    assert "what is left of 16.00 GiB" in str(plan)


def test_a_budget_is_spent_and_not_exceeded():
    plan = plan_memory(demand(max_num_seqs=1000), available=64 * GIB, default_share=0.5, limit="4GiB")
    spent = sum(line.bytes for line in plan.lines)
    assert 4 * GIB - 12288 * 16 < spent <= 4 * GIB
    assert "memory=4GiB" in str(plan)


def test_a_context_that_does_not_fit_is_lowered_unless_it_was_asked_for():
    tight = "1120MiB"
    plan = plan_memory(demand(), available=64 * GIB, default_share=0.5, limit=tight)
    assert plan.max_model_len < 8192
    assert plan.max_model_len == plan.num_blocks[0] * 16
    assert "lowered from 8192" in str(plan)
    with pytest.raises(ConfigError, match="one sequence of 8192 tokens needs"):
        plan_memory(demand(max_model_len=8192), available=64 * GIB, default_share=0.5, limit=tight)
    with pytest.raises(ConfigError, match="Raise memory"):
        plan_memory(demand(), available=64 * GIB, default_share=0.5, limit="1GiB")


def test_captured_steps_are_taken_from_the_pool_and_have_a_line():
    plain, recorded = (
        plan_memory(demand(**some, max_num_seqs=1000), available=64 * GIB, default_share=0.5, limit="4GiB")
        for some in ({}, {"captured_steps_bytes": GIB, "captured_steps_reason": "22 graphs"})
    )
    assert plain.num_blocks[0] - recorded.num_blocks[0] == pytest.approx(GIB / (12288 * 16), abs=1)
    line = recorded.lines[-1]
    assert (line.name, line.bytes, line.reason) == ("captured", GIB, "22 graphs")
    assert sum(line.bytes for line in recorded.lines) <= 4 * GIB
    assert [line.name for line in plain.lines] == ["weights", "KV pool", "workspace"]
    staged = plan_memory(demand(staging_bytes=GIB), available=64 * GIB, default_share=0.5, limit=None)
    assert (staged.lines[-1].name, staged.lines[-1].bytes) == ("staging", GIB)
    with pytest.raises(ConfigError, match=r"workspace 1\.51 GiB"):
        plan_memory(demand(captured_steps_bytes=GIB, max_num_seqs=1000), available=GIB * 2, default_share=1, limit=None)


@pytest.mark.parametrize(
    ("asked", "limit", "num_bytes", "reason"),
    [
        (DEFAULT_LORA_MEMORY, "4GiB", GIB // 2, "LoRA adapters, at most 1.00 GiB (lora_memory not set)"),
        (DEFAULT_LORA_MEMORY, "32GiB", GIB, "LoRA adapters, at most 1.00 GiB (lora_memory not set)"),
        ("64MiB", "4GiB", 2**26, "LoRA adapters, lora_memory=64MiB"),
        ("0.25", "4GiB", GIB, "LoRA adapters, lora_memory=0.25"),
    ],
)
def test_adapters_are_taken_from_the_pool_and_have_a_line(asked, limit, num_bytes, reason):
    plain, adapted = (
        plan_memory(demand(lora_memory=some, max_num_seqs=1000), available=64 * GIB, default_share=0.5, limit=limit)
        for some in (None, asked)
    )
    assert (plain.lora_bytes, adapted.lora_bytes) == (0, num_bytes)
    assert plain.num_blocks[0] - adapted.num_blocks[0] == pytest.approx(num_bytes / (12288 * 16), abs=1)
    line = adapted.lines[-1]
    assert (line.name, line.bytes, line.reason) == ("adapters", num_bytes, reason)
    assert "adapters" not in [line.name for line in plain.lines]


@pytest.mark.parametrize("text", ["", "much", "0", "-1"])
def test_a_bad_memory_of_adapters_is_named(text):
    with pytest.raises(ConfigError, match="lora_memory must be bytes"):
        plan_memory(demand(lora_memory=text), available=64 * GIB, default_share=0.5, limit=None)


def test_adapters_that_leave_no_room_are_refused():
    with pytest.raises(ConfigError, match=r"adapters 3.90 GiB, the rest KV.* Raise memory, or lower lora_memory, "):
        plan_memory(demand(lora_memory="3.9GiB"), available=64 * GIB, default_share=0.5, limit="4GiB")


@pytest.mark.parametrize("max_model_len", [0, 1, -5, 8193])
def test_a_context_that_the_model_does_not_have_is_refused(max_model_len):
    with pytest.raises(ConfigError, match="max_model_len must be between 2 and the model's 8192"):
        plan_memory(demand(max_model_len=max_model_len), available=64 * GIB, default_share=0.5, limit=None)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4GiB", 4 * GIB),
        ("500MB", 5e8),
        ("0.5", 500),
        ("1", 1000),
        ("123", 123),
        ("2k", 2000),
        ("1B", 1),
        ("0.5k", 500),
    ],
)
def test_sizes(text, value):
    assert parse_memory(text, available=1000) == value


@pytest.mark.parametrize("text", ["", "much", "-1", "4 XiB", "1e9", "0"])
def test_bad_sizes_say_what_a_size_is(text):
    with pytest.raises(ConfigError, match="memory must be"):
        plan_memory(demand(), available=64 * GIB, default_share=0.5, limit=text)


@given(
    window=st.integers(1, 9000),
    budget=st.integers(1100, 3000),
    seqs=st.integers(1, 300),
    length=st.sampled_from([None, 100, 8192]),
    block_size=st.sampled_from([1, 16, 64]),
)
def test_groups_share_a_budget(window, budget, seqs, length, block_size):
    kv = (KVProfile(6144, kv_kind(1, 8, 0), "full"), KVProfile(3 * 6144, kv_kind(1, 8, window), "window"))
    asked = demand(kv=kv, max_num_seqs=seqs, max_model_len=length, block_size=block_size)
    try:
        plan = plan_memory(asked, available=64 * GIB, default_share=0.5, limit=f"{budget}MiB")
    except ConfigError as error:
        assert "Raise memory" in str(error)
        return
    assert sum(line.bytes for line in plan.lines) <= budget * 2**20
    groups = (("full", 0), ("window", window))
    cache = CacheConfig(
        block_size,
        tuple(
            kv_group((0,), 1, 8, "float32", num, 1, window=seen)
            for (kind, seen), num in zip(groups, plan.num_blocks, strict=True)
        ),
    )
    assert cache.fits_sequence(plan.max_model_len, asked.max_num_batched_tokens)
    if plan.max_model_len == 8192 and window > 8192:
        assert plan.num_blocks[0] == plan.num_blocks[1], "a window that is never left is none"


def test_no_group_is_left_short_when_another_has_enough():
    kv = (KVProfile(1, kv_kind(1, 8, 0), ""), KVProfile(1, kv_kind(1, 8, 1), ""), KVProfile(1, kv_kind(1, 8, 0), ""))
    asked = demand(kv=kv, max_num_seqs=4, max_model_len=96, max_num_batched_tokens=96)
    for extra in range(0, 3000, 7):
        plan = plan_memory(asked, available=64 * GIB, default_share=0.5, limit=str(1_125_700_000 + extra))
        spent, useful = sum(line.bytes for line in plan.lines), 4 * 6
        if plan.num_blocks[0] < useful:
            assert 1_125_700_000 + extra - spent < 3 * 16, plan.num_blocks


def test_a_window_leaves_more_of_the_budget_to_the_other_group():
    asked = {"max_num_seqs": 1000, "max_num_batched_tokens": 64}
    both = demand(kv=(KVProfile(6144, kv_kind(1, 8, 0), ""), KVProfile(6144, kv_kind(1, 8, 0), "")), **asked)
    windowed = demand(kv=(KVProfile(6144, kv_kind(1, 8, 0), ""), KVProfile(6144, kv_kind(1, 8, 512), "")), **asked)
    full, saved = (plan_memory(d, available=64 * GIB, default_share=0.5, limit="2GiB") for d in (both, windowed))
    assert saved.concurrency(4096) > 1.5 * full.concurrency(4096)


def test_a_context_of_one_token_is_no_use():
    for extra in range(0, 100_000, 5_000):
        limit = str(GIB + 54_900_000 + extra)
        try:
            plan = plan_memory(demand(block_size=1), available=64 * GIB, default_share=0.5, limit=limit)
        except ConfigError as error:
            assert "Raise memory" in str(error)
        else:
            assert plan.max_model_len >= 2


def test_more_than_there_is():
    with pytest.raises(ConfigError, match=r"more than the 2\.00 GiB available"):
        plan_memory(demand(), available=2 * GIB, default_share=0.5, limit="3GiB")


def test_sizes_for_people():
    assert (format_bytes(512), format_bytes(1536), format_bytes(3 * GIB)) == ("512 B", "1.50 KiB", "3.00 GiB")


def test_pace_finds_the_line_through_noise():
    pace, rng = StepTime(), random.Random(1)
    assert pace.tokens_within(0.1, 500) == 500, "nothing known, nothing held back"
    for _ in range(300):
        n = rng.choice([1, 8, 64, 512])
        pace.observe(n, (0.005 + 1e-4 * n) * rng.uniform(0.9, 1.1))
    assert pace.per_token == pytest.approx(1e-4, rel=0.1)
    assert pace.fixed == pytest.approx(0.005, rel=0.3)
    assert pace.tokens_within(0.1, 2048) == pytest.approx(950, rel=0.1)
    assert pace.tokens_within(0.0001, 2048) == 1
    assert pace.tokens_within(1e308, 2048) == 2048


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan"), 1e-320])
def test_pace_learns_nothing_from_durations_that_cannot_be(seconds):
    pace = StepTime()
    pace.observe(8, 0.01)
    before = (pace.fixed, pace.per_token)
    pace.observe(8, seconds)
    assert (pace.fixed, pace.per_token) == before


@given(st.lists(st.tuples(st.integers(1, 4096), st.floats()), min_size=1, max_size=50), st.floats(1e-6, 1e300))
def test_step_time_stays_non_negative_for_any_observations(steps, seconds):
    pace = StepTime()
    for n, took in steps:
        pace.observe(n, took)
    assert pace.per_token >= 0
    assert pace.fixed >= 0
    assert 1 <= pace.tokens_within(seconds, 2048) <= 2048
