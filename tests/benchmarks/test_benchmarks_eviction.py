"""Eviction by cost on the traces of benchmarks.eviction, beside LRU and the optimum."""

from random import Random

import pytest

from benchmarks.eviction.belady import optimum, paths
from benchmarks.eviction.compare import cells
from benchmarks.eviction.rigs import cache_of, longest, run
from benchmarks.eviction.traces import TRACES, Ask, trace


@pytest.mark.parametrize(
    ("name", "share", "most"), [("chat-tree", 0.1, 0), ("agent", 0.2, -10), ("rag", 0.1, -8), ("tenants", 0.2, -20)]
)
def test_cost_computes_less_again_than_lru(name, share, most):
    """One seed; the benchmark has more requests and seeds."""
    (cell,) = cells(name, 0, 800, (share,), ("lru", "cost"))
    assert cell.against("cost", "lru") < most


def test_cost_is_hardly_worse_where_nothing_can_be_known():
    for name in ("few-shot", "uniform", "scan"):
        (cell,) = cells(name, 0, 500, (0.15,), ("lru", "cost"))
        assert cell.against("cost", "lru") <= 2, name


def test_a_trace_gives_the_same_evictions_twice():
    asks = trace("tenants", 3, 250)
    outcomes = [run(asks, cache_of(3 * longest(asks), "cost")) for _ in range(2)]
    assert outcomes[0] == outcomes[1]
    assert outcomes[0].num_evicted > 0


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_is_the_same_for_the_same_seed(name):
    assert trace(name, 1, 40) == trace(name, 1, 40) != trace(name, 2, 40)


def brute_force(blocks, wanted, num_blocks: int) -> int:
    """The most blocks that any choice of evicted leaves finds."""

    def best(number: int, held: frozenset) -> int:
        if number == len(blocks):
            return 0
        path = blocks[number]
        found = 0
        while found < wanted[number] and path[found] in held:
            found += 1
        return found + max(best(number + 1, left) for left in shrink(held | set(path), frozenset(path)))

    def shrink(held: frozenset, own: frozenset) -> set:
        if len(held) <= num_blocks:
            return {held}
        inner = {path[i] for path in blocks for i in range(len(path) - 1) if path[i + 1] in held}
        return {left for block in held - own - inner for left in shrink(held - {block}, own)}

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(12))
def test_the_optimum_is_what_brute_force_finds(seed):
    rng = Random(seed)
    asks = []
    for _ in range(7):
        prompt = [rng.randrange(2) for _ in range(rng.randint(2, 4))]
        asks.append(Ask(prompt, [rng.randrange(2)] * rng.randrange(2), 0.0))
    blocks, wanted = paths(asks, 1)
    for num_blocks in (5, 6, 8):
        assert optimum(blocks, wanted, num_blocks) == brute_force(blocks, wanted, num_blocks)
    assert optimum(blocks, wanted, 6, lambda depth: 1.0 + depth) <= optimum(blocks, wanted, 6)


@pytest.mark.parametrize("name", ["chat-tree", "rag"])
def test_no_order_finds_more_whole_blocks_than_the_optimum(name):
    (cell,) = cells(name, 1, 250, (0.2,), ("lru", "lfu", "cost"))
    assert all(lost >= 0 for lost in cell.num_whole_lost.values())
    assert cell.num_whole_lost["lru"] > 0
