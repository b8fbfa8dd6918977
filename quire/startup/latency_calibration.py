"""Measurement of a latency profile: whole steps of an engine, scheduling included, with batches of many sizes.

Unlike the calibration at a start (`calibration.py`), which measures the runner for a fraction of a second, this runs
the engine as requests would, for seconds, and covers large batches and long contexts. The profile is for predictions.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import count
from random import Random

from quire.config import EngineOptions
from quire.core.request import Request
from quire.core.step import Step
from quire.cost.latency_profile import LatencyProfile, StepSample, fit_profile
from quire.cost.step_work import StepWork, step_work
from quire.engine.engine import Engine
from quire.errors import ConfigError
from quire.models.model import Progress
from quire.params import SamplingParams
from quire.startup.build import Report, build
from quire.startup.hardware import cpu_description, gpu_description

_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # sequences that run at once
_PROMPT_TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_OUTPUT_TOKENS = 64
_STAGGER = 3  # steps between the arrivals of the second half of a batch
_FIRST_TOKEN = 3  # lower ids may be special
_OUTLIER = 3.0  # a step that took this many times its prediction is left out: another program ran


def calibrate(
    options: EngineOptions,
    *,
    seconds: float,
    report: Report,
    progress: Progress,
    advance: Callable[[float, float], None] = lambda _done, _total: None,
) -> LatencyProfile:
    """Build an engine and measure its latency profile. Drafts are off: the profile is that of tokens.

    report: receives lines. progress: as in `build`. advance(done, total): receives seconds of the measurement.
    """
    built = build(replace(options, speculation="off", speculative_config=None), report=report, progress=progress)
    with closing(built.engine) as engine:
        device = cpu_description() if str(built.options.device) == "cpu" else gpu_description()
        return measure_latency(engine, model=built.model_name, device=device, seconds=seconds, advance=advance)


def measure_latency(
    engine: Engine,
    *,
    model: str,
    device: str,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
    advance: Callable[[float, float], None] = lambda _done, _total: None,
) -> LatencyProfile:
    """The latency profile of an idle engine, from about `seconds` of steps. The prefix cache is flushed.

    advance(done, total): receives seconds. clock: seconds. Raises ConfigError if the time was too short for any step.
    """
    windows = [group.kind.span for group in engine.scheduler.cache.config.groups]
    samples: list[StepSample] = []
    launched: list[StepWork] = []

    def record(step: Step) -> None:
        chunks = step.chunks
        if len(chunks):
            launched.append(step_work(chunks.starts, chunks.stops, windows, len(step.opens.rows)))

    began = clock()
    captured: set[int] = set()  # numbers of tokens of steps that are replayed: the first step of each is captured
    for requests in _rounds(engine):
        for _ in _added(engine, requests):
            before = clock()
            engine.step(record)
            now = clock()
            for work in launched:
                if not work.is_replayed or work.num_tokens in captured:
                    samples.append(StepSample(work, (now - before) / len(launched)))
                else:
                    captured.add(work.num_tokens)
            launched.clear()
            if now - began >= seconds:
                break
        for request in requests:  # those that the end of the time cut off
            engine.abort(request.id)
        while engine.has_work:
            engine.step()
        engine.flush_cache()
        advance(min(now - began, seconds), seconds)
        if now - began >= seconds:
            break
    if not samples:
        raise ConfigError(f"no step was measured in {seconds:g} s; give it more")
    return _fitted(engine, samples, windows, model, device)


def _added(engine: Engine, requests: Sequence[Request]) -> Iterator[None]:
    """Add half of the requests at once and the others between steps. Yields before each step, until all have ended."""
    half = len(requests) // 2
    for request in requests[half:]:
        engine.add(request)
    for request in requests[:half]:
        for _ in range(_STAGGER):
            yield
        engine.add(request)
    while engine.has_work:
        yield


def _fitted(engine: Engine, samples: list[StepSample], windows: list[int], model: str, device: str) -> LatencyProfile:
    out, back = engine.scheduler.costs.copy_seconds(1)
    per_byte = (out + back) / 2 if engine.scheduler.cache.host_pools.num_blocks and out + back < float("inf") else 0.0
    first = fit_profile(samples, windows, model=model, device=device, seconds_per_byte=per_byte)
    kept = [
        one for one in samples if first.seconds(one.work) / _OUTLIER < one.seconds < first.seconds(one.work) * _OUTLIER
    ]
    return fit_profile(kept, windows, model=model, device=device, seconds_per_byte=per_byte) if kept else first


def _rounds(engine: Engine) -> Iterator[list[Request]]:
    """Batches of requests that run together: each size with several prompt lengths, in random order, again and again.

    The order is random so that a short time covers large and small batches alike.
    """
    rng, numbers = Random(0), count()
    limits, pool = engine.scheduler.config, engine.scheduler.cache.config
    longest = engine.max_model_len - _OUTPUT_TOKENS
    room = min(group.num_blocks for group in pool.groups) * pool.block_size // 2
    sizes = [
        (batch, length)
        for batch in _BATCHES
        for length in _PROMPT_TOKENS
        if batch <= limits.max_num_seqs and length <= longest and (length + _OUTPUT_TOKENS) * batch <= room
    ]
    while True:
        rng.shuffle(sizes)
        for batch, length in sizes:
            # a chunked prompt beside decoding sequences, and contexts of different lengths
            lengths = [max(1, rng.randrange(length // 2, length + 1)) for _ in range(batch)]
            yield [_request(next(numbers), size, rng, engine.vocab_size) for size in lengths]


def _request(number: int, length: int, rng: Random, vocab_size: int) -> Request:
    prompt = [rng.randrange(_FIRST_TOKEN, vocab_size) for _ in range(length)]
    params = SamplingParams(max_tokens=rng.randrange(4, _OUTPUT_TOKENS + 1), temperature=0.0, ignore_eos=True)
    return Request(f"calibration-{number}", prompt, params)
