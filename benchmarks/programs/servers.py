"""The server interface of the benchmark, implemented by the scheduler and KV cache in virtual time."""

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from benchmarks.small_engines import limits, memory, request, simulated
from quire.config import Eviction, Policy
from quire.core.output import Output
from quire.core.scheduling_params import SchedulingParams


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

    @property
    def now(self) -> float:
        """The current time."""

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
    """See Server. The engine of a simulation, whose steps take 5 ms and 50 us a token."""

    def __init__(self, setup: Setup) -> None:
        config = limits(setup.policy, max_num_seqs=setup.num_rows, max_model_len=4096)
        simulation = simulated(config, replace(memory(setup.num_blocks), eviction=setup.eviction), 5e-3, 5e-5)
        self.engine = simulation.engines[0].engine
        self._clock = simulation.engines[0].clock

    @property
    def now(self) -> float:
        """See Server."""
        return self._clock.now

    @property
    def has_work(self) -> bool:
        """See Server."""
        return self.engine.has_work

    def add(self, name: str, prompt: list[int], num_output_tokens: int, scheduling_params: SchedulingParams) -> None:
        """See Server."""
        self.engine.add(request(name, prompt, num_output_tokens, scheduling_params=scheduling_params))

    def end_program(self, program: str, branch: str | None) -> None:
        """See Server."""
        self.engine.end_program("", program, branch)

    def step(self) -> list[Output]:
        """See Server."""
        before, outputs = self.now, self.engine.step()
        if self.now == before and not outputs:
            raise AssertionError("nothing can run, and requests wait")
        return outputs

    def wait(self, until: float) -> None:
        """See Server."""
        self._clock.advance_to(until)

    def counted(self) -> Counted:
        """See Server."""
        stats = self.engine.stats()
        return Counted(stats.prefix_query_tokens, stats.prefix_hit_tokens, stats.num_step_tokens, stats.num_preemptions)
