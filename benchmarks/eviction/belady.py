"""The offline optimum: evict the block whose next use is the latest (Belady, 1966).

A block's KV is used only together with all blocks before it, so its predecessors are used again no later. Of the blocks
with the latest next use the deepest one is a leaf, so the tree removes no choice. Blocks are of equal size, and the
blocks of the running request must stay. The result is optimal in whole blocks, as the test against brute force shows.

With `seconds`, the weight of a block is the number of requests until its next use, divided by the seconds to compute
the block. This is a heuristic, because the optimum with costs is not greedy. It is what `cost` would do if it knew the
future.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from math import inf

from benchmarks.eviction.rigs import BLOCK_SIZE
from benchmarks.eviction.traces import Ask

Path = list[int]  # ids of blocks; an id stands for the block's tokens and all tokens before it


def paths(asks: Sequence[Ask], block_size: int = BLOCK_SIZE) -> tuple[list[Path], list[int]]:
    """Blocks of each request, and how many leading ones its prompt could find in a cache."""
    ids: dict[object, int] = {}
    out, wanted = [], []
    for ask in asks:
        tokens, path = ask.prompt + ask.output, []
        before: object = ask.tenant
        for begin in range(0, len(tokens) // block_size * block_size, block_size):
            before = ids.setdefault((before, tuple(tokens[begin : begin + block_size])), len(ids))
            path.append(before)
        out.append(path)
        wanted.append((len(ask.prompt) - 1) // block_size)
    return out, wanted


def optimum(
    blocks: Sequence[Path],
    wanted: Sequence[int],
    num_blocks: int,
    seconds: Callable[[int], float] | None = None,
) -> int:
    """Blocks that prompts find if the block with the latest next use is evicted. seconds: of a block, by its depth."""
    uses, memory = _uses(blocks, wanted), _Memory(num_blocks)
    num_found = 0
    for now, (path, most) in enumerate(zip(blocks, wanted, strict=True)):
        found = 0
        while found < most and path[found] in memory.held:
            found += 1
        num_found += found
        for depth, block in enumerate(path):
            coming = uses.get(block, [])
            while coming and coming[-1] <= now:
                coming.pop()
            later = coming[-1] if coming else inf
            memory.put(
                block, path[depth - 1] if depth else None, later if seconds is None else (later - now) / seconds(depth)
            )
        memory.shrink(set(path))
    return num_found


class _Memory:
    """Blocks ordered by their next use. Only leaves can be evicted."""

    def __init__(self, num_blocks: int) -> None:
        self.held: dict[int, float] = {}
        self._num_blocks = num_blocks
        self._heap: list[tuple[float, int, int]] = []
        self._parents: dict[int, int | None] = {}
        self._num_children: Counter[int | None] = Counter()
        self._num_put = 0

    def put(self, block: int, parent: int | None, lateness: float) -> None:
        """Insert a block behind its parent. Of equal blocks the one inserted last, the deepest, is evicted first."""
        if block not in self.held:
            self._parents[block] = parent
            self._num_children[parent] += 1
        self.held[block] = lateness
        self._num_put += 1
        heappush(self._heap, (-lateness, -self._num_put, block))

    def shrink(self, own: set[int]) -> None:
        """Evict until the blocks fit, but never a block of `own`, the running request."""
        aside = []
        while len(self.held) > self._num_blocks:
            entry = heappop(self._heap)
            block = entry[2]
            if self.held.get(block) != -entry[0]:
                continue
            if block in own or self._num_children[block]:
                aside.append(entry)
                continue
            del self.held[block]
            parent = self._parents.pop(block)
            self._num_children[parent] -= 1
            if parent not in own and not self._num_children[parent]:
                for one in aside:
                    heappush(self._heap, one)
                aside.clear()
        for one in aside:
            heappush(self._heap, one)
        if len(self._heap) > 4 * len(self.held) + 64:
            self._heap = [entry for entry in self._heap if self.held.get(entry[2]) == -entry[0]]
            heapify(self._heap)


def _uses(blocks: Sequence[Path], wanted: Sequence[int]) -> dict[int, list[int]]:
    """Per block the requests whose prompts use it, the last request first."""
    uses: dict[int, list[int]] = {}
    for number in reversed(range(len(blocks))):
        for block in blocks[number][: wanted[number]]:
            uses.setdefault(block, []).append(number)
    return uses
