"""Prediction of the queue wait by a simulation of running and waiting sequences. Reads no clock.

Time passes in steps. In each step every running sequence gets one token, and prompts get the rest of the token budget.
A waiting sequence is admitted when a row is free, memory has space for its tokens, and the prompts before it leave part
of a step's budget. The simulation has no preemptions and no later arrivals, and shared blocks count for each sequence.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import NamedTuple


class Machine(NamedTuple):
    """Resources of the engine, and the cost of a step."""

    rows: int
    budget: int  # tokens per step
    room: float  # tokens that the block pools hold; infinite if all groups have windows
    fixed: float  # seconds per step
    per_token: float  # seconds per token


class Work(NamedTuple):
    """Remaining work and memory of a sequence."""

    num_new: int  # known tokens whose KV is not computed
    num_outputs: float  # tokens to generate
    num_held: float  # tokens whose KV it holds once the new ones are computed


class Turn(NamedTuple):
    """Waiting sequences of one request that are admitted one after the other."""

    works: list[Work]
    num_tokens: int | None  # prompt tokens of the request that leaves the queue here; None if it left the queue before


class Turns:
    """Simulates the running sequences. Waiting sequences are added in the order of the queue."""

    def __init__(self, machine: Machine, running: Iterable[Work]) -> None:
        self._machine = machine
        self._step = self._seconds = self._due = self._held = 0.0  # due: prompt tokens that are not computed yet
        self._ends: list[tuple[float, float]] = []  # heap of (step in which a sequence ends, tokens that it frees)
        for work in running:
            self._ends.append(self._begin(work))
        heapify(self._ends)

    def next(self, work: Work) -> float:
        """Simulate until one more sequence is admitted, after all before it. Returns seconds from the begin."""
        while self._ends and (len(self._ends) >= self._machine.rows or self._held + work.num_new > self._machine.room):
            self._pass(self._ends[0][0] - self._step)
            self._held -= heappop(self._ends)[1]
        if self._due >= self._per_step:
            self._pass((self._due - self._per_step) / self._per_step + 1)
        heappush(self._ends, self._begin(work))
        return self._seconds

    @property
    def _per_step(self) -> float:
        """Prompt tokens that fit into one step."""
        return max(self._machine.budget - len(self._ends), 1)

    def _begin(self, work: Work) -> tuple[float, float]:
        self._due += work.num_new
        num_steps = self._due / self._per_step + work.num_outputs
        self._held += work.num_held
        return self._step + num_steps, work.num_held + num_steps

    def _pass(self, num_steps: float) -> None:
        """Simulate `num_steps` steps. Each running sequence grows by one token per step."""
        if num_steps <= 0:
            return
        computed = min(self._due, num_steps * self._per_step)
        machine, rows = self._machine, len(self._ends)
        self._seconds += num_steps * (machine.fixed + machine.per_token * rows) + machine.per_token * computed
        self._due -= computed
        self._step += num_steps
        self._held += num_steps * rows


class Line:
    """The waiting requests, then rejected requests that were given a Retry-After: when each leaves the queue."""

    def __init__(self, turns: Turns, waiting: Iterable[Turn], num_requests: int, num_tokens: int) -> None:
        """waiting: iterated lazily. num_requests, num_tokens: requests in the line and their prompt tokens."""
        self.num_requests = num_requests
        self.num_tokens = num_tokens
        self._turns = turns
        self._waiting = iter(waiting)
        self._behind = deque[Turn]()
        self._seconds: list[float] = []  # per request that leaves the queue: when
        self._requests: list[int] = []  # requests that have left by then
        self._tokens: list[int] = []  # prompt tokens of these

    def append(self, turn: Turn) -> None:
        """Add a request behind all others."""
        self._behind.append(turn)
        if turn.num_tokens is not None:
            self.num_requests += 1
            self.num_tokens += turn.num_tokens

    def drop(self, turn: Turn) -> None:
        """Do not count an appended request any more, because it was accepted meanwhile or did not return."""
        if turn.num_tokens is not None:
            self.num_requests -= 1
            self.num_tokens -= turn.num_tokens

    def seconds_until(self, num_requests: int, num_tokens: int) -> float:
        """Seconds until at least `num_requests` requests and `num_tokens` prompt tokens have left, or all of them."""
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


_FORGET = 0.98  # decay: weight of a sequence when the next one ends


class Lengths:
    """Mean output length of recently ended sequences."""

    __slots__ = ("_tokens", "_weight")

    def __init__(self) -> None:
        self._weight = self._tokens = 0.0

    def ended(self, num_tokens: int) -> None:
        """Add a sequence with `num_tokens` output tokens, of a request that may end before `max_tokens`."""
        self._weight = self._weight * _FORGET + 1
        self._tokens = self._tokens * _FORGET + num_tokens

    @property
    def mean(self) -> float | None:
        """Output tokens; None before any sequence has ended."""
        return self._tokens / self._weight if self._weight else None
