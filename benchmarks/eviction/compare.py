"""Counts of cached and recomputed tokens for one trace and seed, per pool size and eviction policy."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from time import process_time
from typing import NamedTuple, TypeVar

from benchmarks.eviction.belady import optimum, paths
from benchmarks.eviction.rigs import BLOCK_SIZE, Outcome, cache_of, longest, run
from benchmarks.eviction.traces import Ask, trace
from quire.config import Eviction

ORDERS: tuple[Eviction, ...] = ("lru", "lfu", "cost")  # no request sets a retention, so `priority` would equal `lru`
V = TypeVar("V", int, float)
_T = (0.0, 0.0, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # Student's t, 95 %, by number of values


class Interval(NamedTuple):
    """Mean and half-width of the 95 % confidence interval."""

    mean: float
    half: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Interval":
        """The interval of independent values, one per seed."""
        count = len(values)
        half = _T[min(count, len(_T) - 1)] * statistics.stdev(values) / sqrt(count) if count > 1 else 0.0
        return cls(statistics.mean(values), half)

    def __str__(self) -> str:
        return f"{self.mean:.1f} ± {self.half:.1f}"


@dataclass(slots=True)
class Cell:
    """Counts of one trace and seed in one pool."""

    num_blocks: int
    num_tokens: int
    num_cached: dict[str, int]  # by policy; "optimum" in whole blocks
    num_recomputed: dict[str, int]  # tokens that were computed, evicted and computed again
    num_whole_lost: dict[str, int]  # regret: tokens in whole blocks that the optimum finds and a policy does not
    cpu_seconds: dict[str, float]  # of the whole run

    def hit_rate(self, order: str) -> float:
        """Percent of prompt tokens found in the cache."""
        return 100 * self.num_cached[order] / self.num_tokens

    @classmethod
    def together(cls, cells: Sequence["Cell"]) -> "Cell":
        """Sums over all pools of one trace and seed."""

        def added(counts: Sequence[dict[str, V]]) -> dict[str, V]:
            return {order: sum((one[order] for one in counts[1:]), counts[0][order]) for order in counts[0]}

        return cls(
            sum(one.num_blocks for one in cells),
            sum(one.num_tokens for one in cells),
            added([one.num_cached for one in cells]),
            added([one.num_recomputed for one in cells]),
            added([one.num_whole_lost for one in cells]),
            added([one.cpu_seconds for one in cells]),
        )

    def against(self, order: str, base: str) -> float:
        """Percent by which `order` recomputes more than `base`; percent of all prompt tokens if `base` recomputes 0."""
        ours, theirs = self.num_recomputed[order], self.num_recomputed[base]
        return 100 * (ours - theirs) / theirs if theirs else 100 * ours / self.num_tokens


def cells(name: str, seed: int, count: int, shares: Sequence[float], orders: Sequence[Eviction]) -> list[Cell]:
    """One cell per pool size. shares: of the trace's footprint, which is the number of its distinct blocks."""
    asks = trace(name, seed, count)
    blocks, wanted = paths(asks)
    footprint = len({block for path in blocks for block in path})
    without_end = run(asks, cache_of(2 * footprint + 2 * longest(asks) + 2 * count))
    return [_cell(asks, blocks, wanted, int(footprint * share), without_end, orders) for share in shares]


def _cell(
    asks: Sequence[Ask],
    blocks: list[list[int]],
    wanted: list[int],
    num_blocks: int,
    without_end: Outcome,
    orders: Sequence[Eviction],
) -> Cell:
    num_blocks = max(num_blocks, 2 * longest(asks))
    found = optimum(blocks, wanted, num_blocks) * BLOCK_SIZE
    cell = Cell(num_blocks, without_end.num_tokens, {"optimum": found}, {}, {}, {})
    for order in orders:
        begin = process_time()
        outcome = run(asks, cache_of(num_blocks, order))
        cell.cpu_seconds[order] = round(process_time() - begin, 3)
        cell.num_cached[order] = outcome.num_cached
        cell.num_recomputed[order] = without_end.num_cached - outcome.num_cached
        cell.num_whole_lost[order] = found - outcome.num_cached_whole
    cell.num_recomputed["optimum"] = without_end.num_cached_whole - found
    return cell
