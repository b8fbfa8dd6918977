"""Pins, sessions and times to live: what they hold, how much of it, when they end, and that nobody waits for ever."""

from random import Random

import pytest
from rig import Rig
from test_mind_eviction import POLICIES, Memory

from quire.core.events import Evicted, PinsRefused, PinsYielded
from quire.core.terms import Retention, Terms


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
    memory.run([1] * 6, pin=True)
    memory.run([2] * 6, pin=True)
    assert memory.kv.num_pinned == 10
    (event,) = memory.kv.take_events()
    assert isinstance(event, PinsRefused)
    assert (event.request_id, event.num_blocks, event.num_pinned) == ("2", 2, 4)
    memory.evict(20)
    assert (memory.has([1] * 6), memory.has([2] * 6)) == (6, 4), "its begin is what is of use"
    assert memory.kv.take_events() == []


def test_blocks_that_two_pins_share_count_once_and_stay_for_the_last_one():
    memory = Memory()
    memory.run([1, 1, 2, 2], pin=True, ttl=5.0)
    memory.run([1, 1, 3, 3], pin=True, ttl=9.0)
    assert memory.kv.num_pinned == 6
    memory.evict(9, now=6.0)
    assert (memory.has([1, 1, 2, 2]), memory.has([1, 1, 3, 3])) == (2, 4)
    assert memory.kv.num_pinned == 4


def test_a_pin_survives_what_is_computed_behind_it_and_whoever_uses_it():
    memory = Memory(block_size=2)
    memory.run([1, 1, 2, 2, 3], pin=True, ttl=50.0)
    memory.run([1, 1, 2, 2, 3, 4, 5, 6], now=1.0)
    memory.run([1, 1, 2, 9], now=2.0)
    memory.evict(9, now=3.0)
    assert memory.has([1, 1, 2, 2, 3, 4]) == 4, "whole blocks"
    assert memory.evict(9, now=51.0) == 2


def test_the_latest_request_of_a_session_can_end_its_pin():
    memory = Memory(block_size=2)
    memory.run([1] * 6, pin=True, session="s")
    memory.run([*[1] * 6, *[2] * 6], now=1.0, pin=True, session="s")
    assert memory.kv.num_pinned == 6
    memory.run([*[1] * 6, *[2] * 6, 3, 3], now=2.0, session="s")
    assert memory.kv.num_pinned == 0
    assert memory.evict(9, now=3.0) == 7


def test_the_ttl_of_a_session_begins_with_the_end_of_its_latest_request():
    memory = Memory()
    memory.run([1, 1, 1], pin=True, ttl=10.0, session="s")
    memory.run([1, 1, 1, 2], now=8.0, pin=True, ttl=10.0, session="s")
    memory.evict(9, now=12.0)
    assert memory.has([1, 1, 1, 2]) == 4
    assert memory.evict(9, now=18.5) == 4


def test_many_pins_of_one_prompt_cost_no_more_than_a_few():
    memory = Memory()
    for i in range(50):
        memory.run([1, 1, 1], now=float(i), pin=True, ttl=100.0 - i)
    wishes = memory.kv.index.forest.wishes
    assert len(wishes._nodes) <= 4
    assert memory.kv.num_pinned == 3
    assert memory.evict(3, now=90.0) == 0
    assert memory.evict(3, now=100.5) == 3


def test_pins_yield_to_a_sequence_that_would_wait_for_ever_the_weakest_first():
    memory = Memory(num_blocks=20)
    memory.run([1] * 5, pin=True, ttl=100.0)
    memory.run([2] * 5, pin=True, ttl=50.0)
    assert memory.begin([3] * 14, spare=[0]) is None, "others run: it can wait"
    assert memory.kv.num_pinned == 10
    assert memory.begin([3] * 14) is not None
    (event,) = memory.kv.take_events()
    assert isinstance(event, PinsYielded)
    assert event.num_blocks == 5
    assert (memory.has([1] * 5), memory.kv.num_pinned) == (5, 5)


def test_a_failed_step_ends_the_pins_of_what_it_did_not_write():
    memory = Memory()
    memory.begin([1, 1, 1], pin=True)
    memory.end(1)
    memory.begin([2, 2])
    memory.kv.index.forest.void({node.blocks[0][0] for node in memory.leaves})
    assert memory.kv.num_pinned == 0
    assert memory.kv.check() == []


# With the scheduler


def rig_with(eviction: str, **options) -> Rig:
    return Rig(prefix_index="radix", eviction=eviction, **({"num_blocks": 24, "steps_in_flight": 2} | options))


def talk(rig: Rig, num_requests: int) -> None:
    """Chats that go on, with wishes of all kinds, in a pool that is too small."""
    rng, contexts = Random(1), [[i] * 6 for i in range(4)]
    for number in range(num_requests):
        which = rng.randrange(4)
        prompt = contexts[which][-36:] + [rng.randrange(50) for _ in range(rng.randint(1, 6))]
        wish = Retention(
            priority=rng.choice((10, 50, 90)),
            ttl=rng.choice((None, 0.01, 1.0)),
            pin=rng.random() < 0.4,
            session=rng.choice((None, f"chat {which}")),
        )
        rig.add(str(number), prompt, max_tokens=rng.randint(1, 9), n=rng.choice((1, 1, 2)), terms=Terms(retention=wish))
        for _ in range(rng.randint(0, 6)):
            rig.step()
        contexts[which] = prompt
    most = 5000
    while rig.engine.has_work:
        rig.step()
        most -= 1
        assert most > 0, "somebody waits for ever"


@pytest.mark.parametrize("eviction", POLICIES)
def test_wishes_change_no_token_and_a_journal_replays(eviction):
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
    events = list(rig.scheduler.accounts.events)
    evicted = [event for event in events if isinstance(event, Evicted)]
    assert evicted
    assert all(event.policy == eviction and "age" in event.reason for event in evicted)
    assert any(isinstance(event, (PinsRefused, PinsYielded)) for event in events)
    assert not rig.scheduler.leaks
    rig.scheduler.flush(rig.now)
    assert rig.cache.pools.num_free == rig.cache.pools.num_blocks


def test_a_request_as_long_as_the_pool_runs_beside_pins():
    rig = rig_with("lru", num_blocks=24, max_model_len=96)
    rig.add("pinned", list(range(40)), max_tokens=4, terms=Terms(retention=Retention(pin=True)))
    rig.run()
    assert rig.cache.num_pinned == 10
    rig.add("long", [7] * 60, max_tokens=30)
    rig.run()
    assert rig.reasons["long", 0] == "length"
    assert any(isinstance(event, PinsYielded) for event in rig.scheduler.accounts.events)
