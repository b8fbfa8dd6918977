"""Prediction of the queue wait by a simulation of running and waiting sequences. `scheduler.queue_limit` makes
Retry-After of it. Reads no clock.

Time passes in steps. In each step every running sequence gets one token, and prompts get the rest of the token budget.
A waiting sequence is admitted when a row is free, memory has space for its tokens, and the prompts before it leave part
of a step's budget. The simulation has no preemptions and no later arrivals, and shared blocks count for each sequence.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import NamedTuple


class SimulatedEngine(NamedTuple):
    """Resources of the engine, and the cost of a step."""

    rows: int
    token_budget: int  # tokens per step
    kv_capacity: float  # tokens that the block pools hold; infinite if all groups have windows
    fixed: float  # seconds per step
    per_token: float  # seconds per token


class Work(NamedTuple):
    """Remaining work and memory of a sequence."""

    num_new: int  # known tokens whose KV is not computed
    num_outputs: float  # tokens to generate
    num_held: float  # tokens whose KV it holds once the new ones are computed


class QueuedRequest(NamedTuple):
    """Waiting sequences of one request that are admitted one after the other."""

    works: list[Work]
    num_prompt_tokens: (
        int | None
    )  # prompt tokens of the request that leaves the queue here; None if it left the queue before


class QueueSimulation:
    """Simulates the running sequences. Waiting sequences are added in the order of the queue."""

    def __init__(self, engine: SimulatedEngine, running: Iterable[Work]) -> None:
        self._engine = engine
        self._step = self._seconds = self._num_held_tokens = 0.0
        self._num_prefill_tokens = 0.0  # prompt tokens that are not computed yet
        self._ends: list[tuple[float, float]] = []  # heap of (step in which a sequence ends, tokens that it frees)
        for work in running:
            self._ends.append(self._start(work))
        heapify(self._ends)

    def admit(self, work: Work) -> float:
        """Simulate until one more sequence is admitted, after all before it. Returns seconds from the begin."""
        while self._ends and (
            len(self._ends) >= self._engine.rows or self._num_held_tokens + work.num_new > self._engine.kv_capacity
        ):
            self._advance(self._ends[0][0] - self._step)
            self._num_held_tokens -= heappop(self._ends)[1]
        if self._num_prefill_tokens >= self._prefill_tokens_per_step:
            self._advance(
                (self._num_prefill_tokens - self._prefill_tokens_per_step) / self._prefill_tokens_per_step + 1
            )
        heappush(self._ends, self._start(work))
        return self._seconds

    @property
    def _prefill_tokens_per_step(self) -> float:
        """Prompt tokens that fit into one step."""
        return max(self._engine.token_budget - len(self._ends), 1)

    def _start(self, work: Work) -> tuple[float, float]:
        self._num_prefill_tokens += work.num_new
        num_steps = self._num_prefill_tokens / self._prefill_tokens_per_step + work.num_outputs
        self._num_held_tokens += work.num_held
        return self._step + num_steps, work.num_held + num_steps

    def _advance(self, num_steps: float) -> None:
        """Simulate `num_steps` steps. Each running sequence grows by one token per step."""
        if num_steps <= 0:
            return
        computed = min(self._num_prefill_tokens, num_steps * self._prefill_tokens_per_step)
        machine, rows = self._engine, len(self._ends)
        self._seconds += num_steps * (machine.fixed + machine.per_token * rows) + machine.per_token * computed
        self._num_prefill_tokens -= computed
        self._step += num_steps
        self._num_held_tokens += num_steps * rows


class QueueForecast:
    """The waiting requests, then rejected requests that were given a Retry-After: when each leaves the queue."""

    def __init__(
        self, simulation: QueueSimulation, waiting: Iterable[QueuedRequest], num_requests: int, num_tokens: int
    ) -> None:
        """waiting: iterated lazily. num_requests, num_tokens: requests in the line and their prompt tokens."""
        self.num_requests = num_requests
        self.num_tokens = num_tokens
        self._simulation = simulation
        self._waiting = iter(waiting)
        self._appended = deque[QueuedRequest]()
        self._seconds: list[float] = []  # per request that leaves the queue: when
        self._requests: list[int] = []  # requests that have left by then
        self._tokens: list[int] = []  # prompt tokens of these

    def append(self, request: QueuedRequest) -> None:
        """Add a request behind all others."""
        self._appended.append(request)
        if request.num_prompt_tokens is not None:
            self.num_requests += 1
            self.num_tokens += request.num_prompt_tokens

    def remove(self, request: QueuedRequest) -> None:
        """Do not count an appended request any more, because it was accepted meanwhile or did not return."""
        if request.num_prompt_tokens is not None:
            self.num_requests -= 1
            self.num_tokens -= request.num_prompt_tokens

    def seconds_until(self, num_requests: int, num_tokens: int) -> float:
        """Seconds until at least `num_requests` requests and `num_tokens` prompt tokens have left, or all of them."""
        while not (self._seconds and self._requests[-1] >= num_requests and self._tokens[-1] >= num_tokens):
            turn = next(self._waiting, None)
            if turn is None and not self._appended:
                break
            self._admit(turn or self._appended.popleft())
        at = max(bisect_left(self._requests, num_requests), bisect_left(self._tokens, num_tokens))
        return self._seconds[min(at, len(self._seconds) - 1)] if self._seconds else 0.0

    def _admit(self, request: QueuedRequest) -> None:
        began = [self._simulation.admit(work) for work in request.works]
        if request.num_prompt_tokens is not None:
            self._seconds.append(began[0])
            self._requests.append(len(self._requests) + 1)
            self._tokens.append((self._tokens[-1] if self._tokens else 0) + request.num_prompt_tokens)


_DECAY = 0.98  # decay: weight of a sequence when the next one ends


class MeanOutputLength:
    """Mean output length of recently ended sequences."""

    __slots__ = ("_tokens", "_weight")

    def __init__(self) -> None:
        self._weight = self._tokens = 0.0

    def observe(self, num_tokens: int) -> None:
        """Add a sequence with `num_tokens` output tokens, of a request that may end before `max_tokens`."""
        self._weight = self._weight * _DECAY + 1
        self._tokens = self._tokens * _DECAY + num_tokens

    @property
    def mean(self) -> float | None:
        """Output tokens; None before any sequence has ended."""
        return self._tokens / self._weight if self._weight else None
