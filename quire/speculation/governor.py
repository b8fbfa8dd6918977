"""The governor: which drafts are worth their time.

A step with drafts takes longer and yields more tokens. The governor knows the seconds of a step by its tokens from the
cost model, what drafts add to the time between steps from earlier steps, and the chance of each draft from the drafts
before it. It takes the drafts, over all sequences of the step, that yield the most expected tokens per second; none if
none of them pays.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from itertools import accumulate
from math import inf
from typing import NamedTuple

from quire.speculation.drafters import Proposal

_MATCH_LENGTHS = (3, 4, 6, 9, 17)  # first match length of each class but the first
_PLACES = (0, 1, 2, 2, 3, 3, 3, 3)  # class of each of the first places in the chain; later ones are _LAST_PLACES
_LAST_PLACES = 4
_PRIOR_CHANCES = (0.3, 0.4, 0.55, 0.7, 0.8, 0.9)  # of a draft by class of match length, before any was tried
_PRIOR_WEIGHT = 4.0  # drafts that the prior counts as
_DECAY = 0.995  # weight of a draft when the next one of its class is tried
_OWN_PRIOR_WEIGHT = 8.0  # drafts that the chance of all sequences counts as, beside those of a sequence
_OWN_DECAY = 0.95
_MOST_PER_SAMPLE = 8  # drafts of a sequence
_LEAST_COST = 0.01  # of a draft, as a share of the step without drafts: measured costs are too noisy for less
_LEAST_SHARE = 0.1  # of a draft, as a share of a token of the step without drafts, if that is less
_NO_GAIN = 0.01  # expected tokens of a draft that is never selected
_GROUP = 8  # tokens that kernels compute at once
_LEAST_GAIN = 1.05  # expected speed with drafts, by that without; less is within the error of the estimates
_LEAST_GAIN_OF_SEVERAL = 1.15  # the same of several sequences, because a longer step delays those without drafts
_PROPOSAL_SECONDS = 50e-6  # for the proposal of a sequence, until it has been measured
_LEAST_PROPOSAL_SECONDS = 10e-6
_DRAFTS_SECONDS = 100e-6  # that drafts add to the host time of a step, until it has been measured
_HOST_DECAY = 0.98  # weight of a step when the next one of its kind is observed
_MOST_HOST_TIMES = 4.0  # the mean of its kind, or _LEAST_HOST_SECONDS: a step with more counts as with so much
_LEAST_HOST_SECONDS = 100e-6
_LEAST_HOST_STEPS = 3.0  # of a kind, before its time counts
_PROPOSED_SHARE = 0.004  # of the time of all steps, for proposals, beside what drafts have saved
_MOST_BALANCE = 16  # steps whose time can be saved up for proposals and drafts, or be owed for proposals
_MOST_OWED = 2  # steps whose time can be owed for drafts: what failed changes their chances as well
_RESUMED = 16  # steps with proposals that are saved up before these resume: one alone seldom shows that they pay
_INDEXED_SECONDS = 1.5e-6  # to index a token of a sequence
_TRIED_SHARE = 0.005  # of the time of all steps, for steps that are expected to be worse than the best


class Chances:
    """Learned chances that a draft is accepted if the drafts before it are, by drafter, match length and place."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], list[list[float]]] = {}  # by class of place: accepted, tried; decayed
        self._by_index: dict[tuple[str, int], list[float]] = {}  # chances of the first drafts of a chain

    def of(self, proposal: Proposal) -> list[float]:
        """The chance of each draft of a proposal."""
        key = proposal.drafter, bisect_right(_MATCH_LENGTHS, proposal.match_length)
        chances = self._by_index.get(key)
        if chances is None:
            prior = _PRIOR_CHANCES[-1] if proposal.drafter == "prediction" else _PRIOR_CHANCES[key[1]]
            counts = self._counts.get(key, [(0.0, 0.0)] * (_LAST_PLACES + 1))
            by_class = [(accepted + _PRIOR_WEIGHT * prior) / (tried + _PRIOR_WEIGHT) for accepted, tried in counts]
            chances = self._by_index[key] = [by_class[place] for place in (*_PLACES, _LAST_PLACES)]
        more = len(proposal.tokens) - len(chances)
        return chances[: len(proposal.tokens)] if more <= 0 else chances + chances[-1:] * more

    def observe(self, proposal: Proposal, num_accepted: int) -> None:
        """Learn from a verified proposal, of which `num_accepted` leading drafts were accepted."""
        key = proposal.drafter, bisect_right(_MATCH_LENGTHS, proposal.match_length)
        counts = self._counts.get(key)
        if counts is None:
            counts = self._counts[key] = [[0.0, 0.0] for _ in range(_LAST_PLACES + 1)]
        for i in _tested(proposal, num_accepted):
            of_place = counts[_PLACES[i] if i < len(_PLACES) else _LAST_PLACES]
            of_place[0] = of_place[0] * _DECAY + (i < num_accepted)
            of_place[1] = of_place[1] * _DECAY + 1
        self._by_index.pop(key, None)


class OwnCounts:
    """The drafts of one sequence so far, by drafter. They move the learned chances towards those of the sequence."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[str, tuple[float, float]] = {}  # decayed: accepted, tried

    def gains(self, drafter: str, chances: Sequence[float]) -> list[float]:
        """Expected tokens from each draft of this sequence. chances: of drafts of all sequences.

        Those from the first draft on that yields too little are left out.
        """
        accepted, tried = self._counts.get(drafter, (0.0, 0.0))
        gains, gain, weight = [], 1.0, tried + _OWN_PRIOR_WEIGHT
        for chance in chances:
            gain *= (accepted + _OWN_PRIOR_WEIGHT * chance) / weight
            if gain < _NO_GAIN:
                break
            gains.append(gain)
        return gains

    def observe(self, proposal: Proposal, num_accepted: int) -> None:
        """Learn from a verified proposal, of which `num_accepted` leading drafts were accepted."""
        accepted, tried = self._counts.get(proposal.drafter, (0.0, 0.0))
        rejected = num_accepted < len(proposal.tokens)
        before = _OWN_DECAY ** (len(_tested(proposal, num_accepted)) - rejected)  # weight of earlier drafts
        new = (1 - before) / (1 - _OWN_DECAY)  # sum of the weights of the accepted ones
        accepted, tried = accepted * before + new, tried * before + new
        if rejected:
            accepted, tried = accepted * _OWN_DECAY, tried * _OWN_DECAY + 1
        self._counts[proposal.drafter] = accepted, tried


def _tested(proposal: Proposal, num_accepted: int) -> Sequence[int]:
    """Indices of the drafts that were compared with a sampled token: up to the first that was rejected."""
    stop = min(num_accepted + 1, len(proposal.tokens))
    return [i for i in range(stop) if i not in proposal.forced] if proposal.forced else range(stop)


class Drafting(Enum):
    """What a step does about drafts."""

    NONE = "none"  # no proposal was made
    PROPOSED = "proposed"  # none of the proposals was worth its time
    VERIFIED = "verified"


class HostTime:
    """Seconds between the end of one decode step and the next one's, without those in which the device computes.

    They are planning with proposals, launch, verification and commit. Steps differ by what they do about drafts, so
    what drafts cost is the difference of the means. Steps are compared with those of about as many sequences.
    """

    def __init__(self) -> None:
        # decayed: steps, seconds, proposals; by what a step did, and by the bits of its number of sequences
        self._sums: dict[tuple[Drafting, int], tuple[float, float, float]] = {}

    def observe(
        self, drafting: Drafting, num_sequences: int, seconds: float, *, num_proposals: int = 0, num_indexed: int = 0
    ) -> None:
        """Learn from a step. An outlier is clamped.

        num_indexed: tokens, whose time is known. A step that was mostly indexing says nothing else.
        """
        key = drafting, num_sequences.bit_length()
        steps, total, proposals = self._sums.get(key, (0.0, 0.0, 0.0))
        indexing = num_indexed * _INDEXED_SECONDS
        if indexing > seconds / 2 > 0:
            return
        seconds = max(0.0, seconds - indexing)
        if steps >= 1:
            seconds = min(seconds, _MOST_HOST_TIMES * max(total / steps, _LEAST_HOST_SECONDS))
        kept = _HOST_DECAY
        self._sums[key] = steps * kept + 1, total * kept + seconds, proposals * kept + num_proposals

    def of_plain_step(self, num_sequences: int) -> float:
        """Seconds of a step without proposals; 0 before they are known."""
        return self._mean(Drafting.NONE, num_sequences) or 0.0

    def of_proposal(self, num_sequences: int) -> float:
        """Seconds that the proposal of a sequence adds."""
        plain, mean = self._mean(Drafting.NONE, num_sequences), self._mean(Drafting.PROPOSED, num_sequences)
        if plain is None or mean is None:
            return _PROPOSAL_SECONDS
        steps, _, proposals = self._sums[Drafting.PROPOSED, num_sequences.bit_length()]
        return max(_LEAST_PROPOSAL_SECONDS, (mean - plain) * steps / max(proposals, 1.0))

    def of_drafts(self, num_sequences: int) -> float:
        """Seconds that drafts add to a step with proposals, at least 0."""
        plain, mean = self._mean(Drafting.NONE, num_sequences), self._mean(Drafting.VERIFIED, num_sequences)
        if plain is None or mean is None:
            return _DRAFTS_SECONDS
        steps, _, proposals = self._sums[Drafting.VERIFIED, num_sequences.bit_length()]
        return max(0.0, mean - plain - proposals / steps * self.of_proposal(num_sequences))

    def _mean(self, drafting: Drafting, num_sequences: int) -> float | None:
        steps, total, _ = self._sums.get((drafting, num_sequences.bit_length()), (0.0, 0.0, 0.0))
        return total / steps if steps >= _LEAST_HOST_STEPS else None


class Candidate(NamedTuple):
    """A proposal for one sequence of the step."""

    proposal: Proposal
    gains: Sequence[float]  # expected tokens from each draft, falling; from later ones 0


class Governor:
    """Selects the drafts of a step.

    Proposals are made while there is time for them: a small share of the time of all steps, and what drafts have saved
    beyond what they cost. So drafts that never pay cost about that share, and those that pay are proposed in each step.
    """

    def __init__(self, seconds: Callable[[int], float], row_seconds: Callable[[], float] = lambda: 0.0) -> None:
        """seconds: seconds of a step on the device by its number of tokens; 0 if unknown.

        row_seconds: what each sequence adds to them, whatever the number of its drafts.
        """
        self.host_time = HostTime()
        self._seconds_of_tokens = seconds
        self._row_seconds = row_seconds
        self._unspent = 0.0  # seconds for trials: steps that are expected to be worse than the best
        self._tries_more = True  # whether the next trial has more drafts than the best step, not none
        self._balance = inf  # seconds for proposals and drafts; at first as much as can be saved up
        self._most_balance = 0.0
        self._most_owed = 0.0  # for drafts
        self._pauses = False  # whether there was no time left for proposals, and too little is saved up to resume them
        self._token_seconds = 0.0  # that an accepted draft saves

    def may_pay(self, num_tokens: int, num_samples: int, num_proposals: int) -> bool:
        """Whether proposals are made for a step: there is time for them, and drafts that are right can pay, or a trial.

        num_tokens, num_samples: of the step without drafts. num_proposals: at most. Called once per step.
        """
        device, host = self._seconds(num_tokens, num_samples), self.host_time
        plain = host.of_plain_step(num_samples)
        base = device + plain
        if base == 0:
            return True  # nothing is selected before the costs are known, but chances are learned
        self._unspent = min(self._unspent + _TRIED_SHARE * base, base)
        cost = num_proposals * host.of_proposal(num_samples)
        self._most_balance = _MOST_BALANCE * base
        self._balance = min(self._balance + _PROPOSED_SHARE * base, self._most_balance)
        self._most_owed = _MOST_OWED * base
        self._pauses = self._balance < (_RESUMED * cost if self._pauses else cost)
        if self._pauses:
            return False
        added = host.of_drafts(num_samples)
        if self._seconds(num_tokens + 1, num_samples) + added - device <= self._unspent:
            return True
        # the first token of a group of tokens may cost more than the others
        least = _least_gain(num_samples) * num_samples
        return any(
            (num_samples + count) * base >= least * (self._seconds(num_tokens + count, num_samples) + plain + added)
            for count in (1, _GROUP, _MOST_PER_SAMPLE * num_samples)
        )

    def select(
        self,
        candidates: Sequence[Candidate],
        *,
        num_tokens: int,
        num_samples: int,
        most: int,
        price: float = 0.0,
        tries: bool = True,
    ) -> list[int]:
        """The number of drafts to verify of each candidate.

        num_tokens, num_samples: of the step without drafts. most: drafts of all candidates together. price: tokens that
        a sequence loses by having drafts. tries: whether the drafts are of this step, which may be a trial.
        """
        least, gains = [], []
        for i, one in enumerate(candidates):
            number, priced = _priced(one.gains, price)
            least.append(number)
            gains += [(gain, i) for gain in priced]
        gains = sorted(gains, reverse=True)[:most]  # the gains of a chain fall, so a prefix of it is selected
        base = self._seconds(num_tokens, num_samples)
        expected = list(accumulate((gain for gain, _ in gains), initial=float(num_samples)))
        least_cost = base * min(_LEAST_COST, _LEAST_SHARE / num_samples)
        plain, added = self.host_time.of_plain_step(num_samples), self.host_time.of_drafts(num_samples)

        def seconds(count: int) -> float:
            device = max(self._seconds(num_tokens + count, num_samples), base + least_cost * count)
            return device + plain + (added if count else 0.0)

        best = 0
        if base > 0:
            best = max(_compared(num_tokens, len(gains)), key=lambda count: expected[count] / seconds(count))
            if expected[best] * seconds(0) < _least_gain(num_samples) * num_samples * seconds(best):
                best = 0
        if tries:
            self._token_seconds = (self._seconds(num_samples, num_samples) + plain) / num_samples
            paying = best
            if base > 0:
                best = self._tried(best, expected, seconds, len(candidates))
            # what a trial takes beyond it has a time of its own
            self._pay(seconds(min(best, paying)) - seconds(0), self._most_owed)
        counts = [0] * len(candidates)
        for _, index in gains[:best]:
            counts[index] += 1
        counts = [count if count >= least[i] else 0 for i, count in enumerate(counts)]
        if tries:
            self._pay(price * self._token_seconds * sum(map(bool, counts)), self._most_owed)
        return counts

    def proposed(self, num_proposals: int, num_indexed: int, num_samples: int) -> None:
        """Record the proposals of a step, and the tokens that were indexed for them."""
        cost = num_proposals * self.host_time.of_proposal(num_samples)
        self._pay(cost + num_indexed * _INDEXED_SECONDS, self._most_balance)

    def accepted(self, number: int) -> None:
        """Record accepted drafts."""
        self._balance = min(self._balance + number * self._token_seconds, self._most_balance)

    def _seconds(self, num_tokens: int, num_rows: int) -> float:
        """Seconds of a step on the device."""
        return self._seconds_of_tokens(num_tokens) + self._row_seconds() * num_rows

    def _pay(self, seconds: float, most_owed: float) -> None:
        self._balance = max(self._balance - seconds, min(self._balance, -most_owed))

    def _tried(self, best: int, expected: Sequence[float], seconds: Callable[[int], float], most: int) -> int:
        """The best number of drafts, or another one, if the time to try it has been saved up.

        Estimates of costs that are not tried now and then are not corrected either. Steps with more drafts and steps
        without drafts take turns.
        """
        base, more = seconds(0), min(len(expected) - 1, 2 * best or most)
        lost = {}
        if best:
            lost[0] = base - expected[0] * seconds(best) / expected[best]  # beyond the time for as many tokens
        if more > best:
            lost[more] = seconds(more) - seconds(best)
        trials = [number for number in lost if lost[number] <= base]  # the most that is saved up
        if not trials:
            return best
        other = max(trials) if self._tries_more else min(trials)
        if lost[other] > self._unspent:
            return best
        self._unspent -= max(lost[other], 0.0)
        self._tries_more = not self._tries_more
        return other


def _least_gain(num_samples: int) -> float:
    return _LEAST_GAIN if num_samples == 1 else _LEAST_GAIN_OF_SEVERAL


def _priced(gains: Sequence[float], price: float) -> tuple[int, Sequence[float]]:
    """How many drafts of a chain are verified at least, and their gains if the first ones have to yield `price`.

    The first drafts, as many as yield the most for each, have equal gains. So gains fall, and are selected together.
    """
    if price == 0 or not gains:
        return 0, gains
    number = max(range(1, len(gains) + 1), key=lambda n: (sum(gains[:n]) - price) / n)
    mean = (sum(gains[:number]) - price) / number
    return (number, [mean] * number + list(gains[number:])) if mean > 0 else (0, ())


def _compared(num_tokens: int, most: int) -> Iterator[int]:
    """Numbers of drafts from 0 to `most` that are compared: all small ones, then those that fill groups."""
    yield from range(min(most, 2 * _GROUP) + 1)
    yield from range(3 * _GROUP - num_tokens % _GROUP, most, _GROUP)
    yield most
