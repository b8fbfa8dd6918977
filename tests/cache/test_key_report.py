"""The reported keys are those of the committed whole blocks in the trees, and a router finds prompts by them."""

from random import Random

import pytest
from cached_block_keys import keys_in
from example_budget import examples
from prefix_cache_model import PUBLIC_TOKEN, Model, radix_config

from quire.cache.key_report import KeyReport
from quire.cache.prefix import radix_tree
from quire.cache.prefix.index import EvictionCause, PublicPrefixes
from quire.core.block_keys import BYTES_PER_TOKEN, BlockKeys, token_key


class Router:
    """What a router knows of a cache: the keys so far."""

    def __init__(self, model: Model) -> None:
        self.cache = model.cache
        config = model.cache.config
        self.size = config.block_size * BYTES_PER_TOKEN
        self.block_keys = BlockKeys(config.block_size, b"secret", "model")
        self.public = PublicPrefixes(config.public_prefixes, self.size)
        self.report = KeyReport(model.cache.index, self.block_keys, self.public)
        self.keys: set[bytes] = set()

    def hear(self) -> None:
        changes = self.report.take(self.cache.unwritten_blocks)
        assert self.keys.isdisjoint(changes.added)
        assert self.keys.issuperset(changes.removed)
        self.keys = (self.keys | set(changes.added)) - set(changes.removed)

    def num_found(self, namespace, tokens) -> int:
        """Leading blocks of a prompt that have a key."""
        data = token_key(tokens)
        keys = self.block_keys.chain(
            data,
            namespace,
            public=self.public.root_key(namespace)[0],
            num_public=self.public.num_blocks(namespace, data),
        )
        return next((i for i, key in enumerate(keys) if key not in self.keys), len(data) // self.size)


def drive(model: Model, rng: Random, num_operations: int, *, fails: float = 0.0) -> Router:
    """Random operations, with the router's keys compared after each."""
    router = Router(model)
    for _ in range(num_operations):
        kind = rng.random()
        if kind < 0.25:
            if len(model.live) < 6:
                model.arrive(rng)
        elif kind < 0.6:
            if len(model.in_flight) < 2:
                model.plan(rng, fails=rng.random() < fails)
        elif kind < 0.9:
            if model.in_flight:
                model.collect()
        elif kind < 0.92:
            model.cache.index.evict(0, rng.randrange(1, 6), EvictionCause())
        elif model.running():
            seq = rng.choice(model.running())
            (model.preempt, model.end, lambda one: model.branch(rng, one), lambda one: model.fork(rng, one))[
                rng.randrange(4)
            ](seq)
        if rng.random() < 0.7:  # otherwise changes of several operations come together
            router.hear()
            assert router.keys == keys_in(router.cache, router.block_keys)
    return router


@pytest.mark.parametrize("activates", [False, True])
@pytest.mark.parametrize("public", [(), ((PUBLIC_TOKEN,) * 9, (7, 7, 3, 3, 3))], ids=["", "public"])
@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("windows", [(0,), (0, 6)], ids=["", "window"])
def test_reported_keys_are_those_of_written_blocks_after_any_operation(block_size, public, activates, windows):
    for seed in range(examples(4)):
        config = radix_config(60 // block_size + 8, block_size, windows, public)
        drive(Model(config, activates=activates), Random(seed), 500, fails=0.1)


@pytest.mark.parametrize("activates", [False, True])
@pytest.mark.parametrize("public", [(), ((PUBLIC_TOKEN,) * 9,)], ids=["", "public"])
def test_a_router_finds_the_whole_blocks_that_the_cache_finds(public, activates):
    model, rng = Model(radix_config(4000, 4, (0,), public), activates=activates), Random(7)
    router = drive(model, rng, 400)
    while model.in_flight:
        model.collect()
    model.cache.launched(10**6)
    model.cache.collected(10**6)
    router.hear()
    num_found = 0
    for _ in range(300):
        namespace, tokens = model.prompt(rng)
        match = model.cache.index.match_prefix(namespace, tokens)
        found = router.num_found(namespace, tokens)
        assert found == len(match.blocks[0])
        num_found += found
    assert num_found > 100


def test_no_key_is_known_without_the_secret():
    model = Model(radix_config(400, 4))
    router = drive(model, Random(1), 200)
    assert router.keys
    for namespace, _ in model.cache.index.trees.roots:
        for node in model.cache.index.trees.nodes():
            assert router.keys.isdisjoint(BlockKeys(4, b"", "model").chain(node.path, namespace))


def test_more_changes_than_are_kept_are_found_by_a_walk(monkeypatch):
    monkeypatch.setattr(radix_tree, "MOST_CHANGES", 2)
    drive(Model(radix_config(24, 4)), Random(3), 400, fails=0.1)
