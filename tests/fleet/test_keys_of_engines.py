"""A router knows exactly the blocks of all engines: after any steps, evictions, failed steps, flushes and deaths."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from cached_block_keys import keys_in
from example_budget import examples
from fake_engines import FACTS
from scripted_engine import Rig

from quire.cache.kv_cache import KVCache
from quire.core.adapter import Adapter
from quire.core.block_keys import BlockKeys, state_key, token_key
from quire.core.request import NO_NAMESPACE, Namespace, Request
from quire.core.scheduling_params import Program, SchedulingParams
from quire.core.step import Pooling
from quire.fleet.request_keys import RequestKeys
from quire.fleet.routing import Router, RouterConfig
from quire.params import SamplingParams
from quire.startup.replica_share import ReplicaShare, block_keys

SIZE = 4
SHARE = ReplicaShare(0, 2, secret=bytes(32))
KEYS = BlockKeys(SIZE, b"s" * 32, "model")


class Engines:
    """Engines whose reports a router gets after each turn, in order."""

    def __init__(self, num_replicas, rng, steps_in_flight, num_states):
        self.rng, self.steps_in_flight, self.num_states = rng, steps_in_flight, num_states
        self.router = Router(
            RouterConfig(
                routing="predicted",
                num_replicas=num_replicas,
                block_size=SIZE,
                num_blocks=40,
                max_num_seqs=8,
                max_num_batched_tokens=32,
                has_states=num_states > 0,
            )
        )
        self.rigs = [self.start() for _ in range(num_replicas)]
        self.num_failed = self.num_added = 0

    def start(self):
        rig = Rig(
            num_blocks=40,
            prefix_index="radix",
            seed=self.rng.randrange(10**6),
            fails=lambda _step: self.rng.random() < 0.05,
            steps_in_flight=self.steps_in_flight,
            max_model_len=80,
            states=self.num_states,
        )
        rig.engine.report_keys(KEYS)
        return rig

    def die(self, replica):
        self.num_failed += self.rigs[replica].num_failures
        self.rigs[replica] = self.start()
        self.router.lose_cache(replica)

    def add(self, replica):
        prompt = [self.rng.randrange(2) for _ in range(self.rng.randrange(1, 40))]
        namespace = Namespace(self.rng.choice("ab"), "", "", deterministic=False)
        self.num_added += 1
        self.rigs[replica].add(f"r{self.num_added}", prompt, namespace=namespace, max_tokens=self.rng.randrange(1, 12))

    def turn(self, replica):
        rig = self.rigs[replica]
        if rig.engine.has_work:
            rig.step()
        self.router.update_keys(replica, rig.engine.take_key_changes())
        known = self.router.keys.of(replica)
        assert known == keys_in(rig.cache, KEYS)
        return len(known)

    def found(self, replica, namespace, tokens):
        """Blocks of a prompt that a replica can use: as the router knows, and as the cache finds."""
        keys = KEYS.chain(token_key(tokens), namespace)
        match = self.rigs[replica].cache.match_prefix(namespace, tokens)
        return self.router.keys.num_blocks(keys, {})[replica], match.num_tokens // SIZE


@pytest.mark.parametrize("num_states", [0, 12], ids=["", "states"])
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_the_map_is_the_union_of_the_engines_blocks(steps_in_flight, num_states):
    for seed in range(examples(6)):
        rng = Random(seed)
        engines = Engines(3, rng, steps_in_flight, num_states)
        most = evicted = 0
        for _ in range(200):
            replica = rng.randrange(3)
            match rng.randrange(30):
                case 0:
                    evicted += engines.rigs[replica].engine.stats().kv_blocks_evicted
                    engines.die(replica)
                case 1:
                    engines.rigs[replica].engine.flush_cache()
                case kind if kind < 12:
                    engines.add(replica)
            most = max(most, engines.turn(replica))
        union = set().union(*(keys_in(rig.cache, KEYS) for rig in engines.rigs))
        assert len(engines.router.keys) == len(union)
        assert most > 10 and evicted > 0 and engines.num_failed > 0


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_router_finds_the_blocks_up_to_the_deepest_snapshot_as_the_cache_does(steps_in_flight):
    total = 0
    for seed in range(examples(10)):
        rng = Random(seed)
        engines = Engines(1, rng, steps_in_flight, num_states=12)
        for _ in range(80):
            if rng.random() < 0.4:
                engines.add(0)
            engines.turn(0)
        engines.rigs[0].run()
        engines.turn(0)
        found = {}
        for (namespace, _), root in engines.rigs[0].cache.index.trees.roots.items():
            for leaf in (node for node in root.walk() if not node.children):
                tokens = tuple(np.frombuffer(leaf.path, np.int64).tolist())
                found[namespace, tokens] = engines.found(0, namespace, tokens)
        for (namespace, tokens), (known, usable) in found.items():
            assert usable <= known + (steps_in_flight - 1), "a snapshot may have an input of the next block"
            assert any(
                number >= known
                for (other, others), (_, number) in found.items()
                if (other, others[: known * SIZE]) == (namespace, tokens[: known * SIZE])
            ), "no prompt that begins with these blocks can use them"
            total += usable
    assert total > 50


def test_a_snapshot_is_reported_once_its_step_is_committed_and_until_it_leaves():
    rig = Rig(num_blocks=200, prefix_index="radix", states=3, steps_in_flight=2)
    rig.engine.report_keys(KEYS)
    common = [1] * 19
    keys = list(KEYS.chain(token_key(common), NO_NAMESPACE))
    rig.add("warm", [9] * 20, max_tokens=4)  # from now on the engine predicts seconds
    rig.run()
    rig.add("first", [*common, *[2] * 9], max_tokens=2)
    rig.run()
    assert set(keys) <= set(rig.engine.take_key_changes().added)
    rig.add("second", [*common, *[3] * 9], max_tokens=2)
    rig.step()
    assert state_key(keys[-1]) not in rig.engine.take_key_changes().added
    rig.step()
    assert state_key(keys[-1]) in rig.engine.take_key_changes().added
    for token in range(10, 18):
        rig.add(f"{token}", [token] * 20, max_tokens=2)
        rig.run()
    changes = rig.engine.take_key_changes()
    assert state_key(keys[-1]) in changes.removed
    assert not {*keys} & {*changes.removed}, "keys and values stay"


def test_a_request_has_the_keys_that_its_engine_reports():
    public = (1, 2, 3, 4, 5, 6, 7, 8, 9)
    rig = Rig(
        num_blocks=512,
        prefix_index="radix",
        max_loras=2,
        lora_bytes=10**6,
        new_cache=lambda config: KVCache(replace(config, public_prefixes=(public,))),
    )
    rig.engine.runner.capabilities = replace(rig.engine.runner.capabilities, deterministic=True)
    info = replace(FACTS, cache=rig.cache.config)
    requested = RequestKeys(info, SHARE)
    rig.engine.report_keys(block_keys(SHARE, info))
    adapter = Adapter("d" * 64, "a", "/a", 1000, 8)
    activated = Adapter("e" * 64, "b", "/b", 1000, 8, (31, 32))
    kinds = [
        {},
        {"namespace": Namespace("t")},
        {"namespace": Namespace("t", "salt")},
        {"deterministic": True},
        {"adapter": adapter},
        {"adapter": activated},
    ]
    seen = set()
    for number, kind in enumerate(kinds):
        for prompt in ([*public, *range(10, 40)], [20, 21, 31, 32, 23, 24, 25, 31, 32, 33, 34, 35, 36], [40] * 12):
            name = f"r{number} {len(prompt)}"
            rig.add(name, prompt, max_tokens=1, **kind)
            rig.run()
            seen |= set(rig.engine.take_key_changes().added)
            request = made(name, prompt, **kind)
            keys = requested.routed(request).keys
            assert len(keys) == len(prompt) // SIZE
            assert seen.issuperset(keys), (kind, prompt)
    assert seen == keys_in(rig.cache, block_keys(SHARE, info))
    for kind in ({"prompt_logprobs": 0}, {"pooling": Pooling.MEAN}):  # all of the prompt is computed
        assert requested.routed(made("p", [40] * 12, **kind)).keys == []
    program = SchedulingParams(program=Program(id="p"))
    routed = requested.routed(made("p", [40] * 12, scheduling_params=program, namespace=Namespace("t"), n=3), 5)
    assert (routed.num_tokens, routed.num_sequences, routed.program) == (17, 3, "t\np")


def made(name, prompt, *, namespace=NO_NAMESPACE, adapter=None, pooling=Pooling.NONE, scheduling_params=None, **params):
    """A request as a front end has it."""
    return Request(
        name,
        prompt,
        SamplingParams(**{"temperature": 0.0, "max_tokens": 1} | params),
        namespace=namespace,
        adapter=adapter,
        pooling=pooling,
        scheduling_params=scheduling_params or SchedulingParams(),
    )
