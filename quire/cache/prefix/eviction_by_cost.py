"""Leaves by what they are worth: seconds to compute them again x chance that they are used again / bytes.

The seconds are the cost model's, the chance is learnt (chance.py). A request's priority doubles what a leaf is worth
every ten points above 50, and halves it below.

The learnt order decides while it does better than plain recency (duels.py), which cannot be much worse than it is.

A chance falls as a leaf grows old, and nobody says so: each time that a leaf is to be given up, a few that were
looked at longest ago are looked at again, and of those that come up the least is taken. So the work for a leaf is
bounded, and each leaf is looked at again before long.
"""

from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from math import inf

from quire.cache.prefix.by_tenant import LeavesByTenant
from quire.cache.prefix.chance import Chance, Features
from quire.cache.prefix.duels import Duels
from quire.cache.prefix.eviction import Aside, LeastRecent
from quire.cache.prefix.examples import Examples
from quire.cache.prefix.index import SYMBOL
from quire.cache.prefix.radix_node import Node
from quire.cache.prefix.uses import Clock
from quire.cache.retention import ORDINARY, priority_at

_REFRESHED, _COMPARED = 6, 3  # leaves looked at for each that is given up: longest ago, and of the least value
_MOST_AT_ONCE = 16  # blocks that are given up of a leaf before it is compared again
_BLOCKS_OF_A_KEY = 4
_POINTS_TO_DOUBLE = 10

Seconds = Callable[[int, int], float]  # to compute so many tokens behind so many others


def seconds_by_default(num_tokens: int, num_before: int) -> float:
    """In no unit: as many as the tokens, and more behind many others, whose keys are all looked at."""
    return num_tokens * (1 + (num_before + num_tokens / 2) / 16384)


class LeavesByWorth:
    """See Leaves. `chance` can be looked into."""

    def __init__(self, clock: Clock, seconds: Seconds, block_size: int, block_bytes: int, horizon: int) -> None:
        """block_bytes: of all groups together. horizon: see Examples."""
        self._key_bytes = block_size * SYMBOL
        self.chance = Chance(self._key_bytes)
        self.examples = Examples(self.chance, horizon)
        self.duels = Duels(horizon)
        self.num_given_up = 0  # blocks
        self._clock = clock
        self._seconds = seconds
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._heap: list[tuple[float, int, Node]] = []
        self._members: dict[int, tuple[float, int, Node]] = {}  # their latest entries, by id
        self._turn: deque[Node] = deque()  # those looked at longest ago first; some have left
        self._in_turn: set[int] = set()
        self._aside = Aside()
        self._by_age = LeavesByTenant(LeastRecent(clock), clock)  # the same members
        self._victim: tuple[Node, int, int] | None = None  # the last one, its last use, and when it is compared again

    def __contains__(self, node: Node) -> bool:
        return node.id in self._members or node in self._aside

    def __len__(self) -> int:
        return len(self._members)

    def add(self, node: Node) -> None:
        """See Leaves."""
        if node.id in self._members:
            return
        self._aside.discard(node)
        if self._victim is not None and self._victim[0] is node:
            self._push(node, self._heap[0][0] if self._heap else 0.0)  # it goes on being the one
        else:
            self._push(node, self._look(node))
        if node.id not in self._in_turn:
            self._in_turn.add(node.id)
            self._turn.append(node)

    def renew(self, node: Node) -> None:
        """See Leaves."""
        if node.id in self._members:
            self._push(node, self._look(node))
            self._by_age.renew(node)

    def num_at_once(self, leaf: Node) -> int:
        """See Leaves."""
        return min(_MOST_AT_ONCE, leaf.num_alike)

    def discard(self, node: Node) -> None:
        """See Leaves."""
        self._aside.discard(node)
        if self._members.pop(node.id, None) is not None:
            self._by_age.discard(node)
            self._compact()

    def set_aside(self, node: Node) -> None:
        """See Leaves."""
        if node.id not in self._members:
            self._aside.put(node)

    def begin(self) -> None:
        """See Leaves."""
        for node in self._aside.some():
            self.add(node)

    def pop(self) -> Node | None:
        """See Leaves."""
        if self._victim is not None:
            node, tick, until = self._victim
            if node.id in self._members and node.tick == tick and self.num_given_up < until:
                return self._take_out(node)
        self.examples.expire(self.num_given_up)
        self._refresh()
        best = self._least()
        if best is None:
            return self._aside.pop()
        oldest = self._by_age.first()
        if oldest is not None and oldest is not best:
            is_finished = self._by_age.is_finished(oldest)  # then there is nothing to be weighed
            if not is_finished:
                self.duels.begin(self._told_of_use(best), self._told_of_use(oldest), self.num_given_up)
            if is_finished or not self.duels.learnt_leads:
                self._by_age.instead(oldest)
                best = oldest
        self._victim = best, best.tick, self.num_given_up + _MOST_AT_ONCE
        return self._take_out(best)

    def _take_out(self, node: Node) -> Node:
        del self._members[node.id]
        self._by_age.discard(node)
        return node

    def _refresh(self) -> None:
        """Look again at those looked at longest ago."""
        for _ in range(min(_REFRESHED, len(self._turn))):
            node = self._turn.popleft()
            if node.id not in self._members:
                self._in_turn.discard(node.id)
                continue
            self._turn.append(node)
            self._push(node, self._look(node, learns=True))

    def _least(self) -> Node | None:
        """The least valuable of those that come up first."""
        looked_at: list[tuple[float, int, Node]] = []
        while self._heap and len(looked_at) < _COMPARED:
            entry = heappop(self._heap)
            _, number, node = entry
            if self._members.get(number) is entry:
                del self._members[number]
                looked_at.append((self._look(node), number, node))
        if not looked_at:
            return None
        for worth, _, node in looked_at:
            self._push(node, worth)
        return min(looked_at)[2]

    def used(self, node: Node, *, hit: bool) -> None:
        """See Leaves."""
        if not hit:
            return
        if node.example is not None:
            self.examples.used(node)
        if node.duel is not None:
            self.duels.used(node)

    def given_up(self, leaf: Node, num_blocks: int) -> None:
        """See Leaves."""
        if leaf.example is not None or leaf.duel is not None:
            key = self._key_of(leaf)
            if leaf.example is not None:
                self.examples.left(leaf, key)
            if leaf.duel is not None:
                self.duels.left(leaf, key)
        if num_blocks >= leaf.num_alike:
            self._victim = None  # what comes before is another matter
        self.num_given_up += num_blocks

    def reason(self, leaf: Node) -> dict[str, float]:
        """See Leaves."""
        seconds, chance = self._seconds_of(leaf), self.chance.of(self._features(leaf))
        worth = self._worth(leaf, seconds, chance)
        age, hits = self._clock.tick - leaf.tick, leaf.uses.hits
        return {
            "worth": worth,
            "seconds": seconds,
            "chance": chance,
            "bytes": self._block_bytes,
            "age": age,
            "hits": hits,
        }

    def _features(self, leaf: Node) -> Features:
        return self.chance.features(leaf, self._clock.tick, leaf.tenant)

    def _look(self, leaf: Node, *, learns: bool = False) -> float:
        """What a leaf is worth now."""
        features = self._features(leaf)
        if learns and not leaf.writers and (told := self._told_of_use(leaf)) is not None:
            self.examples.take(told, features, leaf.tenant, self.num_given_up)
        return self._worth(leaf, self._seconds_of(leaf), self.chance.of(features))

    def _told_of_use(self, leaf: Node) -> Node | None:
        """The node that is told when a leaf is used: not a tail, which is copied, but what comes before it."""
        if len(leaf.edge) >= self._key_bytes:
            return leaf
        parent = leaf.parent
        return parent if parent is not None and parent.parent is not None and len(parent.children) == 1 else None

    def _worth(self, leaf: Node, seconds: float, chance: float) -> float:
        worth = seconds * chance / self._block_bytes
        priority = priority_at(leaf.marks, leaf.end, self._clock.now)
        return worth if priority == ORDINARY else worth * 2 ** ((priority - ORDINARY) / _POINTS_TO_DOUBLE)

    def _seconds_of(self, leaf: Node) -> float:
        """To compute its last block again."""
        before = (leaf.end - 1) * self._block_size
        seconds = self._seconds(self._block_size, before)
        return seconds if 0 < seconds < inf else seconds_by_default(self._block_size, before)

    def _push(self, node: Node, worth: float) -> None:
        self._by_age.add(node)
        entry = self._members[node.id] = (worth, node.id, node)
        heappush(self._heap, entry)
        self._compact()

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = list(self._members.values())
            heapify(self._heap)
            self._turn = deque(node for node in self._turn if node.id in self._members)
            self._in_turn = {node.id for node in self._turn}

    # What a prompt asks for in vain

    @property
    def asks_for_misses(self) -> bool:
        """See Leaves."""
        return self.examples.any_gone or self.duels.any_gone

    def missed(self, root_key: object, data: bytes, first: int, at: int) -> None:
        """The whole blocks of a prompt from index `at` on are not there. first: where their root begins."""
        size = self._key_bytes
        for index in range(at, len(data) // size):
            begin = max(first, index + 1 - _BLOCKS_OF_A_KEY)
            key = hash((root_key, index + 1, data[begin * size : (index + 1) * size]))
            self.examples.wanted(key)
            self.duels.wanted(key)

    def _key_of(self, leaf: Node) -> int:
        """By which a prompt can ask for the last block of a leaf: its place, and the tokens before its end."""
        tokens = leaf.path_end(len(leaf.edge), _BLOCKS_OF_A_KEY * self._key_bytes)
        return hash((leaf.root.root_key, leaf.end, tokens))
