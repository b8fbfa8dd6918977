"""First token of a short prompt that arrives while long prompts are computed.

    python -m benchmarks.short_prompts [--shape 0.5b] [--models DIR] [--rounds 7] [--step-seconds 0.5] [--json FILE]

A prompt of 50 tokens arrives 20 ms behind one or four prompts of 2,000 tokens, or at a random time while one is
computed. Its first token is compared with that of the same prompt alone, and the long prompt's with that of a long one
alone. All cases take turns in each round. As in the engine process, an arrival is handled between two steps.
"""

import argparse
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rich.console import Console
from rich.progress import track

from benchmarks.cpu.checkpoints import SHAPES, checkpoint
from benchmarks.result_file import write_result
from quire import LLM, SamplingParams
from quire.core.request import Request
from quire.engine.engine import Engine

LONG, SHORT, BEHIND = 2000, 50, 0.02  # tokens, tokens, seconds
_CONSOLE = Console(stderr=True)


@dataclass(frozen=True)
class Case:
    """Prompts that arrive together, and the arrival of a short one behind them: seconds, None: no short one."""

    name: str
    num_long: int
    short_at: float | None


class FirstTokens(NamedTuple):
    """Seconds from the arrival to the first token."""

    long: list[float]
    short: float | None


@dataclass
class Bench:
    """An engine, and the state of the random numbers."""

    engine: Engine
    draw: random.Random
    number: int = 0

    def first_tokens(self, case: Case, num_output: int = 4) -> FirstTokens:
        """Run a case on the idle engine."""
        due = [(0.0, LONG)] * case.num_long + ([] if case.short_at is None else [(case.short_at, SHORT)])
        asked = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        arrivals, firsts = dict[str, float](), dict[str, float]()
        began, waiting = time.perf_counter(), list(due)
        while waiting or self.engine.has_work:
            now = time.perf_counter() - began
            while waiting and waiting[0][0] <= now:
                at, length = waiting.pop(0)
                self.number += 1
                prompt = [self.draw.randrange(3, self.engine.vocab_size) for _ in range(length)]
                arrivals[str(self.number)] = at
                self.engine.add(Request(str(self.number), prompt, asked))
            if not self.engine.has_work:
                continue
            for output in self.engine.step():
                if output.token_ids:
                    firsts.setdefault(output.request_id, time.perf_counter() - began)
        seconds = [firsts[key] - at for key, at in arrivals.items()]
        return FirstTokens(seconds, None) if case.short_at is None else FirstTokens(seconds[:-1], seconds[-1])


def measure(bench: Bench, rounds: int) -> list[dict[str, object]]:
    """A row for each case: medians of the rounds, and their ratios to the same prompts alone in the same round."""
    fixed = [
        Case("short alone", 0, 0.0),
        Case("long alone", 1, None),
        Case("four long alone", 4, None),
        Case("short 20 ms behind one long", 1, BEHIND),
        Case("short 20 ms behind four long", 4, BEHIND),
    ]
    bench.first_tokens(fixed[3])
    rows: dict[str, list[FirstTokens]] = {}
    for _ in track(range(rounds), "rounds", console=_CONSOLE, transient=True):
        alone = median(bench.first_tokens(fixed[1]).long)
        at_random = Case("short at a random time of one long", 1, bench.draw.uniform(0.0, 0.9 * alone))
        for case in (*fixed, at_random):
            rows.setdefault(case.name, []).append(bench.first_tokens(case))
    return [_row(name, rows) for name in rows]


def _row(name: str, rows: dict[str, list[FirstTokens]]) -> dict[str, object]:
    row: dict[str, object] = {"case": name}
    shorts = [one.short for one in rows[name] if one.short is not None]
    if shorts:
        ratios = _ratios(shorts, [one.short or 0.0 for one in rows["short alone"]])
        row |= {"short s": median(shorts), "by alone": median(ratios), "most by alone": max(ratios)}
    if rows[name][0].long:
        alone = rows["four long alone" if "four" in name else "long alone"]
        longs = [max(one.long) for one in rows[name]]
        row |= {"last long s": median(longs), "long by alone": median(_ratios(longs, [max(one.long) for one in alone]))}
    return row


def _ratios(values: Iterable[float], alone: Iterable[float]) -> list[float]:
    return [value / one for value, one in zip(values, alone, strict=True)]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--models", type=Path, default=Path("build/models"), help="folder of the random checkpoints")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--step-seconds", type=float, default=0.5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    llm = LLM(
        str(checkpoint(args.shape, args.models)),
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=32,
        step_seconds=args.step_seconds,
        calibration=1.0,
        enable_prefix_caching=False,
    )
    engine = llm.llm_engine
    print(engine.scheduler.costs)
    rows = measure(Bench(engine, random.Random(1)), args.rounds)
    for row in rows:
        print(
            ", ".join(f"{name} {value:.3f}" if isinstance(value, float) else f"{value}" for name, value in row.items())
        )
    if args.json:
        write_result(args.json, {"costs": str(engine.scheduler.costs), "rows": rows})


if __name__ == "__main__":
    main()
