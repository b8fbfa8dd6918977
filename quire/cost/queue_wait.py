"""Turns: when each of those who wait gets its turn, if nobody else comes. Reads no clock; an estimate, in few numbers.

Time passes in steps. In each, whoever runs gets a token, and what is left of the budget goes to prompts. Somebody
begins as soon as a row is free, memory has room for its prompt, and the prompts before it leave some of a step's
budget. Preemptions are not foreseen, and what is shared counts for whoever has it.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import NamedTuple


class Machine(NamedTuple):
    """What there is to be had, and what it takes."""

    rows: int
    budget: int  # tokens of a step
    room: float  # tokens that memory holds; infinite where nothing grows
    fixed: float  # seconds of a step
    per_token: float  # seconds


class Work(NamedTuple):
    """What a sequence still has to do, and how much it holds."""

    num_new: int  # tokens known and to be computed
    num_outputs: float  # tokens to be generated
    num_held: float  # tokens that its memory holds, once the new ones are computed


class Turn(NamedTuple):
    """The sequences of a request, or some of them, that begin one after the other."""

    works: list[Work]
    num_tokens: int | None  # of the prompt with which the request leaves the queue; None where it has before


class Turns:
    """A simulation of those who run, to which those who wait are added in the order of the queue."""

    def __init__(self, machine: Machine, running: Iterable[Work]) -> None:
        self._machine = machine
        self._step = self._seconds = self._due = self._held = 0.0  # due: tokens of prompts, not computed yet
        self._ends: list[tuple[float, float]] = []  # (step in which one ends, tokens that it gives back)
        for work in running:
            self._ends.append(self._begin(work))
        heapify(self._ends)

    def next(self, work: Work) -> float:
        """Seconds from the beginning until one more begins, which comes behind all before it."""
        while self._ends and (len(self._ends) >= self._machine.rows or self._held + work.num_new > self._machine.room):
            self._pass(self._ends[0][0] - self._step)
            self._held -= heappop(self._ends)[1]
        if self._due >= self._per_step:
            self._pass((self._due - self._per_step) / self._per_step + 1)
        heappush(self._ends, self._begin(work))
        return self._seconds

    @property
    def _per_step(self) -> float:
        """Tokens of prompts that a step has room for."""
        return max(self._machine.budget - len(self._ends), 1)

    def _begin(self, work: Work) -> tuple[float, float]:
        self._due += work.num_new
        num_steps = self._due / self._per_step + work.num_outputs
        self._held += work.num_held
        return self._step + num_steps, work.num_held + num_steps

    def _pass(self, num_steps: float) -> None:
        """So many steps pass. Everybody who runs grows by a token in each."""
        if num_steps <= 0:
            return
        computed = min(self._due, num_steps * self._per_step)
        machine, rows = self._machine, len(self._ends)
        self._seconds += num_steps * (machine.fixed + machine.per_token * rows) + machine.per_token * computed
        self._due -= computed
        self._step += num_steps
        self._held += num_steps * rows


class Line:
    """Those who wait, and behind them those who were told to come: who has left the queue when."""

    def __init__(self, turns: Turns, waiting: Iterable[Turn], num_requests: int, num_tokens: int) -> None:
        """waiting: is asked for as much as is needed. num_requests, num_tokens: that are to leave, all in all."""
        self.num_requests = num_requests
        self.num_tokens = num_tokens
        self._turns = turns
        self._waiting = iter(waiting)
        self._behind = deque[Turn]()
        self._seconds: list[float] = []  # when one leaves the queue
        self._requests: list[int] = []  # that have left with it
        self._tokens: list[int] = []  # of their prompts

    def append(self, turn: Turn) -> None:
        """One more, behind all others."""
        self._behind.append(turn)
        if turn.num_tokens is not None:
            self.num_requests += 1
            self.num_tokens += turn.num_tokens

    def drop(self, turn: Turn) -> None:
        """One that was put behind is not to be counted: it came, and stands somewhere else, or it will not come."""
        if turn.num_tokens is not None:
            self.num_requests -= 1
            self.num_tokens -= turn.num_tokens

    def seconds_until(self, num_requests: int, num_tokens: int) -> float:
        """From the beginning until so many requests, with so many tokens, have left; or all, where they are fewer."""
        while not (self._seconds and self._requests[-1] >= num_requests and self._tokens[-1] >= num_tokens):
            turn = next(self._waiting, None)
            if turn is None and not self._behind:
                break
            self._pass(turn or self._behind.popleft())
        at = max(bisect_left(self._requests, num_requests), bisect_left(self._tokens, num_tokens))
        return self._seconds[min(at, len(self._seconds) - 1)] if self._seconds else 0.0

    def _pass(self, turn: Turn) -> None:
        began = [self._turns.next(work) for work in turn.works]
        if turn.num_tokens is not None:
            self._seconds.append(began[0])
            self._requests.append(len(self._requests) + 1)
            self._tokens.append((self._tokens[-1] if self._tokens else 0) + turn.num_tokens)


_FORGET = 0.98  # weight that a sequence keeps when the next one ends


class Lengths:
    """The mean over sequences that ended lately."""

    __slots__ = ("_tokens", "_weight")

    def __init__(self) -> None:
        self._weight = self._tokens = 0.0

    def ended(self, num_tokens: int) -> None:
        """One that an end token or a stop string could end has ended with so many output tokens."""
        self._weight = self._weight * _FORGET + 1
        self._tokens = self._tokens * _FORGET + num_tokens

    @property
    def mean(self) -> float | None:
        """Output tokens; None where nothing is known yet."""
        return self._tokens / self._weight if self._weight else None
