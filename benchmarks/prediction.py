"""Predicted against measured latencies: the simulator beside the live engine, on this machine.

    python -m benchmarks.prediction [--seconds 10] [--requests 300] [--load 0.4] [--workloads NAME ...] [--json FILE]

Calibrates a latency profile (as `quire calibrate` does), then runs workloads that the calibration has not seen, each
live in real time on the same engine and in the simulator, with the same requests and arrivals. The error of a mean is
that of the predicted mean; that of requests is the mean of |predicted - measured| / measured over requests. Nothing is
tuned per workload. The machine has to be idle: other programs lengthen the measured times only.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import track

from benchmarks.cpu.machine import describe
from benchmarks.result_file import write_result
from quire.config import EngineOptions
from quire.core.request import Namespace, Request
from quire.engine.engine import Engine
from quire.params import SamplingParams
from quire.planner.results import RequestResult
from quire.planner.setup import PlannedEngine, plan_engine
from quire.planner.simulate import for_workload
from quire.planner.simulation import Simulation
from quire.planner.workloads import NO_PARENT, Session, make_workload, num_requests, tokens_of, with_arrivals
from quire.startup.build import build
from quire.startup.hardware import cpu_description
from quire.startup.latency_calibration import measure_latency

WORKLOADS = ("alpaca", "sharegpt", "chat", "few-shot", "rag")  # none of them is used by the calibration
CLAIMS = {"latency": 0.10, "ttft": 0.15}  # mean errors that are to be reached


def live(engine: Engine, workload: Sequence[Session]) -> list[RequestResult]:
    """The sessions on an idle engine in real time. As in the simulator, requests are added between steps."""
    results, contexts = dict[str, RequestResult](), dict[str, tuple[Session, int, list[int]]]()
    waiting = sorted(((session.at, i, session, 0) for i, session in enumerate(workload)), key=lambda one: one[:2])
    histories: dict[int, list[list[int]]] = {i: [] for i in range(len(workload))}
    number, began = 0, time.perf_counter()
    while waiting or engine.has_work:
        now = time.perf_counter() - began
        while waiting and waiting[0][0] <= now:
            at, place, session, index = waiting.pop(0)
            turn = session.turns[index]
            prompt = list(histories[place][turn.parent]) if turn.parent != NO_PARENT else []
            for part in turn.new:
                prompt += [3 + token % (engine.vocab_size - 3) for token in tokens_of(part, engine.vocab_size)]
            params = SamplingParams(max_tokens=turn.num_output, temperature=0.0, ignore_eos=True, seed=number)
            key = str(number)
            results[key] = RequestResult(session.tenant, at, len(prompt), session=place, turn=index)
            contexts[key] = session, place, prompt
            engine.add(Request(key, prompt, params, namespace=Namespace(session.tenant)))
            number += 1
        if not engine.has_work:
            time.sleep(max(0.0, waiting[0][0] - (time.perf_counter() - began)))
            continue
        outputs = engine.step()
        now = time.perf_counter() - began
        for output in outputs:
            result = results[output.request_id]
            if output.token_ids and not result.num_output:
                result.first_token, result.num_cached = now, output.num_cached_tokens
            result.num_output += len(output.token_ids)
            session, place, context = contexts[output.request_id]
            context += output.token_ids
            if output.end is not None:
                result.ended, result.reason = now, str(output.finish_reason)
                histories[place].append(context)
                after = len(histories[place])
                if after < len(session.turns):
                    waiting.append((now + session.turns[after].pause, place, session, after))
                    waiting.sort(key=lambda one: one[:2])
    engine.flush_cache()
    return list(results.values())


def compare(predicted: Sequence[RequestResult], measured: Sequence[RequestResult]) -> dict[str, float]:
    """Means, medians and errors of the same requests."""
    paired = [sorted(some, key=lambda one: (one.session, one.turn)) for some in (predicted, measured)]
    found: dict[str, float] = {"requests": len(measured)}
    for metric in ("ttft", "latency", "tpot"):
        ours, theirs = ([getattr(one, metric) for one in some] for some in paired)
        pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if b > 0]
        found[f"{metric}_predicted_ms"], found[f"{metric}_measured_ms"] = 1e3 * mean(ours), 1e3 * mean(theirs)
        found[f"{metric}_error_of_mean"] = abs(mean(ours) / mean(theirs) - 1)
        found[f"{metric}_error_of_median"] = abs(median(ours) / median(theirs) - 1)
        found[f"{metric}_error_of_requests"] = mean(abs(a - b) / b for a, b in pairs)
    return found


def short_pauses(workload: Sequence[Session]) -> list[Session]:
    """The sessions with pauses of a twentieth, so that a run takes minutes."""
    return [
        replace(session, turns=tuple(replace(turn, pause=turn.pause / 20) for turn in session.turns))
        for session in workload
    ]


def main() -> None:
    """Calibrate, measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prediction", description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="folder of a checkpoint [default: the embedded model]")
    parser.add_argument("--seconds", type=float, default=10.0, help="of calibration")
    parser.add_argument("--requests", type=int, default=300, help="of each workload")
    parser.add_argument("--load", type=float, default=0.4, help="rate, as a share of what is completed at once")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--memory", default="1GiB")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    options = EngineOptions(
        model=args.model,
        max_num_seqs=args.max_num_seqs,
        max_model_len=args.max_model_len,
        memory=args.memory,
        dtype=args.dtype,
        calibration=0.3,
    )
    quiet = {"report": lambda _line: None, "progress": lambda _done, _total: None}
    built = build(replace(options, speculation="off"), **quiet)
    engine = built.engine
    profile = measure_latency(engine, model=built.model_name, device=cpu_description(), seconds=args.seconds)
    print(f"profile: {profile.source}; mean error of the fit {profile.error:.1%}")
    rows: dict[str, dict[str, float]] = {}
    with TemporaryDirectory() as folder:
        file = Path(folder) / "profile.json"
        profile.save(file)
        planned: PlannedEngine = plan_engine(options, str(file))
    for name in track(args.workloads, "workloads", console=Console(stderr=True), transient=True):
        base = short_pauses(make_workload(name, args.requests, max_model_len=args.max_model_len, seed=11))
        setup = for_workload(planned.setup, [])
        at_once = Simulation(setup).run([replace(session, at=0.0) for session in base])
        workload = with_arrivals(base, args.load * at_once.steady_rate, seed=12)
        predicted = Simulation(setup).run(workload).requests
        measured = live(engine, workload)
        assert len(predicted) == len(measured) == num_requests(workload), "every request is completed"
        rows[name] = compare(predicted, measured)
    print(
        f"{'workload':<10}" + "".join(f"{f'{m} {w}':>20}" for m in ("ttft", "latency", "tpot") for w in ("ms", "error"))
    )
    for name, row in rows.items():
        cells = [
            f"{row[f'{m}_measured_ms']:>20.2f}{row[f'{m}_error_of_mean']:>20.1%}" for m in ("ttft", "latency", "tpot")
        ]
        print(f"{name:<10}" + "".join(cells))
    means = {m: mean(row[f"{m}_error_of_mean"] for row in rows.values()) for m in ("ttft", "latency", "tpot")}
    for metric, limit in CLAIMS.items():
        reached = "met" if means[metric] < limit else "MISSED"
        print(f"mean error of {metric}: {means[metric]:.1%}, claimed below {limit:.0%}: {reached}")
    if args.json:
        setting = {name: str(value) for name, value in vars(args).items() if name != "json"}
        figures = {
            "machine": describe(),
            "setting": setting,
            "fit_error": profile.error,
            "workloads": rows,
            "mean": means,
        }
        write_result(args.json, figures)


if __name__ == "__main__":
    main()
