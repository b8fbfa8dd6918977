"""How likely a leaf is to be used again soon: a small logistic model, learnt as it goes. Draws no random numbers."""

from collections import OrderedDict
from math import exp, log2
from typing import NamedTuple

from quire.cache.prefix.radix_node import Node
from quire.cache.prefix.uses import Uses

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
