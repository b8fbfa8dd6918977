"""Moves to and from the host that are done later than their step: nothing reads or reuses their blocks before."""

import pytest
from scripted_engine import VOCAB, cache_config
from test_preemption import Watched, crowd, prompt

from quire.cache.kv_cache import KVCache
from quire.core.request import NO_NAMESPACE
from quire.runner.scripted_runner import script

BOTH = pytest.mark.parametrize("steps_in_flight", [1, 2])


def swapping(**options) -> Watched:
    return Watched(**({"num_blocks": 16, "preemption": "swap"} | options))


@BOTH
@pytest.mark.parametrize("prefix_index", ["none", "radix"])
@pytest.mark.parametrize(
    "delay_of", [lambda move: 4, lambda move: move.id % 3, lambda move: 6 * (move.source == "host")]
)
def test_tokens_are_the_same_however_late_moves_are(steps_in_flight, prefix_index, delay_of):
    rig = swapping(steps_in_flight=steps_in_flight, prefix_index=prefix_index, swap_delay_of=delay_of)
    crowd(rig, 4)
    assert {event.how for event in rig.preempted} == {"swap"}
    assert rig.replay().difference == ""


def test_other_sequences_run_while_moves_are_under_way():
    rig = swapping(num_blocks=24, swap_delay_of=lambda move: 5)
    waited = []
    for i in range(5):
        rig.add(str(i), prompt(20, i), max_tokens=20)
    while rig.engine.has_work:
        rig.step()
        if any(seq.is_swapping_in for seq in rig.scheduler.state.running_queue.running):
            waited.append(len(rig.steps[-1].chunks))
    assert sum(waited) > 5, "the results of these steps did not wait for the Moves"
    for i in range(5):
        assert rig.tokens[str(i), 0] == script(prompt(20, i), 20, VOCAB)


def test_an_empty_step_waits_if_nothing_else_can_run():
    rig = swapping(num_blocks=10, swap_delay_of=lambda move: 10**6)
    crowd(rig, 2)
    empty = [step for step in rig.steps if not (len(step.chunks) or step.moves or len(step.opens))]
    assert empty


@BOTH
def test_aborted_requests_leave_nothing_behind_late_moves(steps_in_flight):
    rig = swapping(steps_in_flight=steps_in_flight, swap_delay_of=lambda move: 3)
    for i in range(4):
        rig.add(str(i), prompt(20, i), max_tokens=20)
    while not any(seq.is_swapping_in for seq in rig.scheduler.state.running_queue.running):
        rig.step()
    for i in range(4):
        rig.abort(str(i))
    assert rig.engine.has_work, "the Moves are under way"
    rig.run()
    assert rig.cache.pools.num_free == 16
    assert rig.cache.host_pools.num_free == 64


@BOTH
def test_a_step_fails_while_moves_of_others_are_under_way(steps_in_flight):
    failing = set(range(12, 60, 5))
    rig = swapping(steps_in_flight=steps_in_flight, swap_delay_of=lambda move: 3, fails=lambda step: step.id in failing)
    crowd(rig, 4)
    assert rig.num_failures > 2
    assert rig.replay().difference == ""


def test_released_blocks_belong_to_the_move_that_writes_them():
    cache = KVCache(cache_config(8, num_host_blocks=8))
    cache.grow(cache.new_table(0, prompt(12)), 12)
    cache.swap_out({0: 12})
    cache.release(0)
    (out,) = cache.launched(0)
    cache.collected(0)
    assert cache.is_swapping_out(0) and cache.pools.num_free == 8
    cache.moves_done([out.id])
    admission = cache.admit(0, prompt(13), NO_NAMESPACE, reusable=12, limit=13, max_new_positions=1)
    (back,) = cache.launched(1)
    cache.collected(1)
    assert cache.is_swapping_in(admission.table) and cache.has_moves_in_flight
    cache.release(0)
    assert (cache.pools.num_free, cache.host_pools.num_free) == (5, 5)
    assert cache.check() == []
    assert cache.moves_done([back.id, 99]) == [back]
    assert (cache.pools.num_free, cache.host_pools.num_free) == (8, 8)
    assert cache.check() == [] and not cache.has_moves_in_flight


def test_a_failed_step_takes_its_moves_with_it():
    cache = KVCache(cache_config(8, num_host_blocks=8))
    cache.grow(cache.new_table(0, prompt(12)), 12)
    cache.swap_out({0: 12})
    cache.release(0)
    (out,) = cache.launched(0)
    cache.failed(0)
    assert (cache.pools.num_free, cache.host_pools.num_free, dict(cache.swapped)) == (8, 8, {})
    assert cache.moves_done([out.id]) == []


@BOTH
def test_requests_end_although_the_device_fails_for_good_while_moves_are_in_flight(steps_in_flight):
    dead = []
    rig = swapping(steps_in_flight=steps_in_flight, swap_delay_of=lambda move: 3, fails=lambda step: bool(dead))
    for i in range(4):
        rig.add(str(i), prompt(20, i), max_tokens=20)
    while not any(seq.is_swapping_in for seq in rig.scheduler.state.running_queue.running):
        rig.step()
    dead.append(True)
    for _ in range(200):
        rig.step()
    assert not rig.engine.has_work
    assert set(rig.reasons.values()) <= {"error", "length"} and "error" in rig.reasons.values()
