"""Several engines and their router in one virtual clock."""

import io
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from kv_groups import kv_group

from quire.config import CacheConfig, EngineOptions, SchedulerConfig
from quire.cost.latency_profile import AttentionTime, LatencyProfile
from quire.errors import ConfigError
from quire.planner.options import WorkloadOptions
from quire.planner.plan import Plan
from quire.planner.report import headline
from quire.planner.results import Window
from quire.planner.search import Requests, Runs, Search, Sustained
from quire.planner.setup import find_model, plan_engine
from quire.planner.simulate import as_wanted, simulate
from quire.planner.simulated_engine import EngineSetup
from quire.planner.simulation import Simulation
from quire.planner.slo import parse_slo
from quire.planner.workloads import Failures, Part, Session, Turn, make_workload, with_arrivals
from quire.scheduler.journal import read_records, replay, replay_journal

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


def setup_of(num_replicas=2, routing="predicted", *, num_blocks=512, **changed):
    group = kv_group((0,), 1, 64, "bfloat16", num_blocks, 4096)
    limits = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 1024, "step_seconds": 0.5}
    limits |= {"watermark": 0.01, "steps_in_flight": 2, **changed}
    return EngineSetup(
        scheduler=SchedulerConfig(**limits),
        cache=CacheConfig(16, (group,), "radix"),
        profile=PROFILE,
        num_replicas=num_replicas,
        routing=routing,
    )


def prefixed(count, num_prefixes, rate):
    rng = Random(0)
    turns = [Turn((Part(1 + rng.randrange(num_prefixes), 480), Part(1000 + i, 16)), 8) for i in range(count)]
    return with_arrivals([Session(0.0, (turn,)) for turn in turns], rate)


@pytest.mark.parametrize("routing", ["predicted", "round-robin", "least-loaded", "cache"])
def test_every_request_runs_on_its_replica_and_the_sums_are_those_of_the_engines(routing):
    workload = with_arrivals(make_workload("rag", 120, max_model_len=1024), rate=200.0)
    simulation = Simulation(setup_of(3, routing))
    result = simulation.run(workload)
    assert [one.reason for one in result.requests] == ["length"] * 120
    stats = [engine.engine.stats() for engine in simulation.engines]
    assert result.num_steps == sum(one.num_steps for one in stats)
    assert sum(one.num_output for one in result.requests) == sum(one.generation_tokens for one in stats)
    by_replica = Counter()
    for one in result.requests:
        by_replica[one.replica] += one.num_prompt
    assert [by_replica[i] for i in range(3)] == [one.prefix_query_tokens for one in stats]
    assert 0 < result.mean_kv_use <= 1
    assert not any(engine.scheduler.check() or engine.scheduler.leaks for engine in simulation.engines)


def test_replicas_that_never_share_a_request_are_engines_alone():
    """Round robin over two replicas is two simulations of every second request: the clocks do not touch each other."""
    workload = prefixed(60, 7, rate=60.0)
    both = Simulation(setup_of(2, "round-robin")).run(workload)
    for replica in range(2):
        alone = Simulation(setup_of(1)).run(workload[replica::2])
        mine = [one for one in both.requests if one.replica == replica]
        assert [(one.arrived, one.first_token, one.ended, one.num_cached) for one in mine] == [
            (one.arrived, one.first_token, one.ended, one.num_cached) for one in alone.requests
        ]


def test_the_router_keeps_disjoint_prefixes_apart_where_neither_cache_holds_all():
    workload = prefixed(240, 16, rate=60.0)  # 16 prefixes of 30 blocks
    hits = {
        name: Simulation(setup_of(2, name, num_blocks=320)).run(workload).hit_rate
        for name in ("predicted", "round-robin")
    }
    roomy = Simulation(setup_of(1, num_blocks=2000)).run(workload).hit_rate
    assert hits["predicted"] > 0.95 * roomy
    assert hits["round-robin"] < 0.7 * roomy


def test_a_request_that_arrives_in_a_step_is_placed_by_what_was_reported_before_it():
    """The first prompt ends its only step later than the second arrives, so that the router counts both."""
    workload = [Session(at, (Turn((Part(key, 200),), 4),)) for at, key in ((0.0, 1), (1e-4, 2), (2e-4, 3))]
    result = Simulation(setup_of(3, "least-loaded")).run(workload)
    assert sorted(one.replica for one in result.requests) == [0, 1, 2]


def test_the_journals_of_replicas_replay_with_failed_steps_and_aborts():
    journals = [io.BytesIO(), io.BytesIO()]
    failures = Failures(failed_steps=0.02, aborted=0.2, abort_seconds=1.0)
    simulation = Simulation(setup_of(num_blocks=96), journals=journals, failures=failures)
    result = simulation.run(with_arrivals(make_workload("chat", 80, max_model_len=1024), rate=50.0))
    assert {one.reason for one in result.requests} == {"length", "abort", "error"}
    steps = 0
    for journal in journals:
        journal.seek(0)
        report = replay(read_records(journal))
        assert report.difference == ""
        steps += report.num_steps
    assert steps == result.num_steps


def test_a_simulation_of_replicas_is_a_function_of_its_arguments_and_its_window_counts_each_of_them():
    workload = with_arrivals(make_workload("agents", 100, max_model_len=1024), rate=30.0)
    first, second = (Simulation(setup_of(), window=Window(0.5, 2.5)).run(workload) for _ in range(2))
    assert first.requests == second.requests
    assert first.figures() == second.figures()
    assert first.seconds == 2.0
    assert 0 < first.busy_seconds <= 2 * first.seconds


def test_the_command_takes_replicas_and_writes_a_journal_for_each(tmp_path):
    journal = str(tmp_path / "journal")
    options = EngineOptions(model="llama-3.1-8b", device="H100", max_model_len=2048, journal=journal)
    wanted = WorkloadOptions(workload="few-shot", num_requests=40, rate=100.0, data_parallel_size=2)
    said = []
    result, figures = simulate(options, wanted, report=said.append)
    assert any("2 replicas, each on a device of its own" in line for line in said)
    assert (figures["replicas"], figures["complete"]) == (2, 40)
    reports = [replay_journal(tmp_path / f"journal.engine-{i}") for i in range(2)]
    assert [one.difference for one in reports] == ["", ""]
    assert sum(one.num_steps for one in reports) == result.num_steps


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"data_parallel_size": 0}, "data_parallel_size must be from 1 to 64, not 0"),
        ({"routing": "least-load"}, "routing must be one of .* least-loaded"),
    ],
)
def test_replicas_and_routings_that_do_not_exist_are_refused(changed, says):
    options = EngineOptions(model="llama-3.1-8b", device="H100", max_model_len=2048)
    with pytest.raises(ConfigError, match=says):
        simulate(options, replace(WorkloadOptions(num_requests=4), **changed), report=lambda _: None)


def test_a_plan_expects_of_two_replicas_twice_of_one_and_prices_both_devices():
    options = EngineOptions(model="llama-3.1-8b", device="L4", max_model_len=1024, max_num_seqs=16)
    slo, found = parse_slo("tpot=200ms,ttft=60s,share=80%"), []
    for number in (1, 2):
        wanted = WorkloadOptions(workload="alpaca", num_requests=100 * number, data_parallel_size=number)
        with Runs(1, lambda _: None, lambda _done, _expected: None) as runs:
            finder = Search(wanted, slo, Requests(wanted, find_model(options), 0), runs)
            engine = as_wanted(plan_engine(options, options.device), wanted)
            at_once = finder.at_once(engine)
            (run,) = finder.short_runs(engine, [0.5 * number], "a rate")
            plan = Plan(engine, slo, at_once, Sustained(run, None))
        found.append((finder.bound(engine, at_once), finder.estimate(engine, at_once), plan))
    (bound, estimate, one), (both_bound, both_estimate, both) = found
    assert both_bound == pytest.approx(2 * bound, rel=0.03)
    assert 1.7 < both_estimate / estimate < 2.3
    assert both.at_rate.holds(surely=False)
    assert both.command == f"{one.command} --data-parallel-size 2 --routing predicted"
    assert headline(both) == "llama-3.1-8b on 2 x L4 sustains 1.00 requests/s (estimated)"
    prices = [plan.price(2.0)["per_million_output_tokens"] for plan in (one, both)]
    rates = [plan.at_rate.result.token_rate for plan in (one, both)]
    assert prices == pytest.approx([number * 2e6 / 3600 / rate for number, rate in zip((1, 2), rates, strict=True)])
