"""Incrementally updated prefix matches against a full search."""

from random import Random

import pytest
from eviction_memory import NS, Memory

from quire.cache import incremental_match
from quire.cache.incremental_match import IncrementalMatch, IncrementalMatcher


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
