"""The server interface of the benchmark, implemented by the scheduler and KV cache in virtual time."""

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from quire.cache.kv_cache import KVCache
from quire.config import Eviction, Policy
from quire.core.output import Output
from quire.core.scheduling_params import SchedulingParams
from quire.scheduler.scheduler import Scheduler
from tools.virtual_time import limits, memory, request, result_of


@dataclass(frozen=True, slots=True)
class Setup:
    """Options of a server."""

    policy: Policy = "fcfs"
    eviction: Eviction = "lru"
    num_blocks: int = 1024
    num_rows: int = 32


class Counted(NamedTuple):
    """Counts since the start."""

    num_prompt_tokens: int  # of requests at their first admission
    num_hit_tokens: int
    num_computed_tokens: int  # of all steps: prompts, output and recomputed tokens
    num_preemptions: int


class Server(Protocol):
    """A server. Times are seconds since the start."""

    now: float

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""

    def add(self, name: str, prompt: list[int], num_output_tokens: int, scheduling_params: SchedulingParams) -> None:
        """Add a request."""

    def end_program(self, program: str, branch: str | None) -> None:
        """End a program or one of its branches."""

    def step(self) -> list[Output]:
        """Run one step."""

    def wait(self, until: float) -> None:
        """Advance the clock to `until`."""

    def counted(self) -> Counted:
        """The counts since the start."""


class Virtual:
    """See Server. A formula gives the duration of a step."""

    def __init__(self, setup: Setup) -> None:
        config = limits(setup.policy, max_num_seqs=setup.num_rows, max_model_len=4096)
        self.scheduler = Scheduler(config, KVCache(replace(memory(setup.num_blocks), eviction=setup.eviction)))
        self.now = 0.0
        self._num_computed = 0

    @property
    def has_work(self) -> bool:
        """See Server."""
        return self.scheduler.has_work

    def add(self, name: str, prompt: list[int], num_output_tokens: int, scheduling_params: SchedulingParams) -> None:
        """See Server."""
        self.scheduler.add(request(name, prompt, num_output_tokens, scheduling_params=scheduling_params), self.now)

    def end_program(self, program: str, branch: str | None) -> None:
        """See Server."""
        self.scheduler.end_program("", program, branch, self.now)

    def step(self) -> list[Output]:
        """See Server."""
        step = self.scheduler.plan(self.now)
        if step is None:
            raise AssertionError("nothing can run, and somebody waits")
        seconds = 5e-3 + 5e-5 * step.num_tokens
        self.now += seconds
        self._num_computed += step.num_tokens
        return self.scheduler.commit(result_of(step, seconds), self.now)

    def wait(self, until: float) -> None:
        """See Server."""
        self.now = until

    def counted(self) -> Counted:
        """See Server."""
        accounts = self.scheduler.request_stats
        counts = accounts.num_query_tokens, accounts.num_hit_tokens
        return Counted(*counts, self._num_computed, accounts.num_preemptions)
