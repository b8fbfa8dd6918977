"""The simulator: the real engine in virtual time over a modelled runner."""

import io
from dataclasses import replace
from itertools import pairwise
from math import inf

import numpy as np
import pytest
from kv_groups import kv_group

from quire.cache.kv_cache import KVCache
from quire.config import CacheConfig, SchedulerConfig
from quire.core.request import Request
from quire.cost.latency_profile import AttentionTime, LatencyProfile
from quire.engine.engine import Engine
from quire.errors import ConfigError
from quire.params import SamplingParams
from quire.planner.modelled_runner import ModelledRunner, VirtualClock, candidates_at
from quire.planner.results import NUM_BATCHES, Window
from quire.planner.simulated_engine import EngineSetup
from quire.planner.simulation import Simulation
from quire.planner.workloads import (
    WORKLOADS,
    Failures,
    Part,
    Session,
    Turn,
    context_lengths,
    make_workload,
    num_requests,
    tokens_of,
    with_arrivals,
    with_rate,
)
from quire.scheduler.journal import read_records, replay
from quire.scheduler.scheduler import Scheduler
from quire.startup.latency_calibration import measure_latency

PROFILE = LatencyProfile(
    model="m",
    device="d",
    source="",
    fixed=1e-3,
    eager=5e-4,
    per_chunk=1e-5,
    per_sequence=1e-4,
    linear=((1.0, 1e-3), (64.0, 2e-3), (512.0, 1e-2)),
    attention=(AttentionTime(0, 1e-8, 1e-7),),
    seconds_per_byte=1e-9,
)


def setup_of(*, num_blocks=512, num_host_blocks=0, **changed):
    group = kv_group((0,), 1, 64, "bfloat16", num_blocks, 4096, num_host_blocks=num_host_blocks)
    limits = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 1024, "step_seconds": 0.5}
    limits |= {"watermark": 0.01, "steps_in_flight": 1, **changed}
    return EngineSetup(scheduler=SchedulerConfig(**limits), cache=CacheConfig(16, (group,), "radix"), profile=PROFILE)


def single(at, prompt, num_output, key=1):
    return Session(at, (Turn((Part(key, prompt),), num_output),))


def test_a_request_alone_takes_the_sum_of_its_predicted_steps():
    (one,) = Simulation(setup_of()).run([single(2.0, 100, 5)]).requests
    first = PROFILE.prefill_seconds(100)
    others = [PROFILE.decode_seconds(1, context) for context in range(100, 104)]
    assert one.arrived == 2.0
    assert one.ttft == pytest.approx(first)
    assert one.latency == pytest.approx(first + sum(others))
    assert (one.num_prompt, one.num_output, one.reason) == (100, 5, "length")


def test_with_two_steps_in_flight_the_device_still_runs_one_after_the_other():
    workload = [single(0.0, 100, 5, key) for key in range(4)]
    one, two = (Simulation(setup_of(steps_in_flight=n)).run(workload) for n in (1, 2))
    assert two.seconds == pytest.approx(one.seconds, rel=0.2)
    assert two.busy_seconds <= two.seconds * (1 + 1e-9)


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_runs_to_its_end_and_leaks_nothing(name):
    workload = with_arrivals(make_workload(name, 60, max_model_len=1024), rate=20.0)
    assert num_requests(workload) == 60
    simulation = Simulation(setup_of())
    result = simulation.run(workload)
    assert [one.reason for one in result.requests] == ["length"] * 60
    wanted = sorted(pair for session in workload for pair in context_lengths(session))
    assert sorted((one.num_prompt, one.num_output) for one in result.requests) == wanted
    assert not simulation.engines[0].scheduler.check()
    assert not simulation.engines[0].scheduler.leaks
    assert 0 < result.mean_running <= 16


def test_a_turn_continues_from_the_context_of_its_parent():
    turns = (
        Turn((Part(1, 64),), 16),
        Turn((Part(2, 16),), 16, parent=0, pause=5.0),
        Turn((Part(3, 16),), 16, parent=0, pause=5.0),
    )
    first, second, third = Simulation(setup_of()).run([Session(0.0, turns)]).requests
    assert second.arrived == first.ended + 5.0
    assert (second.num_prompt, third.num_prompt) == (96, 96)
    assert second.num_cached == 79  # the KV of the last output token was never computed
    assert third.num_cached >= 79


def test_parts_with_one_key_begin_with_the_same_tokens():
    short, long, other = (tokens_of(part, 1000) for part in (Part(7, 50), Part(7, 80), Part(8, 50)))
    assert long[:50] == short
    assert sum(a == b for a, b in zip(short, other, strict=True)) < 5
    assert all(0 <= token < 1000 for token in long)


def test_rates_are_those_that_were_asked_for():
    workload = make_workload("chat", 400, max_model_len=1024)
    spread = with_arrivals(workload, rate=4.0, seed=1)
    assert max(session.at for session in spread) == pytest.approx(100, rel=0.25)
    faster = with_rate(spread, 8.0)
    assert max(session.at for session in faster) == pytest.approx(50, rel=0.05)
    bursty = with_arrivals(workload, rate=4.0, burstiness=0.1, seed=1)
    gaps = [[b.at - a.at for a, b in pairwise(some)] for some in (spread, bursty)]
    assert max(gaps[1]) > 2 * max(gaps[0])
    with pytest.raises(ConfigError, match="no arrival times"):
        with_rate(workload, 1.0)


def test_a_simulation_writes_a_journal_that_replays_to_the_same_steps(tmp_path):
    file = io.BytesIO()
    failures = Failures(failed_steps=0.02, aborted=0.2, abort_seconds=1.0)
    result = Simulation(setup_of(num_blocks=96), journals=[file], failures=failures).run(
        with_arrivals(make_workload("chat", 80, max_model_len=1024), rate=50.0)
    )
    assert result.num_preemptions
    file.seek(0)
    report = replay(read_records(file))
    assert report.difference == ""
    assert report.num_steps == result.num_steps > 100


def test_aborts_and_failed_steps_lose_no_request_and_no_block():
    failures = Failures(failed_steps=0.05, aborted=0.3, abort_seconds=2.0)
    simulation = Simulation(setup_of(), failures=failures)
    result = simulation.run(with_arrivals(make_workload("sharegpt", 80, max_model_len=512), rate=20.0))
    reasons = {one.reason for one in result.requests}
    assert reasons >= {"abort", "length"}
    assert len(result.requests) == 80
    assert all(one.reason for one in result.requests)
    assert not simulation.engines[0].scheduler.check()


def test_swapped_sequences_wait_for_their_copies():
    setup = setup_of(num_blocks=80, num_host_blocks=400, preemption="swap")
    result = Simulation(setup).run([single(0.0, 200, 200, key) for key in range(8)])
    assert result.num_preemptions
    assert all(one.is_complete for one in result.requests)
    slower = replace(setup, profile=replace_field(PROFILE, seconds_per_byte=1e-6))
    assert Simulation(slower).run([single(0.0, 200, 200, key) for key in range(8)]).seconds > result.seconds


def replace_field(profile, **changed):
    return LatencyProfile(**{name: getattr(profile, name) for name in profile.__struct_fields__} | changed)


def test_recorded_outputs_are_generated_and_their_repetitions_are_drafted():
    prompt, output = tuple(range(3, 67)), tuple(range(3, 67)) * 2
    workload = [Session(0.0, (Turn((prompt,), 128, output=output),))]
    plain, drafted = (
        Simulation(setup_of(speculation=drafters)).run(workload) for drafters in ((), ("suffix", "answers"))
    )
    assert drafted.num_steps < plain.num_steps / 2
    assert drafted.requests[0].num_output == plain.requests[0].num_output == 128


def test_percentiles_count_incomplete_requests_as_infinite():
    result = Simulation(setup_of(max_queued_requests=1)).run([single(0.0, 900, 100, key) for key in range(40)])
    assert {one.reason for one in result.requests} == {"length", "rejected"}
    assert result.percentile("ttft", 0.99) == inf
    assert result.percentile("ttft", 0.0) < inf
    assert result.figures()["complete"] == len(result.complete)


def test_candidates_of_beams_are_distinct_likely_tokens_in_order():
    found = candidates_at(np.arange(200), np.arange(200) * 3, 12, 1000)
    assert found.ids.shape == found.values.shape == (200, 13)
    assert (found.ids[:, 0] == found.ids[:, 1]).all()
    assert all(len(set(row)) == 12 for row in found.ids[:, 1:].tolist())
    assert (np.diff(found.values[:, 1:]) <= 0).all()
    assert np.exp(found.values[:, 1:]).sum(1) == pytest.approx(1, abs=1e-5)
    assert 0.45 < np.exp(found.values[:, 1]).mean() < 0.75


def test_a_beam_search_is_simulated_by_the_scheduler_and_replays():
    file = io.BytesIO()
    setup = replace(setup_of(), beam_width=4)
    workload = [single(0.0, 40, 24, key) for key in range(6)]
    simulation = Simulation(setup, journals=[file])
    beams = simulation.run(workload)
    assert [(one.reason, one.num_output, one.output_length) for one in beams.requests] == [("length", 96, 24)] * 6
    assert simulation.engines[0].scheduler.cache.num_copied_tokens > 0  # beams part and go on in copied blocks
    assert not simulation.engines[0].scheduler.check()
    file.seek(0)
    assert replay(read_records(file)).difference == ""


def test_the_output_length_of_a_request_is_that_of_one_of_its_sequences():
    alone, three = (
        Simulation(replace(setup_of(), num_samples=n)).run([single(0.0, 40, 24)]).requests[0] for n in (1, 3)
    )
    assert (three.num_output, three.output_length) == (72, 24)
    assert three.tpot == pytest.approx((three.ended - three.first_token) / 23)
    assert three.tpot > alone.tpot


def test_the_same_simulation_has_the_same_result():
    workload = with_arrivals(make_workload("tenants", 80, max_model_len=1024), rate=40.0)
    first, second = (Simulation(setup_of(policy="fair")).run(workload) for _ in range(2))
    assert first == second


def test_calibration_recovers_the_profile_of_a_modelled_engine():
    setup, clock = setup_of(num_blocks=4096), VirtualClock()
    runner = ModelledRunner(PROFILE, setup.cache, clock, max_num_seqs=16, vocab_size=1000)
    engine = Engine(Scheduler(setup.scheduler, KVCache(setup.cache)), runner, vocab_size=1000, clock=clock)
    found = measure_latency(engine, model="m", device="d", seconds=8.0, clock=clock)
    assert found.error < 0.02
    for rows in (1, 3, 12):
        assert found.decode_seconds(rows, 300) == pytest.approx(PROFILE.decode_seconds(rows, 300), rel=0.03)
    assert found.prefill_seconds(150) == pytest.approx(PROFILE.prefill_seconds(150), rel=0.05)
    assert not engine.has_work
    engine.add(Request("after", [1, 2, 3], SamplingParams(max_tokens=1)))
    engine.step()


def test_a_request_that_arrives_during_a_step_waits_for_its_end():
    long, short = (
        Simulation(setup_of(max_num_batched_tokens=1024))
        .run([single(0.0, 900, 2), single(1e-3, 10, 2, key=2)])
        .requests
    )
    assert short.arrived == 1e-3
    assert short.first_token > long.first_token
    assert short.ttft > PROFILE.prefill_seconds(900) - 1e-3


def test_a_window_counts_the_requests_that_arrive_in_it_and_its_time():
    workload = with_arrivals(make_workload("alpaca", 120, max_model_len=1024), rate=60.0)
    whole = Simulation(setup_of()).run(workload)
    window = Window(0.5, 1.5)
    part = Simulation(setup_of(), window=window).run(workload)
    assert part.requests == [one for one in whole.requests if 0.5 <= one.arrived < 1.5]
    assert part.seconds == 1.0
    assert 0 < part.busy_seconds <= 1.0 + 1e-9
    assert part.row_seconds < whole.row_seconds
    times = np.arange(0.5, 1.5, 1e-3) + 5e-4
    counts = [sum(one.arrived <= at < one.ended for one in whole.requests) for at in times]
    assert part.open_requests == pytest.approx(np.array(counts).reshape(NUM_BATCHES, -1).mean(1), rel=0.02)


def test_a_simulation_that_is_stopped_early_ends_there():
    workload = with_arrivals(make_workload("alpaca", 120, max_model_len=1024), rate=60.0)
    seen = []
    result = Simulation(setup_of(), stops_early=lambda request: seen.append(request) or len(seen) == 20).run(workload)
    assert result.stopped_early
    assert sum(one.first_token < inf for one in result.requests) < 30
