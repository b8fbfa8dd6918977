"""Scheduling time: `plan` + `commit` with many running and many waiting sequences, for every policy."""

import statistics
import time
from typing import get_args

from benchmarks.small_engines import limits, memory, request, result_of
from quire.cache.kv_cache import KVCache
from quire.config import Policy
from quire.core.scheduling_params import SchedulingParams
from quire.scheduler.scheduler import Scheduler

NUM_RUNNING, NUM_WAITING = 256, 1000
PROMPT = 64
LONG_PROMPT = 1024
_KINDS = 40  # distinct prefixes, spread over tenants


def loaded(policy: str, num_running: int, num_waiting: int, num_steps: int, num_prompt: int = PROMPT) -> Scheduler:
    """A scheduler with all requests added: those that fill the rows do not end, and the others wait.

    Prompts share prefixes, so that there are matches, and are in no order in the queue.
    """
    length = num_prompt + num_steps + 16
    num_blocks = num_running * (length // 16 + 2)
    config = limits(
        policy,
        max_num_seqs=num_running,
        max_num_batched_tokens=num_running * num_prompt,
        max_model_len=length,
        wait_weight=100.0,
    )
    scheduler = Scheduler(config, KVCache(memory(num_blocks)))
    for i in range(num_running + num_waiting):
        kind = i * 7 % _KINDS
        stem = [kind] * (16 * (1 + kind % 3))
        prompt = stem + [100 + i] * (num_prompt - len(stem) - i % 16 + 1)
        of_class = 0 if i < num_running else 1  # with one class the first waiting request would get a row
        scheduling_params = SchedulingParams(priority=of_class)
        asked = request(str(i), prompt, num_steps + 8, tenant=str(kind % 8), scheduling_params=scheduling_params)
        scheduler.add(asked, i * 1e-3)
    return scheduler


def measure(
    policy: str, num_running: int, num_waiting: int, num_steps: int, num_prompt: int = PROMPT
) -> tuple[list[float], list[float]]:
    """CPU seconds of plan + commit in each step, without the first 8 steps, and those of `refresh` in it."""
    scheduler = loaded(policy, num_running, num_waiting, num_steps, num_prompt)
    seconds, of_queue, refresh = list[float](), list[float](), scheduler.state.queue.refresh

    def timed() -> None:
        begin = time.process_time()
        refresh()
        of_queue.append(time.process_time() - begin)

    scheduler.state.queue.refresh = timed  # type: ignore[method-assign]
    for i in range(num_steps):
        seconds.append(_step(scheduler, 100.0 + i * 0.02))
    if (scheduler.num_running, scheduler.num_waiting) != (num_running, num_waiting):
        raise AssertionError("somebody ended or began; the figure would mean something else")
    return seconds[8:], of_queue[8:]


def churn(policy: str, num_running: int, num_waiting: int, num_steps: int) -> list[float]:
    """CPU seconds of plan + commit while about four sequences per step end and begin, so that orders change."""
    length = PROMPT + 80
    config = limits(policy, max_num_seqs=num_running, max_num_batched_tokens=2048, max_model_len=length)
    scheduler = Scheduler(config, KVCache(memory(num_running * (length // 16 + 2) + 512)))
    seconds, number = [], 0
    for i in range(num_steps):
        now = i * 0.02
        while scheduler.num_running + scheduler.num_waiting < num_running + num_waiting:
            kind = number * 7 % _KINDS
            prompt = [kind] * 48 + [100 + number] * 16
            scheduler.add(request(str(number), prompt, 32 + number * 37 % 64, tenant=str(kind % 8)), now)
            number += 1
        seconds.append(_step(scheduler, now))
    return seconds[num_steps // 4 :]


def _step(scheduler: Scheduler, now: float) -> float:
    """CPU seconds of one plan + commit."""
    begin = time.process_time()
    step = scheduler.plan(now)
    planned = time.process_time() - begin
    assert step is not None, "there is always work"
    result = result_of(step, 0.02)
    begin = time.process_time()
    scheduler.commit(result, now)
    return planned + time.process_time() - begin


def plan(*, quick: bool = False) -> dict[str, object]:
    """Milliseconds of each policy, with a constant batch and with a changing one."""
    sizes = (32, 100, 40) if quick else (NUM_RUNNING, NUM_WAITING, 400)
    rows: dict[str, object] = {}
    for policy in get_args(Policy):
        for name, num_prompt in (("standing", PROMPT), (f"standing, prompts of {LONG_PROMPT} tokens", LONG_PROMPT)):
            seconds, of_queue = measure(policy, *sizes, num_prompt)
            rows[f"{policy}, {name}"] = _figures(seconds) | {"queue_median_ms": statistics.median(of_queue) * 1e3}
        rows[f"{policy}, changing"] = _figures(churn(policy, *sizes))
    return rows


def _figures(seconds: list[float]) -> dict[str, float]:
    return {
        "median_ms": statistics.median(seconds) * 1e3,
        "p99_ms": statistics.quantiles(seconds, n=100)[98] * 1e3,
    }
