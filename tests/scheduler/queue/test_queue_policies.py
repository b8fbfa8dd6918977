"""Queue orders against orders computed from scratch, and equal outputs under any order."""

from typing import get_args

import pytest
from held_items import waiting_tenants
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import VOCAB, Rig
from small_engines import limits, memory, request, result_of, simulated

from quire.cache.kv_cache import KVCache
from quire.config import Policy
from quire.core.request import Namespace, Request
from quire.core.scheduling_params import SchedulingParams
from quire.params import SamplingParams
from quire.planner.workloads import Session, Turn
from quire.runner.scripted_runner import script
from quire.scheduler.queue import prefix_aware
from quire.scheduler.queue.fcfs import RankedQueue
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.sequence import Sequence

POLICIES = get_args(Policy)
BLOCK = 4
CHAIN = [list(range(10 * i, 10 * i + BLOCK)) for i in range(3)]  # prompts consist of these blocks


def prompts(most_blocks: int = 4):
    """Prompts of random length, many with a common prefix."""
    stem = st.lists(st.sampled_from(CHAIN), min_size=0, max_size=most_blocks)
    rest = st.lists(st.integers(900, 903), min_size=1, max_size=BLOCK)
    return st.builds(lambda blocks, tail: [token for block in blocks for token in block] + tail, stem, rest)


@given(st.lists(st.tuples(st.integers(-2, 2), st.booleans()), min_size=1, max_size=30), st.randoms())
def test_ranks_in_the_queue_equal_a_full_sort(items, rng):
    queue = RankedQueue()
    inside: list[Sequence] = []
    for i, (of_class, leaves) in enumerate(items):
        seq = Sequence(i, request(str(i), [1] * (i + 1), 1), 0, 0.0, of_class)
        queue.put(seq)
        inside.append(seq)
        if leaves:
            gone = inside.pop(rng.randrange(len(inside)))
            queue.remove(gone)
            assert gone not in queue
        inside.sort(key=lambda one: one.rank)
        assert len(queue) == len(inside)
        assert queue.head is (inside[0] if inside else None)
        assert all(one in queue for one in inside)
        probe = Sequence(99, request("probe", [1], 1), 0, 0.0, of_class)
        assert queue.num_tokens_before(probe) == sum(len(one.tokens) for one in inside if one.rank[0] <= of_class)


def single(prompt, num_output: int = 4, *, at: float = 0.0, tenant: str = "") -> Session:
    return Session(at, (Turn((prompt,), num_output),), tenant)


def num_matched(scheduler, seq) -> int:
    found = scheduler.cache.index.match_prefix(seq.request.namespace, seq.tokens[: seq.reusable])
    return len(found.blocks[0]) if found.blocks else 0


def expected_head(scheduler, weight) -> Sequence | None:
    queued = [seq for seq in scheduler.state.sequences.values() if seq in scheduler.state.queue]
    back = [seq for seq in queued if seq.has_run]
    if back or not queued:
        return min(back, key=lambda seq: seq.rank, default=None)
    return min(queued, key=lambda seq: (-BLOCK * num_matched(scheduler, seq) + weight * seq.queued_at, seq.id))


def update_all(scheduler) -> None:
    """Update the match of every waiting sequence."""
    for _ in range(0, len(scheduler.state.queue), prefix_aware.MAX_UPDATES_IN_TURN):
        scheduler.state.queue.refresh()


@pytest.mark.parametrize("policy", ["lpm", "cache-aware"])
@given(data=st.data())
@settings(max_examples=40)
def test_the_queue_head_equals_that_of_a_full_sort(policy, data):
    weight = data.draw(st.sampled_from([0.5, 4.0, 100.0])) if policy == "cache-aware" else 0.0
    config = limits(policy, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=48, wait_weight=weight)
    scheduler = Scheduler(config, KVCache(memory(data.draw(st.integers(12, 30)), BLOCK)))
    for i, prompt in enumerate(data.draw(st.lists(prompts(), min_size=2, max_size=14))):
        scheduler.add(request(str(i), prompt, data.draw(st.integers(1, 6))), float(i) / 8)
        for _ in range(data.draw(st.integers(0, 3))):
            if (step := scheduler.plan(0.0)) is not None:
                scheduler.commit(result_of(step, 0.01), 0.0)
        if data.draw(st.integers(0, 5)) == 0:
            scheduler.abort(str(data.draw(st.integers(0, i))), 0.0)
        update_all(scheduler)
        assert scheduler.state.queue.head is expected_head(scheduler, weight)
    while scheduler.has_work:
        update_all(scheduler)
        assert scheduler.state.queue.head is expected_head(scheduler, weight)
        scheduler.commit(result_of(scheduler.plan(0.0), 0.01), 0.0)


@pytest.mark.parametrize("prefix_index", ["hash", "none"])
def test_policies_that_match_work_with_every_index(prefix_index):
    for policy in ("lpm", "cache-aware"):
        simulation = simulated(limits(policy, max_num_seqs=2), memory(128, 16, prefix_index), 0.01)
        result = simulation.run([single([i % 3] * 40 + [i]) for i in range(9)])
        assert {one.reason for one in result.requests} == {"length"}
        assert (simulation.engines[0].scheduler.request_stats.num_hit_tokens > 0) == (prefix_index == "hash")


# Outputs


@pytest.mark.parametrize("policy", POLICIES)
@given(data=st.data())
@settings(max_examples=12)
def test_tokens_do_not_depend_on_the_policy_and_everything_replays(policy, data):
    rig = Rig(
        policy=policy,
        num_blocks=data.draw(st.integers(10, 24)),
        prefix_index="radix",
        max_num_seqs=data.draw(st.integers(1, 5)),
        max_num_batched_tokens=data.draw(st.integers(5, 40)),
        max_model_len=40,
        wait_weight=data.draw(st.sampled_from([0.0, 10.0, 1e4])),
        steps_in_flight=data.draw(st.sampled_from([1, 2])),
        watermark=0.0,
    )
    asked = {}
    for i in range(data.draw(st.integers(1, 10))):
        prompt = [token % VOCAB for token in data.draw(prompts())]
        params = {"max_tokens": data.draw(st.integers(1, 16)), "n": data.draw(st.sampled_from([1, 1, 1, 2]))}
        scheduling_params = SchedulingParams(priority=data.draw(st.integers(-1, 1)))
        tenant = Namespace(data.draw(st.sampled_from(["a", "b", "c"])))
        rig.engine.add(
            Request(
                str(i),
                prompt,
                SamplingParams(temperature=0.0, **params),
                namespace=tenant,
                scheduling_params=scheduling_params,
            )
        )
        asked[str(i)] = (prompt, params)
        for _ in range(data.draw(st.integers(0, 4))):
            rig.step()
        if data.draw(st.integers(0, 9)) == 0:
            gone = str(data.draw(st.integers(0, i)))
            rig.abort(gone)
            asked.pop(gone, None)
    rig.run()
    for request_id, (prompt, params) in asked.items():
        for index in range(params["n"]):
            assert rig.tokens[request_id, index] == script(prompt, params["max_tokens"], VOCAB)
    assert len(rig.scheduler.state.queue) == 0
    assert rig.replay().difference == ""


def hot_and_cold(policy: str, **options: object) -> float:
    """Wait in seconds of a prompt without prefix match, while prompts with one arrive faster than they are served."""
    hot = [single([*[7] * 160, i], 8, at=i / 100, tenant="hot") for i in range(1000)]
    cold = single(range(100, 160), 8, at=0.5, tenant="cold")
    simulation = simulated(limits(policy, max_num_seqs=4, **options), memory(512), 0.01)
    requests = simulation.run([*hot[:50], cold, *hot[50:]], until=12.0).requests
    return next(one.ttft for one in requests if one.tenant == "cold")


def test_requests_without_a_prefix_match_starve_under_lpm_only():
    assert hot_and_cold("lpm") > 11
    assert hot_and_cold("fcfs") < 2
    assert hot_and_cold("cache-aware", wait_weight=100.0) < 2 + 160 / 100 + 2
    assert hot_and_cold("cache-aware", wait_weight=1000.0) < 2 + 160 / 1000 + 1
    assert hot_and_cold("fair") < 0.2


def test_an_explanation_has_the_policy_the_queue_place_and_the_number_of_overtakers():
    simulation = simulated(limits("lpm", max_num_seqs=1), memory(128), 0.01)
    simulation.run([single([i % 2] * 32 + [i]) for i in range(6)])
    explanations = [simulation.engines[0].scheduler.explain(str(i), simulation.engines[0].clock.now) for i in range(6)]
    assert {one.policy for one in explanations} == {"lpm"}
    assert [one.place for one in explanations] == list(range(6))
    assert [one.num_passed_by for one in explanations] == [0, 2, 0, 1, 0, 0]  # 0 2 4 share a prefix, so do 1 3 5


def test_an_explanation_counts_requests_of_its_own_tenant_only():
    simulation = simulated(limits("lpm", max_num_seqs=1), memory(128), 0.01)
    sessions = [single([3] * 30, tenant="other")]
    for i in range(6):
        sessions += [single([i % 2] * 32 + [i], tenant=tenant) for tenant in ("", "other")]
    simulation.run(sessions)
    names = [name for name, one in simulation.results.items() if not one.tenant]
    explanations = [simulation.engines[0].scheduler.explain(name, simulation.engines[0].clock.now) for name in names]
    assert [one.place for one in explanations] == list(range(6))
    assert [one.num_passed_by for one in explanations] == [0, 2, 0, 1, 0, 0]
    assert not waiting_tenants(simulation.engines[0].scheduler)


@given(data=st.data())
@settings(max_examples=15)
def test_queue_places_equal_a_count_of_the_queue(data):
    rig = Rig(num_blocks=12, max_num_seqs=3, max_num_batched_tokens=12, max_model_len=40, watermark=0.0)
    for i in range(data.draw(st.integers(1, 10))):
        tenant, state = Namespace(data.draw(st.sampled_from("ab"))), rig.scheduler.state
        queued = [one for one in state.sequences.values() if one in state.queue and one.request.namespace == tenant]
        params = SamplingParams(max_tokens=data.draw(st.integers(1, 16)), n=data.draw(st.sampled_from([1, 3])))
        rig.engine.add(Request(str(i), [i] * data.draw(st.integers(1, 20)), params, namespace=tenant))
        assert rig.scheduler.explain(str(i), rig.now).place == len(queued)
        if data.draw(st.integers(0, 5)) == 0:
            rig.abort(str(data.draw(st.integers(0, i))))
        for _ in range(data.draw(st.integers(0, 6))):
            rig.step()
    rig.run()
    assert not waiting_tenants(rig.scheduler)


# Run time


def counted_tokens(scheduler, monkeypatch) -> list[int]:
    """The number of tokens of each prompt that is matched from now on."""
    counts, match = [], scheduler.cache.index.match_prefix

    def counted(namespace, tokens):
        counts.append(len(tokens))
        return match(namespace, tokens)

    monkeypatch.setattr(scheduler.cache.index, "match_prefix", counted)
    return counts


def test_prefix_matches_of_all_waiting_sequences_are_refreshed_in_turn(monkeypatch):
    scheduler = Scheduler(limits("lpm", max_num_seqs=1, max_model_len=4096), KVCache(memory(600)))
    scheduler.add(request("first", [1], 2000), 0.0)
    for i in range(300):
        scheduler.add(request(str(i), [i] * (40 + i), 1), 0.0)
    scheduler.commit(result_of(scheduler.plan(0.0), 0.01), 0.0)
    counts = counted_tokens(scheduler, monkeypatch)
    for _ in range(300):
        scheduler.commit(result_of(scheduler.plan(0.0), 0.01), 0.0)
    assert set(counts) == {39 + i for i in range(300)}


@pytest.mark.parametrize("length", [100, 20_000])
def test_long_prompts_are_matched_within_the_same_limit_as_short_ones(length, monkeypatch):
    """A prompt that is longer than the limit uses the tokens of later steps, too."""
    scheduler = Scheduler(limits("lpm", max_num_seqs=1, max_model_len=2**15), KVCache(memory(2**12)))
    scheduler.add(request("first", [1], 2000), 0.0)
    for i in range(40):
        scheduler.add(request(str(i), [i] * length, 1), 0.0)
    scheduler.commit(result_of(scheduler.plan(0.0), 0.01), 0.0)
    counts, num_steps = counted_tokens(scheduler, monkeypatch), 60
    for _ in range(num_steps):
        scheduler.commit(result_of(scheduler.plan(0.0), 0.01), 0.0)
    assert 5 < len(counts) < 10 * num_steps
    assert sum(counts) <= prefix_aware.MAX_MATCHED_TOKENS * num_steps + length
