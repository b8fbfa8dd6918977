"""One engine of a simulation: the real engine, scheduler and KV cache with a modelled runner and a virtual clock."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

from quire.cache.kv_cache import KVCache
from quire.cache.manager import KVCacheManager
from quire.config import CacheConfig, Routing, SchedulerConfig
from quire.core.output import Output
from quire.core.step import Step
from quire.cost.latency_profile import LatencyProfile
from quire.engine.engine import Engine
from quire.planner.modelled_runner import Fails, ModelledRunner, Outputs, VirtualClock
from quire.planner.results import SimulationResult, Window
from quire.planner.workloads import Turn
from quire.scheduler.journal import JournalledScheduler
from quire.scheduler.scheduler import Scheduler
from quire.supervisor.protocol import ServedElsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """The engine that is simulated, or several that are alike: each has all of the memory and a device of its own."""

    scheduler: SchedulerConfig
    cache: CacheConfig
    profile: LatencyProfile
    vocab_size: int = 32_000
    num_samples: int = 1  # sequences of each request; 1: as many as its turn has
    beam_width: int = 0  # of a beam search instead; 0: requests are sampled
    num_replicas: int = 1
    routing: Routing = "predicted"  # of requests to replicas

    def num_sequences(self, turn: Turn) -> int:
        """Sequences of a request."""
        return self.beam_width or (self.num_samples if self.num_samples > 1 else turn.num_samples)


LengthOf = Callable[[str], tuple[int, int]]  # request id -> its prompt tokens and its output tokens
NewCache = Callable[[CacheConfig, LengthOf], KVCacheManager]


def paged_cache(config: CacheConfig, length_of: LengthOf) -> KVCacheManager:
    """The KV cache that serves, which does not know how long requests will be."""
    del length_of
    return KVCache(config)


class SimulatedEngine:
    """An engine with its clock, which is at the end of the last step: the outputs of that step are delivered then."""

    def __init__(
        self,
        setup: EngineSetup,
        cache: KVCacheManager,
        *,
        journal: BinaryIO | None,
        outputs: Outputs,
        fails: Fails | None,
        window: Window,
        on_step: Callable[["SimulatedEngine"], None] | None,
    ) -> None:
        """outputs: recorded ones, see ModelledRunner. on_step: called with each step planned."""
        self.clock = VirtualClock()
        self.scheduler = (
            Scheduler(setup.scheduler, cache)
            if journal is None
            else JournalledScheduler(setup.scheduler, cache, journal)
        )
        self._runner = ModelledRunner(
            setup.profile,
            setup.cache,
            self.clock,
            max_num_seqs=setup.scheduler.max_num_seqs,
            vocab_size=setup.vocab_size,
            outputs=outputs,
            fails=fails,
        )
        self.engine = Engine(self.scheduler, self._runner, vocab_size=setup.vocab_size, clock=self.clock)
        self.scheduler.calibrate(setup.profile.calibration(setup.scheduler.max_num_batched_tokens))
        self.inbox: deque[Callable[[], None]] = deque()  # what is done before the next step
        self.has_turn = False  # whether a step is planned, or waits for something to happen
        self._outputs: list[Output] = []
        self._window = window
        self._on_step = on_step
        self._total = SimulationResult()
        self._last = 0.0  # seconds: until then, the integrals are complete
        self._last_busy = 0.0  # seconds in which a step ran until then
        self._num_running, self._kv_use = 0, 0.0  # of the step planned last

    @property
    def num_free(self) -> int:
        """KV blocks that are neither used nor cached."""
        pools = self.scheduler.cache.pools
        return pools.num_available - pools.num_idle

    @property
    def is_serving(self) -> bool:
        """Whether it hears of the service of others."""
        return True

    def send(self, command: ServedElsewhere) -> None:
        """Count service of others before the next step."""
        self.inbox.append(partial(self.engine.served_elsewhere, command.service))

    def begin(self, when: float) -> None:
        """End the time without work."""
        self.clock.advance_to(when)
        self._last = self.clock.now

    def step(self) -> bool:
        """Run a step. False if nothing can run before something else happens."""
        before = self.clock.now
        self._outputs = self.engine.step(self._launched)
        self._integrate()
        return self.clock.now != before or bool(self._outputs) or bool(self.scheduler.state.in_flight)

    def take_outputs(self) -> Sequence[Output]:
        """The outputs of the last step, once."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def totals(self) -> SimulationResult:
        """The figures so far, without requests and seconds."""
        total, stats = self._total, self.engine.stats()
        total.num_steps, total.num_step_tokens = stats.num_steps, stats.num_step_tokens
        total.num_preemptions, total.num_evicted_blocks = stats.num_preemptions, stats.kv_blocks_evicted
        return total

    def _launched(self, _: Step) -> None:
        """Note what runs in the step that has been planned."""
        pools = self.scheduler.cache.pools
        self._num_running, self._kv_use = self.scheduler.num_running, 1 - pools.num_available / pools.num_blocks
        if self._on_step is not None:
            self._on_step(self)

    def _integrate(self) -> None:
        """Add the time since the last step to the integrals."""
        total, now, busy = self._total, self.clock.now, self._runner.busy_seconds
        if now == self._last:
            return
        inside = self._window.overlap(self._last, now)
        if inside:
            total.row_seconds += self._num_running * inside
            total.block_seconds += self._kv_use * inside
            total.busy_seconds += (busy - self._last_busy) * inside / (now - self._last)
            total.most_running = max(total.most_running, self._num_running)
            total.most_kv_use = max(total.most_kv_use, self._kv_use)
        self._last, self._last_busy = now, busy
