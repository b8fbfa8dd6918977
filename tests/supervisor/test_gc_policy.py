"""Full policy collections: rare while requests wait, done when idle, and policy is found in the end."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from quire.supervisor.gc_policy import GCPolicy


class Clock:
    """A clock that only full collections advance."""

    def __init__(self) -> None:
        self.now = 100.0
        self.num_full = 0
        self.seconds = 1.0  # duration of a full collection

    def __call__(self) -> float:
        return self.now

    def collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            self.num_full += 1
            self.now += self.seconds


class Knot:
    """An object with a reference to itself."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def clock() -> Iterator[Clock]:
    thresholds = gc.get_threshold()
    clock = Clock()
    gc.callbacks.append(clock.collected)
    yield clock
    gc.callbacks.remove(clock.collected)
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def grow(prompts: list[list[list[int]]], count: int) -> None:
    """Append `count` prompts, as to a queue."""
    for _ in range(count):
        prompts.append([[1, 2, 3]])


def middle_age() -> None:
    """Move all objects to the oldest generation, so that only a full collection finds policy."""
    gc.collect(1)
    gc.collect(1)


def test_a_growing_queue_is_searched_by_default_and_not_any_more(clock):
    queue: list[list[list[int]]] = []
    gc.set_threshold(700, 10, 10)  # Python 3.13 has other thresholds
    gc.freeze()
    gc.collect()
    before = clock.num_full
    grow(queue, 60_000)
    assert clock.num_full > before
    GCPolicy(clock)
    before = clock.num_full
    grow(queue, 60_000)
    assert clock.num_full == before


def test_an_idle_engine_runs_one_full_collection_per_interval(clock):
    policy = GCPolicy(clock)
    held = Knot()
    knot = weakref.ref(held)
    middle_age()
    del held
    gc.collect(1)
    assert knot() is not None, "it is too old for that"
    before = clock.num_full
    policy.collect_if_due(idle=True)
    assert knot() is None
    assert clock.num_full == before + 1
    middle_age()
    clock.now += 50
    policy.collect_if_due(idle=True)
    assert clock.num_full == before + 1
    clock.now += 50
    policy.collect_if_due(idle=True)
    assert clock.num_full == before + 2


def test_while_requests_wait_full_collections_take_a_small_share_of_the_time(clock):
    policy = GCPolicy(clock)
    middle_age()
    policy.collect_if_due(idle=True)
    before = clock.num_full
    for _ in range(4000):
        clock.now += 1.0
        if not gc.get_count()[2]:
            middle_age()
        policy.collect_if_due(idle=False)
    assert clock.num_full - before == 2


def test_a_full_collection_that_was_short_says_nothing_of_the_next_one(clock):
    clock.seconds = 1e-3
    policy = GCPolicy(clock)
    before = clock.num_full
    for seconds, num_full in ((299.0, 0), (2.0, 1), (299.0, 1)):
        clock.now += seconds
        middle_age()
        policy.collect_if_due(idle=False)
        assert clock.num_full - before == num_full


def test_no_full_collection_runs_without_long_lived_objects(clock):
    gc.disable()
    policy = GCPolicy(clock)
    before = clock.num_full
    clock.now += 1e6
    policy.collect_if_due(idle=True)
    gc.enable()
    assert clock.num_full == before
