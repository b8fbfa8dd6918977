"""Timing of work on a device: medians of several samples, taken in turns."""

import math
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

Work = Callable[[], object]
SAMPLES = 7
LEAST_SECONDS = 0.01  # of one sample
MOST_REPEATS = 500


def seconds(works: Sequence[Work], device: str, samples: int = SAMPLES) -> list[float]:
    """Median seconds of each work. The works take turns.

    On a GPU each work is captured as a CUDA graph, which excludes launch time, and timed by device events. Work that
    cannot be captured is launched many times in a row.
    """
    if not device.startswith("cuda"):
        return [_on_cpu(work) for work in works]
    replays = [_captured(work) for work in works]
    repeats = [_repeats(replay) for replay in replays]
    found: list[list[float]] = [[] for _ in works]
    for _ in range(samples):
        for i, (replay, count) in enumerate(zip(replays, repeats, strict=True)):
            found[i].append(elapsed(replay, count))
    return [median(times) for times in found]


def elapsed(work: Work, count: int) -> float:
    """Seconds of one work, averaged over `count` runs in a row on the GPU."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(count):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / count


def _captured(work: Work) -> Work:
    """A function that replays `work` as a CUDA graph, or `work` if it cannot be captured. Compiles and warms up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
        work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            work()
    except RuntimeError:
        torch.cuda.synchronize()
        return work
    graph.replay()
    return graph.replay


def _repeats(work: Work) -> int:
    return min(MOST_REPEATS, max(1, math.ceil(LEAST_SECONDS / elapsed(work, 1))))


def _on_cpu(work: Work) -> float:
    work()
    times = []
    for _ in range(2):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return median(times)
