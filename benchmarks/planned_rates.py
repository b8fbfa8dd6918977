"""Whether planned rates hold: a run of ten times the length meets the SLO at the planned rate, and fails at 1.15 of it.

    python -m benchmarks.planned_rates [--only NAME ...] [--json FILE]

Twelve pairs of a workload and a device, Llama-3.1-8B. The rate is searched as `quire plan` does. The longer run has
other requests and other arrivals. Simulations are deterministic: a busy machine changes only the seconds. Results are
written after each pair, and a run that was stopped goes on with the pairs that its file lacks.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from benchmarks.result_file import write_result
from quire.config import EngineOptions
from quire.planner.options import WorkloadOptions
from quire.planner.search import Requests, Runs, Search, Sustained
from quire.planner.setup import find_model, plan_engine
from quire.planner.slo import SLO, parse_slo
from quire.planner.steady import SteadyRun, run
from quire.planner.workloads import make_workload, num_requests

WORKLOADS = ("alpaca", "azure-code", "rag", "agents")
SLOS: Mapping[str, str] = MappingProxyType(
    {"H100": "ttft=500ms,tpot=50ms", "A100-80GB": "ttft=1s,tpot=80ms", "L4": "ttft=4s,tpot=200ms"}
)
LONGER = 10
ABOVE = 1.15
MAX_MODEL_LEN = 8192
GOAL = 11  # of the twelve, for each of the two


def main() -> None:
    """Measure, print, and write the file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planned_rates", description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="workload/device, as alpaca/H100")
    parser.add_argument("--num-requests", type=int, help="of a run of the search [default: what a steady state needs]")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    names = [f"{workload}/{device}" for device in SLOS for workload in WORKLOADS]
    cases: dict[str, object] = {}
    if args.json and args.json.exists():
        cases = json.loads(args.json.read_text())["cases"]
    for name in args.only or names:
        if name not in names:
            parser.error(f"there is no {name}; known: {', '.join(names)}")
        if name in cases and not args.only:
            continue
        cases[name] = measured(*name.split("/"), num_requests=args.num_requests)
        print(name, json.dumps(cases[name]), flush=True)
        if args.json:
            write_result(args.json, {**summary(cases), "cases": cases}, code=["quire/planner", "quire/cost"])


def summary(cases: Mapping[str, object]) -> dict[str, object]:
    """How many of the pairs do what a plan says."""
    done = [case for case in cases.values() if isinstance(case, dict)]
    return {
        "pairs": len(done),
        "goal": GOAL,
        "meet_at_the_planned_rate": sum(bool(case["at_rate"]["holds"]) for case in done),
        "fail_above_it": sum(not case["above"]["holds"] for case in done),
    }


def measured(workload: str, device: str, num_requests: int | None = None) -> dict[str, object]:
    """One pair."""
    began, slo = time.process_time(), parse_slo(SLOS[device])
    options = EngineOptions(model="llama-3.1-8b", device=device, max_model_len=MAX_MODEL_LEN)
    found = sustained(options, workload, slo, num_requests)
    if found.best is None:
        return {"slo": str(slo), "planned_rate": None, "at_rate": {"holds": False}, "above": {"holds": True}}
    searched = time.process_time()
    at_rate, above = (longer(found.best, workload, found.rate * share) for share in (1.0, ABOVE))
    return {
        "slo": str(slo),
        "planned_rate": found.rate,
        "rate_that_does_not_hold": None if found.above is None else found.above.rate,
        "requests": len(found.best.result.requests),
        "run_seconds": found.best.window.stop,
        "window_in_longest_requests": (found.best.window.stop - found.best.window.start) / found.best.longest,
        "search_cpu_seconds": searched - began,
        "cpu_seconds": time.process_time() - began,
        "at_rate": verdict(at_rate),
        "above": verdict(above),
    }


def sustained(options: EngineOptions, workload: str, slo: SLO, num_requests: int | None) -> Sustained:
    """The sustainable rate, as `quire plan --no-search` finds it."""
    wanted = WorkloadOptions(workload=workload, num_requests=num_requests)
    model = find_model(options)
    engine = plan_engine(options, options.device, model)
    with Runs(1, lambda text: print(" ", text, file=sys.stderr, flush=True), lambda _done, _total: None) as runs:
        search = Search(wanted, slo, Requests(wanted, model, options.seed), runs)
        return search.sustainable(engine, search.estimate(engine, search.at_once(engine)), workload)


def longer(planned: SteadyRun, workload: str, rate: float) -> SteadyRun:
    """A run of LONGER times as many requests as the planned one, with other requests and arrivals."""
    count = LONGER * num_requests(planned.task.sessions)
    seed = planned.task.seed + 1
    sessions = make_workload(workload, count, max_model_len=MAX_MODEL_LEN, seed=seed)
    task = replace(planned.task, sessions=sessions, rate=rate, seed=seed)
    return SteadyRun(task, run(task), planned.slo)


def verdict(one: SteadyRun) -> dict[str, object]:
    """Whether a run meets the SLO, with what says so."""
    return {
        "rate": one.rate,
        "holds": one.holds(surely=False),
        "stopped_early": one.result.stopped_early,
        "requests": len(one.result.requests),
        "kept": {metric: kept.share for metric, kept in one.kept.items()},
        "backlog_growth": one.growth.share,
    }


if __name__ == "__main__":
    main()
