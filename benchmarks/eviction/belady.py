"""The offline optimum: who knows the future evicts the block that is used again last (Belady, 1966).

A block's KV is used only together with all before it, so what comes before a block is used again no later: of blocks
with the latest next use the deepest is a leaf, and no choice is lost to the tree. Blocks are of equal size and each
request's own have to be there while it runs; so this is optimal in whole blocks, as the test against brute force says.

weighted: seconds to compute a block, divided by the requests until it is used again, takes the place of the latter.
That is a rule of thumb (with costs the optimum is not greedy), and what `cost` would do if it knew the future.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from math import inf

from benchmarks.eviction.rigs import BLOCK_SIZE
from benchmarks.eviction.traces import Ask

Path = list[int]  # ids of blocks, each named by its tokens and all before them


def paths(asks: Sequence[Ask], block_size: int = BLOCK_SIZE) -> tuple[list[Path], list[int]]:
    """Blocks of each request, and how many leading ones its prompt could find."""
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
    """Blocks that prompts find when what is used again last is evicted first. seconds: of a block by its depth."""
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
    """Blocks by how late each is used again; only leaves can go."""

    def __init__(self, num_blocks: int) -> None:
        self.held: dict[int, float] = {}
        self._num_blocks = num_blocks
        self._heap: list[tuple[float, int, int]] = []
        self._parents: dict[int, int | None] = {}
        self._num_children: Counter[int | None] = Counter()
        self._num_put = 0

    def put(self, block: int, parent: int | None, lateness: float) -> None:
        """It is there, behind its parent. Of equals the one that was put last goes first: the deepest."""
        if block not in self.held:
            self._parents[block] = parent
            self._num_children[parent] += 1
        self.held[block] = lateness
        self._num_put += 1
        heappush(self._heap, (-lateness, -self._num_put, block))

    def shrink(self, own: set[int]) -> None:
        """Evict until they fit, but none of a request's own."""
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
    """The requests whose prompts want each block, the last one first."""
    uses: dict[int, list[int]] = {}
    for number in reversed(range(len(blocks))):
        for block in blocks[number][: wanted[number]]:
            uses.setdefault(block, []).append(number)
    return uses
