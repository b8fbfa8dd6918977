"""The map from keys of blocks to replicas, beside a set of each replica."""

from itertools import combinations
from random import Random

import pytest
from example_budget import examples

from quire.cache.key_report import KeyChanges
from quire.core.block_keys import BlockKeys, state_key, token_key
from quire.core.request import Namespace
from quire.fleet.cached_keys import CachedKeys


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_the_map_equals_the_sets_of_the_replicas_after_any_changes():
    for seed in range(examples(60)):
        rng, num_replicas = Random(seed), 1 + seed % 9
        keys, sets = CachedKeys(num_replicas), [set() for _ in range(num_replicas)]
        for _ in range(60):
            replica = rng.randrange(num_replicas)
            own = sets[replica]
            if rng.random() < 0.05:
                keys.forget(replica)
                own.clear()
            gone = {one for one in own if rng.random() < 0.2}
            new = {key(rng.randrange(12)) for _ in range(rng.randrange(9))} - own
            keys.update(replica, KeyChanges(sorted(new), sorted(gone)))
            own -= gone
            own |= new
        assert [keys.of(replica) for replica in range(num_replicas)] == sets
        assert len(keys) == len(set().union(*sets))
        prompt = [key(i) for i in range(12)]
        expected = [next((i for i, one in enumerate(prompt) if one not in own), 12) for own in sets]
        assert keys.num_blocks(prompt, {}) == expected


def test_with_states_a_prompt_counts_up_to_the_deepest_snapshot_within_its_leading_blocks():
    for seed in range(examples(60)):
        rng, prompt = Random(seed), [key(i) for i in range(8)]
        keys = CachedKeys(3, has_states=True)
        there, expected = [], {}
        for replica in range(3):
            blocks = {one for one in prompt if rng.random() < 0.8}
            states = {state_key(one) for one in prompt if rng.random() < 0.4}
            reported = {one for one in (*blocks, *states) if rng.random() < 0.8}
            keys.update(replica, KeyChanges(sorted(reported)))
            for one in blocks | states:
                expected[one] = expected.get(one, 0) | 1 << replica
            there.append(blocks | states)
        found = []
        for own in there:
            depth = next((i for i, one in enumerate(prompt) if one not in own), 8)
            found.append(max((i for i in range(1, depth + 1) if state_key(prompt[i - 1]) in own), default=0))
        assert keys.num_blocks(prompt, expected) == found


def test_no_key_is_asked_for_behind_the_longest_match():
    keys = CachedKeys(3)
    keys.update(1, KeyChanges([key(0), key(1)]))
    asked = []

    def prompt():
        for i in range(9):
            asked.append(i)
            yield key(i)

    assert keys.num_blocks(prompt(), {}) == [0, 2, 0]
    assert asked == [0, 1, 2]


def test_the_oldest_keys_are_forgotten_beyond_the_most():
    keys = CachedKeys(2, most=10)
    for i in range(30):
        keys.update(0, KeyChanges([key(i)]))
    assert keys.of(0) == {key(i) for i in range(20, 30)}
    keys.update(0, KeyChanges([], [key(3)]))  # forgotten before
    assert len(keys) == 10
    keys.update(1, KeyChanges([key(20)]))
    keys.update(0, KeyChanges([key(99)]))
    assert keys.of(1) == {key(20)}, "reported again, so that it stays"
    assert keys.of(0) == {*(key(i) for i in (20, *range(22, 30))), key(99)}


NAMESPACES = [
    Namespace(),
    Namespace("acme"),
    Namespace("globex"),
    Namespace("acme", "salt"),
    Namespace("acme", "pepper"),
    Namespace("acme", adapter="style"),
    Namespace("acme", deterministic=True),
    Namespace("a", "cme"),
]


@pytest.mark.parametrize(("one", "other"), list(combinations(NAMESPACES, 2)))
def test_equal_prompts_of_two_namespaces_never_match(one, other):
    block_keys = BlockKeys(4, b"secret", "model")
    prompt = token_key(range(20))
    keys = CachedKeys(2)
    keys.update(1, KeyChanges(list(block_keys.chain(prompt, one))))
    assert keys.num_blocks(block_keys.chain(prompt, one), {}) == [0, 5]
    assert keys.num_blocks(block_keys.chain(prompt, other), {}) == [0, 0]


def test_the_beginning_of_a_prompt_that_is_asked_for_stays():
    keys, hot = CachedKeys(1, most=10), [key(i) for i in range(5)]
    keys.update(0, KeyChanges(hot))
    for i in range(100, 140):
        keys.update(0, KeyChanges([key(i)]))
        assert keys.num_blocks(hot, {}) == [5]
    for i in range(200, 207):
        keys.update(0, KeyChanges([key(i)]))
    assert keys.num_blocks(hot, {}) == [3], "the last blocks go first"
    assert keys.num_cached(0, hot) == 3
