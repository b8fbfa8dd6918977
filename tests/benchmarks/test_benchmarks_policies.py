"""Queue policies beside the best order and under floods, and what a decision costs: drivers of benchmarks.policies."""

import asyncio
from collections import Counter
from random import Random

import pytest
from small_engines import limits, memory, result_of, simulated

from benchmarks.policies import live
from benchmarks.policies.fair import Load, arrivals, harm
from benchmarks.policies.order import best, best_of_all_orders, crossover, few_shot, served, small_case
from benchmarks.policies.plan import loaded
from quire.planner.workloads import Session, Turn
from quire.scheduler.queue import prefix_aware
from quire.scheduler.queue.prefix_aware import score

BLOCK = 4


def test_waiting_outweighs_a_longer_match_from_357_tokens_a_second_on():
    assert crossover((1800, 50), (0.1, 5.0)) == pytest.approx(357.14, abs=0.01)
    matched, waited = (1800, 50), (0.1, 5.0)
    assert [score(m, w, 500) for m, w in zip(matched, waited, strict=True)] == [1850, 2550]
    for weight, first in ((0, 0), (100, 0), (356, 0), (358, 1), (500, 1), (1e12, 1)):
        scores = [score(m, w, weight) for m, w in zip(matched, waited, strict=True)]
        assert scores.index(max(scores)) == first


def test_prefix_aware_policies_reach_96_percent_of_the_best_order_on_small_cases():
    best_found, found = 0, Counter()
    for seed in range(8):
        prompts = small_case(Random(seed), 5, BLOCK)
        options = {"num_blocks": 6, "block_size": BLOCK}
        brute = best_of_all_orders(prompts, **options).num_found
        assert brute <= best(prompts).num_found
        best_found += brute
        for policy in ("lpm", "cache-aware"):
            found[policy] += served(prompts, policy, max_num_seqs=1, **options).num_found
    assert min(found.values()) >= 0.96 * best_found, (found, best_found)


@pytest.mark.parametrize("policy", ["lpm", "cache-aware"])
def test_prefix_aware_policies_reach_96_percent_of_the_best_order_on_few_shot_prompts(policy):
    prompts = few_shot(Random(0), 12, 10)
    bound = best(prompts)
    options = {"num_blocks": 200, "block_size": 16, "num_output_tokens": 8, "max_num_seqs": 8}
    assert served(prompts, policy, **options).rate >= 0.96 * bound.rate
    assert served(prompts, "fcfs", **options).rate < 0.9 * bound.rate


@pytest.mark.parametrize("policy", ["lpm", "cache-aware"])
def test_a_step_looks_at_a_bounded_number_of_waiting_sequences(policy, monkeypatch):
    counts, scheduler = [], loaded(policy, 8, 1500, 40)
    match = scheduler.cache.index.match_prefix

    def counted(namespace, tokens):
        counts.append(len(tokens))
        return match(namespace, tokens)

    monkeypatch.setattr(scheduler.cache.index, "match_prefix", counted)
    for i in range(40):
        counts.clear()
        step = scheduler.plan(100.0 + i)
        assert counts
        assert sum(counts) <= prefix_aware.MAX_MATCHED_TOKENS + 8 * 96  # those of admitted sequences, too
        if i == 20:
            scheduler.abort(scheduler.state.running_queue.running[0].request.id, 100.0)  # another one may begin
        scheduler.commit(result_of(step, 0.01), 100.0 + i)
    assert scheduler.num_waiting == 1499


def test_a_flood_hardly_moves_another_tenant_and_with_first_come_first_served_it_does():
    assert harm("fair", seconds=12.0, seeds=[3])["moved"] < 0.2
    assert harm("fcfs", seconds=12.0, seeds=[3])["moved"] > 10


def test_a_flood_over_http_refuses_none_of_another_tenants_requests():
    """Through `quire serve` with keys of two tenants: 120 requests at once, where 16 run and 20 may wait."""
    flood = [Session(0.0, (Turn(([1] * 40,), 600),), "loud")] * 120
    quiet = [Session(0.2 + i / 10, (Turn(([2] * 40,), 4),), "quiet") for i in range(5)]
    found = live.Found()
    with live.site("--max-queued-requests", "20") as served:
        asyncio.run(live.play(served, flood + quiet, found))
    assert served.policy == "fair"
    assert found.num_refused["loud"] > 0
    assert (found.num_refused["quiet"], found.num_unanswered, len(found.waits)) == (0, 0, 5)


def test_a_burst_of_a_tenant_that_uses_less_than_its_share_does_not_wait_behind_a_flood():
    """Steps take longer with more tokens, and there are few rows: 99 of 100 requests are admitted at once."""
    seconds, num_seqs = 5.0, 16
    config = limits("fair", max_num_seqs=num_seqs, max_num_batched_tokens=256)
    simulation = simulated(config, memory(2048), 3e-3, 35e-6)
    loads = {"quiet": Load(18.0, num_prompt=160, num_output=32), "loud": Load(200.0, num_prompt=160, num_output=32)}
    simulation.run(arrivals(loads, seconds, 1), until=seconds)
    quiet = [name for name, one in simulation.results.items() if one.tenant == "quiet"]
    now = simulation.engines[0].clock.now
    explanations = [simulation.engines[0].scheduler.explain(name, now) for name in quiet]
    waits = sorted((one.admitted or now) - one.arrived for one in explanations if one is not None)
    assert len(waits) > 60
    assert waits[int(0.99 * len(waits))] < 0.03
