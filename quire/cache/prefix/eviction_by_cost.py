"""Eviction policy "cost": evict the leaf with the lowest seconds to recompute x chance of reuse / bytes.

The seconds come from the cost model, the chance is learned (Chance). Each 10 points of request priority above 50 double
the key of a leaf, and each 10 below halve it. The learned order applies only while it leads over LRU in set dueling
(Duels), so it cannot be much worse than LRU.

A chance falls as a leaf ages, and no event reports it. So for each eviction a few leaves that were checked longest ago
are checked again, and the lowest of a few leaves at the top of the heap is taken. The work per eviction is bounded, and
every leaf is checked again after some time.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from math import exp, inf, log2
from typing import NamedTuple

from quire.cache.prefix.eviction import Aside, LeastRecent
from quire.cache.prefix.index import SYMBOL
from quire.cache.prefix.radix_node import Clock, Node, Uses
from quire.cache.prefix.retention_marks import LeavesByTenant
from quire.cache.retention import ORDINARY, priority_at

_MOST_TENANTS = 1024
_AGE_RATE, _RATE = 0.05, 0.02  # learning rates: of the age, the main feature, and of the others
_MOST_WEIGHT = 16.0
_NUM_AGES, _NUM_KINDS, _NUM_LEVELS = 20, 8, 8
_YOUNG, _FADE = 4.0, 0.8  # initial logits: of a new leaf, and their decrease per doubling of the age
_SMOOTH = 0.02  # weight of the latest outcome in a tenant's rate

# Index of the first weight of each feature. A feature has several bins, and one bin of each applies to a leaf.
_AGE = 0  # (kind, age)
_BEFORE = _AGE + _NUM_KINDS * _NUM_AGES  # (kind, how often earlier continuations of the same place were reused)
_GAP = _BEFORE + _NUM_KINDS * _NUM_LEVELS  # age / gap between the last two uses
_DEPTH = _GAP + _NUM_LEVELS
_HITS = _DEPTH + 2 * _NUM_LEVELS
_PLACE = _HITS + _NUM_LEVELS  # (ends behind the prompt or in it, of a session or not, tail or not)
_TENANT = _PLACE + 8
_LENGTH = _TENANT + _NUM_LEVELS
_NUM_WEIGHTS = _LENGTH + _NUM_LEVELS


class Features(NamedTuple):
    """Indices of weights. The age lies between two bins; `share` interpolates."""

    young: int
    old: int
    share: float  # of `old`
    others: tuple[int, ...]


class Chance:
    """P(used again before the index evicts as many blocks as the pool has) = sigmoid(sum of its features' weights).

    Features are bins on logarithmic scales. Learning is stochastic gradient descent on the log loss, one example at a
    time; weights are bounded.
    """

    def __init__(self, key_bytes: int) -> None:
        """key_bytes: bytes of a block's key. A leaf with fewer is a tail."""
        self._key_bytes = key_bytes
        self.weights = [0.0] * _NUM_WEIGHTS
        for kind in range(_NUM_KINDS):
            for age in range(_NUM_AGES):
                self.weights[_AGE + kind * _NUM_AGES + age] = _YOUNG - _FADE * age
        self.num_learnt = 0
        self._tenants: OrderedDict[str, float] = OrderedDict()  # share of examples that were reused, latest tenant last
        self._anybody = 0.5

    def features(self, leaf: Node, tick: int, tenant: str) -> Features:
        """The features of a leaf as indices of weights."""
        uses, before = leaf.uses, leaf.before
        assert leaf.parent is not None, "roots are not leaves"
        is_tail = len(leaf.edge) < self._key_bytes
        if is_tail and leaf.parent.parent is not None and len(leaf.parent.children) == 1:
            uses, before = leaf.parent.uses, leaf.parent.before
        age = tick - leaf.tick
        kind = min(uses.turns, 1) + 2 * min(uses.hits, 1) + 4 * (leaf.end < leaf.prompt_end)
        place = (leaf.end > leaf.prompt_end) + 2 * any(mark.wish.session is not None for mark in leaf.marks)
        bins = min(log2(age + 1), _NUM_AGES - 1.001)
        young = _AGE + kind * _NUM_AGES + int(bins)
        others = (
            _BEFORE + kind * _NUM_LEVELS + _rate_level(before),
            _GAP + (min(max(int(log2((age + 1) / uses.gap)) + 3, 1), _NUM_LEVELS - 1) if uses.gap else 0),
            _DEPTH + min(leaf.end.bit_length(), 2 * _NUM_LEVELS - 1),
            _HITS + min(max(uses.hits, uses.turns).bit_length(), _NUM_LEVELS - 1),
            _PLACE + place + 4 * is_tail,
            _TENANT + int(self._tenants.get(tenant, self._anybody) * (_NUM_LEVELS - 1e-9)),
            _LENGTH + min(len(leaf.blocks[0]).bit_length(), _NUM_LEVELS - 1),
        )
        return Features(young, young + 1, bins % 1, others)

    def of(self, features: Features) -> float:
        """The chance, from 0 to 1."""
        weights, (young, old, share, others) = self.weights, features
        total = weights[young] * (1 - share) + weights[old] * share
        for place in others:
            total += weights[place]
        return 1 / (1 + exp(-total))

    def learn(self, features: Features, tenant: str, *, came_back: bool) -> None:
        """Train on one example. came_back: whether the leaf was used again."""
        error = came_back - self.of(features)
        step = _AGE_RATE * error
        self._add(features.young, step * (1 - features.share))
        self._add(features.old, step * features.share)
        for place in features.others:
            self._add(place, _RATE * error)
        self.num_learnt += 1
        self._anybody += _SMOOTH * (came_back - self._anybody)
        rate = self._tenants.pop(tenant, self._anybody)
        self._tenants[tenant] = rate + _SMOOTH * (came_back - rate)
        if len(self._tenants) > _MOST_TENANTS:
            self._tenants.popitem(last=False)

    def _add(self, place: int, step: float) -> None:
        self.weights[place] = min(max(self.weights[place] + step, -_MOST_WEIGHT), _MOST_WEIGHT)


def _rate_level(before: Uses) -> int:
    """Bin of the uses per continuation of a place, from at most 1/8 to at least 8."""
    return min(max(int(log2((before.num_came_back + 0.5) / (before.num_begun + 1)) + 4), 0), _NUM_LEVELS - 1)


_MAX_OPEN_DUELS = 1024
_FORGET = 1 - 1 / 128  # weight of an outcome when the next one arrives
_TO_LEAD = 1.5  # least lead, in decayed duels, with which the learned order applies


class Duel:
    """Two leaves: the victim of the learned order and the victim of LRU."""

    __slots__ = ("due", "is_open", "keys")

    def __init__(self, due: int) -> None:
        """due: number of evicted blocks at which the duel ends without a winner."""
        self.due = due
        self.is_open = True
        self.keys: list[int] = []  # of leaves that were evicted


Side = tuple[Duel, bool]  # whether this leaf is the victim of the learned order


class Duels:
    """Set dueling: when the learned order and LRU select different victims, the one whose victim is used first loses.

    A leaf is in at most one open duel, `node.duel`. Time is the number of evicted blocks.
    """

    def __init__(self, horizon: int) -> None:
        self.balance = 0.0  # duels that the learned order won minus those that it lost, decayed
        self._horizon = horizon
        self._open: deque[Duel] = deque()
        self._gone: dict[int, Side] = {}

    @property
    def learnt_leads(self) -> bool:
        """Whether the learned order applies."""
        return self.balance >= _TO_LEAD

    @property
    def any_gone(self) -> bool:
        """Whether a leaf of an open duel was evicted."""
        return bool(self._gone)

    def begin(self, learnt: Node | None, oldest: Node | None, time: int) -> None:
        """Start a duel between two different victims. None: a leaf whose use is not observed; then no duel starts."""
        while self._open and (not self._open[0].is_open or self._open[0].due <= time):
            self._close(self._open.popleft())
        if learnt is None or oldest is None or learnt is oldest or len(self._open) >= _MAX_OPEN_DUELS:
            return
        if _is_free(learnt) and _is_free(oldest):
            duel = Duel(time + self._horizon)
            learnt.duel, oldest.duel = (duel, True), (duel, False)
            self._open.append(duel)

    def used(self, node: Node) -> None:
        """A leaf in a duel had a hit."""
        side, node.duel = node.duel, None
        self._lost(side)

    def left(self, leaf: Node, key: int) -> None:
        """A leaf in a duel is evicted. key: identifies its last block in `wanted`."""
        side, leaf.duel = leaf.duel, None
        if side[0].is_open:
            side[0].keys.append(key)
            self._gone[key] = side

    def wanted(self, key: int) -> None:
        """A prompt requests a block that is not in the index."""
        side = self._gone.get(key)
        if side is not None:
            self._lost(side)

    def _lost(self, side: Side) -> None:
        duel, by_learnt = side
        if duel.is_open:
            self.balance = self.balance * _FORGET + (-1 if by_learnt else 1)
            self._close(duel)

    def _close(self, duel: Duel) -> None:
        duel.is_open = False
        for key in duel.keys:
            if key in self._gone and self._gone[key][0] is duel:
                del self._gone[key]


def _is_free(node: Node) -> bool:
    return node.duel is None or not node.duel[0].is_open


_MAX_OPEN_EXAMPLES = 2048


class Example:
    """The features of a leaf at some time, as a training example."""

    __slots__ = ("due", "features", "is_open", "key", "tenant")

    def __init__(self, features: Features, tenant: str, due: int) -> None:
        """due: number of evicted blocks at which the example counts as not reused."""
        self.features = features
        self.tenant = tenant
        self.due = due
        self.key: int | None = None  # of the leaf's last block, once the leaf is evicted
        self.is_open = True


class Examples:
    """Open training examples. A leaf has at most one, `node.example`. Time is the number of evicted blocks."""

    def __init__(self, chance: Chance, horizon: int) -> None:
        """horizon: number of evicted blocks within which a leaf must be used again to count as reused."""
        self._chance = chance
        self._horizon = horizon
        self._spacing = max(1, horizon // _MAX_OPEN_EXAMPLES)
        self._open: deque[Example] = deque()  # the oldest first
        self._gone: dict[int, Example] = {}  # by key: examples whose leaves were evicted
        self._last = -self._spacing

    def __len__(self) -> int:
        return len(self._open)

    def take(self, leaf: Node, features: Features, tenant: str, time: int) -> None:
        """Make a leaf an example, unless it is one, or many examples are open and the last one is too recent."""
        is_busy = len(self._open) > _MAX_OPEN_EXAMPLES // 2
        if leaf.example is not None or (is_busy and time < self._last + self._spacing):
            return
        self._last = time
        leaf.example = Example(features, tenant, time + self._horizon)
        self._open.append(leaf.example)
        if len(self._open) > 2 * _MAX_OPEN_EXAMPLES:  # possible with many leaves of few blocks each
            self._close(self._open.popleft(), came_back=None)

    def used(self, node: Node) -> None:
        """A leaf had a hit: its example is labelled as reused."""
        self._close(node.example, came_back=True)
        node.example = None

    def left(self, leaf: Node, key: int) -> None:
        """A leaf with an example is evicted. key: identifies its last block in `wanted`."""
        example, leaf.example = leaf.example, None
        if example.is_open:
            example.key = key
            self._gone[key] = example

    def wanted(self, key: int) -> None:
        """A prompt requests a block that is not in the index: its example, if any, is labelled as reused."""
        example = self._gone.get(key)
        if example is not None:
            self._close(example, came_back=True)

    @property
    def any_gone(self) -> bool:
        """Whether a leaf with an open example was evicted."""
        return bool(self._gone)

    def expire(self, time: int) -> None:
        """Label examples that are due as not reused."""
        while self._open and (not self._open[0].is_open or self._open[0].due <= time):
            self._close(self._open.popleft(), came_back=False)

    def _close(self, example: Example, *, came_back: bool | None) -> None:
        """Train on an example and remove it. came_back: None drops it without training."""
        if not example.is_open:
            return
        example.is_open = False
        if example.key is not None and self._gone.get(example.key) is example:
            del self._gone[example.key]
        if came_back is not None:
            self._chance.learn(example.features, example.tenant, came_back=came_back)


_REFRESHED, _COMPARED = 6, 3  # leaves checked per eviction: those checked longest ago, and those at the top
_MOST_AT_ONCE = 16  # blocks of a leaf that are evicted before it is compared again
_BLOCKS_OF_A_KEY = 4
_POINTS_TO_DOUBLE = 10

Seconds = Callable[[int, int], float]  # (tokens to compute, tokens before them) -> seconds


def seconds_by_default(num_tokens: int, num_before: int) -> float:
    """A cost without a unit: the number of tokens, increased with the number of tokens that they attend to."""
    return num_tokens * (1 + (num_before + num_tokens / 2) / 16384)


class LeavesByWorth:
    """Leaves in the order of the policy "cost". See Leaves. `chance`, `examples` and `duels` are readable."""

    def __init__(self, clock: Clock, seconds: Seconds, block_size: int, block_bytes: int, horizon: int) -> None:
        """block_bytes: bytes of a block of all groups together. horizon: see Examples."""
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
        self._members: dict[int, tuple[float, int, Node]] = {}  # the latest heap entry of each, by id
        self._turn: deque[Node] = deque()  # the leaf checked longest ago first; contains some removed leaves
        self._in_turn: set[int] = set()
        self._aside = Aside()
        self._by_age = LeavesByTenant(LeastRecent(clock), clock)  # the same leaves in LRU order
        self._victim: tuple[Node, int, int] | None = None  # the last one, its tick, and when it is compared again

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
            self._push(node, self._heap[0][0] if self._heap else 0.0)  # it stays the next victim
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
            is_finished = self._by_age.is_finished(oldest)  # then it is evicted without a comparison
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
        """Check the leaves that were checked longest ago."""
        for _ in range(min(_REFRESHED, len(self._turn))):
            node = self._turn.popleft()
            if node.id not in self._members:
                self._in_turn.discard(node.id)
                continue
            self._turn.append(node)
            self._push(node, self._look(node, learns=True))

    def _least(self) -> Node | None:
        """The leaf with the lowest current key of the few at the top of the heap."""
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
            self._victim = None  # the blocks before are compared anew
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
        """The current eviction key of a leaf. learns: it may become a training example."""
        features = self._features(leaf)
        if learns and not leaf.writers and (told := self._told_of_use(leaf)) is not None:
            self.examples.take(told, features, leaf.tenant, self.num_given_up)
        return self._worth(leaf, self._seconds_of(leaf), self.chance.of(features))

    def _told_of_use(self, leaf: Node) -> Node | None:
        """The node whose hits show that a leaf is used; None if there is none.

        That is the leaf itself. A tail is copied and has no hits: then it is the parent, if the tail is its only child.
        """
        if len(leaf.edge) >= self._key_bytes:
            return leaf
        parent = leaf.parent
        return parent if parent is not None and parent.parent is not None and len(parent.children) == 1 else None

    def _worth(self, leaf: Node, seconds: float, chance: float) -> float:
        worth = seconds * chance / self._block_bytes
        priority = priority_at(leaf.marks, leaf.end, self._clock.now)
        return worth if priority == ORDINARY else worth * 2 ** ((priority - ORDINARY) / _POINTS_TO_DOUBLE)

    def _seconds_of(self, leaf: Node) -> float:
        """Seconds to compute the last block of a leaf again."""
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

    # Misses

    @property
    def asks_for_misses(self) -> bool:
        """See Leaves."""
        return self.examples.any_gone or self.duels.any_gone

    def missed(self, root_key: object, data: bytes, first: int, at: int) -> None:
        """See Leaves. Each missing block counts as a use of the evicted leaf that ended with it."""
        size = self._key_bytes
        for index in range(at, len(data) // size):
            begin = max(first, index + 1 - _BLOCKS_OF_A_KEY)
            key = hash((root_key, index + 1, data[begin * size : (index + 1) * size]))
            self.examples.wanted(key)
            self.duels.wanted(key)

    def _key_of(self, leaf: Node) -> int:
        """Key of the last block of a leaf: its position, and the tokens of up to 4 blocks up to its end."""
        tokens = leaf.path_end(len(leaf.edge), _BLOCKS_OF_A_KEY * self._key_bytes)
        return hash((leaf.root.root_key, leaf.end, tokens))
