"""Eviction policies: each against a scan of all leaves, the effect of retention, and the time per eviction."""

from dataclasses import replace
from math import log2
from random import Random
from time import thread_time
from typing import get_args

import pytest
from eviction_memory import POLICIES, Memory
from example_budget import examples
from prefix_cache_model import Model, radix_config

from quire.cache.prefix.eviction import (
    LFUPolicy,
    LRUPolicy,
    OrderedLeaves,
    PriorityPolicy,
    default_recompute_seconds,
)
from quire.cache.prefix.index import EvictionCause
from quire.cache.prefix.radix_index import EVICTION
from quire.cache.prefix.radix_node import Clock
from quire.cache.retention import DEFAULT_PRIORITY, NO_RETENTION, SequenceRetention
from quire.config import CacheConfig, Eviction
from quire.core.scheduling_params import Retention
from quire.errors import ConfigError


def standing_by_hand(eviction: str, leaf, clock: Clock) -> tuple:
    """A leaf's eviction order key, implemented a second time from the documentation."""
    if eviction == "lru":
        return (leaf.tick,)
    if eviction == "lfu":
        return (leaf.level + leaf.uses.hits, leaf.tick)
    hints = [mark.hint for mark in leaf.marks if mark.reach >= leaf.end and mark.hint.expires > clock.now]
    defaults = [] if hints and leaf.default_reach < leaf.end else [DEFAULT_PRIORITY]
    priority = max([*(hint.priority for hint in hints), *defaults])
    if eviction == "cost":
        seconds = default_recompute_seconds(2, 2 * leaf.end - 2) / default_recompute_seconds(2, 0)
        reuse = log2(1 + leaf.uses.hits) if leaf.uses.hits else leaf.uses.chance
        return (leaf.level + seconds * reuse * 2 ** ((priority - DEFAULT_PRIORITY) / 10), leaf.tick)
    return (priority, leaf.tick)


@pytest.mark.parametrize("eviction", ["lru", "lfu", "priority", "cost"])
@pytest.mark.parametrize("seed", range(examples(6)))
def test_the_evicted_leaf_is_the_least_in_a_scan_of_all_leaves(eviction, seed):
    rng, memory, now, compared = Random(seed), Memory(eviction, num_blocks=400, block_size=2), 0.0, 0
    stems = [[rng.randrange(5) for _ in range(rng.randint(2, 12))] for _ in range(6)]
    trees = memory.kv.index.trees
    for _ in range(250):
        now += rng.random()
        stem = rng.choice(stems)
        tokens = stem[: rng.randint(1, len(stem))] + [rng.randrange(5) for _ in range(rng.randint(1, 9))]
        if rng.random() < 0.2:
            stems[rng.randrange(6)] = tokens[:20]
        retention = {"priority": rng.choice((50, 50, 10, 90)), "ttl": rng.choice((None, 3.0, 10.0))}
        memory.run(tokens, now=now, **retention)
        for _ in range(rng.choice((0, 0, 1, 4))):
            trees.retention.advance_clock(now)
            least = min(memory.leaves, key=lambda leaf: (*standing_by_hand(eviction, leaf, trees.clock), leaf.id))
            before, key = least.end, least.path
            size = len(key)
            assert memory.evict(1, now=now) == 1
            assert least.is_removed or least.end == before - 1, f"{least.id} was to go"
            assert len(least.path) < size or least.is_removed or least.parent is None
            compared += 1
            if not memory.leaves:
                break
    assert compared > 150


def test_lfu_keeps_what_is_asked_for_often_and_forgets_it_in_time():
    memory = Memory("lfu")
    for last in range(5):
        memory.run([1, 2, 3, 10 + last])
    memory.run([4, 5, 6])
    memory.evict(8)
    assert memory.has([1, 2, 3, 0]) == 3, "it has hits; the other, used later, has none"
    assert memory.has([4, 5, 6]) == 0
    for round_ in range(12):
        stem = [100 + round_, 7]
        for last in range(3):
            memory.run([*stem, last, 8])
        memory.evict(8)
    assert memory.has([1, 2, 3, 0]) == 0, "others rose above it"


def evicted_first(memory: Memory, *prompts) -> list[int]:
    """Evict as many blocks as the first prompt has. Returns the matched tokens of each prompt."""
    memory.evict(len(prompts[0]))
    return [memory.has(prompt) for prompt in prompts]


def test_cost_keeps_the_block_that_takes_longer_to_compute_again():
    memory = Memory("cost")
    memory.kv.set_recompute_seconds(lambda num_tokens, num_before: num_tokens * (1.0 if num_before < 4 else 50.0))
    memory.run([1] * 9)
    memory.run([2] * 4)
    assert evicted_first(memory, [2] * 4, [1] * 9) == [0, 9], "the older one, whose end costs more"


def test_cost_keeps_its_order_when_the_unit_of_the_seconds_changes():
    memory = Memory("cost")
    memory.run([1] * 4)
    memory.run([1] * 4)
    for i in range(2, 20):
        memory.run([i] * 4)
    memory.evict(60)
    memory.kv.set_recompute_seconds(lambda num_tokens, num_before: 1e-6 * num_tokens)
    for i in range(20, 80):
        memory.run([i] * 4)
        memory.evict(4)
    assert memory.has([1] * 4) == 0, "its level was stored before the change, and others rose above it"


def test_cost_evicts_first_what_follows_a_prefix_whose_continuations_had_no_hits():
    memory = Memory("cost", num_blocks=200)
    document = [1] * 8
    for question in range(2, 12):
        memory.run([*document, *[question] * 4])
    memory.run([50] * 8)
    memory.run([*document, *[90] * 4])
    assert evicted_first(memory, [90] * 4, [50] * 8, document) == [0, 8, 8], "though they were used later"
    assert memory.has([*document, *[90] * 4]) < 12


def test_cost_counts_ten_points_of_priority_as_twice_the_value():
    memory = Memory("cost")
    memory.run([1] * 4, priority=60)
    memory.run([2] * 4)
    assert evicted_first(memory, [2] * 4, [1] * 4) == [0, 4]
    memory.run([3] * 4)
    memory.evict(1)
    why = memory.kv.index.take_reason().numbers
    memory.evict(1)
    assert why["key"] == pytest.approx(why["level"] + why["cost"] * why["reuse"])


def test_priority_counts_before_recency_and_ends_with_its_ttl():
    memory = Memory("priority")
    memory.run([1, 1, 1], priority=90, ttl=10.0)
    memory.run([2, 2, 2], now=1.0)
    memory.run([3, 3, 3], now=2.0, priority=10, ttl=10.0)
    memory.evict(3, now=3.0)
    assert (memory.has([1, 1, 1]), memory.has([2, 2, 2]), memory.has([3, 3, 3])) == (3, 3, 0)
    memory.evict(3, now=4.0)
    assert (memory.has([1, 1, 1]), memory.has([2, 2, 2])) == (3, 0)
    memory.run([2, 2, 2], now=5.0)
    memory.evict(3, now=20.0)
    assert (memory.has([1, 1, 1]), memory.has([2, 2, 2])) == (0, 3), "after the ttl only recency is left"


def test_low_priority_counts_only_while_no_other_request_has_used_the_blocks():
    memory = Memory("priority")
    memory.run([1, 1, 1, 1], priority=0)
    memory.run([2, 2, 2, 2], now=1.0)
    memory.run([1, 1, 1, 1], now=2.0)
    memory.evict(4, now=3.0)
    assert (memory.has([1, 1, 1, 1]), memory.has([2, 2, 2, 2])) == (4, 0)


def test_the_priority_of_a_leaf_counts_for_the_blocks_before_it():
    memory = Memory("priority")
    memory.run([1, 1, 1, 2, 2, 2])
    memory.run([1, 1, 1, 3, 3, 3], now=1.0, priority=80)
    memory.run([4, 4, 4], now=2.0)
    memory.evict(6, now=3.0)
    assert (memory.has([1, 1, 1, 3, 3, 3]), memory.has([4, 4, 4])) == (6, 0)
    memory.run([4, 4, 4], now=4.0, priority=79)
    memory.evict(5, now=5.0)
    assert memory.has([1, 1, 1, 3, 3, 3]) == 4, "its end goes first, and its begin is worth as much"


@pytest.mark.parametrize("eviction", POLICIES)
def test_all_idle_blocks_can_be_evicted_at_once(eviction):
    memory, rng = Memory(eviction, num_blocks=300, block_size=4), Random(5)
    for _ in range(40):
        memory.run([rng.randrange(2) for _ in range(rng.randint(1, 40))])
    memory.begin([7] * 30)
    idle = memory.kv.pools.num_idle
    assert memory.evict(1000) == idle > 50
    assert memory.kv.pools.num_idle == 0


@pytest.mark.parametrize("eviction", POLICIES)
def test_a_leaf_in_use_is_passed_over_and_found_again_when_it_is_idle(eviction):
    memory = Memory(eviction)
    memory.begin([1, 1, 1])
    memory.run([2, 2, 2])
    assert memory.evict(4) == 3
    assert memory.evict(1) == 0
    memory.end(1)
    assert memory.evict(9) == 3


@pytest.mark.parametrize("eviction", ["lfu", "priority", "cost"])
def test_an_order_that_needs_the_tree_is_refused_without_it(eviction):
    config = radix_config(8, 4)
    for index in ("hash", "none"):
        with pytest.raises(ConfigError, match="radix"):
            CacheConfig(4, config.groups, index, (), eviction)
    CacheConfig(4, config.groups, "hash", (), "lru")


def seconds_per_eviction(eviction: str, num_leaves: int) -> float:
    memory = Memory(eviction, num_blocks=2 * num_leaves + 10)
    for i in range(num_leaves):
        memory.begin([i % 997, i])
        memory.kv.release(i + 1, 2)
    times = []
    for _ in range(300):
        begin = thread_time()
        assert memory.kv.index.evict(0, 1, EvictionCause()) == 1
        times.append(thread_time() - begin)
    return sorted(times)[150]


@pytest.mark.parametrize("eviction", ["lfu", "priority", "cost"])
def test_evicting_one_block_takes_hardly_longer_among_sixteen_times_the_leaves(eviction):
    assert seconds_per_eviction(eviction, 8_000) < 4 * seconds_per_eviction(eviction, 500), "linear would be 16 times"


@pytest.mark.parametrize("order", [LRUPolicy, LFUPolicy, PriorityPolicy])
def test_a_heap_of_leaves_keeps_no_more_than_it_needs(order):
    memory = Memory(num_blocks=10)
    memory.run([1, 2, 3])
    (node,) = memory.leaves
    leaves = OrderedLeaves(order(Clock()))
    for _ in range(10_000):
        leaves.add(node)
        leaves.update(node)
        leaves.discard(node)
    leaves.add(node)
    for _ in range(10_000):
        leaves.update(node)
    assert len(leaves) == 1
    assert len(leaves._heap) <= 70
    assert leaves.pop() is node
    assert leaves.pop() is None


@pytest.mark.parametrize("eviction", ["lfu", "priority", "cost"])
def test_reuse_is_right_and_nothing_leaks_with_every_order(eviction):
    """The cache model with random retention: 6 000 operations on pools that are too small, with failing steps."""
    rng = Random(eviction)
    for block_size, windows in ((4, (0,)), (1, (0,)), (4, (0, 6))):
        config = radix_config(70 // block_size + 8, block_size, windows)
        model = Model(CacheConfig(block_size, config.groups, "radix", (), eviction))
        churn(model, rng, 2000)
        assert model.num_admitted > 40


def churn(model: Model, rng: Random, num_operations: int) -> None:
    now = 0.0
    for number in range(num_operations):
        now += rng.random()
        model.cache.advance_clock(now)
        kind = rng.random()
        if kind < 0.25:
            if len(model.live) < 6:
                model.arrive(rng)
        elif kind < 0.6:
            if len(model.in_flight) < 2:
                model.plan(rng, fails=rng.random() < 0.08)
        elif kind < 0.9:
            if model.in_flight:
                model.collect()
        elif model.running():
            seq = rng.choice(model.running())
            retention = Retention(
                priority=rng.choice((20, 50, 80)),
                ttl=rng.choice((None, 2.0, 30.0)),
                pin=rng.random() < 0.3,
            )
            seq.table.retention = SequenceRetention(retention, str(seq.id), seq.namespace.tenant)
            (model.preempt, model.end, lambda one: model.branch(rng, one), lambda one: model.fork(rng, one))[
                rng.randrange(4)
            ](seq)
        if number % 25 == 0:
            model.check()
    for seq in model.running():
        seq.table.retention = NO_RETENTION
    model.cache.index.retention.end_pins()
    model.wind_up()


def test_an_unknown_order_of_eviction_is_refused_by_name():
    config = radix_config(4, 4)
    with pytest.raises(ConfigError, match="there is no eviction 'fifo'; known: lru, lfu, priority, cost"):
        replace(config, eviction="fifo")
    assert set(EVICTION) == set(get_args(Eviction))
