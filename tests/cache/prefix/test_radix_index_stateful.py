"""KVCache with the radix tree, beside a model of the memory: reuse is exact to the token, and no block leaks."""

from random import Random

import pytest
from example_budget import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from prefix_cache_model import PUBLIC_TOKEN, Model, radix_config

from quire.cache.in_flight import InFlight
from quire.cache.prefix.index import EvictionCause

SEEDS = st.integers(0, 2**20).map(Random)
SIZES = st.sampled_from((1, 4, 8))
PUBLIC = st.sampled_from(((), ((PUBLIC_TOKEN,) * 20,), ((PUBLIC_TOKEN,) * 5, (7, 7, 7, 3, 7, 7, 7, 7, 7, 7))))
MOST_SEQUENCES = 6


class PrefixMachine(RuleBasedStateMachine):
    """Sequences arrive, run, branch, fork, are preempted and end in any order, with two steps in flight."""

    model: Model
    failing = st.sampled_from((False,))

    @precondition(lambda self: len(self.model.live) < MOST_SEQUENCES)
    @rule(rng=SEEDS)
    def arrive(self, rng: Random) -> None:
        self.model.arrive(rng)

    @precondition(lambda self: len(self.model.in_flight) < 2)
    @rule(rng=SEEDS, data=st.data())
    def plan(self, rng: Random, data: st.DataObject) -> None:
        self.model.plan(rng, fails=data.draw(self.failing))

    @precondition(lambda self: self.model.in_flight)
    @rule()
    def collect(self) -> None:
        self.model.collect()

    @precondition(lambda self: self.model.live)
    @rule(rng=SEEDS)
    def end(self, rng: Random) -> None:
        self.model.end(rng.choice(list(self.model.live.values())))

    @precondition(lambda self: self.model.running())
    @rule(rng=SEEDS)
    def preempt(self, rng: Random) -> None:
        self.model.preempt(rng.choice(self.model.running()))

    @precondition(lambda self: self.model.running() and len(self.model.live) < MOST_SEQUENCES)
    @rule(rng=SEEDS, copies=st.booleans())
    def multiply(self, rng: Random, *, copies: bool) -> None:
        parent = rng.choice(self.model.running())
        (self.model.branch if copies else self.model.fork)(rng, parent)

    @invariant()
    def holds(self) -> None:
        self.model.check()

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.model.wind_up()


class ExactMachine(PrefixMachine):
    """Without evictions and failures, a sequence begins with the longest prefix that was ever computed."""

    @initialize(block_size=SIZES, public=PUBLIC, activates=st.booleans())
    def begin(self, block_size: int, public, *, activates: bool) -> None:
        self.model = Model(radix_config(4000, block_size, public=public), exact=True, activates=activates)


class RoughMachine(PrefixMachine):
    """With few blocks, failing steps, windows, flushes and corruption, all matched KV is correct and no block leaks."""

    failing = st.sampled_from((False, False, False, True))

    @initialize(
        block_size=SIZES,
        public=PUBLIC,
        more=st.integers(0, 10),
        windows=st.sampled_from(((0,), (0,), (6,), (0, 6), (5, 0), (1,), (3, 9))),
        activates=st.booleans(),
    )
    def begin(self, block_size: int, public, more: int, windows: tuple[int, ...], *, activates: bool) -> None:
        num_blocks = -(-Model.longest // block_size) + 2 + more
        self.model = Model(radix_config(num_blocks, block_size, windows, public), activates=activates)

    @rule(group=st.integers(0, 1), count=st.integers(1, 5))
    def evict(self, group: int, count: int) -> None:
        cache = self.model.cache
        group %= len(cache.pools)
        before = cache.pools[group].num_free
        freed = cache.index.evict(group, count, EvictionCause())
        assert cache.pools[group].num_free == before + freed
        assert freed <= count

    @rule()
    def flush(self) -> None:
        idle = self.model.cache.pools.num_idle
        assert self.model.cache.flush() == idle - self.model.cache.pools.num_idle

    @precondition(lambda self: self.model.running() and not self.model.in_flight)
    @rule(rng=SEEDS)
    def corrupt(self, rng: Random) -> None:
        """Corrupt a reference count or the index. `check` reports it, and `repair` repairs it."""
        cache = self.model.cache
        nodes = [node for node in cache.index.trees.nodes() if node.parent is not None]
        if nodes and rng.random() < 0.5:
            rng.choice(nodes).end += 1
        else:
            pool = rng.choice(cache.pools)
            used = [block for block in range(pool.num_blocks) if pool.num_refs(block)]
            if not used:
                return
            pool.incr_ref(rng.choice(used))
        assert cache.check() != []
        cache.repair()


ExactMachine.TestCase.settings = settings(max_examples=examples(120), stateful_step_count=60, deadline=None)
RoughMachine.TestCase.settings = settings(max_examples=examples(200), stateful_step_count=60, deadline=None)
TestEveryPrefixReuseEqualsAModel = ExactMachine.TestCase
TestNothingLeaksWithFailedSteps = RoughMachine.TestCase


def drive(model: Model, rng: Random, num_operations: int, *, fails: float = 0.0, every: int = 1) -> None:
    """Run the operations of the machines, but much faster. Check everything after every `every` operations."""
    for number in range(num_operations):
        kind = rng.random()
        if kind < 0.25:
            if len(model.live) < MOST_SEQUENCES:
                model.arrive(rng)
        elif kind < 0.6:
            if len(model.in_flight) < 2:
                model.plan(rng, fails=rng.random() < fails)
        elif kind < 0.9:
            if model.in_flight:
                model.collect()
        elif model.running():
            seq = rng.choice(model.running())
            (model.preempt, model.end, lambda one: model.branch(rng, one), lambda one: model.fork(rng, one))[
                rng.randrange(4)
            ](seq)
        if number % every == 0:
            model.check()
    model.wind_up()


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16, 32])
def test_reuse_is_the_longest_computed_prefix_whatever_the_block_size(block_size):
    model = Model(radix_config(20_000, block_size), exact=True, budget=3 * block_size)
    model.longest = max(60, 4 * block_size)
    drive(model, Random(block_size), 2500, every=100)
    assert model.num_admitted > 50 and model.num_reused > 2 * model.num_admitted, "it hits"
    assert model.num_uncertain < 0.05 * model.num_admitted


@pytest.mark.parametrize("seed", range(4))
def test_nothing_leaks_over_many_random_operations(seed):
    """100 000 operations over all seeds in the profile `thorough`, on pools that are too small, with failing steps."""
    num_operations = examples(25_000)
    rng = Random(seed)
    block_size, windows = ((4, (0,)), (1, (0,)), (8, (0, 6)), (4, (6,)))[seed]
    public = ((), ((PUBLIC_TOKEN,) * 9,), (), ((PUBLIC_TOKEN,) * 20,))[seed]
    model = Model(radix_config(60 // block_size + 8, block_size, windows, public))
    drive(model, rng, num_operations, fails=0.1, every=500)
    assert model.num_admitted > num_operations / 50


def test_the_model_sees_a_cache_that_reuses_what_a_failed_step_wrote(monkeypatch):
    """The tests above can fail: they find blocks that were never written."""
    monkeypatch.setattr(InFlight, "pop_writes", lambda self, step_id: set())
    with pytest.raises(AssertionError, match=r"holds other tokens|does not read back|builds on"):
        drive(Model(radix_config(40, 4)), Random(1), 2000, fails=0.3)
