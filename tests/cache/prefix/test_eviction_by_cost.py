"""Eviction policy `cost`: the learned reuse predictor and its bounds, results against lru, the offline optimum."""

from random import Random

import pytest
from eviction_memory import Memory

from quire.cache.prefix.eviction_by_cost import (
    _MAX_OPEN_EXAMPLES,
    LeafState,
    ReusePredictor,
    SetDueling,
    TrainingExamples,
    default_recompute_seconds,
)
from quire.cache.prefix.index import BYTES_PER_TOKEN


def leaf_of(memory: Memory):
    return memory.leaves[0]


def test_before_anything_is_learnt_what_is_older_is_worth_less():
    memory = Memory("cost")
    memory.run([1, 2, 3])
    chance = ReusePredictor(BYTES_PER_TOKEN)
    tick = memory.kv.index.trees.clock.tick
    values = [chance.predict(chance.features(leaf_of(memory), tick + age, "tenant")) for age in (0, 1, 5, 50, 5000)]
    assert values == sorted(values, reverse=True)
    assert values[0] > 2 * values[-1]


def test_a_chance_becomes_what_it_is_shown():
    memory, chance, rng = Memory("cost"), ReusePredictor(BYTES_PER_TOKEN), Random(1)
    memory.run([1, 2, 3])
    leaf, tick = leaf_of(memory), memory.kv.index.trees.clock.tick
    for _ in range(3000):
        chance.learn(chance.features(leaf, tick + 3, "a"), "a", reused=rng.random() < 0.1)
        chance.learn(chance.features(leaf, tick + 300, "b"), "b", reused=rng.random() < 0.7)
    assert abs(chance.predict(chance.features(leaf, tick + 3, "a")) - 0.1) < 0.08
    assert abs(chance.predict(chance.features(leaf, tick + 300, "b")) - 0.7) < 0.12
    for _ in range(20_000):
        chance.learn(chance.features(leaf, tick + 3, "a"), "a", reused=False)
    assert max(map(abs, chance.weights)) <= 16, "and it can still learn better"


def test_open_examples_are_bounded_and_all_are_closed_in_time():
    memory, chance = Memory("cost"), ReusePredictor(BYTES_PER_TOKEN)
    memory.run([1, 2, 3])
    leaf, examples = leaf_of(memory), TrainingExamples(chance, 10)
    features = chance.features(leaf, 9, "a")
    for time in range(20_000):
        LeafState.of(leaf).example = None
        examples.sample(leaf, features, "a", time // 1000)
        examples.sample(leaf, features, "a", time // 1000 + 1)
    assert len(examples) <= 2 * _MAX_OPEN_EXAMPLES
    for time in range(50_000):
        LeafState.of(leaf).example = None
        examples.sample(leaf, features, "a", 100 + time)
        if LeafState.of(leaf).example is not None:
            examples.on_evict(LeafState.of(leaf), time)
    assert len(examples._evicted) <= 2 * _MAX_OPEN_EXAMPLES
    learnt = chance.num_examples
    examples.expire(10**9)
    assert len(examples) == 0 == len(examples._evicted)
    assert chance.num_examples > learnt


def test_what_was_evicted_and_is_asked_for_again_is_an_example_that_came_back():
    memory = Memory("cost", num_blocks=12)
    order = memory.kv.index.trees.leaves
    shown = []
    order.predictor.learn = lambda features, tenant, *, reused: shown.append(reused)
    memory.run([1, 2, 3, 4])
    memory.run([9] * 4)
    memory.evict(8)
    assert len(order.examples) == 2
    memory.run([1, 2, 3, 4, 5])
    assert shown == [True]
    memory.run([9] * 3)
    assert shown == [True], "all but the last block of the other was asked for"


def test_what_takes_longer_to_compute_is_kept_longer():
    memory = Memory("cost")
    memory.kv.index.trees.leaves.duels.balance = 100.0
    memory.kv.set_recompute_seconds(lambda num_tokens, num_before: num_tokens * (1.0 if num_before < 4 else 50.0))
    memory.run([1] * 9)
    memory.run([2] * 4)
    memory.evict(4)
    assert (memory.has([1] * 9), memory.has([2] * 5)) == (9, 0), "the older one, whose end is dear"
    assert 0 < default_recompute_seconds(16, 0) < default_recompute_seconds(16, 10_000)


def test_the_reason_of_an_eviction_multiplies_to_its_worth():
    memory = Memory("cost")
    memory.run([1] * 9, priority=60)
    memory.evict(1)
    why = memory.kv.index.take_reason().numbers
    assert why["worth"] == pytest.approx(2 * why["seconds"] * why["chance"] / why["bytes"])
    assert (why["age"], why["hits"]) == (0, 0)


def test_recency_rules_until_the_learnt_order_has_won_and_again_when_it_has_lost():
    memory, duels = Memory("cost"), SetDueling(10)
    for i in range(40):
        memory.run([i, i])
    for time, (learnt, oldest) in enumerate([(30, 1), (31, 2)]):
        duels.start(memory.leaves[learnt], memory.leaves[oldest], time)
        assert not duels.learnt_leads
        duels.on_hit(LeafState.of(memory.leaves[oldest]))
    assert duels.learnt_leads, "twice the oldest leaf was asked for, and the other was not"
    duels.start(memory.leaves[33], memory.leaves[4], 4)
    duels.on_evict(LeafState.of(memory.leaves[33]), 77)
    duels.on_miss(77)
    assert not duels.learnt_leads, "it had been evicted, and was asked for"
    before = duels.balance
    duels.start(memory.leaves[5], memory.leaves[6], 5)
    duels.start(memory.leaves[7], memory.leaves[8], 16)
    duels.on_hit(LeafState.of(memory.leaves[6]))
    assert duels.balance == before, "too late to count"
    assert not duels.any_evicted


def test_the_order_in_force_decides_between_the_oldest_and_the_least_valuable():
    for balance, goes in ((-9.0, [1, 2, 3]), (9.0, [7, 8, 9])):
        memory = Memory("cost")
        order = memory.kv.index.trees.leaves
        memory.run([1, 2, 3])
        memory.run([7, 8, 9])
        order.predictor.predict = lambda features, order=order: 0.9 if features.upper_share else 0.1  # the older one
        order.duels.balance = balance
        memory.evict(3)
        assert memory.has(goes) == 0
        assert memory.kv.pools.num_idle == 3
