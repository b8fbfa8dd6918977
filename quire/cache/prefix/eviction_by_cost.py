"""Eviction policy "cost": evict the leaf with the lowest seconds to recompute x chance of reuse / bytes.

The seconds come from the cost model, the chance is learned (ReusePredictor). Each 10 points of request priority above
50 double the key of a leaf, and each 10 below halve it. The learned order applies only while it leads over LRU in set
dueling (SetDueling), so it cannot be much worse than LRU.

A chance falls as a leaf ages, and no event reports it. So for each eviction a few leaves that were checked longest ago
are checked again, and the lowest of a few leaves at the top of the heap is taken. The work per eviction is bounded, and
every leaf is checked again after some time.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from math import exp, inf, log2
from typing import NamedTuple

from quire.cache.prefix.eviction import DeferredLeaves, LRUPolicy
from quire.cache.prefix.index import BYTES_PER_TOKEN
from quire.cache.prefix.radix_node import Clock, Node, UseStats
from quire.cache.prefix.retention_marks import LeavesByTenant
from quire.cache.retention import DEFAULT_PRIORITY, priority_at

_MOST_TENANTS = 1024
_AGE_LEARNING_RATE, _LEARNING_RATE = 0.05, 0.02  # learning rates: of the age, the main feature, and of the others
_MAX_WEIGHT = 16.0
_NUM_AGES, _NUM_KINDS, _NUM_LEVELS = 20, 8, 8
_INITIAL_LOGIT, _LOGIT_PER_DOUBLING = (
    4.0,
    0.8,
)  # initial logits: of a new leaf, and their decrease per doubling of the age
_TENANT_LEARNING_RATE = 0.02  # weight of the latest outcome in a tenant's rate

# Index of the first weight of each feature. A feature has several bins, and one bin of each applies to a leaf.
_AGE = 0  # (kind, age)
_CONTINUATIONS = _AGE + _NUM_KINDS * _NUM_AGES  # (kind, how often earlier continuations of the same place were reused)
_GAP = _CONTINUATIONS + _NUM_KINDS * _NUM_LEVELS  # age / gap between the last two uses
_DEPTH = _GAP + _NUM_LEVELS
_HITS = _DEPTH + 2 * _NUM_LEVELS
_PLACE = _HITS + _NUM_LEVELS  # (ends behind the prompt or in it, of a session or not, tail or not)
_TENANT = _PLACE + 8
_LENGTH = _TENANT + _NUM_LEVELS
_NUM_WEIGHTS = _LENGTH + _NUM_LEVELS


class Features(NamedTuple):
    """Indices of weights. The age lies between two bins; `upper_share` interpolates."""

    lower_age_bin: int
    upper_age_bin: int
    upper_share: float  # weight of the upper bin
    others: tuple[int, ...]


class ReusePredictor:
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
                self.weights[_AGE + kind * _NUM_AGES + age] = _INITIAL_LOGIT - _LOGIT_PER_DOUBLING * age
        self.num_examples = 0
        self._reuse_rates: OrderedDict[str, float] = (
            OrderedDict()
        )  # share of examples that were reused, latest tenant last
        self._mean_reuse_rate = 0.5

    def features(self, leaf: Node, tick: int, tenant: str) -> Features:
        """The features of a leaf as indices of weights."""
        uses, before = leaf.uses, leaf.previous_uses
        assert leaf.parent is not None, "roots are not leaves"
        is_tail = len(leaf.edge) < self._key_bytes
        if is_tail and leaf.parent.parent is not None and len(leaf.parent.children) == 1:
            uses, before = leaf.parent.uses, leaf.parent.previous_uses
        age = tick - leaf.tick
        kind = min(uses.turns, 1) + 2 * min(uses.hits, 1) + 4 * (leaf.end < leaf.prompt_end)
        place = (leaf.end > leaf.prompt_end) + 2 * any(mark.hint.session is not None for mark in leaf.marks)
        bins = min(log2(age + 1), _NUM_AGES - 1.001)
        young = _AGE + kind * _NUM_AGES + int(bins)
        others = (
            _CONTINUATIONS + kind * _NUM_LEVELS + _rate_level(before),
            _GAP + (min(max(int(log2((age + 1) / uses.gap)) + 3, 1), _NUM_LEVELS - 1) if uses.gap else 0),
            _DEPTH + min(leaf.end.bit_length(), 2 * _NUM_LEVELS - 1),
            _HITS + min(max(uses.hits, uses.turns).bit_length(), _NUM_LEVELS - 1),
            _PLACE + place + 4 * is_tail,
            _TENANT + int(self._reuse_rates.get(tenant, self._mean_reuse_rate) * (_NUM_LEVELS - 1e-9)),
            _LENGTH + min(len(leaf.blocks[0]).bit_length(), _NUM_LEVELS - 1),
        )
        return Features(young, young + 1, bins % 1, others)

    def predict(self, features: Features) -> float:
        """The chance, from 0 to 1."""
        weights, (young, old, share, others) = self.weights, features
        total = weights[young] * (1 - share) + weights[old] * share
        for place in others:
            total += weights[place]
        return 1 / (1 + exp(-total))

    def learn(self, features: Features, tenant: str, *, reused: bool) -> None:
        """Train on one example. reused: whether the leaf was used again."""
        error = reused - self.predict(features)
        step = _AGE_LEARNING_RATE * error
        self._update_weight(features.lower_age_bin, step * (1 - features.upper_share))
        self._update_weight(features.upper_age_bin, step * features.upper_share)
        for place in features.others:
            self._update_weight(place, _LEARNING_RATE * error)
        self.num_examples += 1
        self._mean_reuse_rate += _TENANT_LEARNING_RATE * (reused - self._mean_reuse_rate)
        rate = self._reuse_rates.pop(tenant, self._mean_reuse_rate)
        self._reuse_rates[tenant] = rate + _TENANT_LEARNING_RATE * (reused - rate)
        if len(self._reuse_rates) > _MOST_TENANTS:
            self._reuse_rates.popitem(last=False)

    def _update_weight(self, place: int, step: float) -> None:
        self.weights[place] = min(max(self.weights[place] + step, -_MAX_WEIGHT), _MAX_WEIGHT)


def _rate_level(before: UseStats) -> int:
    """Bin of the uses per continuation of a place, from at most 1/8 to at least 8."""
    return min(
        max(int(log2((before.num_continuation_hits + 0.5) / (before.num_continuations + 1)) + 4), 0), _NUM_LEVELS - 1
    )


_MAX_OPEN_DUELS = 1024
_DECAY = 1 - 1 / 128  # weight of an outcome when the next one arrives
_MIN_LEAD = 1.5  # least lead, in decayed duels, with which the learned order applies


class Duel:
    """Two leaves: the victim of the learned order and the victim of LRU."""

    __slots__ = ("due", "is_open", "keys")

    def __init__(self, due: int) -> None:
        """due: number of evicted blocks at which the duel ends without a winner."""
        self.due = due
        self.is_open = True
        self.keys: list[int] = []  # of leaves that were evicted


Side = tuple[Duel, bool]  # whether this leaf is the victim of the learned order


class LeafState:
    """What is kept of a leaf in `Node.policy_state`: at most one open duel, and at most one open example."""

    __slots__ = ("example", "side")

    def __init__(self) -> None:
        self.example: TrainingExample | None = None
        self.side: Side | None = None

    @staticmethod
    def of(node: Node) -> "LeafState":
        """The state of a leaf, which gets one if it has none."""
        state = node.policy_state
        if not isinstance(state, LeafState):
            state = node.policy_state = LeafState()
        return state

    def take_side(self) -> Side:
        """Remove the duel and return it."""
        side, self.side = self.side, None
        assert side is not None, "the leaf is in no duel"
        return side

    def take_example(self) -> "TrainingExample":
        """Remove the training example and return it."""
        example, self.example = self.example, None
        assert example is not None, "the leaf is no example"
        return example


class SetDueling:
    """Set dueling: when the learned order and LRU select different victims, the one whose victim is used first loses.

    Time is the number of evicted blocks.
    """

    def __init__(self, horizon: int) -> None:
        self.balance = 0.0  # duels that the learned order won minus those that it lost, decayed
        self._horizon = horizon
        self._open: deque[Duel] = deque()
        self._evicted: dict[int, Side] = {}

    @property
    def learnt_leads(self) -> bool:
        """Whether the learned order applies."""
        return self.balance >= _MIN_LEAD

    @property
    def any_evicted(self) -> bool:
        """Whether a leaf of an open duel was evicted."""
        return bool(self._evicted)

    def start(self, learnt: Node | None, oldest: Node | None, time: int) -> None:
        """Start a duel between two different victims. None: a leaf whose use is not observed; then no duel starts."""
        while self._open and (not self._open[0].is_open or self._open[0].due <= time):
            self._close(self._open.popleft())
        if learnt is None or oldest is None or learnt is oldest or len(self._open) >= _MAX_OPEN_DUELS:
            return
        if _is_free(learnt) and _is_free(oldest):
            duel = Duel(time + self._horizon)
            LeafState.of(learnt).side, LeafState.of(oldest).side = (duel, True), (duel, False)
            self._open.append(duel)

    def on_hit(self, state: LeafState) -> None:
        """A leaf in a duel had a hit."""
        self._lose(state.take_side())

    def on_evict(self, state: LeafState, key: int) -> None:
        """A leaf in a duel is evicted. key: identifies its last block in `on_miss`."""
        side = state.take_side()
        if side[0].is_open:
            side[0].keys.append(key)
            self._evicted[key] = side

    def on_miss(self, key: int) -> None:
        """A prompt requests a block that is not in the index."""
        side = self._evicted.get(key)
        if side is not None:
            self._lose(side)

    def _lose(self, side: Side) -> None:
        duel, by_learnt = side
        if duel.is_open:
            self.balance = self.balance * _DECAY + (-1 if by_learnt else 1)
            self._close(duel)

    def _close(self, duel: Duel) -> None:
        duel.is_open = False
        for key in duel.keys:
            if key in self._evicted and self._evicted[key][0] is duel:
                del self._evicted[key]


def _is_free(node: Node) -> bool:
    state = node.policy_state
    return not isinstance(state, LeafState) or state.side is None or not state.side[0].is_open


_MAX_OPEN_EXAMPLES = 2048


class TrainingExample:
    """The features of a leaf at some time, as a training example."""

    __slots__ = ("due", "features", "is_open", "key", "tenant")

    def __init__(self, features: Features, tenant: str, due: int) -> None:
        """due: number of evicted blocks at which the example counts as not reused."""
        self.features = features
        self.tenant = tenant
        self.due = due
        self.key: int | None = None  # of the leaf's last block, once the leaf is evicted
        self.is_open = True


class TrainingExamples:
    """Open training examples. Time is the number of evicted blocks."""

    def __init__(self, chance: ReusePredictor, horizon: int) -> None:
        """horizon: number of evicted blocks within which a leaf must be used again to count as reused."""
        self._predictor = chance
        self._horizon = horizon
        self._spacing = max(1, horizon // _MAX_OPEN_EXAMPLES)
        self._open: deque[TrainingExample] = deque()  # the oldest first
        self._evicted: dict[int, TrainingExample] = {}  # by key: examples whose leaves were evicted
        self._last = -self._spacing

    def __len__(self) -> int:
        return len(self._open)

    def sample(self, leaf: Node, features: Features, tenant: str, time: int) -> None:
        """Make a leaf an example, unless it is one, or many examples are open and the last one is too recent."""
        is_busy = len(self._open) > _MAX_OPEN_EXAMPLES // 2
        state = LeafState.of(leaf)
        if state.example is not None or (is_busy and time < self._last + self._spacing):
            return
        self._last = time
        state.example = TrainingExample(features, tenant, time + self._horizon)
        self._open.append(state.example)
        if len(self._open) > 2 * _MAX_OPEN_EXAMPLES:  # possible with many leaves of few blocks each
            self._close(self._open.popleft(), reused=None)

    def on_hit(self, state: LeafState) -> None:
        """A leaf had a hit: its example is labelled as reused."""
        self._close(state.take_example(), reused=True)

    def on_evict(self, state: LeafState, key: int) -> None:
        """A leaf with an example is evicted. key: identifies its last block in `on_miss`."""
        example = state.take_example()
        if example.is_open:
            example.key = key
            self._evicted[key] = example

    def on_miss(self, key: int) -> None:
        """A prompt requests a block that is not in the index: its example, if any, is labelled as reused."""
        example = self._evicted.get(key)
        if example is not None:
            self._close(example, reused=True)

    @property
    def any_evicted(self) -> bool:
        """Whether a leaf with an open example was evicted."""
        return bool(self._evicted)

    def expire(self, time: int) -> None:
        """Label examples that are due as not reused."""
        while self._open and (not self._open[0].is_open or self._open[0].due <= time):
            self._close(self._open.popleft(), reused=False)

    def _close(self, example: TrainingExample, *, reused: bool | None) -> None:
        """Train on an example and remove it. reused: None drops it without training."""
        if not example.is_open:
            return
        example.is_open = False
        if example.key is not None and self._evicted.get(example.key) is example:
            del self._evicted[example.key]
        if reused is not None:
            self._predictor.learn(example.features, example.tenant, reused=reused)


_REFRESHED, _COMPARED = 6, 3  # leaves checked per eviction: those checked longest ago, and those at the top
_MAX_BLOCKS_PER_COMPARISON = 16  # blocks of a leaf that are evicted before it is compared again
_BLOCKS_OF_A_KEY = 4
_POINTS_TO_DOUBLE = 10

RecomputeSeconds = Callable[[int, int], float]  # (tokens to compute, tokens before them) -> seconds


def default_recompute_seconds(num_tokens: int, num_before: int) -> float:
    """A cost without a unit: the number of tokens, increased with the number of tokens that they attend to."""
    return num_tokens * (1 + (num_before + num_tokens / 2) / 16384)


class CostOrderedLeaves:
    """Leaves in the order of the policy "cost". See EvictableLeaves. `predictor`, `examples`, `duels` are readable."""

    def __init__(
        self, clock: Clock, seconds: RecomputeSeconds, block_size: int, block_bytes: int, horizon: int
    ) -> None:
        """block_bytes: bytes of a block of all groups together. horizon: see TrainingExamples."""
        self._key_bytes = block_size * BYTES_PER_TOKEN
        self.predictor = ReusePredictor(self._key_bytes)
        self.examples = TrainingExamples(self.predictor, horizon)
        self.duels = SetDueling(horizon)
        self.num_evicted = 0  # blocks
        self._clock = clock
        self._seconds = seconds
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._heap: list[tuple[float, int, Node]] = []
        self._members: dict[int, tuple[float, int, Node]] = {}  # the latest heap entry of each, by id
        self._refresh_queue: deque[Node] = deque()  # the leaf checked longest ago first; contains some removed leaves
        self._in_refresh_queue: set[int] = set()
        self._deferred = DeferredLeaves()
        self._lru_leaves = LeavesByTenant(LRUPolicy(clock), clock)  # the same leaves in LRU order
        self._victim: tuple[Node, int, int] | None = None  # the last one, its tick, and when it is compared again

    def __contains__(self, node: Node) -> bool:
        return node.id in self._members or node in self._deferred

    def __len__(self) -> int:
        return len(self._members)

    def add(self, node: Node) -> None:
        """See EvictableLeaves."""
        if node.id in self._members:
            return
        self._deferred.discard(node)
        if self._victim is not None and self._victim[0] is node:
            self._push(node, self._heap[0][0] if self._heap else 0.0)  # it stays the next victim
        else:
            self._push(node, self._current_key(node))
        if node.id not in self._in_refresh_queue:
            self._in_refresh_queue.add(node.id)
            self._refresh_queue.append(node)

    def update(self, node: Node) -> None:
        """See EvictableLeaves."""
        if node.id in self._members:
            self._push(node, self._current_key(node))
            self._lru_leaves.update(node)

    def num_evicted_together(self, leaf: Node) -> int:
        """See EvictableLeaves."""
        return min(_MAX_BLOCKS_PER_COMPARISON, leaf.num_uniform_blocks)

    def discard(self, node: Node) -> None:
        """See EvictableLeaves."""
        self._deferred.discard(node)
        if self._members.pop(node.id, None) is not None:
            self._lru_leaves.discard(node)
            self._compact()

    def defer(self, node: Node) -> None:
        """See EvictableLeaves."""
        if node.id not in self._members:
            self._deferred.add(node)

    def requeue_deferred(self) -> None:
        """See EvictableLeaves."""
        for node in self._deferred.pop_some():
            self.add(node)

    def pop(self) -> Node | None:
        """See EvictableLeaves."""
        if self._victim is not None:
            node, tick, until = self._victim
            if node.id in self._members and node.tick == tick and self.num_evicted < until:
                return self._remove(node)
        self.examples.expire(self.num_evicted)
        self._refresh()
        best = self._lowest()
        if best is None:
            return self._deferred.pop()
        oldest = self._lru_leaves.peek()
        if oldest is not None and oldest is not best:
            is_finished = self._lru_leaves.is_finished(oldest)  # then it is evicted without a comparison
            if not is_finished:
                self.duels.start(self._observed_node(best), self._observed_node(oldest), self.num_evicted)
            if is_finished or not self.duels.learnt_leads:
                self._lru_leaves.record_victim(oldest)
                best = oldest
        self._victim = best, best.tick, self.num_evicted + _MAX_BLOCKS_PER_COMPARISON
        return self._remove(best)

    def _remove(self, node: Node) -> Node:
        del self._members[node.id]
        self._lru_leaves.discard(node)
        return node

    def _refresh(self) -> None:
        """Check the leaves that were checked longest ago."""
        for _ in range(min(_REFRESHED, len(self._refresh_queue))):
            node = self._refresh_queue.popleft()
            if node.id not in self._members:
                self._in_refresh_queue.discard(node.id)
                continue
            self._refresh_queue.append(node)
            self._push(node, self._current_key(node, learns=True))

    def _lowest(self) -> Node | None:
        """The leaf with the lowest current key of the few at the top of the heap."""
        looked_at: list[tuple[float, int, Node]] = []
        while self._heap and len(looked_at) < _COMPARED:
            entry = heappop(self._heap)
            _, number, node = entry
            if self._members.get(number) is entry:
                del self._members[number]
                looked_at.append((self._current_key(node), number, node))
        if not looked_at:
            return None
        for worth, _, node in looked_at:
            self._push(node, worth)
        return min(looked_at)[2]

    def on_use(self, node: Node, *, hit: bool) -> None:
        """See EvictableLeaves."""
        state = node.policy_state
        if not hit or not isinstance(state, LeafState):
            return
        if state.example is not None:
            self.examples.on_hit(state)
        if state.side is not None:
            self.duels.on_hit(state)

    def on_evict(self, leaf: Node, num_blocks: int) -> None:
        """See EvictableLeaves."""
        state = leaf.policy_state
        if isinstance(state, LeafState) and (state.example is not None or state.side is not None):
            key = self._key_of(leaf)
            if state.example is not None:
                self.examples.on_evict(state, key)
            if state.side is not None:
                self.duels.on_evict(state, key)
        if num_blocks >= leaf.num_uniform_blocks:
            self._victim = None  # the blocks before are compared anew
        self.num_evicted += num_blocks

    def reason(self, leaf: Node) -> dict[str, float]:
        """See EvictableLeaves."""
        seconds, chance = self._recompute_seconds(leaf), self.predictor.predict(self._features(leaf))
        worth = self._eviction_key(leaf, seconds, chance)
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
        return self.predictor.features(leaf, self._clock.tick, leaf.tenant)

    def _current_key(self, leaf: Node, *, learns: bool = False) -> float:
        """The current eviction key of a leaf. learns: it may become a training example."""
        features = self._features(leaf)
        if learns and not leaf.writers and (observed := self._observed_node(leaf)) is not None:
            self.examples.sample(observed, features, leaf.tenant, self.num_evicted)
        return self._eviction_key(leaf, self._recompute_seconds(leaf), self.predictor.predict(features))

    def _observed_node(self, leaf: Node) -> Node | None:
        """The node whose hits show that a leaf is used; None if there is none.

        That is the leaf itself. A tail is copied and has no hits: then it is the parent, if the tail is its only child.
        """
        if len(leaf.edge) >= self._key_bytes:
            return leaf
        parent = leaf.parent
        return parent if parent is not None and parent.parent is not None and len(parent.children) == 1 else None

    def _eviction_key(self, leaf: Node, seconds: float, chance: float) -> float:
        worth = seconds * chance / self._block_bytes
        priority = priority_at(leaf.marks, leaf.end, self._clock.now)
        return (
            worth if priority == DEFAULT_PRIORITY else worth * 2 ** ((priority - DEFAULT_PRIORITY) / _POINTS_TO_DOUBLE)
        )

    def _recompute_seconds(self, leaf: Node) -> float:
        """Seconds to compute the last block of a leaf again."""
        before = (leaf.end - 1) * self._block_size
        seconds = self._seconds(self._block_size, before)
        return seconds if 0 < seconds < inf else default_recompute_seconds(self._block_size, before)

    def _push(self, node: Node, worth: float) -> None:
        self._lru_leaves.add(node)
        entry = self._members[node.id] = (worth, node.id, node)
        heappush(self._heap, entry)
        self._compact()

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = list(self._members.values())
            heapify(self._heap)
            self._refresh_queue = deque(node for node in self._refresh_queue if node.id in self._members)
            self._in_refresh_queue = {node.id for node in self._refresh_queue}

    # Misses

    @property
    def uses_misses(self) -> bool:
        """See EvictableLeaves."""
        return self.examples.any_evicted or self.duels.any_evicted

    def on_miss(self, root_key: object, data: bytes, first: int, at: int) -> None:
        """See EvictableLeaves. Each missing block counts as a use of the evicted leaf that ended with it."""
        size = self._key_bytes
        for index in range(at, len(data) // size):
            begin = max(first, index + 1 - _BLOCKS_OF_A_KEY)
            key = hash((root_key, index + 1, data[begin * size : (index + 1) * size]))
            self.examples.on_miss(key)
            self.duels.on_miss(key)

    def _key_of(self, leaf: Node) -> int:
        """Key of the last block of a leaf: its position, and the tokens of up to 4 blocks up to its end."""
        tokens = leaf.path_end(len(leaf.edge), _BLOCKS_OF_A_KEY * self._key_bytes)
        return hash((leaf.root.root_key, leaf.end, tokens))
