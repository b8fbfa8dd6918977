"""Swap does not change tokens (fp32), with the real model, real blocks and a real host pool."""

import random

import pytest
from engine_equality_cases import GREEDY, SAMPLED, prompts
from kv_groups import kv_group

from quire.cache.kv_cache import KVCache
from quire.config import CacheConfig, SchedulerConfig
from quire.core.events import Preempted
from quire.core.request import Request
from quire.core.step import Chunks, Move, NewRows, SamplingMasks, Step, TableUpdates
from quire.engine.engine import Engine
from quire.hub import embedded
from quire.kernels import reference
from quire.models.description import describe
from quire.models.loading import load
from quire.params import SamplingParams
from quire.runner.model_runner import TorchRunner
from quire.scheduler.scheduler import Scheduler

MODULES = {"reference": reference}
try:
    from quire.kernels.cpu import kernels as cpu

    MODULES["cpu"] = cpu
except ImportError:
    pass


@pytest.fixture(scope="module")
def model():
    return load(describe(embedded.folder()), dtype="float32")


def make(model, num_blocks: int, *, kernels="reference", num_host_blocks=200, num_groups=1, index="none", **limits):
    config = model.config
    groups = [
        kv_group(
            tuple(range(config.num_layers)[g::num_groups]),
            config.num_kv_heads,
            config.head_dim,
            "float32",
            num_blocks,
            2 * 4 * 16 * config.num_kv_heads * config.head_dim * config.num_layers // num_groups,
            num_host_blocks=num_host_blocks,
        )
        for g in range(num_groups)
    ]
    cache = CacheConfig(16, tuple(groups), index)
    chosen = {"preemption": "swap", "steps_in_flight": 1} | limits
    limits = SchedulerConfig(8, 64, num_blocks * 16, 0.5, 0.0, **chosen)
    runner = TorchRunner(model, MODULES[kernels], cache=cache, max_num_seqs=8, max_model_len=num_blocks * 16)
    scheduler = Scheduler(limits, KVCache(cache))
    return Engine(scheduler, runner, vocab_size=model.vocab_size), scheduler


def run(engine: Engine, requests) -> dict[tuple[str, int], list[int]]:
    for i, (prompt, params) in enumerate(requests):
        engine.add(Request(str(i), prompt, SamplingParams(**params)))
    tokens: dict[tuple[str, int], list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault((output.request_id, output.index), []).extend(output.token_ids)
    stats = engine.stats()
    assert stats.kv_blocks_used == stats.host_blocks_used == stats.failed_steps == 0
    return tokens


@pytest.fixture(scope="module")
def requests():
    rng = random.Random(3)
    return [
        (prompt, (GREEDY if i % 2 else SAMPLED) | {"max_tokens": rng.randint(10, 40), "n": 3 if i == 2 else 1})
        for i, prompt in enumerate(prompts([3, 33, 40, 64, 16, 90], 2048, seed=3))
    ]


@pytest.fixture(scope="module")
def undisturbed(model, requests):
    engine, scheduler = make(model, 200)
    tokens = run(engine, requests)
    assert scheduler.request_stats.num_preemptions == 0
    return tokens


@pytest.mark.parametrize("kernels", sorted(MODULES))
@pytest.mark.parametrize(("steps_in_flight", "num_groups", "index"), [(1, 1, "none"), (2, 2, "radix")])
def test_swapping_changes_no_token(model, requests, undisturbed, kernels, steps_in_flight, num_groups, index):
    engine, scheduler = make(
        model, 12, kernels=kernels, num_groups=num_groups, index=index, steps_in_flight=steps_in_flight
    )
    got = run(engine, requests)
    assert got == undisturbed
    stats = engine.stats()
    assert stats.num_preemptions and stats.num_swapped_in_blocks
    assert all(event.how == "swap" for event in scheduler.request_stats.events if isinstance(event, Preempted))
    out, back = scheduler.costs.copy_seconds(10**6)
    assert 0 < out < 1 and 0 < back < 1, "measured"


def test_a_step_may_carry_nothing_but_copies(model, requests, undisturbed):
    """Each sequence alone fills the pool, so that a swapped-in sequence has the device for itself."""
    engine, _ = make(model, 9, steps_in_flight=2)
    asked = [requests[i] for i in (3, 5)]
    tokens = run(engine, asked)
    assert [tokens["0", 0], tokens["1", 0]] == [undisturbed["3", 0], undisturbed["5", 0]]


def test_seconds_of_copies_are_no_part_of_a_steps_seconds(model):
    group = kv_group((0,), model.config.num_kv_heads, model.config.head_dim, "float32", 4, 1, num_host_blocks=4)
    clock = iter([10.0, 11.0, 12.0, 14.0]).__next__  # launch, begin and end of a copy, end of sampling
    runner = TorchRunner(
        model, reference, cache=CacheConfig(16, (group,)), max_num_seqs=1, max_model_len=64, clock=clock
    )
    nothing = TableUpdates.of([])
    moves = [Move(1, 0, "device", "host", [(0, 3)], 16)]
    runner.launch(Step(0, False, NewRows.of(rows=[]), nothing, [nothing], moves, Chunks.of([])))  # noqa: FBT003
    runner.sample(0, SamplingMasks.empty())
    result = runner.collect()
    assert (result.seconds, result.swap_seconds) == (3.0, (1.0, 0.0))
