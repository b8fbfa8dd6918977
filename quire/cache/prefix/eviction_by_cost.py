"""Leaves by what they are worth: seconds to compute them again x chance that they are used again / bytes.

The seconds are the cost model's, the chance is learnt (chance.py). A request's priority doubles what a leaf is worth
every ten points above 50, and halves it below.

The learnt order decides while it does better than plain recency (duels.py), which cannot be much worse than it is.

A chance falls as a leaf grows old, and nobody says so: each time that a leaf is to be given up, a few that were
looked at longest ago are looked at again, and of those that come up the least is taken. So the work for a leaf is
bounded, and each leaf is looked at again before long.
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
_AGE_RATE, _RATE = 0.05, 0.02  # of learning: the age says most, the others only how leaves of one age differ
_MOST_WEIGHT = 16.0
_NUM_AGES, _NUM_KINDS, _NUM_LEVELS = 20, 8, 8
_YOUNG, _FADE = 4.0, 0.8  # logits before anything was learnt: of a new leaf, and less at twice the age
_SMOOTH = 0.02  # weight of the latest outcome in a tenant's rate

# Where the weights of each feature begin. All are one of several: a leaf has as many features as there are rows.
_AGE = 0  # (kind, age)
_BEFORE = _AGE + _NUM_KINDS * _NUM_AGES  # (kind, how often what went on from the same place came back)
_GAP = _BEFORE + _NUM_KINDS * _NUM_LEVELS  # age by the gap before its last use
_DEPTH = _GAP + _NUM_LEVELS
_HITS = _DEPTH + 2 * _NUM_LEVELS
_PLACE = _HITS + _NUM_LEVELS  # (in the prompt or behind it, of a session or not, of several tails or not)
_TENANT = _PLACE + 8
_LENGTH = _TENANT + _NUM_LEVELS
_NUM_WEIGHTS = _LENGTH + _NUM_LEVELS


class Features(NamedTuple):
    """Places of weights. The age lies between two bins: of the first counts the rest."""

    young: int
    old: int
    share: float  # of `old`
    others: tuple[int, ...]


class Chance:
    """P(used again before as many blocks have been given up as the pool has) = sigmoid(sum of its features' weights).

    Features are bins of what is known of a leaf, on logarithmic scales. Learning is stochastic gradient descent on
    the log loss, one example at a time; weights are bounded.
    """

    def __init__(self, key_bytes: int) -> None:
        """key_bytes: of a block; a leaf that has less is a tail."""
        self._key_bytes = key_bytes
        self.weights = [0.0] * _NUM_WEIGHTS
        for kind in range(_NUM_KINDS):
            for age in range(_NUM_AGES):
                self.weights[_AGE + kind * _NUM_AGES + age] = _YOUNG - _FADE * age
        self.num_learnt = 0
        self._tenants: OrderedDict[str, float] = OrderedDict()  # share of examples that came back, the latest last
        self._anybody = 0.5

    def features(self, leaf: Node, tick: int, tenant: str) -> Features:
        """What there is to be known of a leaf, as places of weights."""
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
        """0 to 1."""
        weights, (young, old, share, others) = self.weights, features
        total = weights[young] * (1 - share) + weights[old] * share
        for place in others:
            total += weights[place]
        return 1 / (1 + exp(-total))

    def learn(self, features: Features, tenant: str, *, came_back: bool) -> None:
        """What became of a leaf that looked like this."""
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
    """Uses of what went on from a place, for each time that something went on: 1/8 or less to 8 or more."""
    return min(max(int(log2((before.num_came_back + 0.5) / (before.num_begun + 1)) + 4), 0), _NUM_LEVELS - 1)


_MAX_OPEN_DUELS = 1024
_FORGET = 1 - 1 / 128  # weight that outcomes keep when the next one comes
_TO_LEAD = 1.5  # more duels won than lost, of the latest ones


class Duel:
    """Two leaves, of which each order would give up one."""

    __slots__ = ("due", "is_open", "keys")

    def __init__(self, due: int) -> None:
        """due: blocks that were given up when nobody has won."""
        self.due = due
        self.is_open = True
        self.keys: list[int] = []  # of leaves that have gone


Side = tuple[Duel, bool]  # whether the learnt order would have given up this leaf


class Duels:
    """A leaf takes part in one open duel at most, `node.duel`. Time is counted in blocks given up."""

    def __init__(self, horizon: int) -> None:
        self.balance = 0.0  # duels that the learnt order won, less those that it lost; old ones count less
        self._horizon = horizon
        self._open: deque[Duel] = deque()
        self._gone: dict[int, Side] = {}

    @property
    def learnt_leads(self) -> bool:
        """Whether the learnt order has earned to decide."""
        return self.balance >= _TO_LEAD

    @property
    def any_gone(self) -> bool:
        """Whether anything could be asked for in vain."""
        return bool(self._gone)

    def begin(self, learnt: Node | None, oldest: Node | None, time: int) -> None:
        """The learnt order would give up one and recency the other; None: nobody would say when it is used."""
        while self._open and (not self._open[0].is_open or self._open[0].due <= time):
            self._close(self._open.popleft())
        if learnt is None or oldest is None or learnt is oldest or len(self._open) >= _MAX_OPEN_DUELS:
            return
        if _is_free(learnt) and _is_free(oldest):
            duel = Duel(time + self._horizon)
            learnt.duel, oldest.duel = (duel, True), (duel, False)
            self._open.append(duel)

    def used(self, node: Node) -> None:
        """A leaf in a duel was used."""
        side, node.duel = node.duel, None
        self._lost(side)

    def left(self, leaf: Node, key: int) -> None:
        """A leaf in a duel is given up."""
        side, leaf.duel = leaf.duel, None
        if side[0].is_open:
            side[0].keys.append(key)
            self._gone[key] = side

    def wanted(self, key: int) -> None:
        """A prompt asks for a block that is not there."""
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
    """How a leaf looked at some time."""

    __slots__ = ("due", "features", "is_open", "key", "tenant")

    def __init__(self, features: Features, tenant: str, due: int) -> None:
        """due: blocks that were given up when it counts as not used again."""
        self.features = features
        self.tenant = tenant
        self.due = due
        self.key: int | None = None  # by which a prompt names it when its leaf has gone
        self.is_open = True


class Examples:
    """A leaf has one open example at most, `node.example`. Time is counted in blocks given up."""

    def __init__(self, chance: Chance, horizon: int) -> None:
        """horizon: blocks given up within which a leaf has to be used again."""
        self._chance = chance
        self._horizon = horizon
        self._spacing = max(1, horizon // _MAX_OPEN_EXAMPLES)
        self._open: deque[Example] = deque()  # the oldest first
        self._gone: dict[int, Example] = {}  # by key: their leaves have left the tree
        self._last = -self._spacing

    def __len__(self) -> int:
        return len(self._open)

    def take(self, leaf: Node, features: Features, tenant: str, time: int) -> None:
        """A leaf is looked at: it becomes an example, unless it is one or there are enough."""
        is_busy = len(self._open) > _MAX_OPEN_EXAMPLES // 2
        if leaf.example is not None or (is_busy and time < self._last + self._spacing):
            return
        self._last = time
        leaf.example = Example(features, tenant, time + self._horizon)
        self._open.append(leaf.example)
        if len(self._open) > 2 * _MAX_OPEN_EXAMPLES:  # many leaves of few blocks each
            self._close(self._open.popleft(), came_back=None)

    def used(self, node: Node) -> None:
        """A leaf was used again."""
        self._close(node.example, came_back=True)
        node.example = None

    def left(self, leaf: Node, key: int) -> None:
        """A leaf that is an example is given up."""
        example, leaf.example = leaf.example, None
        if example.is_open:
            example.key = key
            self._gone[key] = example

    def wanted(self, key: int) -> None:
        """A prompt asks for a block that is not there."""
        example = self._gone.get(key)
        if example is not None:
            self._close(example, came_back=True)

    @property
    def any_gone(self) -> bool:
        """Whether anything could be asked for in vain."""
        return bool(self._gone)

    def expire(self, time: int) -> None:
        """What was not used again until now was not used again."""
        while self._open and (not self._open[0].is_open or self._open[0].due <= time):
            self._close(self._open.popleft(), came_back=False)

    def _close(self, example: Example, *, came_back: bool | None) -> None:
        """came_back: None where nobody knows."""
        if not example.is_open:
            return
        example.is_open = False
        if example.key is not None and self._gone.get(example.key) is example:
            del self._gone[example.key]
        if came_back is not None:
            self._chance.learn(example.features, example.tenant, came_back=came_back)


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
