"""Decisions of the scheduler as events with reasons, and explanations made of them."""

from collections import Counter

import pytest
from held_items import waiting_tenants
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import Rig

from quire.core.events import Evicted, PinsRefused, PinsYielded, Refused
from quire.core.explanation import Explanation
from quire.core.request import Namespace
from quire.core.scheduling_params import Retention, SchedulingParams
from quire.errors import DeadlineUnreachable, QueueFull
from quire.scheduler import request_stats


def explained(rig: Rig, request_id: str) -> Explanation:
    explanation = rig.engine.explain(request_id)
    assert explanation is not None
    return explanation


def events(rig: Rig, kind: type) -> list:
    return [event for event in rig.scheduler.request_stats.events if isinstance(event, kind)]


def busy(rig: Rig) -> None:
    """Train the cost model and run a request."""
    for i in range(12):
        rig.add(f"warm {i}", [1 + i] * (10 + 15 * (i % 3)), max_tokens=6)
    rig.run()
    rig.add("busy", [3], max_tokens=60)
    rig.step()


def test_the_explanation_of_an_unreachable_deadline_has_the_prediction():
    rig = Rig(num_blocks=256, max_model_len=900)
    busy(rig)
    with pytest.raises(DeadlineUnreachable) as caught:
        rig.add("late", [7] * 800, max_tokens=90, scheduling_params=SchedulingParams(deadline=0.05))
    late = explained(rig, "late")
    assert (late.state, late.num_prompt_tokens, late.admitted) == ("refused", 800, None)
    assert late.arrived == late.finished
    assert late.refusal is not None
    assert (late.refusal.reason, late.refusal.asked_seconds) == ("deadline", 0.05)
    assert late.refusal.predicted_seconds == caught.value.predicted
    assert late.refusal.error == str(caught.value)
    (event,) = events(rig, Refused)
    assert (event.request_id, event.reason, event.predicted_seconds) == ("late", "deadline", caught.value.predicted)
    rig.run()
    assert rig.replay().difference == ""


def test_a_request_that_finds_the_queue_full_is_explained_with_when_there_is_room():
    rig = Rig(max_num_seqs=1, max_queued_requests=1)
    for name in ("runs", "waits"):
        rig.add(name, [1, 2, 3], max_tokens=9)
        rig.step()
    with pytest.raises(QueueFull) as caught:
        rig.add("third", [1, 2, 3])
    refusal = explained(rig, "third").refusal
    assert refusal is not None
    assert (refusal.reason, refusal.predicted_seconds) == ("queue_full", caught.value.retry_after)
    assert [event.request_id for event in events(rig, Refused)] == ["third"]
    rig.run()
    rig.add("third", [1, 2, 3])
    assert (explained(rig, "third").state, explained(rig, "third").refusal) == ("waiting", None)
    rig.run()
    assert explained(rig, "third").finish_reason == "length"


def test_of_refused_requests_the_latest_are_remembered_and_nothing_else_of_them(monkeypatch):
    monkeypatch.setattr(request_stats, "MOST_ENDED", 30)
    rig = Rig(num_blocks=256, max_model_len=900)
    busy(rig)
    for i in range(100):
        with pytest.raises(DeadlineUnreachable):
            rig.add(f"late {i}", [7] * 800, max_tokens=90, scheduling_params=SchedulingParams(deadline=0.001))
    kept = [i for i in range(100) if rig.engine.explain(f"late {i}") is not None]
    assert kept == list(range(70, 100))
    assert explained(rig, "late 70").state == "refused"
    assert set(rig.scheduler.state.requests) == {"busy"}
    rig.run()
    assert not waiting_tenants(rig.scheduler)


def test_an_explanation_says_that_a_request_ended_since_its_deadline_could_not_be_met():
    rig = Rig(max_num_seqs=1)
    rig.add("runs", [1] * 10, max_tokens=30)
    rig.step()
    rig.add("waits", [1] * 10, max_tokens=4, scheduling_params=SchedulingParams(deadline=0.01))
    rig.run()
    assert rig.reasons["waits", 0] == "abort"
    assert (explained(rig, "waits").finish_reason, explained(rig, "runs").finish_reason) == ("deadline", "length")


@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_each_evicted_block_is_in_the_explanation_of_the_evicting_request(data):
    rig = Rig(
        num_blocks=24,
        max_model_len=60,
        prefix_index=data.draw(st.sampled_from(["radix", "hash"])),
        steps_in_flight=data.draw(st.integers(1, 2)),
        windows=data.draw(st.sampled_from([(0,), (0, 8)])),
    )
    numbers = st.tuples(st.integers(0, 40), st.integers(1, 30), st.integers(1, 12), st.sampled_from("ab"))
    requests = data.draw(st.lists(numbers, min_size=4, max_size=12))
    for i, (first, length, num_output, tenant) in enumerate(requests):
        prompt = [(first + j) % 50 for j in range(length)]
        rig.add(str(i), prompt, max_tokens=num_output, namespace=Namespace(tenant))
        for _ in range(data.draw(st.integers(0, 8))):
            rig.step()
    rig.run()
    by_request = Counter[str]()
    for event in events(rig, Evicted):
        assert event.num_blocks > 0
        by_request[event.request_id] += event.num_blocks
    assert by_request.total() == rig.cache.num_evicted
    for i in range(len(requests)):
        one = explained(rig, str(i))
        assert one.num_evicted_blocks == by_request[str(i)]
        assert sum(eviction.num_blocks for eviction in one.evictions) <= one.num_evicted_blocks
    rig.scheduler.flush(rig.now)
    explained(rig, "0")
    assert sum(event.num_blocks for event in events(rig, Evicted)) == rig.cache.num_evicted


def test_an_explained_eviction_has_its_reason_for_blocks_of_the_same_tenant():
    rig = Rig(num_blocks=8, max_model_len=32, prefix_index="radix")
    ann, bob = Namespace("ann"), Namespace("bob")
    for name, namespace in (("first", ann), ("second", ann), ("other", bob)):
        rig.add(name, [len(name)] * 26, max_tokens=2, namespace=namespace)
        rig.run()
    assert explained(rig, "first").evictions == []
    (own,), (other,) = explained(rig, "second").evictions, explained(rig, "other").evictions
    assert own.num_blocks == explained(rig, "second").num_evicted_blocks > 0
    assert own.policy == "lru"
    assert own.reason["age"] > 0
    assert other.reason == {}
    assert all(event.reason["age"] > 0 for event in events(rig, Evicted))


def test_an_explanation_lists_the_first_evictions_and_counts_all(monkeypatch):
    monkeypatch.setattr(request_stats, "MOST_EVICTIONS", 2)
    rig = Rig(num_blocks=16, max_model_len=64, prefix_index="radix")
    rig.add("before", list(range(40)), max_tokens=9)
    rig.run()
    rig.add("long", [7] * 10, max_tokens=50)
    rig.run()
    one = explained(rig, "long")
    assert len(one.evictions) == 2
    assert one.num_evicted_blocks == rig.cache.num_evicted > 2


def test_rejected_and_revoked_pins_are_in_the_explanation_of_their_request():
    rig = Rig(num_blocks=24, max_model_len=96, prefix_index="radix")
    rig.add(
        "pins",
        list(range(40)),
        max_tokens=20,
        scheduling_params=SchedulingParams(retention=Retention(pin=True)),
    )
    rig.run()
    one = explained(rig, "pins")
    (refused,) = events(rig, PinsRefused)
    assert one.num_blocks_not_pinned == refused.num_blocks > 0
    assert one.num_pinned_blocks_yielded == 0
    rig.add("long", [7] * 60, max_tokens=30)
    rig.run()
    (yielded,) = events(rig, PinsYielded)
    assert yielded.request_id == "pins"
    assert explained(rig, "pins").num_pinned_blocks_yielded == yielded.num_blocks > 0
    assert explained(rig, "long").num_pinned_blocks_yielded == 0
