"""The governor: which drafts are worth their time.

A step with drafts takes longer and yields more tokens. The governor knows the seconds of a step by its tokens from the
cost model, and the chance of each draft from the drafts before it. It takes the drafts, over all sequences of the step,
that yield the most expected tokens per second; none if none of them pays.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from quire.config import Drafter
from quire.speculation.drafters import Proposal

_MATCH_LENGTHS = (3, 4, 6, 9, 17)  # first match length of each class but the first
_PLACES = (1, 2, 4, 8)  # first place in the chain of each class but the first
_PRIOR_CHANCES = (0.3, 0.4, 0.55, 0.7, 0.8, 0.9)  # of a draft by class of match length, before any was tried
_PRIOR_WEIGHT = 4.0  # drafts that the prior counts as
_DECAY = 0.995  # weight of a draft when the next one of its class is tried
_OWN_PRIOR_WEIGHT = 8.0  # drafts that the chance of all sequences counts as, beside those of a sequence
_OWN_DECAY = 0.95
_MOST_PER_SAMPLE = 8  # drafts of a sequence
_LEAST_COST = 0.01  # of a draft, as a share of the step without drafts: measured costs are too noisy for less
_LEAST_SHARE = 0.1  # of a draft, as a share of a token of the step without drafts, if that is less
_GROUP = 8  # tokens that kernels compute at once
_LEAST_GAIN = 1.05  # expected speed with drafts, by that without; less is within the error of the estimates
_PROPOSAL_SECONDS = 25e-6  # for the proposal of a sequence, after a step that has emptied the caches of the processor
_PROPOSED_SHARE = 0.004  # of the time of all steps, for proposals while no drafts pay
_EXPLORED_SHARE = 0.005  # of the time of all steps, for steps that are expected to be worse than the best


class Chances:
    """Learned chances that a draft is accepted if the drafts before it are, by drafter, match length and place."""

    def __init__(self) -> None:
        self._counts: dict[tuple[Drafter, int, int], list[float]] = {}  # decayed: accepted, tried
        self._by_index: dict[tuple[Drafter, int], list[float]] = {}  # chances of the first drafts of a chain

    def of(self, proposal: Proposal) -> list[float]:
        """The chance of each draft of a proposal."""
        key = proposal.drafter, bisect_right(_MATCH_LENGTHS, proposal.match_length)
        chances = self._by_index.get(key)
        if chances is None:
            by_place = [self._chance((*key, place)) for place in range(len(_PLACES) + 1)]
            chances = self._by_index[key] = [by_place[bisect_right(_PLACES, i)] for i in range(_PLACES[-1] + 1)]
        more = len(proposal.tokens) - len(chances)
        return chances[: len(proposal.tokens)] if more <= 0 else chances + chances[-1:] * more

    def observe(self, proposal: Proposal, num_accepted: int) -> None:
        """Learn from a verified proposal, of which `num_accepted` leading drafts were accepted."""
        match_class = bisect_right(_MATCH_LENGTHS, proposal.match_length)
        for i in _tested(proposal, num_accepted):
            key = (proposal.drafter, match_class, bisect_right(_PLACES, i))
            counts = self._counts.setdefault(key, [0.0, 0.0])
            counts[0] = counts[0] * _DECAY + (i < num_accepted)
            counts[1] = counts[1] * _DECAY + 1
        self._by_index.pop((proposal.drafter, match_class), None)

    def _chance(self, key: tuple[Drafter, int, int]) -> float:
        accepted, tried = self._counts.get(key, (0.0, 0.0))
        prior = _PRIOR_CHANCES[-1] if key[0] == "prediction" else _PRIOR_CHANCES[key[1]]
        return (accepted + _PRIOR_WEIGHT * prior) / (tried + _PRIOR_WEIGHT)


class OwnCounts:
    """The drafts of one sequence so far, by drafter. They move the learned chances towards those of the sequence."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[Drafter, list[float]] = {}  # decayed: accepted, tried

    def gains(self, drafter: Drafter, chances: Sequence[float]) -> list[float]:
        """Expected tokens from each draft of this sequence. chances: of drafts of all sequences.

        Those from the first draft on that yields too little are left out.
        """
        accepted, tried = self._counts.get(drafter, (0.0, 0.0))
        gains, gain = [], 1.0
        for chance in chances:
            gain *= (accepted + _OWN_PRIOR_WEIGHT * chance) / (tried + _OWN_PRIOR_WEIGHT)
            if gain < _LEAST_COST:
                break
            gains.append(gain)
        return gains

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
    gains: Sequence[float]  # expected tokens from each draft, falling; from later ones 0


class Governor:
    """Selects the drafts of a step."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        """seconds: seconds of a step by its number of tokens; 0 if unknown."""
        self._seconds = seconds
        self._unspent = 0.0  # seconds for steps that are expected to be worse than the best
        self._has_paid = True  # whether the last selection had drafts
        self._unproposed = 0.0  # seconds for proposals
        self._explores_plain = False  # whether the next of these has no drafts, where drafts pay

    def may_pay(self, num_tokens: int, num_samples: int) -> bool:
        """Whether proposals are made for a step: drafts that are surely right would pay, or one can be tried.

        While none pay, proposals are only made as often as there is time for them.

        num_tokens, num_samples: of the step without drafts. Called once per step.
        """
        base = self._seconds(num_tokens)
        self._unspent = min(self._unspent + _EXPLORED_SHARE * base, base)
        if not self._has_paid:
            share = _PROPOSED_SHARE * base
            self._unproposed += share
            cost = num_samples * min(_PROPOSAL_SECONDS, share)
            if self._unproposed < cost:
                return False
            self._unproposed = min(self._unproposed - cost, cost)
        if self._seconds(num_tokens + 1) - base <= self._unspent:
            return True
        # the first token of a group of tokens may cost more than the others
        return any(
            (num_samples + count) * base >= _LEAST_GAIN * num_samples * self._seconds(num_tokens + count)
            for count in (1, _GROUP, _MOST_PER_SAMPLE * num_samples)
        )

    def select(self, candidates: Sequence[Candidate], *, num_tokens: int, num_samples: int, most: int) -> list[int]:
        """The number of drafts to verify of each candidate.

        num_tokens, num_samples: of the step without drafts. most: drafts of all candidates together.
        """
        # the gains of a chain fall, so a prefix of it is selected
        gains = sorted(((gain, i) for i, one in enumerate(candidates) for gain in one.gains), reverse=True)[:most]
        base = self._seconds(num_tokens)
        expected = list(accumulate((gain for gain, _ in gains), initial=float(num_samples)))
        least_cost = base * min(_LEAST_COST, _LEAST_SHARE / num_samples)

        def seconds(count: int) -> float:
            return max(self._seconds(num_tokens + count), base + least_cost * count)

        best = len(gains)
        if base > 0:
            best = max(_compared(num_tokens, len(gains)), key=lambda count: expected[count] / seconds(count))
            if expected[best] * base < _LEAST_GAIN * num_samples * seconds(best):
                best = 0
            self._has_paid = best > 0
            best = self._explored(best, expected, seconds, len(candidates))
        counts = [0] * len(candidates)
        for _, index in gains[:best]:
            counts[index] += 1
        return counts

    def _explored(self, best: int, expected: Sequence[float], seconds: Callable[[int], float], most: int) -> int:
        """The best number of drafts, or another one, if the time to try it has been saved up.

        Estimates of costs and chances that are not tried now and then are not corrected either.
        """
        if best and self._explores_plain:
            other = 0
            lost = seconds(0) - expected[0] * seconds(best) / expected[best]  # beyond the time for as many tokens
        else:
            other = min(len(expected) - 1, 2 * best or most)
            lost = seconds(other) - seconds(best)
        if other == best or lost > self._unspent:
            return best
        self._unspent -= lost
        self._explores_plain = not self._explores_plain
        return other


def _compared(num_tokens: int, most: int) -> Iterator[int]:
    """Numbers of drafts from 0 to `most` that are compared: all small ones, then those that fill groups."""
    yield from range(min(most, 2 * _GROUP) + 1)
    yield from range(3 * _GROUP - num_tokens % _GROUP, most, _GROUP)
    yield most
