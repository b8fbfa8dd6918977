"""`quire simulate`: a workload or a trace on an engine that options make on a device, in virtual time."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import get_args

from quire.config import MOST_REPLICAS, EngineOptions, Routing
from quire.core.journal_file import open_journal
from quire.errors import ConfigError, nearest
from quire.planner.baselines import baseline_setup
from quire.planner.options import WorkloadOptions
from quire.planner.results import Metric, SimulationResult
from quire.planner.setup import PlannedEngine, plan_engine
from quire.planner.simulated_engine import EngineSetup, NewCache, paged_cache
from quire.planner.simulation import Simulation
from quire.planner.traces import read_trace
from quire.planner.workloads import (
    Failures,
    Session,
    Workload,
    has_times,
    make_workload,
    num_requests,
    with_arrivals,
    with_rate,
)
from quire.startup.replica_share import ReplicaShare

Advance = Callable[[int, int], None]  # finished requests, all requests
Report = Callable[[str], None]


def load_workload(wanted: WorkloadOptions, planned: PlannedEngine) -> list[Session]:
    """The sessions. Raises ConfigError for a trace that cannot be read, or options that contradict each other."""
    if wanted.rate is not None and not wanted.rate > 0:
        raise ConfigError(f"rate must be above 0 requests per second, not {wanted.rate:g}")
    if wanted.burstiness is not None and not wanted.burstiness > 0:
        raise ConfigError(f"burstiness must be above 0, not {wanted.burstiness:g}")
    if wanted.burstiness is not None and wanted.rate is None:
        raise ConfigError("burstiness needs a rate, in requests per second")
    seed = planned.options.seed
    if wanted.trace is None:
        length = planned.memory.max_model_len
        sessions = make_workload(wanted.workload, wanted.num_requests or 1000, max_model_len=length, seed=seed)
        if wanted.rate is None:
            return sessions
        return with_arrivals(sessions, wanted.rate, burstiness=wanted.burstiness or 1.0, seed=seed)
    sessions = read_trace(Path(wanted.trace), planned.model.tokenize(), wanted.num_requests)
    if wanted.rate is None:
        return sessions
    if wanted.burstiness is not None or not has_times(sessions):
        return with_arrivals(sessions, wanted.rate, burstiness=wanted.burstiness or 1.0, seed=seed)
    return with_rate(sessions, wanted.rate)


def as_wanted(planned: PlannedEngine, wanted: WorkloadOptions) -> PlannedEngine:
    """The engine with requests that have several samples or beams, or as several replicas.

    Raises ConfigError for a number of replicas or a routing that does not exist.
    """
    if not 1 <= wanted.data_parallel_size <= MOST_REPLICAS:
        raise ConfigError(f"data_parallel_size must be from 1 to {MOST_REPLICAS}, not {wanted.data_parallel_size}")
    if wanted.routing not in get_args(Routing):
        hint = nearest(wanted.routing, get_args(Routing))
        raise ConfigError(f"routing must be one of {', '.join(get_args(Routing))}, not {wanted.routing!r:.60}{hint}")
    setup = replace(
        planned.setup,
        num_samples=wanted.num_samples,
        beam_width=wanted.beam_width,
        num_replicas=wanted.data_parallel_size,
        routing=wanted.routing,
    )
    if setup.num_replicas == 1:
        return replace(planned, setup=setup)
    note = f"{setup.num_replicas} replicas, each on a device of its own; routing is {setup.routing}"
    return replace(planned, setup=setup, notes=(*planned.notes, note))


def for_workload(setup: EngineSetup, workload: Workload) -> EngineSetup:
    """The setup, without speculation if no output is recorded: drafts of made-up tokens would never be accepted."""
    if any(turn.output for session in workload for turn in session.turns):
        return setup
    return replace(setup, scheduler=replace(setup.scheduler, speculation=()))


def simulate(
    options: EngineOptions,
    wanted: WorkloadOptions,
    *,
    baseline: str | None = None,
    failures: Failures | None = None,
    report: Report,
    advance: Advance = lambda _done, _total: None,
) -> tuple[SimulationResult, Mapping[str, object]]:
    """Run a simulation and report it. options.device: a device or a profile; options.journal: is written.

    baseline: one of BASELINES instead of paged memory.

    Returns the result, and its figures with the setup for JSON. Raises ConfigError, ModelError.
    """
    planned = as_wanted(plan_engine(options, options.device), wanted)
    workload = load_workload(wanted, planned)
    setup = for_workload(planned.setup, workload)
    new_cache: NewCache = paged_cache
    if baseline is not None:
        setup, new_cache = baseline_setup(setup, baseline)
    report(f"{planned.model.name} on {planned.device}: {setup.cache}, {setup.scheduler.max_num_seqs} rows")
    for note in planned.notes:
        report(f"note       {note}")
    if planned.options.speculation != "off" and not setup.scheduler.speculation:
        report(
            "note       speculation is off: the requests have no recorded outputs that drafts could be compared with"
        )
    journals = []
    if options.journal is not None:
        shares = [ReplicaShare(index, setup.num_replicas) for index in range(setup.num_replicas)]
        journals = [open_journal(share.journal(options.journal)) for share in shares]
    began = time.perf_counter()
    simulation = Simulation(setup, new_cache=new_cache, journals=journals, failures=failures)
    result = simulation.run(workload, advance=advance)
    for engine in simulation.engines:
        engine.scheduler.close()
    took = time.perf_counter() - began
    for line in summary(result):
        report(line)
    rows = sum(one.num_output for one in result.requests)
    per_row = max(0.0, took - _STEP_SECONDS * result.num_steps) / max(1, rows)
    report(
        f"simulated  {num_requests(workload)} requests, {rows} tokens in {took:.1f} s: "
        f"{1e3 * _STEP_SECONDS:.2f} ms a step + {1e6 * per_row:.2f} us a token"
    )
    about: dict[str, object] = {
        "model": planned.model.name,
        "device": planned.device,
        "workload": wanted.trace or wanted.workload,
    }
    about |= {"memory": baseline or "paged", "replicas": setup.num_replicas, "routing": setup.routing}
    return result, {**about, "rate": wanted.rate, **result.figures(), "simulation_seconds": took}


_STEP_SECONDS = 0.15e-3  # of the simulation's own time, counted per step; the rest is counted per token


def summary(result: SimulationResult) -> list[str]:
    """The result in lines of text."""
    lost = len(result.requests) - len(result.complete)
    reasons = sorted({one.reason for one in result.requests if not one.is_complete})
    lines = [
        f"requests   {len(result.complete)} complete" + (f", {lost} not: {', '.join(reasons)}" if lost else ""),
        f"rate       {result.request_rate:.2f} requests/s, {result.token_rate:.0f} output tokens/s over "
        f"{result.seconds:.1f} s",
        f"batch      {result.mean_running:.1f} running sequences, {result.mean_kv_use:.0%} of KV blocks in use, "
        f"{result.num_preemptions} preemptions",
        f"cache      {result.hit_rate:.1%} of prompt tokens cached, {result.num_evicted_blocks} blocks evicted",
    ]
    for metric in get_args(Metric):
        values = {p: 1e3 * result.percentile(metric, p / 100) for p in (50, 90, 99)}
        lines.append(f"{metric:<11}" + ", ".join(f"p{p} {format_ms(value)}" for p, value in values.items()))
    return lines


def format_ms(value: float) -> str:
    """Milliseconds as text; "-" for a time that is infinite."""
    if value == inf:
        return "-"
    return f"{value:,.0f} ms" if value >= 1000 else f"{value:.3g} ms"
