"""The cost model: step and copy times fitted to samples, the host pool's size."""

import random
from math import inf, isfinite

import numpy as np
import pytest
from hybrid_shape import state_group
from hypothesis import given
from hypothesis import strategies as st
from kv_groups import kv_group
from scripted_engine import Rig

from quire.cache.kv_cache import KVCache
from quire.config import CacheConfig, SchedulerConfig
from quire.core import codec
from quire.core.kv_groups import kv_kind
from quire.core.scheduling_params import Retention, SchedulingParams
from quire.core.step import StepResult
from quire.cost.memory_plan import KVProfile, MemoryProfile, parse_swap_space, plan_host_pool, plan_memory
from quire.cost.step_time import Calibration, CopySample, CostModel, DecodeSample, PrefillSample, PrefillTime, num_pairs
from quire.errors import ConfigError, RequestError
from quire.scheduler.scheduler import Scheduler

MIB, GIB = 2**20, 2**30


def seconds_of(num_tokens, pairs):
    return 2e-3 + 1e-5 * num_tokens + 3e-9 * pairs


def chunks(rng, count):
    for _ in range(count):
        num_tokens = rng.choice((16, 64, 256, 700, 2048))
        yield num_tokens, num_pairs(num_tokens, rng.choice((0, 0, 512, 4096, 30_000)))


def test_pairs_are_tokens_and_what_they_attend_to():
    for num_tokens, num_before in ((1, 0), (1, 7), (5, 0), (5, 11)):
        assert num_pairs(num_tokens, num_before) == sum(num_before + i + 1 for i in range(num_tokens))


def test_prefill_time_is_fitted_exactly_without_noise():
    prefill, rng = PrefillTime(), random.Random(1)
    for num_tokens, pairs in chunks(rng, 60):
        prefill.observe(num_tokens, pairs, seconds_of(num_tokens, pairs))
    found = (prefill.fixed, prefill.per_token, prefill.per_pair)
    assert found == pytest.approx((2e-3, 1e-5, 3e-9), rel=1e-6)


def test_noise_of_a_fifth_leaves_predictions_within_a_tenth():
    prefill, rng = PrefillTime(), random.Random(2)
    for num_tokens, pairs in chunks(rng, 300):
        prefill.observe(num_tokens, pairs, seconds_of(num_tokens, pairs) * rng.uniform(0.8, 1.2))
    for num_tokens, before in ((2048, 0), (2048, 30_000), (700, 4096)):
        pairs = num_pairs(num_tokens, before)
        assert prefill.seconds(num_tokens, pairs) == pytest.approx(seconds_of(num_tokens, pairs), rel=0.1)


def test_the_fit_is_that_of_numpy():
    rng, kept = random.Random(3), []
    prefill = PrefillTime()
    for num_tokens, pairs in chunks(rng, 40):
        seconds = seconds_of(num_tokens, pairs) * rng.uniform(0.97, 1.03)
        prefill.observe(num_tokens, pairs, seconds)
        kept = [(row, weight * 0.98) for row, weight in kept] + [((num_tokens, pairs, 1.0, seconds), 1.0)]
    rows = np.array([np.array(row) * weight**0.5 for row, weight in kept])
    scale = np.abs(rows[:, :3]).max(axis=0)
    expected = np.linalg.lstsq(rows[:, :3] / scale, rows[:, 3], rcond=None)[0] / scale
    assert (expected > 0).all()
    assert (prefill.per_token, prefill.per_pair, prefill.fixed) == pytest.approx(tuple(expected), rel=1e-6)


steps = st.tuples(st.integers(1, 10**6), st.integers(0, 10**6), st.floats(1e-9, 1e6))


@given(st.lists(steps, max_size=40))
def test_no_coefficient_is_ever_negative_nor_without_bounds(seen):
    prefill = PrefillTime()
    for num_tokens, before, seconds in seen:
        prefill.observe(num_tokens, num_pairs(num_tokens, before), seconds)
        found = (prefill.fixed, prefill.per_token, prefill.per_pair)
        assert all(isfinite(value) and value >= 0 for value in found)
    if prefill.num_steps:
        assert prefill.seconds(10**6, num_pairs(10**6, 10**6)) > 0


def test_of_steps_that_were_all_alike_tokens_carry_everything():
    prefill = PrefillTime()
    for _ in range(5):
        prefill.observe(100, num_pairs(100, 0), 0.5)
    assert (prefill.per_token, prefill.per_pair, prefill.fixed) == (pytest.approx(0.005), 0.0, 0.0)


def test_the_prefill_fit_resists_one_outlier_and_follows_a_slower_machine():
    prefill, rng = PrefillTime(), random.Random(4)
    for num_tokens, pairs in chunks(rng, 60):
        prefill.observe(num_tokens, pairs, seconds_of(num_tokens, pairs))
    pairs = num_pairs(700, 0)
    prefill.observe(700, pairs, 3600.0)
    assert prefill.seconds(700, pairs) < 4 * seconds_of(700, pairs)
    for num_tokens, more in chunks(rng, 200):
        prefill.observe(num_tokens, more, 20 * seconds_of(num_tokens, more))
    assert prefill.seconds(700, pairs) == pytest.approx(20 * seconds_of(700, pairs), rel=0.05)


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e7, inf, float("nan")])
def test_durations_that_cannot_be_teach_nothing(seconds):
    costs = CostModel()
    costs.observe_step(10, seconds, num_pairs(10, 0))
    costs.observe_step(10, seconds)
    costs.observe_copies(100, seconds, 100, seconds)
    assert costs.recompute_seconds(1000) == costs.decode_step_seconds == 0.0
    assert costs.copy_seconds(100) == (inf, inf)
    assert str(costs) == "not measured yet"


def test_a_step_without_tokens_teaches_nothing():
    costs = CostModel()
    costs.observe_step(0, 1.0)
    assert (costs.step_time.per_token, costs.decode_step_seconds) == (0.0, 0.0)


def test_a_cost_model_without_observations_predicts_zero_seconds():
    costs = CostModel()
    assert costs.recompute_seconds(100) == costs.first_token_seconds(1000, 100) == costs.output_seconds(50) == 0.0
    assert costs.copy_seconds(1) == (inf, inf)
    figures = costs.figures()
    assert (figures.prompt_seconds_per_token, figures.seconds_per_byte_out) == (0.0, None)


def calibration():
    sizes = ((16, 0), (64, 0), (256, 0), (1024, 0), (1024, 1024), (64, 1984), (1024, 2048))
    return Calibration(
        prefill=[PrefillSample(n, before, seconds_of(n, num_pairs(n, before))) for n, before in sizes],
        decode=[DecodeSample(1, 4e-3), DecodeSample(16, 6e-3)],
        copies=[CopySample(2**20, 1e-3, 2e-3), CopySample(2**23, 8e-3, 16e-3)],
    )


def test_a_calibration_teaches_all_of_it():
    costs = CostModel()
    costs.calibrate(calibration())
    assert costs.recompute_seconds(1000, 500) == pytest.approx(1e-5 * 1000 + 3e-9 * num_pairs(1000, 500), rel=1e-6)
    alone = 2e-3 + 1e-5 * 3000 + 3e-9 * num_pairs(1000, 0)
    assert costs.first_token_seconds(2000, 1000) == pytest.approx(alone, rel=1e-6)
    assert 100 * 4e-3 < costs.output_seconds(100) < 100 * 6e-3
    assert costs.copy_seconds(2**20) == (pytest.approx(1e-3), pytest.approx(2e-3))
    assert costs.step_time.per_token > 0
    assert "copies 1.05 GB/s to the host, 0.524 GB/s from it" in str(costs)


def test_ten_short_prompts_correct_a_calibration_of_a_busy_machine():
    sizes = (8, 32, 128, 512, 2048)
    wrong = [PrefillSample(n, 0, 6 * seconds_of(n, num_pairs(n, 0))) for n in sizes]
    costs = CostModel()
    costs.calibrate(Calibration(prefill=wrong, decode=[DecodeSample(1, 0.012)]))
    pairs = num_pairs(512, 0)
    assert costs.predicted_step_seconds(512, pairs) == pytest.approx(6 * seconds_of(512, pairs), rel=0.05)
    for num_tokens in (40, 60, 30, 90, 50, 45, 70, 35, 100, 55):
        more = num_pairs(num_tokens, 0)
        costs.observe_step(num_tokens, seconds_of(num_tokens, more), more)
    assert costs.predicted_step_seconds(60, num_pairs(60, 0)) == pytest.approx(
        seconds_of(60, num_pairs(60, 0)), rel=0.25
    )
    assert costs.predicted_step_seconds(60) == pytest.approx(seconds_of(60, 0), rel=0.25)


def test_a_longer_context_makes_tokens_dearer():
    costs = CostModel()
    costs.calibrate(calibration())
    halves = costs.recompute_seconds(500), costs.recompute_seconds(500, 500)
    assert sum(halves) == pytest.approx(costs.recompute_seconds(1000))
    assert halves[0] < halves[1]


def test_copies_of_late_weigh_most():
    costs = CostModel()
    for seconds in [1.0] * 5 + [3.0] * 50:
        costs.observe_copies(10**6, seconds, 0, 0.0)
    out, back = costs.copy_seconds(10**6)
    assert out == pytest.approx(3.0, rel=0.01)
    assert back == inf


# Recurrent states


def hybrid_seconds(num_tokens, num_rows):
    return 50e-3 + 0.5e-3 * num_tokens + 2e-3 * num_rows


def hybrid_costs():
    """The cost model of a model with states, after a calibration."""
    costs = CostModel(has_states=True)
    costs.calibrate(
        Calibration(
            prefill=[PrefillSample(n, 0, hybrid_seconds(n, 1)) for n in (8, 32, 128)],
            decode=[DecodeSample(n, hybrid_seconds(n, n)) for n in (1, 4, 16)],
        )
    )
    return costs


def test_the_time_of_states_counts_by_row_and_not_by_token():
    costs, rng = hybrid_costs(), random.Random(2)
    assert costs.row_time.per_row == pytest.approx(2e-3, rel=0.02)
    for _ in range(300):
        rows = rng.choice((8, 16, 24, 32))
        costs.observe_step(rows, rng.gauss(1, 0.02) * hybrid_seconds(rows, rows), num_rows=rows)
    assert costs.row_time.per_row == pytest.approx(2e-3, rel=0.05), "steps of one token a row do not separate the two"
    curve = costs.step_curve.seconds
    assert 16 * costs.row_time.per_row + curve(16) == pytest.approx(hybrid_seconds(16, 16), rel=0.05)
    assert curve(16) - curve(8) == pytest.approx(8 * 0.5e-3, abs=3e-3), "of 8 drafts; 8 rows more take 20 ms"


def test_the_time_of_states_follows_steps_with_drafts():
    costs, rng = hybrid_costs(), random.Random(3)
    for _ in range(300):
        rows, drafts = rng.choice((4, 8, 16)), rng.randrange(8)
        costs.observe_step(rows + drafts, hybrid_seconds(rows + drafts, 3 * rows), num_rows=rows)
    assert costs.row_time.per_row == pytest.approx(6e-3, rel=0.05)


def test_without_states_rows_take_no_time_of_their_own():
    costs, plain = CostModel(), CostModel()
    for num_rows in (1, 4, 9):
        costs.observe_step(9, 0.01 * num_rows, num_rows=num_rows)
        plain.observe_step(9, 0.01 * num_rows)
    assert costs.row_time.per_row == 0.0
    assert costs.step_curve.seconds(9) == plain.step_curve.seconds(9)


# In the scheduler


def test_a_scheduler_counts_the_rows_of_a_model_with_states():
    groups = (kv_group((0,), 1, 8, "float32", 64, 1),)
    limits = SchedulerConfig(8, 64, 100, 0.5, 0.01, 1)
    plain, hybrid = (
        Scheduler(limits, KVCache(CacheConfig(4, groups, states=states))) for states in (None, state_group(8))
    )
    for scheduler in (plain, hybrid):
        scheduler.calibrate(
            Calibration(
                prefill=[PrefillSample(n, 0, hybrid_seconds(n, 1)) for n in (8, 32)],
                decode=[DecodeSample(n, hybrid_seconds(n, n)) for n in (1, 4, 16)],
            )
        )
    assert plain.costs.row_time.per_row == 0
    assert hybrid.costs.row_time.per_row == pytest.approx(2e-3, rel=0.02)


def test_prefill_and_decode_steps_are_observed_separately():
    rig = Rig(num_blocks=64, max_num_batched_tokens=16)
    rig.add("a", list(range(40)), max_tokens=12)
    rig.run()
    sizes = rig.scheduler.sizes
    assert rig.scheduler.costs.prefill.num_steps == sum(size > 1 for size in sizes) >= 3
    assert rig.scheduler.costs.decode_step_seconds > 0


def test_each_step_is_observed_with_its_rows(monkeypatch):
    observed = []
    monkeypatch.setattr(
        CostModel, "observe_step", lambda _, tokens, *more, num_rows: observed.append((tokens, num_rows))
    )
    rig = Rig(num_blocks=64, max_num_batched_tokens=16)
    for name in "abc":
        rig.add(name, [1, 2, 3], max_tokens=4)
    rig.run()
    assert observed == [(9, 3), (3, 3), (3, 3), (3, 3)]


def test_a_calibrated_scheduler_replays_and_keeps_its_first_step_short():
    rig = Rig(num_blocks=512, max_num_batched_tokens=2048, step_seconds=5e-3)
    rig.scheduler.calibrate(calibration())
    rig.add("a", [i % 40 for i in range(1500)], max_tokens=5)
    rig.step()
    assert 1 < rig.scheduler.sizes[0] < 400  # 2 ms and 10 us per token, and at least half of the time
    rig.scheduler.calibrate(calibration())  # between steps: the runner's rows are rebuilt
    rig.run()
    assert rig.replay().difference == ""
    plain = Rig(num_blocks=512, max_num_batched_tokens=2048)
    plain.add("a", [i % 40 for i in range(1500)], max_tokens=5)
    plain.run()
    assert rig.tokens == plain.tokens
    assert plain.scheduler.sizes[0] == 1500


def test_no_calibration_while_a_step_is_in_flight():
    rig = Rig()
    rig.add("a", [1, 2, 3])
    step = rig.scheduler.plan(0.0)
    with pytest.raises(ValueError, match="in flight"):
        rig.scheduler.calibrate(calibration())
    rig.scheduler.commit(StepResult.failed(step.id, "never run"), 0.0)
    assert rig.replay().difference == ""


def test_a_calibration_survives_its_bytes():
    assert codec.decode(codec.encode(calibration()), Calibration) == calibration()


# The host pool


@pytest.mark.parametrize(
    ("text", "value"), [("4", 4 * GIB), ("0.5", GIB // 2), ("0", 0), ("4GiB", 4 * GIB), ("500MB", 5e8), ("8192", 8192)]
)
def test_swap_space_is_read_as_people_write_it(text, value):
    assert parse_swap_space(text) == value


@pytest.mark.parametrize("text", ["", "lots", "-1", "4 apples", "nan"])
def test_other_swap_spaces_are_refused(text):
    with pytest.raises(ConfigError, match="swap_space must be bytes"):
        parse_swap_space(text)


def memory_plan(*windows):
    demand = MemoryProfile(
        weight_bytes=GIB,
        weight_reason="",
        kv=tuple(KVProfile(12288, kv_kind(1, 8, window), "") for window in windows),
        block_size=16,
        model_max_len=8192,
        max_model_len=None,
        max_num_seqs=8,
        max_num_batched_tokens=1024,
        workspace_bytes_per_token=40_000,
        workspace_bytes_per_seq=500_000,
        scratch_bytes=10_000_000,
    )
    return plan_memory(demand, available=8 * GIB, default_share=0.5, limit=None)


@pytest.mark.parametrize("windows", [(0,), (0, 1024)])
def test_a_host_pool_is_divided_as_the_device_is_and_takes_no_more_than_asked(windows):
    plan = memory_plan(*windows)
    pool = plan_host_pool(plan, asked="1GiB", default=0, available=4 * GIB)
    block = 12288 * 16
    assert GIB - len(windows) * block < pool.line.bytes == sum(pool.num_blocks) * block <= GIB
    for host, device in zip(pool.num_blocks, plan.num_blocks, strict=True):
        assert host / device == pytest.approx(GIB / (block * sum(plan.num_blocks)), rel=0.02)
    assert "swap_space=1GiB; no part of memory" in str(pool.line)


def test_a_host_pool_by_default_takes_a_part_of_the_host_at_most():
    plan = memory_plan(0)
    pool = plan_host_pool(plan, asked=None, default=4 * GIB, available=4 * GIB)
    assert GIB - 12288 * 16 < pool.line.bytes <= GIB
    assert plan_host_pool(plan, asked=None, default=0, available=4 * GIB) == ((0,), None, 0)
    assert plan_host_pool(plan, asked=None, default=4 * GIB, available=MIB // 4) == ((0,), None, 0)
    assert plan_host_pool(plan, asked="0", default=4 * GIB, available=4 * GIB) == ((0,), None, 0)


def test_a_host_pool_that_cannot_be_is_refused():
    with pytest.raises(ConfigError, match=r"more than the 4\.00 GiB of host memory"):
        plan_host_pool(memory_plan(0), asked="5GiB", default=0, available=4 * GIB)
    with pytest.raises(ConfigError, match="holds no block"):
        plan_host_pool(memory_plan(0), asked="1000B", default=0, available=4 * GIB)


# Terms


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: SchedulingParams(priority=2**31), "priority"),
        (lambda: SchedulingParams(priority=True), "priority"),
        (lambda: SchedulingParams(priority=1.5), "priority"),
        (lambda: SchedulingParams(deadline=0), "deadline"),
        (lambda: SchedulingParams(deadline=float("nan")), "deadline"),
        (lambda: SchedulingParams(deadline=10**400), "deadline"),
        (lambda: SchedulingParams(deadline="soon"), "deadline"),
        (lambda: Retention(priority=101), "retention.priority"),
        (lambda: Retention(priority=-1), "retention.priority"),
        (lambda: Retention(ttl=-0.1), "retention.ttl"),
        (lambda: Retention(ttl=inf), "retention.ttl"),
        (lambda: Retention(pin=1), "retention.pin"),
    ],
)
def test_terms_out_of_bounds_name_their_field(make, field):
    with pytest.raises(RequestError, match=f"^{field} must be") as refused:
        make()
    assert refused.value.param == field


def test_terms_survive_their_bytes():
    scheduling_params = SchedulingParams(priority=-3, deadline=2.5, retention=Retention(priority=90, ttl=0.0, pin=True))
    assert codec.decode(codec.encode(scheduling_params), SchedulingParams) == scheduling_params
