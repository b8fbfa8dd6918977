"""Incrementally updated prefix matches against a full search, and their run time in a queue."""

import sys
from random import Random

import pytest
from eviction_memory import NS, Memory

from quire.cache import incremental_match
from quire.cache.incremental_match import IncrementalMatch, IncrementalMatcher
from quire.scheduler.queue.dfs_weight import DepthFirstQueue
from quire.scheduler.sequence import Sequence
from tools.virtual_time import request


def blocks(*numbers: int) -> list[int]:
    return [number for number in numbers for _ in range(2)]


def found(memory: Memory, prompt: list[int]) -> int:
    blocks = memory.kv.index.match_prefix(NS, prompt[:-1]).blocks
    return len(blocks[0]) if blocks else 0


def renewed(memory: Memory, match: IncrementalMatch, prompt: list[int]) -> int:
    IncrementalMatcher(memory.kv).update(match, NS, prompt, len(prompt) - 1)
    return match.num_blocks


def test_a_node_that_is_divided_behind_the_end_of_a_match_adds_nothing_to_it():
    memory, match, prompt = Memory(block_size=2), IncrementalMatch(), blocks(1, 9, 9, 9, 9)
    memory.run(blocks(1, 2, 3, 4, 5))
    assert renewed(memory, match, prompt) == 1
    memory.run(blocks(1, 2, 3, 7, 7))
    assert renewed(memory, match, prompt) == 1


def test_what_comes_behind_a_public_prefix_and_leaves_it_again_is_seen():
    memory, match, prompt = Memory(block_size=2, public=[[7] * 8]), IncrementalMatch(), blocks(7, 7, 2, 2, 2)
    memory.run(blocks(7, 7, 7, 7, 1))
    assert renewed(memory, match, prompt) == 2
    memory.run(blocks(7, 7, 2, 2, 3))
    assert renewed(memory, match, prompt) == 4


@pytest.mark.parametrize("public", [(), ([7] * 8,)])
def test_a_match_kept_over_runs_and_evictions_is_the_one_that_a_search_finds(public):
    for seed in range(8):
        rng = Random(seed)
        memory = Memory(block_size=2, num_blocks=60, public=list(public))

        def prompt(rng=rng):
            return blocks(*(rng.choice((1, 2, 7)) for _ in range(rng.randint(1, 8))))

        asked = [([*prompt(), 9], IncrementalMatch()) for _ in range(6)]
        for _ in range(40):
            memory.run(prompt())
            if rng.random() < 0.3:
                memory.evict(rng.randint(1, 20))
            for one, match in asked:
                if rng.random() < 0.5:
                    assert renewed(memory, match, one) == found(memory, one)


def test_what_differs_early_is_not_compared_to_its_end(monkeypatch):
    packed, pack = [], incremental_match.token_key

    def counted(tokens):
        packed.append(len(tokens))
        return pack(tokens)

    memory, prompt = Memory(num_blocks=3000, block_size=2), blocks(1, *[3] * 2000)
    memory.run(blocks(1, *[2] * 2000))
    monkeypatch.setattr(incremental_match, "token_key", counted)
    assert renewed(memory, IncrementalMatch(), prompt) == 1
    assert sum(packed) <= 100
    memory.run(blocks(1, *[3] * 900))
    assert renewed(memory, IncrementalMatch(), prompt) == 901


class Paths:
    """Matches of sequences with given paths."""

    def __init__(self, paths: dict[int, tuple[int, ...]]) -> None:
        self.path = lambda seq: paths[seq.id]
        self.add = self.drop = lambda seq: None

    def __len__(self) -> int:
        return 0


def num_calls(what) -> int:
    calls = []
    sys.setprofile(lambda frame, event, arg: calls.append(event))
    try:
        what()
    finally:
        sys.setprofile(None)
    return len(calls)


def test_depth_first_does_not_go_through_all_children_after_each_move():
    rng, order = Random(1), []
    paths = {i: (1, 2 + rng.randrange(700)) for i in range(1000)}
    queue = DepthFirstQueue(Paths(paths))
    waiting = [Sequence(i, request(str(i), [1], 1), 0, 0.0) for i in paths]
    for seq in waiting:
        queue.put(seq)
    weights = dict.fromkeys((spot for _, spot in paths.values()), 0)
    for _, spot in paths.values():
        weights[spot] += 1
    while (head := queue.head_of_new()) is not None:
        spot = paths[head.id][-1]
        assert weights[spot] == max(weights.values())
        assert spot == min(one for one, weight in weights.items() if weight == weights[spot])
        order.append(head.id)
        queue.remove_new(head)
        weights[spot] -= 1
        if len(order) < 100:
            assert num_calls(queue.head_of_new) < 200
    assert sorted(order) == sorted(paths)
    assert len(queue._root.heap) < 20
