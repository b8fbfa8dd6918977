"""Pins and ttl: which blocks they retain, the limit of pinned blocks, their end, and no deadlock."""

from dataclasses import replace
from random import Random

import pytest
from eviction_memory import POLICIES, Memory
from scripted_engine import Rig

from quire.cache.kv_cache import KVCache
from quire.cache.prefix.index import NO_REASON, EvictionCause, EvictionReason
from quire.cache.prefix.retention_marks import MAX_NODES_PER_BRANCH
from quire.core.events import Evicted, PinsRefused, PinsYielded
from quire.core.request import Namespace
from quire.core.scheduling_params import Program, Retention, SchedulingParams
from quire.params import BeamSearchParams
from quire.scheduler.beam_search import plan_beams
from quire.scheduler.beam_sequences import BeamSequences


@pytest.mark.parametrize("eviction", POLICIES)
def test_a_pin_holds_until_it_expires_and_no_longer(eviction):
    memory = Memory(eviction)
    memory.run([1, 1, 1], pin=True, ttl=10.0)
    memory.run([2, 2, 2], now=1.0)
    assert memory.kv.num_pinned == 3
    assert memory.kv.pools.num_idle == 3, "nobody plans with what is pinned"
    assert memory.evict(6, now=9.0) == 3
    assert memory.has([1, 1, 1]) == 3
    assert memory.evict(6, now=10.5) == 3
    assert memory.kv.num_pinned == 0


def test_a_pin_without_end_holds_until_a_flush():
    memory = Memory()
    memory.run([1, 1, 1], pin=True)
    assert memory.evict(3, now=1e9) == 0
    assert memory.kv.flush() == 3


def test_pins_hold_no_more_than_half_of_the_blocks_and_say_so():
    memory = Memory(num_blocks=20)
    memory.run([1] * 6, pin=True, tenant="")
    memory.run([2] * 6, pin=True, tenant="")
    assert memory.kv.num_pinned == 10
    (event,) = memory.kv.take_pin_events()
    assert isinstance(event, PinsRefused)
    assert (event.request_id, event.num_blocks, event.num_pinned) == ("2", 2, 4)
    memory.evict(20)
    found = [memory.kv.index.match_prefix(Namespace(), [i] * 6).num_tokens for i in (1, 2)]
    assert found == [6, 4], "its begin is what is of use"
    assert memory.kv.take_pin_events() == []


def test_blocks_that_two_pins_share_count_once_and_stay_for_the_last_one():
    memory = Memory()
    memory.run([1, 1, 2, 2], pin=True, ttl=5.0)
    memory.run([1, 1, 3, 3], pin=True, ttl=9.0)
    assert memory.kv.num_pinned == 6
    memory.evict(9, now=6.0)
    assert (memory.has([1, 1, 2, 2]), memory.has([1, 1, 3, 3])) == (2, 4)
    assert memory.kv.num_pinned == 4


def test_a_pin_outlives_later_requests_that_extend_or_share_its_blocks():
    memory = Memory(block_size=2)
    memory.run([1, 1, 2, 2, 3], pin=True, ttl=50.0)
    memory.run([1, 1, 2, 2, 3, 4, 5, 6], now=1.0)
    memory.run([1, 1, 2, 9], now=2.0)
    memory.evict(9, now=3.0)
    assert memory.has([1, 1, 2, 2, 3, 4]) == 4, "whole blocks"
    assert memory.evict(9, now=51.0) == 2


def test_many_pins_of_one_prompt_cost_no_more_than_a_few():
    memory = Memory()
    for i in range(50):
        memory.run([1, 1, 1], now=float(i), pin=True, ttl=100.0 - i)
    marks = memory.kv.index.trees.retention
    assert len(marks.nodes) <= 4
    assert memory.kv.num_pinned == 3
    assert memory.evict(3, now=90.0) == 0
    assert memory.evict(3, now=100.5) == 3


def test_pins_yield_to_a_sequence_that_would_wait_for_ever_the_weakest_first():
    memory = Memory(num_blocks=20)
    memory.run([1] * 5, pin=True, ttl=100.0)
    memory.run([2] * 5, pin=True, ttl=50.0, tenant="other")
    assert memory.begin([3] * 14, spare=[0]) is None, "others run: it can wait"
    assert memory.kv.num_pinned == 10
    assert memory.begin([3] * 14) is not None
    (event,) = memory.kv.take_pin_events()
    assert isinstance(event, PinsYielded)
    assert event.num_blocks == 5
    assert (memory.has([1] * 5), memory.kv.num_pinned) == (5, 5)


def test_a_failed_step_ends_the_pins_of_what_it_did_not_write():
    memory = Memory()
    memory.begin([1, 1, 1], pin=True)
    memory.end(1)
    memory.begin([2, 2])
    memory.kv.index.trees.invalidate({node.blocks[0][0] for node in memory.leaves})
    assert memory.kv.num_pinned == 0
    assert memory.kv.check() == []


def with_windows(*windows: int, num_blocks: tuple[int, ...]) -> Memory:
    memory = Memory(windows=windows)
    groups = zip(memory.kv.config.groups, num_blocks, strict=True)
    groups = tuple(replace(group, num_blocks=number) for group, number in groups)
    memory.kv = KVCache(replace(memory.kv.config, groups=groups))
    return memory


def test_the_pin_limit_of_one_kv_group_limits_all_groups_and_idle_blocks_are_evictable():
    memory = with_windows(0, 7, num_blocks=(40, 80))
    memory.run([1] * 36, pin=True, tenant="")
    assert [len(memory.kv.index.retention.pin_refs(group)) for group in (0, 1)] == [20, 20]
    assert memory.kv.pools[0].num_idle == 16
    assert memory.evict(16) == 16
    assert memory.begin([2] * 20) is not None


def test_a_check_finds_idle_blocks_that_a_pin_behind_them_keeps():
    memory = with_windows(0, 7, num_blocks=(40, 80))
    memory.run([1] * 9)
    (leaf,) = memory.leaves
    memory.kv.pools[1].incr_ref(leaf.blocks[1][-1])
    memory.kv.index.retention.pin_refs(1)[leaf.blocks[1][-1]] += 1
    assert any("idle blocks of groups [0, 0]" in wrong for wrong in memory.kv.check())


def test_a_tenant_with_a_name_pins_half_of_what_may_be_pinned():
    memory = Memory(num_blocks=100)
    for number, tenant in enumerate("abc"):
        memory.run([number] * 30, pin=True, tenant=tenant, now=float(number))
    refused = memory.kv.take_pin_events()
    assert [(one.num_pinned, one.num_blocks) for one in refused] == [(25, 5), (25, 5), (0, 30)]
    assert memory.kv.num_pinned == 50
    memory.kv.index.retention.end_weakest_pin()
    memory.run([4] * 30, pin=True, tenant="c")
    assert memory.kv.num_pinned == 50


@pytest.mark.parametrize("eviction", POLICIES)
def test_the_end_of_a_request_takes_no_longer_the_more_its_branch_left(eviction):
    memory = Memory(eviction, num_blocks=1000)
    marks, leaves, updated = memory.kv.index.retention, memory.kv.index.trees.leaves, []
    update = leaves.update
    leaves.update = lambda node: (updated.append(node), update(node))
    for number in range(300):
        updated.clear()
        memory.run([1000, number], now=float(number), program=Program(id="p", ttl=100.0))
        assert len(updated) <= 4
    (places,) = marks.nodes.values()
    assert len(places) == MAX_NODES_PER_BRANCH, "the latest"
    memory.run([1000, 300], now=300.0, program=Program(id="p", expects_more=False))
    assert len(updated) >= MAX_NODES_PER_BRANCH, "all are evicted first now"


def test_a_pin_of_what_a_window_has_passed_ends_as_any_other():
    memory = with_windows(3, num_blocks=(12,))
    memory.run([1] * 3, pin=True, ttl=1.0)
    admission = memory.begin([2] * 6, pin=True, ttl=2.0)
    memory.kv.trim(admission.table, 6)
    assert memory.evict(9) == 4
    memory.end(2)
    assert memory.kv.num_pinned == 3
    memory.kv.advance_clock(1.5)
    assert memory.kv.num_pinned == 0
    memory.kv.advance_clock(2.5)
    assert not memory.kv.index.retention.nodes
    assert memory.kv.check() == []


def test_the_reason_is_that_of_the_first_block_since_it_was_asked_for():
    memory = Memory(windows=(0, 7))
    for number in range(4):
        memory.run([number])
    memory.evict(1)
    memory.evict(1)
    tick = memory.kv.index.trees.clock.tick
    assert memory.kv.index.take_reason() == EvictionReason({"age": tick - 2}, "tenant")
    assert memory.kv.index.take_reason() == NO_REASON
    assert memory.kv.index.evict(1, 1, EvictionCause()) == 1
    assert memory.kv.index.take_reason() == EvictionReason({"age": tick - 6}, "tenant"), "of a group with a window, too"


def test_a_try_to_begin_that_fails_leaves_nothing_in_the_table(monkeypatch):
    memory = Memory(num_blocks=20)
    memory.run([1] * 5, pin=True, tenant="tenant")
    grow, tries = memory.kv.grow, []

    def fail_once(table, *args, **options):
        tries.append(len(table.blocks[0]))
        return None if len(tries) == 1 else grow(table, *args, **options)

    monkeypatch.setattr(memory.kv, "grow", fail_once)
    admission = memory.begin([1] * 5 + [2] * 3)
    assert tries == [5, 5]
    assert len(admission.table.blocks[0]) == 8
    assert memory.kv.check() == []


# With the scheduler


def rig_with(eviction: str, **options) -> Rig:
    return Rig(prefix_index="radix", eviction=eviction, **({"num_blocks": 24, "steps_in_flight": 2} | options))


def talk(rig: Rig, num_requests: int) -> None:
    """Chats with random retention in a pool that is too small."""
    rng, contexts = Random(1), [[i] * 6 for i in range(4)]
    for number in range(num_requests):
        which = rng.randrange(4)
        prompt = contexts[which][-36:] + [rng.randrange(50) for _ in range(rng.randint(1, 6))]
        retention = Retention(
            priority=rng.choice((10, 50, 90)),
            ttl=rng.choice((None, 0.01, 1.0)),
            pin=rng.random() < 0.4,
        )
        rig.add(
            str(number),
            prompt,
            max_tokens=rng.randint(1, 9),
            n=rng.choice((1, 1, 2)),
            scheduling_params=SchedulingParams(retention=retention),
        )
        for _ in range(rng.randint(0, 6)):
            rig.step()
        contexts[which] = prompt
    most = 5000
    while rig.engine.has_work:
        rig.step()
        most -= 1
        assert most > 0, "somebody waits for ever"


@pytest.mark.parametrize("eviction", POLICIES)
def test_retention_changes_no_token_and_the_journal_replays(eviction):
    plain, rig = rig_with("lru", num_blocks=400, max_model_len=96), rig_with(eviction)
    talk(plain, 60)
    talk(rig, 60)
    assert rig.tokens == plain.tokens
    assert rig.reasons == plain.reasons
    assert rig.cache.num_evicted > 0 == plain.cache.num_evicted
    assert rig.scheduler.check() == []
    report = rig.replay()
    assert report.difference == ""
    assert report.num_steps > 50
    events = list(rig.scheduler.request_stats.events)
    evicted = [event for event in events if isinstance(event, Evicted)]
    assert evicted
    assert all(event.policy == eviction and "age" in event.reason for event in evicted)
    assert any(isinstance(event, (PinsRefused, PinsYielded)) for event in events)
    assert not rig.scheduler.leaks
    rig.scheduler.flush(rig.now)
    assert rig.cache.pools.num_free == rig.cache.pools.num_blocks


def test_a_request_as_long_as_the_pool_runs_beside_pins():
    rig = rig_with("lru", num_blocks=24, max_model_len=96)
    rig.add("pinned", list(range(40)), max_tokens=4, scheduling_params=SchedulingParams(retention=Retention(pin=True)))
    rig.run()
    assert rig.cache.num_pinned == 10
    rig.add("long", [7] * 60, max_tokens=30)
    rig.run()
    assert rig.reasons["long", 0] == "length"
    assert any(isinstance(event, PinsYielded) for event in rig.scheduler.request_stats.events)


def test_a_request_that_is_preempted_asks_for_nothing_before_it_ends():
    rig = rig_with("lru", num_blocks=64, steps_in_flight=1)
    rig.add(
        "a", list(range(20)), max_tokens=9, scheduling_params=SchedulingParams(retention=Retention(pin=True, ttl=5.0))
    )
    while not rig.tokens.get(("a", 0)):
        rig.step()
    state, marks = rig.scheduler.state, rig.cache.index.retention
    while rig.engine.stats().num_running and any(state.is_in_flight(seq) for seq in state.running_queue.running):
        rig.step()
    state.preempt(state.running_queue.running[0], "a test", rig.now)
    preempted_at = rig.now
    assert (rig.cache.num_pinned, len(marks.nodes)) == (0, 0)
    rig.run()
    assert rig.cache.num_pinned > 0
    (retention,) = marks.nodes
    assert retention.expires > preempted_at + 5.0


def test_beams_that_end_before_their_request_pin_nothing():
    rig = rig_with("lru", num_blocks=64, steps_in_flight=1)
    params = BeamSearchParams(beam_width=4, max_tokens=12)
    beams = plan_beams(params, vocab_size=50, num_end_tokens=1)
    scheduling_params = SchedulingParams(retention=Retention(pin=True))
    rig.add("a", list(range(9)), max_tokens=12, n=4, beams=beams, scheduling_params=scheduling_params)
    while len(rig.scheduler.state.running_queue.running) < 4:
        rig.step()
    for _ in range(4):
        rig.step()
        assert rig.reasons or not rig.cache.num_pinned
    BeamSequences(rig.cache, rig.scheduler.state).hold(rig.scheduler.state.running_queue.running[-1])
    assert (rig.cache.num_pinned, len(rig.cache.index.retention.nodes)) == (0, 0)
    rig.abort("a")
    assert rig.cache.num_pinned > 0
