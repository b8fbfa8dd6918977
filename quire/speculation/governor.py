"""The governor: which drafts are worth their time.

A step with drafts takes longer and yields more tokens. The governor knows the seconds of a step by its tokens from the
cost model, and the chance of each draft from the drafts before it. It takes the drafts, over all sequences of the step,
that yield the most expected tokens per second; none if none of them pays.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from quire.config import Drafter
from quire.speculation.drafters import Proposal

_MATCH_LENGTHS = (3, 4, 6, 9, 17)  # first match length of each class but the first
_PLACES = (1, 2, 4, 8)  # first place in the chain of each class but the first
_PRIOR_CHANCES = (0.3, 0.4, 0.55, 0.7, 0.8, 0.9)  # of a draft by class of match length, before any was tried
_PRIOR_WEIGHT = 4.0  # drafts that the prior counts as
_DECAY = 0.995  # weight of a draft when the next one of its class is tried
_OWN_PRIOR_WEIGHT = 4.0  # drafts that the chance of all sequences counts as, beside those of a sequence
_OWN_DECAY = 0.9
_MOST_PER_SAMPLE = 8  # drafts of a sequence
_LEAST_COST = 0.01  # of a draft, as a share of the step without drafts: measured costs are too noisy for less
_EXPLORED_SHARE = 0.01  # of the time of all steps, for drafts that are not expected to pay


class Chances:
    """Learned chances that a draft is accepted if the drafts before it are, by drafter, match length and place."""

    def __init__(self) -> None:
        self._counts: dict[tuple[Drafter, int, int], list[float]] = {}  # decayed: accepted, tried

    def of(self, proposal: Proposal) -> list[float]:
        """The chance of each draft of a proposal."""
        match_class = bisect_right(_MATCH_LENGTHS, proposal.match_length)
        by_place = [self._chance((proposal.drafter, match_class, place)) for place in range(len(_PLACES) + 1)]
        return [by_place[bisect_right(_PLACES, i)] for i in range(len(proposal.tokens))]

    def observe(self, proposal: Proposal, num_accepted: int) -> None:
        """Learn from a verified proposal, of which `num_accepted` leading drafts were accepted."""
        match_class = bisect_right(_MATCH_LENGTHS, proposal.match_length)
        for i in _tested(proposal, num_accepted):
            key = (proposal.drafter, match_class, bisect_right(_PLACES, i))
            counts = self._counts.setdefault(key, [0.0, 0.0])
            counts[0] = counts[0] * _DECAY + (i < num_accepted)
            counts[1] = counts[1] * _DECAY + 1

    def _chance(self, key: tuple[Drafter, int, int]) -> float:
        accepted, tried = self._counts.get(key, (0.0, 0.0))
        prior = _PRIOR_CHANCES[-1] if key[0] == "prediction" else _PRIOR_CHANCES[key[1]]
        return (accepted + _PRIOR_WEIGHT * prior) / (tried + _PRIOR_WEIGHT)


class OwnCounts:
    """The drafts of one sequence so far, by drafter. They move the learned chances towards those of the sequence."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[Drafter, list[float]] = {}  # decayed: accepted, tried

    def adjust(self, drafter: Drafter, chances: Sequence[float]) -> list[float]:
        """The chances of drafts of this sequence, from those of all sequences."""
        accepted, tried = self._counts.get(drafter, (0.0, 0.0))
        return [(accepted + _OWN_PRIOR_WEIGHT * chance) / (tried + _OWN_PRIOR_WEIGHT) for chance in chances]

    def observe(self, proposal: Proposal, num_accepted: int) -> None:
        """Learn from a verified proposal, of which `num_accepted` leading drafts were accepted."""
        counts = self._counts.setdefault(proposal.drafter, [0.0, 0.0])
        for i in _tested(proposal, num_accepted):
            counts[0] = counts[0] * _OWN_DECAY + (i < num_accepted)
            counts[1] = counts[1] * _OWN_DECAY + 1


def _tested(proposal: Proposal, num_accepted: int) -> list[int]:
    """Indices of the drafts that were compared with a sampled token: up to the first that was rejected."""
    stop = min(num_accepted + 1, len(proposal.tokens))
    return [i for i in range(stop) if i not in proposal.forced] if proposal.forced else list(range(stop))


class Candidate(NamedTuple):
    """A proposal for one sequence of the step."""

    proposal: Proposal
    chances: Sequence[float]  # of each draft, if those before it are accepted


class Governor:
    """Selects the drafts of a step."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        """seconds: seconds of a step by its number of tokens; 0 if unknown."""
        self._seconds = seconds
        self._unspent = 0.0  # seconds for drafts that are not expected to pay

    def may_pay(self, num_tokens: int, num_samples: int) -> bool:
        """Whether drafts that are surely right would pay in a step, or the time to try one has been saved up.

        num_tokens, num_samples: of the step without drafts. Called once per step.
        """
        base = self._seconds(num_tokens)
        self._unspent = min(self._unspent + _EXPLORED_SHARE * base, base)
        if self._seconds(num_tokens + 1) - base <= self._unspent:
            return True
        # the first token of a group of tokens may cost more than the others
        return any(
            (self._seconds(num_tokens + count) - base) * num_samples < 0.99 * base * count
            for count in (1, 8, _MOST_PER_SAMPLE * num_samples)
        )

    def select(self, candidates: Sequence[Candidate], *, num_tokens: int, num_samples: int, most: int) -> list[int]:
        """The number of drafts to verify of each candidate.

        num_tokens, num_samples: of the step without drafts. most: drafts of all candidates together.
        """
        gains = sorted(_gains(candidates), reverse=True)[:most]
        expected, base = float(num_samples), self._seconds(num_tokens)
        best, rate = 0, expected / base if base > 0 else 0.0
        for count, (gain, _) in enumerate(gains, 1):
            expected += gain
            seconds = max(self._seconds(num_tokens + count), base * (1 + _LEAST_COST * count))
            if seconds <= 0 or expected / seconds > rate:
                best, rate = count, expected / seconds if seconds > 0 else 0.0
        more = min(len(gains), 2 * best or len(candidates))  # whose costs may have been overestimated
        extra = self._seconds(num_tokens + more) - self._seconds(num_tokens + best) + _LEAST_COST * base * (more - best)
        if best < more and extra <= self._unspent:
            self._unspent -= extra
            best = more
        counts = [0] * len(candidates)
        for _, index in gains[:best]:
            counts[index] += 1
        return counts


def _gains(candidates: Iterable[Candidate]) -> Iterable[tuple[float, int]]:
    """(expected tokens, candidate index) of each draft. The gains of a chain fall, so a prefix of it is selected."""
    for index, candidate in enumerate(candidates):
        gain = 1.0
        for chance in candidate.chances:
            gain *= chance
            yield gain, index
