"""Several engines and their router in one virtual clock."""

import io
import re
from collections import Counter, defaultdict
from dataclasses import replace
from html import escape
from math import inf
from random import Random

import pytest
from kv_groups import kv_group

from quire.config import CacheConfig, EngineOptions, SchedulerConfig
from quire.core.scheduling_params import Program, SchedulingParams
from quire.cost.latency_profile import AttentionTime, LatencyProfile
from quire.engine.engine import Engine
from quire.errors import ConfigError
from quire.fleet.routing import Router, mean_costs
from quire.fleet.tenant_service import TenantService
from quire.planner.options import WorkloadOptions
from quire.planner.plan import Plan
from quire.planner.reasons import reasons_of
from quire.planner.report import command_line, headline, html_page
from quire.planner.results import Window
from quire.planner.search import Requests, Runs, Search, Sustained
from quire.planner.setup import find_model, plan_engine
from quire.planner.simulate import as_wanted, simulate
from quire.planner.simulated_engine import EngineSetup, SimulatedEngine
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


class Spy(Router):
    """A router that notes its calls, by name."""

    def __init__(self, config):
        super().__init__(config)
        self.calls = defaultdict(list)

    def place(self, request, allowed, num_free, now):
        known = {replica: len(self.keys.of(replica)) for replica in allowed}
        self.calls["place"].append((now, request, list(num_free), known))
        return super().place(request, allowed, num_free, now)

    def set_costs(self, costs):
        self.calls["set_costs"].append(costs)
        super().set_costs(costs)

    def record_progress(self, request_id, num_done):
        if num_done and num_done not in self.calls[request_id]:
            self.calls[request_id].append(num_done)
        super().record_progress(request_id, num_done)


class Run:
    """A finished run of several replicas. Its router knows of no request, and has the first tokens of all."""

    def __init__(self, setup, workload, window=None, **options):
        self.steps = []  # (replica, start, costs known by then)
        made = []
        simulation = Simulation(
            setup,
            new_router=lambda config: made.append(Spy(config)) or made[0],
            on_step=self._note,
            window=window,
            **options,
        )
        self.engines = simulation.engines
        self.result = simulation.run(workload)
        self.requests = [simulation.results[str(number)] for number in range(len(simulation.results))]  # as sent
        (self.router,) = made
        self.calls = self.router.calls
        assert self.router.is_empty
        begun = Counter(one.replica for one in self.requests if one.first_token < inf)
        counted = [sum(self.router.stats[i].errors) for i in range(setup.num_replicas)]
        assert counted == [begun[i] for i in range(setup.num_replicas)]

    def _note(self, engine):
        self.steps.append((self.engines.index(engine), engine.clock.now, engine.engine.cost_figures()))

    @property
    def placed(self):
        return [one.replica for one in self.requests]


def one_turn(at, key, num_prompt, num_output, tenant="", **changes):
    return Session(at, (Turn((Part(key, num_prompt),), num_output, **changes),), tenant)


def prefixed(count, num_prefixes, rate):
    rng = Random(0)
    turns = [Turn((Part(1 + rng.randrange(num_prefixes), 480), Part(1000 + i, 16)), 8) for i in range(count)]
    return with_arrivals([Session(0.0, (turn,)) for turn in turns], rate)


@pytest.mark.parametrize("routing", ["predicted", "round-robin", "least-loaded", "cache"])
def test_every_request_runs_on_its_replica_and_the_sums_are_those_of_the_engines(routing):
    workload = with_arrivals(make_workload("rag", 120, max_model_len=1024), rate=200.0)
    run = Run(setup_of(3, routing), workload)
    result = run.result
    assert [one.reason for one in result.requests] == ["length"] * 120
    stats = [engine.engine.stats() for engine in run.engines]
    assert result.num_steps == sum(one.num_steps for one in stats)
    assert sum(one.num_output for one in result.requests) == sum(one.generation_tokens for one in stats)
    by_replica = Counter()
    for one in result.requests:
        by_replica[one.replica] += one.num_prompt
    assert [by_replica[i] for i in range(3)] == [one.prefix_query_tokens for one in stats]
    assert 0 < result.mean_kv_use <= 1
    assert not any(engine.scheduler.check() or engine.scheduler.leaks for engine in run.engines)


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
    """The second request ends in its only step, in which the third arrives: both replicas have one request then."""
    workload = [one_turn(0.0, 1, 200, 4), one_turn(1e-4, 2, 200, 1), one_turn(2e-4, 3, 200, 4)]
    run = Run(setup_of(2, "least-loaded"), workload)
    assert run.placed == [0, 1, 0]
    assert run.calls["place"][2][3] == {0: 0, 1: 0}, "blocks of steps that run"
    assert run.requests[1].ended > 2e-4
    after = Run(setup_of(2, "least-loaded"), [*workload[:2], one_turn(run.requests[1].ended, 3, 200, 4)])
    assert after.placed == [0, 1, 1]
    assert after.calls["place"][2][3] == {0: 12, 1: 12}  # whole blocks of 200 tokens


def test_the_router_hears_of_the_progress_of_prompts_and_of_free_blocks():
    run = Run(setup_of(2, "round-robin"), [one_turn(0.0, 1, 600, 2), one_turn(5.0, 2, 16, 2), one_turn(6.0, 3, 16, 2)])
    assert run.calls["0"] == [256, 512]
    free = [num_free for _, _, num_free, _ in run.calls["place"]]
    assert free[0] == free[0][::-1]
    assert free[1] == [free[0][0] - 38, free[0][1]]  # the cached blocks of a prompt that has ended
    assert free[2] == [free[1][0], free[0][1] - 2]


def test_the_router_learns_the_costs_of_steps_that_have_ended():
    """The third request arrives in a step, and the costs of that step are not known yet."""
    arrivals = [one_turn(at, key, 250, 1) for key, at in enumerate((0.0, 1.0, 4.999, 5.0005), 1)]
    run = Run(setup_of(2, "round-robin", steps_in_flight=1), [*arrivals, one_turn(9.0, 5, 20, 1)])
    costs, begun = run.calls["set_costs"], {replica: cost for replica, when, cost in run.steps if when <= 5.0005}
    assert len(costs) == 2
    assert costs[1] == mean_costs([begun[0], begun[1]])
    assert costs[1] != costs[0]


def test_turns_of_a_program_are_placed_as_those_of_one():
    program = SchedulingParams(program=Program(id="p"))
    workload = [
        one_turn(float(i), 10 + i, 64, 2, tenant, scheduling_params=params)
        for i, (tenant, params) in enumerate(
            [("a", program), ("a", program), ("b", program), ("a", SchedulingParams())],
        )
    ]
    names = [request.program for _, request, _, _ in Run(setup_of(2), workload).calls["place"]]
    assert names[0] == names[1] != names[2]
    assert all(names[:3]) and not names[3]


def test_the_time_of_a_window_without_an_end_in_sight_is_that_of_the_last_replica():
    run = Run(setup_of(2, "round-robin"), [one_turn(0.0, 1, 16, 1), one_turn(0.0, 2, 16, 50)], Window(0.0, 100.0))
    first, second = (engine.clock.now for engine in run.engines)
    assert first < second == run.result.seconds


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_an_engine_that_cannot_run_waits_for_the_next_event(monkeypatch, num_replicas):
    tries, step = Counter(), SimulatedEngine.step

    def blocked(self):
        tries[self.clock.now] += 1
        assert tries[self.clock.now] < 10, "no event is reached"
        return self.clock.now >= 1.0 and step(self)

    monkeypatch.setattr(SimulatedEngine, "step", blocked)
    setup = setup_of(num_replicas, "round-robin")
    waiting = [one_turn(0.0, key, 100, 2) for key in range(num_replicas)]
    result = Simulation(setup).run([*waiting, one_turn(0.5, 8, 100, 2), one_turn(1.0, 9, 100, 2)])
    assert [one.reason for one in result.requests] == ["length"] * (num_replicas + 2)
    assert all(1.0 < one.first_token < 1.1 for one in result.requests)
    assert sorted(when for when in tries if when < 1.0) == [0.0, 0.5]
    tries.clear()
    with pytest.raises(AssertionError, match="nothing can run, and requests wait"):
        Simulation(setup).run([*waiting, one_turn(0.5, 8, 100, 2)])


def test_a_request_that_a_replica_refuses_is_placed_on_the_others():
    """Of three replicas in turn the first two are full. Then all are."""
    limits = {"max_num_seqs": 1, "max_queued_requests": 1}
    workload = [one_turn(0.05 * i, i, 100, 2 if i == 2 else 300) for i in range(10)]
    run = Run(setup_of(3, "round-robin", **limits), workload)
    assert run.placed[:7] == [0, 1, 2, 0, 1, 2, 2]
    assert [one.reason for one in run.requests] == [*["length"] * 7, *["rejected"] * 3]
    asked = [(request.id, len(num_free)) for when, request, num_free, _ in run.calls["place"] if when > 0.28]
    assert asked[:6] == [("6", 3), ("6", 2), ("6", 1), ("7", 3), ("7", 2), ("7", 1)]
    alone = Simulation(setup_of(1, **limits)).run(workload[3:7])
    assert [one.reason for one in alone.requests] == ["length", "length", "rejected", "rejected"]


def test_a_deadline_that_one_replica_cannot_keep_counts_on_the_next_from_the_arrival(monkeypatch):
    added, add = [], Engine.add

    def note(self, request):
        added.append((request.id, request.waited))
        add(self, request)

    monkeypatch.setattr(Engine, "add", note)
    soon = SchedulingParams(deadline=0.004)
    busy = [one_turn(0.0, 1, 900, 2), one_turn(0.0, 2, 16, 1)]
    run = Run(setup_of(2, "round-robin"), [*busy, one_turn(0.02, 3, 100, 2, scheduling_params=soon)])
    assert run.placed == [0, 1, 1]
    assert run.requests[2].reason == "abort"  # the step in which it came was longer than its time
    (_, first), (_, second) = [one for one in added if one[0] == "2"]
    assert first == 0 < second < 0.02


def requests_of(tenant, rate, seconds, num_output, *, shared=0, seed=0):
    """Requests of a tenant with prompts of 64 tokens, behind `shared` that are the same in all."""
    rng = Random(f"{tenant} {seed}")
    own = [(Part(1, shared),) if shared else () for _ in range(round(rate * seconds))]
    turns = [Turn((*parts, Part(rng.randrange(2, 2**29), 64)), num_output) for parts in own]
    return with_arrivals([Session(0.0, (turn,), tenant) for turn in turns], rate, seed=seed)


def fair_run(workload, until, routing="predicted"):
    """The seconds to the first tokens of the tenant "one" on two replicas of four rows, sorted."""
    setup = setup_of(2, routing, policy="fair", num_blocks=1024, max_num_seqs=4)
    result = Simulation(setup).run(workload, until=until)
    return sorted(one.ttft for one in result.requests if one.tenant == "one")


def test_ten_times_the_flood_of_a_tenant_moves_the_first_tokens_of_another_one_by_less_than_a_fifth():
    """The flooding tenant asks for more than its share at first, too; the other one for less than its own."""
    slowest = []
    for times in (1, 10):
        found = []
        for seed in range(2):
            flood = requests_of("flood", 200.0 * times, 1.5, 16, seed=seed + 100)
            found += fair_run([*requests_of("one", 80.0, 1.5, 16, seed=seed), *flood], 1.9)
        slowest.append(sorted(found)[round(0.99 * len(found)) - 1])
    assert slowest[1] < 1.2 * slowest[0] < 0.1


def test_a_tenant_whose_requests_all_go_to_one_replica_gets_more_of_it_for_what_another_gets_elsewhere(monkeypatch):
    """Its prompts have a common prefix. It asks for half of what both replicas can compute."""
    workload = [*requests_of("one", 100.0, 1.0, 16, shared=160), *requests_of("flood", 600.0, 1.0, 16)]
    assert fair_run(workload, 1.5, "cache")[-1] < 0.2
    monkeypatch.setattr(TenantService, "add", lambda *_: None)
    assert fair_run(workload, 1.5, "cache")[50] > 0.3


def test_service_is_exchanged_ten_times_a_second(monkeypatch):
    heard, hear = [], Engine.served_elsewhere

    def note(self, service):
        heard.append((self, dict(service)))
        hear(self, service)

    monkeypatch.setattr(Engine, "served_elsewhere", note)
    run = Run(setup_of(2, "round-robin", policy="fair"), [one_turn(0.0, 1, 100, 250, "a"), one_turn(0.75, 2, 16, 2)])
    first, second = (engine.engine for engine in run.engines)
    assert {one for one, service in heard if "a" in service} == {second}
    assert sum(service.get("a", 0) for _, service in heard) == 100 + 2 * 250
    assert round(10 * run.requests[0].ended) in range(len(heard) - 3, len(heard) + 1)
    assert first is not second


def test_the_journals_of_replicas_replay_with_failed_steps_and_aborts():
    journals = [io.BytesIO(), io.BytesIO()]
    failures = Failures(failed_steps=0.02, aborted=0.2, abort_seconds=1.0)
    workload = with_arrivals(make_workload("chat", 80, max_model_len=1024), rate=50.0)
    result = Run(setup_of(num_blocks=96), workload, journals=journals, failures=failures).result
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


def test_a_run_of_two_replicas_has_the_token_times_of_one_at_half_the_rate_and_fills_both_caches():
    options = EngineOptions(model="llama-3.1-8b", device="L4", max_model_len=2048)
    slo, found = parse_slo("tpot=200ms,ttft=60s,share=80%"), []
    for number in (1, 2):
        wanted = WorkloadOptions(workload="few-shot", num_requests=200, data_parallel_size=number)
        with Runs(1, lambda _: None, lambda _done, _expected: None) as runs:
            requests = Requests(wanted, find_model(options), 0)
            finder = Search(wanted, slo, requests, runs)
            engine = as_wanted(plan_engine(options, options.device), wanted)
            finder.at_once(engine)
            found.append(finder.length(engine, 8.0 * number, requests.take(200, 2048)))
    (one, one_token), (both, both_token) = found
    assert both_token == pytest.approx(one_token, rel=0.005)
    assert both.num_fill == pytest.approx(2 * one.num_fill, rel=0.02)
    assert one.num_fill > 0


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
    busy, both_busy = (int(re.search(r"steps run (\d+)%", " ".join(reasons_of(plan)))[1]) for plan in (one, both))
    assert abs(both_busy - busy) <= 3 < busy
    assert command_line(both) == f"2 servers of: {one.command}"
    assert command_line(one) == one.command == both.command
    assert [any("a router before all servers" in note for note in plan.notes) for plan in (one, both)] == [False, True]
    assert escape(command_line(both)) in html_page(both)
    assert headline(both) == "llama-3.1-8b on 2 x L4 sustains 1.00 requests/s (estimated)"
    prices = [plan.price(2.0)["per_million_output_tokens"] for plan in (one, both)]
    rates = [plan.at_rate.result.token_rate for plan in (one, both)]
    assert prices == pytest.approx([number * 2e6 / 3600 / rate for number, rate in zip((1, 2), rates, strict=True)])
