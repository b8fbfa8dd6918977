"""Crash bisection: the request that crashes the engine is found, and no other one fails.

Suspects runs with a model of the front end and of many engines.
"""

import random
from collections import deque
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.fleet.crash_isolation import MAX_CRASHES_ALONE, CrashBisection, Crashes

PARTS = 8  # into which a group of suspects is split
MAX_ROWS = 64
MAX_STEPS = 20_000  # of all engines of one case


def deaths_needed(num_rows: int) -> int:
    """The most deaths in a search for one culprit among `num_rows` requests.

    Two make suspects. One is for each split of its group but the first. One is beside those cleared before it, and
    ALONE are of its own.
    """
    splits = 0
    while num_rows > 1:
        num_rows, splits = -(-num_rows // PARTS), splits + 1
    return 2 + max(0, splits - 1) + 1 + MAX_CRASHES_ALONE


@dataclass
class Asked:
    """A request with `prompt` prompt tokens, which ends after `end` positions."""

    name: str
    prompt: int
    end: int
    deadly_at: int = 0  # the step with this position kills the engine; 0: none does
    known: int = 0  # positions whose tokens the front end has: at least the prompt
    highest: int = 0  # highest launched position
    hits: int = 0  # random kills that met it alone since it last progressed

    def __post_init__(self):
        self.known = self.prompt


@dataclass
class Running:
    """A request in one engine."""

    asked: Asked
    computed: int = 0  # by steps that were launched
    written: int = 0  # by steps that are committed


@dataclass
class World:
    """The front end's part of the protocol, as in Fleet, and its engines."""

    open: dict[str, Asked]
    later: list[Asked]  # requests that arrive while engines run
    dice: random.Random
    depth: int  # steps in flight
    chunk: int  # positions of a request per step
    max_rows: int
    kill_every: int  # a random kill in one of this many steps; 0: never
    max_kills: int
    ends_early: float  # probability that a stop string or an abort ends a row of a step
    suspects: CrashBisection = field(default_factory=lambda: CrashBisection(Crashes()))
    engine: dict[str, Running] = field(default_factory=dict)
    in_flight: deque = field(default_factory=deque)
    blamed: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    deaths: int = 0
    kills: int = 0
    steps: int = 0

    def run(self):
        self.submit()
        while self.open or self.later:
            self.steps += 1
            if self.later and self.dice.random() < 0.2:
                asked = self.later.pop()
                self.open[asked.name] = asked
                self.submit()
            assert self.steps < MAX_STEPS, (
                f"held for ever: {list(self.open)}, of which may run {self.suspects.current_group}"
            )
            self.step()

    def submit(self):
        trying = self.suspects.current_group
        for name in list(self.open) if trying is None else trying:
            if name not in self.engine and name in self.open:
                self.engine[name] = Running(self.open[name])

    def step(self):
        """Launch a step. Commit the oldest one if enough are in flight or there is nothing to launch."""
        rows = self.plan()
        if rows:
            self.in_flight.append(rows)
            for running, stop in rows.values():
                running.asked.highest = max(running.asked.highest, stop)
            if self.dies(rows):
                return
        if self.in_flight and (len(self.in_flight) >= self.depth or not rows):
            self.commit(self.in_flight.popleft())

    def plan(self):
        rows = {}
        for name, running in self.engine.items():
            ready = min(running.asked.end, max(running.asked.known, running.written + self.depth))
            stop = min(running.computed + self.chunk, ready)
            if stop > running.computed and len(rows) < self.max_rows:
                rows[name] = (running, stop)
        return rows

    def dies(self, rows):
        deadly = any(running.computed < running.asked.deadly_at <= stop for running, stop in rows.values())
        for running, stop in rows.values():
            running.computed = stop
        if deadly and self.depth > 1 and self.dice.random() < 0.5:  # another step is launched before the crash
            more = self.plan()
            if more:
                self.in_flight.append(more)
        if deadly:
            self.die()
            return True
        if self.kill_every and self.kills < self.max_kills and self.dice.random() * self.kill_every < 1:
            return self.kill()
        return False

    def kill(self):
        """A random kill, except the third one in a row that would meet a request that runs alone without progress."""
        met = {name for step in self.in_flight for name in step}
        if len(met) == 1:
            asked = self.open.get(*met)
            if asked is not None:
                if asked.hits == MAX_CRASHES_ALONE - 1:
                    return False
                asked.hits += 1
        self.kills += 1
        self.die()
        return True

    def die(self):
        self.deaths += 1
        rows = {}
        for step in self.in_flight:
            for name, (_, stop) in step.items():
                rows[name] = max(stop, rows.get(name, 0))
        known = {name: stop for name, stop in rows.items() if name in self.open}
        self.in_flight.clear()
        self.engine.clear()
        culprit = self.suspects.record_crash(known, len(rows) - len(known))
        if culprit is not None:
            self.blamed.append(culprit)
            del self.open[culprit]
        self.submit()

    def commit(self, rows):
        if self.suspects.has_suspects:
            for name, (_, stop) in rows.items():
                self.suspects.record_progress(name, stop)
            self.submit()
        for name, (running, stop) in rows.items():
            asked = running.asked
            running.written = stop
            asked.known = max(asked.known, stop)
            if stop >= asked.highest:
                asked.hits = 0
            early = not asked.deadly_at and self.dice.random() < self.ends_early
            if (stop >= asked.end or early) and name in self.open:
                self.finished.append(name)
                self.end(name)

    def end(self, name):
        """End a request, even if it did not pass the position at which it died."""
        del self.open[name]
        self.engine.pop(name, None)
        self.suspects.forget(name)
        self.submit()


def world_of(seed, *, num_poisons, kill_every=0, max_kills=0):
    """A random world of 1 to 64 requests, of which `num_poisons` are deadly (or all)."""
    dice = random.Random(seed)
    many = dice.choice([1, 2, 3, 8, 20, MAX_ROWS])
    requests = []
    for i in range(many):
        prompt = dice.randint(1, 30)
        requests.append(Asked(f"r{i}", prompt, prompt + dice.randint(1, 12)))
    for asked in requests[:num_poisons]:
        asked.deadly_at = dice.randint(1, asked.end)
    dice.shuffle(requests)
    begun = many if dice.random() < 0.5 else dice.randint(1, many)
    return World(
        {asked.name: asked for asked in requests[:begun]},
        requests[begun:],
        dice,
        depth=dice.randint(1, 2),
        chunk=dice.choice([4, 16, 64]),
        max_rows=dice.choice([3, MAX_ROWS]),
        kill_every=kill_every,
        max_kills=max_kills,
        ends_early=dice.choice([0.0, 0.1]),
    )


def run(world):
    """All requests end, and only the deadly ones are blamed."""
    everybody = [*world.open.values(), *world.later]
    world.run()
    assert sorted(world.blamed) == sorted(asked.name for asked in everybody if asked.deadly_at)
    assert sorted(world.finished) == sorted(asked.name for asked in everybody if not asked.deadly_at)
    assert world.suspects.current_group is None
    assert not world.suspects.has_suspects


SEEDS = st.integers(0, 2**32 - 1)


@given(seed=SEEDS, num_poisons=st.integers(0, 2))
@settings(max_examples=300)
def test_each_crashing_request_is_found_in_few_crashes_and_all_others_finish(seed, num_poisons):
    world = world_of(seed, num_poisons=num_poisons)
    num_rows = min(len(world.open) + len(world.later), world.max_rows)
    run(world)
    # With two steps in flight, the other step can have an innocent request at one death or two.
    assert world.deaths <= len(world.blamed) * (deaths_needed(num_rows) + 2 * (world.depth - 1))


@given(seed=SEEDS, kill_every=st.sampled_from([2, 4, 10]))
@settings(max_examples=200)
def test_random_kills_are_nobodys_fault(seed, kill_every):
    """No request is blamed if no three kills in a row meet it alone and without progress."""
    run(world_of(seed, num_poisons=0, kill_every=kill_every, max_kills=60))


@given(seed=SEEDS, num_poisons=st.integers(1, 2), kill_every=st.sampled_from([3, 10]))
@settings(max_examples=200)
def test_poison_is_found_among_random_kills(seed, num_poisons, kill_every):
    world = world_of(seed, num_poisons=num_poisons, kill_every=kill_every, max_kills=20)
    run(world)


def test_so_many_deaths_find_one_of_many():
    assert [deaths_needed(n) for n in (1, 8, 9, 64, 65, 512)] == [6, 6, 7, 7, 8, 8]


def test_one_crash_starts_no_bisection_and_suspicion_ends_with_progress():
    suspects = CrashBisection(Crashes())
    assert suspects.record_crash({"a": 5, "b": 9}) is None
    assert suspects.current_group is None
    assert suspects.has_suspects
    suspects.record_progress("a", 5)
    suspects.record_progress("b", 8)  # not as far as it was at the crash
    assert suspects.has_suspects
    suspects.record_progress("b", 9)
    assert not suspects.has_suspects


def test_a_request_that_runs_alone_fails_after_the_maximum_of_crashes():
    suspects = CrashBisection(Crashes())
    assert [suspects.record_crash({"a": 5}) for _ in range(MAX_CRASHES_ALONE + 1)] == [None] * MAX_CRASHES_ALONE + ["a"]
    assert suspects.current_group is None
    assert not suspects.has_suspects


def test_progress_resets_the_crash_count_of_a_request():
    suspects = CrashBisection(Crashes())
    for _ in range(20):
        for _ in range(MAX_CRASHES_ALONE):
            assert suspects.record_crash({"a": 5}) is None
        suspects.record_progress("a", 5)
    assert not suspects.has_suspects


def test_coming_as_far_as_in_a_smaller_step_is_not_enough():
    """The highest position counts: a step that stopped before it does not clear the request."""
    suspects = CrashBisection(Crashes())
    suspects.record_crash({"a": 2048})
    suspects.record_crash({"a": 512})
    suspects.record_progress("a", 512)
    assert suspects.current_group == ("a",)


def test_deaths_in_company_that_has_ended_since_are_not_deaths_alone():
    suspects = CrashBisection(Crashes())
    assert [suspects.record_crash({"a": 5}, num_ended=1) for _ in range(10)] == [None] * 10
    assert suspects.current_group == ("a",)


def test_bisection_groups_run_in_turn_and_a_finished_request_blocks_none():
    suspects = CrashBisection(Crashes())
    names = [f"r{i}" for i in range(16)]
    for _ in range(2):
        suspects.record_crash(dict.fromkeys(names, 5))
    assert suspects.current_group == ("r0", "r1")
    suspects.record_progress("r0", 5)
    assert suspects.current_group == ("r1",)
    suspects.forget("r1")  # it ended at any position
    assert suspects.current_group == ("r2", "r3")
    suspects.record_crash({"r2": 5})  # r3 was not in that step
    assert suspects.current_group == ("r2",)
    suspects.record_progress("r2", 5)
    assert suspects.current_group == ("r3",)
    for name in names:
        suspects.forget(name)
    assert suspects.current_group is None
    assert not suspects.has_suspects
