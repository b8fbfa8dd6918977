"""Accuracy of Retry-After for a full queue, under a virtual clock.

    python -m benchmarks.retry [--seconds 120] [--seeds 5] [--json FILE]

Requests arrive at random near the rate that the engine can sustain, and in bursts far above it. Rejected requests get a
Retry-After. Two runs measure its accuracy:

- `line`: rejected requests also wait in a FIFO outside of the engine and enter as soon as the queue has room. This
  shows when there was room for each, and so the error of its Retry-After.
- `retry`: rejected requests return exactly after their Retry-After, and get a new one if the queue is still full.

The real scheduler runs over a modelled runner: a step takes a fixed time and a time per token, with random variation.
"""

import argparse
from collections import deque
from dataclasses import asdict, dataclass
from heapq import heappop, heappush
from pathlib import Path
from random import Random
from statistics import median
from typing import Literal

import numpy as np

from benchmarks.result_file import write_result
from quire.cache.kv_cache import KVCache
from quire.config import CacheConfig, SchedulerConfig
from quire.core.kv_groups import KVGroup, kv_kind
from quire.core.request import Request
from quire.core.step import ChunkOutput, Step, StepResult
from quire.errors import QueueFull
from quire.params import SamplingParams
from quire.scheduler.scheduler import Scheduler

SECONDS_PER_STEP, SECONDS_PER_TOKEN, LUCK = 0.02, 0.0002, 0.15  # LUCK: sigma of the logarithm
EOS = 2
EVERY = 20.0  # seconds between bursts
BLOCK_SIZE = 16
Mode = Literal["line", "retry"]


@dataclass(frozen=True, slots=True)
class Load:
    """Arrivals and queue limits."""

    rate: float  # requests per second
    burst: int  # requests that arrive at once, every EVERY seconds
    length_is_known: bool  # whether max_tokens is the output length; otherwise the sequence ends with EOS
    num_rows: int = 16
    num_blocks: int = 2000
    max_queued_requests: int | None = 32
    max_queued_tokens: int | None = None
    max_tokens: int = 256


LOADS = {
    "a burst, and nobody else": Load(0.01, 150, length_is_known=False),
    "bursts": Load(4.0, 120, length_is_known=True),
    "bursts, ends unknown": Load(4.0, 120, length_is_known=False),
    "bursts, bound by tokens": Load(4.0, 120, length_is_known=False, max_queued_requests=None, max_queued_tokens=6000),
    "bursts, memory short": Load(2.0, 80, length_is_known=False, num_blocks=150),
    "too much all the time": Load(9.0, 0, length_is_known=False),
}


@dataclass(frozen=True, slots=True)
class Report:
    """Figures of the requests that were rejected on arrival. Shares are 0 to 1, times are seconds."""

    num_requests: int
    num_refused: int
    median_wait: float  # of the run `line`
    median_error: float  # |Retry-After / true wait - 1|
    p90_error: float
    bias: float  # median of the signed error; above 0, Retry-After is too long
    accepted_at_retry_after: float  # share of the retries
    mean_tries: float  # of a rejected request, until it was accepted


@dataclass(slots=True)
class _Refused:
    came: float
    retry_at: float  # time at which to retry
    entered: float | None = None
    num_tries: int = 0


class Site:
    """A scheduler with its runner and clients."""

    def __init__(self, load: Load, seed: int, mode: Mode) -> None:
        self._load = load
        self._mode = mode
        self._rng = Random(seed)  # for the arrivals
        self._luck = Random(seed + 1)
        group = KVGroup((0,), kv_kind(1, 64), "bfloat16", load.num_blocks, BLOCK_SIZE * 256)
        bounds = {"max_queued_requests": load.max_queued_requests, "max_queued_tokens": load.max_queued_tokens}
        config = SchedulerConfig(load.num_rows, 512, 1024, 0.5, 0.01, 1, **bounds)  # type: ignore[arg-type]
        self.scheduler = Scheduler(config, KVCache(CacheConfig(BLOCK_SIZE, (group,), "radix")))
        self._lengths: dict[str, int] = {}  # output tokens by request
        self._line = deque[Request]()
        self._again: list[tuple[float, str, Request]] = []
        self.refused: dict[str, _Refused] = {}
        self.now = 0.0
        self.num_requests = 0

    def run(self, seconds: float) -> None:
        """Let requests arrive for `seconds`, then serve all of them."""
        arrivals = deque(self._arrivals(seconds))
        while arrivals or self._line or self._again or self.scheduler.has_work:
            while self._line and (self._has_entered(self._line[0]) or self._has_room(self._line[0])):
                request = self._line.popleft()
                if not self._has_entered(request):
                    self._try(request)
            while self._again and self._again[0][0] <= self.now:
                *_, request = heappop(self._again)
                if not self._has_entered(request):
                    self._try(request)
            while arrivals and arrivals[0] <= self.now:
                arrivals.popleft()
                self._come()
            step = self.scheduler.plan(self.now)
            if step is None:
                self.now = min([*list(arrivals)[:1], *(at for at, _, _ in self._again[:1])], default=self.now)
                continue
            result = self._result(step)
            self.now += result.seconds
            self.scheduler.commit(result, self.now)

    def _arrivals(self, seconds: float) -> list[float]:
        times, at = [], 0.0
        while (at := at + self._rng.expovariate(self._load.rate)) < seconds:
            times.append(at)
        bursts = [10.0 + EVERY * i for i in range(int(seconds / EVERY))]
        return sorted(times + bursts * self._load.burst)

    def _come(self) -> None:
        self.num_requests += 1
        output = min(self._load.max_tokens, max(8, int(self._rng.lognormvariate(4.3, 0.7))))
        prompt = [self._rng.randrange(3, 30_000) for _ in range(self._rng.randint(32, 400))]
        most = output if self._load.length_is_known else self._load.max_tokens
        params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=self._load.length_is_known, seed=0)
        name = str(self.num_requests)
        self._lengths[name] = output
        self._try(Request(id=name, prompt=prompt, params=params, eos_token_ids=(EOS,)))

    def _try(self, request: Request) -> None:
        known = self.refused.get(request.id)
        if known is not None:
            known.num_tries += 1
        try:
            self.scheduler.add(request, self.now)
        except QueueFull as full:
            retry_at = self.now + full.retry_after
            heappush(self._again, (retry_at, request.id, request))
            if known is None:
                self.refused[request.id] = _Refused(self.now, retry_at)
                if self._mode == "line":
                    self._line.append(request)
            return
        if known is not None:
            known.entered = self.now

    def _has_entered(self, request: Request) -> bool:
        return self.refused[request.id].entered is not None

    def _has_room(self, request: Request) -> bool:
        new_requests, config = self.scheduler.state.new_requests, self.scheduler.config
        fits = config.max_queued_requests is None or len(new_requests) < config.max_queued_requests
        total = new_requests.total.num_tokens + len(request.prompt)
        return not new_requests or (fits and (config.max_queued_tokens is None or total <= config.max_queued_tokens))

    def _result(self, step: Step) -> StepResult:
        counts = (step.chunks.outputs == ChunkOutput.SAMPLE).astype(np.int32)
        tokens = []
        for chunk in self.scheduler.state.in_flight[-1].scheduled:
            seq, stop = chunk.seq, chunk.stop
            if stop >= len(seq.tokens):
                num = stop - len(seq.request.prompt) + 1
                tokens.append(EOS if num >= self._lengths[seq.request.id] else 5)
        seconds = (SECONDS_PER_STEP + SECONDS_PER_TOKEN * step.num_tokens) * self._luck.lognormvariate(0, LUCK)
        return StepResult(step.id, seconds, counts, np.array(tokens, np.int32))


def measure(load: Load, seconds: float, seeds: list[int]) -> Report:
    """Figures over both runs of all seeds."""
    num = 0
    lines, again = list[_Refused](), list[_Refused]()
    for seed in seeds:
        line, retry = Site(load, seed, "line"), Site(load, seed, "retry")
        for site in (line, retry):
            site.run(seconds)
        num += line.num_requests
        lines += line.refused.values()
        again += retry.refused.values()
    waits = [one.entered - one.came for one in lines if one.entered is not None]
    errors = [(one.retry_at - one.came) / wait - 1 for one, wait in zip(lines, waits, strict=True)]
    sizes = sorted(map(abs, errors))
    tries = [one.num_tries for one in again]
    return Report(
        num,
        len(lines),
        median(waits),
        median(sizes),
        sizes[int(0.9 * len(sizes))],
        median(errors),
        len(tries) / sum(tries),
        sum(tries) / len(tries),
    )


def main() -> None:
    """Print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="of the virtual clock")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for name, load in LOADS.items():
        report = measure(load, args.seconds, list(range(args.seeds)))
        rows.append({"load": name, **asdict(report)})
        print(
            f"{name:26} {report.num_refused:5} of {report.num_requests:5} refused, wait {report.median_wait:6.1f} s, "
            f"error {report.median_error:.2f} (p90 {report.p90_error:.2f}, bias {report.bias:+.2f}); "
            f"at Retry-After {report.accepted_at_retry_after:.2f} accepted, {report.mean_tries:.2f} tries",
            flush=True,
        )
    if args.json:
        write_result(args.json, {"rows": rows})


if __name__ == "__main__":
    main()
