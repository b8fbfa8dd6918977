"""The engine loop body: plan a step, run it, commit it.

Requests are token ids; the front end handles text. Errors of the runner never leave `step`: the scheduler rolls the
step back, and a request that fails in a step of its own ends with the error.
"""

import logging
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from itertools import zip_longest
from typing import Any, ClassVar, Self

import msgspec

from quire.cache.key_report import CachedKeysOf, KeyChanges
from quire.core.adapter import NO_ADAPTERS, Adapter, AdapterLoader
from quire.core.block_keys import BlockKeys
from quire.core.explanation import DraftCounts, Explanation
from quire.core.output import NO_SEQUENCE, Output
from quire.core.prerequisite import Prerequisite
from quire.core.prompt_progress import PromptProgress
from quire.core.request import (
    CONSTRAINT,
    Request,
    check_known_tokens,
    nth_seed,
    resolve_params,
)
from quire.core.runner import Runner
from quire.core.step import Step, StepResult
from quire.cost.step_time import CostFigures
from quire.errors import RequestError
from quire.monitor.monitor import Load, Monitor
from quire.monitor.tree import detail_of, node_detail
from quire.monitor.update import NodeDetail, Watcher
from quire.params import is_unicode
from quire.scheduler.scheduler import Scheduler

STEP_SIZE_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # tokens; vLLM's


class StepSizes:
    """Histogram of tokens per step. STEP_SIZE_BUCKETS are inclusive upper bounds; the last bucket has larger steps."""

    def __init__(self) -> None:
        self.num_tokens = 0  # sum over all steps
        self._counts = [0] * (len(STEP_SIZE_BUCKETS) + 1)

    @property
    def counts(self) -> tuple[int, ...]:
        """(len(STEP_SIZE_BUCKETS) + 1,): number of steps per bucket, not cumulative."""
        return tuple(self._counts)

    def observe(self, num_tokens: int) -> None:
        """Count a step of `num_tokens` tokens."""
        self.num_tokens += num_tokens
        self._counts[bisect_left(STEP_SIZE_BUCKETS, num_tokens)] += 1


log = logging.getLogger(__name__)
_PREPARE_SECONDS = 0.005  # how long an empty step waits for a prerequisite of a request
_IDLE_PER_CHECK = 100  # pause after a check, times its duration: requests wait for checks at most 1 % of the time


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """Metrics of the engine. Counters count from its start and never fall."""

    GAUGES: ClassVar[frozenset[str]] = frozenset(  # all others are counters
        (
            *("num_running", "num_waiting", "kv_blocks_used", "kv_blocks_total", "failed_in_a_row"),
            *("last_step_seconds", "kv_blocks_cached", "host_blocks_used", "host_blocks_total"),
            *("num_step_tokens", "step_sizes", "waiting_because"),  # the histogram restarts with each engine
            *("drafts", "accepted_by_place", "prompts", "state_blocks_used", "state_blocks_total", "num_snapshots"),
            *("num_adapters", "adapter_bytes", "num_waiting_for_adapters", "adapter_requests"),
        )
    )

    num_running: int
    num_waiting: int
    kv_blocks_used: int  # by running sequences
    kv_blocks_total: int
    num_preemptions: int
    num_steps: int
    failed_steps: int
    prompt_tokens: int  # found in the prefix cache at the first admission, or computed by committed steps; each once
    generation_tokens: int  # output tokens, including those after a stop string
    failed_in_a_row: int  # failed steps since the last successful one
    last_step_seconds: float
    kv_blocks_cached: int  # idle blocks: owned by the prefix cache only
    kv_blocks_evicted: int
    kv_tokens_copied: int  # between device blocks
    prefix_query_tokens: int  # prompt tokens at the first admission of their request
    prefix_hit_tokens: int  # those of them that were found in the prefix cache; the rest of prompt_tokens was computed
    host_blocks_used: int  # by swapped sequences and by copies to and from the host
    host_blocks_total: int
    num_swapped_out_blocks: int
    num_swapped_in_blocks: int
    num_admissions_slowed: int  # times that preemptions raised the admission watermark
    num_step_tokens: int = 0  # tokens computed by all steps
    step_sizes: tuple[int, ...] = ()  # histogram of tokens per step, as in StepSizes
    waiting_because: str = "step"  # WaitCause of the waiting sequences, or of the last that waited
    forced_tokens: int = 0  # forced tokens among generation_tokens
    num_draft_chains: int = 0  # verified
    num_draft_tokens: int = 0
    num_accepted_drafts: int = 0
    drafts: dict[str, DraftCounts] = {}  # the same by drafter, since the engine's start
    accepted_by_place: tuple[int, ...] = ()  # accepted drafts by place in their chain, since the engine's start
    prompts: PromptProgress = PromptProgress()  # of running prompts that take more than one step
    num_adapters: int = 0  # in memory
    adapter_bytes: int = 0  # of those in memory and those being loaded
    num_adapter_loads: int = 0  # completed
    adapter_load_seconds: float = 0.0  # of these loads
    num_evicted_adapters: int = 0
    num_waiting_for_adapters: int = 0  # requests whose adapter is not in memory yet
    adapter_requests: dict[str, tuple[int, int]] = {}  # running and waiting requests by name of the adapter, the most
    state_blocks_used: int = 0  # of recurrent states, by running sequences
    state_blocks_total: int = 0
    num_snapshots: int = 0  # of recurrent states
    num_evicted_snapshots: int = 0
    num_snapshot_hits: int = 0  # requests that started from a snapshot at their first admission
    num_stateless_tokens: int = 0  # prompt tokens that were computed although their KV matched: no snapshot was deeper

    @classmethod
    def zero(cls) -> Self:
        """Metrics of an engine that has reported none: all zero."""
        return msgspec.convert([0] * (len(cls.__struct_fields__) - len(cls.__struct_defaults__)), cls)

    @classmethod
    def total(cls, several: Sequence["EngineStats"]) -> "EngineStats":
        """The metrics of several engines together: sums, but the largest `last_step_seconds` and `failed_in_a_row`.

        `waiting_because` is that of the engine with the most waiting sequences.
        """
        first = max(several, key=lambda one: one.num_waiting)
        changes: dict[str, Any] = {}
        for name in cls.__struct_fields__:
            values = [getattr(one, name) for one in several]
            match values[0]:
                case str():
                    continue
                case dict():
                    changes[name] = _total_by_key(values)
                case tuple():
                    changes[name] = _total_by_place(values)
                case _ if name in ("last_step_seconds", "failed_in_a_row"):
                    changes[name] = max(values)
                case _:
                    changes[name] = sum(values)
        return msgspec.structs.replace(first, **changes)


def _total_by_key(several: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The sums of values that are tuples or DraftCounts."""
    found: dict[str, Any] = {}
    for one in several:
        for key, value in one.items():
            if key not in found:
                found[key] = value
            elif isinstance(value, DraftCounts):
                found[key] = found[key].plus(value)
            else:
                found[key] = _total_by_place([found[key], value])
    return found


def _total_by_place(several: Sequence[Sequence[int]]) -> Any:  # noqa: ANN401  (of the type of the first)
    sums = tuple(map(sum, zip_longest(*several, fillvalue=0)))
    return PromptProgress(*sums) if isinstance(several[0], PromptProgress) else sums


class Engine:
    """One model with one scheduler. Not thread-safe: no two methods may run at the same time."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        seed: int = 0,
        prerequisites: Sequence[Prerequisite] = (),
        adapter_loader: AdapterLoader | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """prerequisites: what is prepared for requests before they are queued, such as the grammars of constraints.

        adapter_loader: None without adapters. Raises ConfigError for more steps in flight than the runner takes.
        """
        runner.capabilities.check_steps_in_flight(scheduler.config.steps_in_flight)
        self.vocab_size = vocab_size
        self.max_model_len = scheduler.config.max_model_len
        self.scheduler = scheduler
        self.runner = runner
        self.eos_token_ids = tuple(token for token in eos_token_ids if 0 <= token < vocab_size)
        self._seed = seed
        self._prerequisites = prerequisites
        self._adapter_loader = adapter_loader
        self._loading: dict[str, float] = {}  # when the load of an adapter began, by digest
        self._adapter_load_seconds = 0.0
        self._clock = clock
        self._steps_in_flight = scheduler.config.steps_in_flight
        self._uses_processors = False  # whether a request has had logits processors
        self._in_flight: deque[int] = deque()  # ids of in-flight steps, oldest first
        self._errors: dict[int, str] = {}  # step id -> error of its launch or sampling
        self._num_requests = self._num_steps = self._failed_steps = 0
        self._generation_tokens = self._forced_tokens = 0
        self._failed_in_a_row = self._last_checked_step = 0
        self._next_check = 0.0
        self._last_step_seconds = 0.0
        self._step_sizes = StepSizes()
        self._monitor: Monitor | None = None  # while there are viewers
        self._cached_keys: CachedKeysOf | None = None
        self._load = Load()  # of all tenants, as viewers may see it

    @property
    def num_end_tokens(self) -> int:
        """Number of end tokens of the model."""
        return len(self.eos_token_ids)

    @property
    def predicted_seconds(self) -> float:
        """Predicted seconds of the step planned last; 0 without a prediction."""
        return self.scheduler.predicted_seconds

    @property
    def last_step_positions(self) -> list[tuple[str, int]]:
        """Per chunk of the step planned last: the request id, and the position at which the chunk stops."""
        return self.scheduler.last_step_positions

    @property
    def prompt_progress(self) -> PromptProgress:
        """The progress of running prompts that take more than one step."""
        return self.scheduler.prompt_progress

    @property
    def num_counted(self) -> dict[str, int]:
        """The counted prompt tokens of unfinished requests whose prompt was counted in part, by request id."""
        return self.scheduler.num_counted

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        """Queue a request. Its end tokens, its seed and its `max_tokens` are filled in where the front end has not.

        `bad_words` are the tokens of `params.bad_words` in all their spellings. A pooling request returns pooled hidden
        states instead of tokens; it needs `params.max_tokens` 0 and `params.n` 1. `known_outputs` are the output tokens
        per sequence of a request that another engine has begun; its parameters must be the same, and include the seed.
        A `resumed` request is not rejected for the queue limit or its deadline. An activated adapter that is not
        invoked in the prompt is left out.

        Raises RequestError for a prompt that is empty, too long or out of range, an id in use, a full queue, a
        deadline that cannot be met, an adapter without room, or an output that the model has no head for. Raises
        ValueError for parameters that contradict `pooling` or `beams`.
        """
        params = request.params
        if not is_unicode(request.id):
            raise RequestError("a request id must be valid Unicode", "request_id")
        self.runner.capabilities.check_request(request)
        if request.pooling and (params.max_tokens != 0 or params.n != 1):
            raise ValueError("a pooling request has one sequence and generates no tokens")
        if request.beams is not None and (
            request.pooling or params.max_tokens == 0 or params.prompt_logprobs is not None
        ):
            raise ValueError("a beam search generates tokens and returns no prompt logprobs or hidden states")
        if (
            params.seed is None
            and params.temperature > 0
            and any(one.token_ids and not one.finished for one in request.known_outputs)
        ):
            raise RequestError("a resumed request needs the seed of the original request", "seed")
        params = resolve_params(
            request.prompt,
            params,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            default_seed=nth_seed(self._seed, self._num_requests),
        )
        request = msgspec.structs.replace(
            request.located,
            params=params,
            bad_words=self._in_vocabulary(request.bad_words),
            eos_token_ids=self.eos_token_ids,
        )
        needed = [one for one in self._prerequisites if one.is_needed(request)]
        if others := [one.name for one in needed if one.name != CONSTRAINT]:
            request = msgspec.structs.replace(request, prerequisites=tuple(others))
        check_known_tokens(request, self.vocab_size)
        self.scheduler.add(request, self._clock())
        self._uses_processors = self._uses_processors or bool(params.logits_processors)
        try:
            for one in needed:
                one.submit(request)
        except BaseException:  # for example no memory for a thread
            self.abort(request.id)
            raise
        self._num_requests += 1

    def _in_vocabulary(self, words: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """The words whose tokens are all in the vocabulary: the same list if none is left out, as requests share it."""
        if all(max(word) < self.vocab_size for word in words):
            return words
        return [word for word in words if max(word) < self.vocab_size]

    def abort(self, request_id: str) -> None:
        """Abort a request. Its blocks are freed within a step. An unknown id is ignored."""
        self.scheduler.abort(request_id, self._clock())
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        """Release the prerequisites of a request whose sequences have begun, or that has ended."""
        for one in self._prerequisites:
            one.forget(request_id)

    def finish(self, seq_id: int, num_tokens: int) -> None:
        """End a sequence at a stop string, after `num_tokens` output tokens. It has no further outputs."""
        self.scheduler.finish(seq_id, num_tokens, self._clock())

    def read_adapter(self, name: str, path: str, when_done: Callable[[Future[Adapter]], None]) -> None:
        """Read and check the files of an adapter beside the steps. when_done: called with the result, from any thread.

        Raises RequestError without adapters.
        """
        self.runner.capabilities.check_adapters()
        if self._adapter_loader is None:
            raise RequestError(NO_ADAPTERS, "adapter")
        self._adapter_loader.read(name, path, when_done)

    def pin_adapter(self, adapter: Adapter, *, pinned: bool) -> None:
        """Load an adapter and keep it in memory, or let it be evicted again.

        Raises RequestError for one that does not fit beside the other pinned ones. A load that fails ends the pin.
        """
        self.runner.capabilities.check_adapters()
        self.scheduler.pin_adapter(adapter, self._clock(), pinned=pinned)

    def end_program(self, tenant: str, program: str, branch: str | None = None) -> None:
        """End a branch of a program (None: all branches): no request will continue from it. Ignores unknown ones."""
        self.scheduler.end_program(tenant, program, branch, self._clock())

    def step(self, on_launch: Callable[[Step], None] | None = None) -> list[Output]:
        """Plan and launch a step, and commit the oldest in-flight step.

        on_launch: called with the step before the runner launches it. Returns the outputs of the committed step, and of
        sequences that ended outside of a commit. With n steps in flight, that is the step launched n - 1 calls before.
        """
        self._process_ready()
        step = None
        if not self._errors:  # a failed step leaves the runner's rows invalid until it is committed and rolled back
            step = self.scheduler.plan(self._clock())
            self._start_loads()
        if step is not None:
            self._step_sizes.observe(step.num_tokens)
            self._launch(step, on_launch)
        outputs = self._take_ended()
        for _ in range(self._num_to_commit(step)):
            outputs += self._commit()
        if step is not None:
            self._sample(step)
            if self._steps_in_flight == 1:
                outputs += self._commit()
        self._generation_tokens += sum(len(output.token_ids) for output in outputs)
        self._forced_tokens += sum(len(output.forced) for output in outputs)
        if step is None and not outputs and self.scheduler.has_unready:
            self._wait()
        if not self.scheduler.has_work:
            self.runner.release_workspace()
        if self.scheduler.leaks:
            self._repair()
        return outputs

    def stats(self) -> EngineStats:
        """The current metrics."""
        cache, accounts, adapters = self.scheduler.cache, self.scheduler.request_stats, self.scheduler.state.adapters
        return EngineStats(
            self.scheduler.num_running,
            self.scheduler.num_waiting,
            cache.pools.num_blocks - cache.pools.num_available,
            cache.pools.num_blocks,
            accounts.num_preemptions,
            self._num_steps,
            self._failed_steps,
            accounts.num_prompt_tokens,
            self._generation_tokens,
            self._failed_in_a_row,
            self._last_step_seconds,
            cache.pools.num_idle,
            cache.num_evicted,
            cache.num_copied_tokens,
            accounts.num_query_tokens,
            accounts.num_hit_tokens,
            cache.host_pools.num_blocks - cache.host_pools.num_free,
            cache.host_pools.num_blocks,
            cache.num_swapped_out_blocks,
            cache.num_swapped_in_blocks,
            accounts.num_watermark_raises,
            self._step_sizes.num_tokens,
            self._step_sizes.counts,
            accounts.wait_cause,
            self._forced_tokens,
            sum(counts.num_chains for counts in accounts.drafts.values()),
            sum(counts.num_drafts for counts in accounts.drafts.values()),
            sum(counts.num_accepted for counts in accounts.drafts.values()),
            dict(accounts.drafts),
            accounts.accepted_by_place,
            self.prompt_progress,
            len(adapters.resident),
            adapters.bytes_used,
            adapters.num_loads,
            self._adapter_load_seconds,
            adapters.num_evicted,
            adapters.num_waiting,
            adapters.requests_by_name(seq.request for seq in self.scheduler.state.running_queue.running),
            *((0, 0, 0, 0) if cache.states is None else cache.states.figures),
            accounts.num_snapshot_hits,
            accounts.num_stateless_tokens,
        )

    def report_keys(self, block_keys: BlockKeys) -> None:
        """Begin to report the keys of cached blocks, see `take_key_changes`."""
        self._cached_keys = CachedKeysOf(self.scheduler.cache, block_keys)

    def take_key_changes(self) -> KeyChanges | None:
        """The keys of cached blocks that came and left since the last call; None if they are not reported."""
        return None if self._cached_keys is None else self._cached_keys.take()

    def take_service(self) -> dict[str, int]:
        """The service of each tenant since the last call, in weighted tokens; empty unless `fair` counts it."""
        return self.scheduler.take_service()

    def served_elsewhere(self, service: Mapping[str, int]) -> None:
        """Count service that other engines gave: weighted tokens by tenant."""
        self.scheduler.served_elsewhere(service)

    def cost_figures(self) -> CostFigures:
        """Figures of the cost model, fitted to the steps so far."""
        return self.scheduler.costs.figures()

    def explain(self, request_id: str) -> Explanation | None:
        """The explanation of a request so far; None if the request is unknown or ended too long ago."""
        return self.scheduler.explain(request_id, self._clock())

    def monitor_update(self, viewer: int, watcher: Watcher, num_seen: int) -> bytes:
        """The next Update of a viewer as JSON: what changed since its `num_seen`-th, else the whole state.

        viewer: a number that the caller chooses. Steps are recorded from the first update until no viewer is left.
        """
        if self._monitor is None:
            self._monitor = Monitor(self.scheduler, self._load)
        return msgspec.json.encode(self._monitor.update(viewer, watcher, num_seen, self._clock(), time.time()))

    def forget_viewer(self, viewer: int) -> None:
        """Forget a viewer that has left. Ignores an unknown one."""
        if self._monitor is not None:
            self._monitor.forget(viewer)
            if not self._monitor.num_viewers:
                self._monitor.close()
                self._monitor = None

    def node(self, watcher: Watcher, number: int) -> NodeDetail | None:
        """A node of the radix trees; None if the watcher may not see one with this id."""
        node = None if self._monitor is None else self._monitor.find_node(watcher, number)
        return detail_of(node) if node is not None else node_detail(self.scheduler.cache.index, watcher, number)

    def flush_cache(self) -> int:
        """Evict all cached KV that no running request uses, pinned or not. Returns the number of freed blocks."""
        return self.scheduler.flush(self._clock())

    def check_block_accounting(self) -> None:
        """Check all block accounting, and log and repair errors. Slow: call it when the engine is idle.

        Returns at once if no step was committed since the last check, or the check was too recent.
        """
        now = self._clock()
        if self._num_steps == self._last_checked_step or now < self._next_check:
            return
        self._last_checked_step = self._num_steps
        if self.scheduler.check():
            self._repair()
        ended = self._clock()
        self._next_check = ended + _IDLE_PER_CHECK * (ended - now)

    def close(self) -> None:
        """Close the scheduler, the prerequisites and the loader. No method may be called afterwards."""
        self.scheduler.close()
        for one in self._prerequisites:
            one.close()
        if self._adapter_loader is not None:
            self._adapter_loader.close()

    def _process_ready(self) -> None:
        """Report finished prerequisites to the scheduler, which queues the requests or ends them with the error."""
        for one in self._prerequisites:
            for request_id, error in one.finished():
                if self.scheduler.ready(request_id, one.name, error, self._clock()):
                    self._forget(request_id)
        for digest, error in () if self._adapter_loader is None else self._adapter_loader.finished():
            self._adapter_loaded(digest, error)

    def _wait(self) -> None:
        """Wait until a prerequisite or an adapter is ready, for at most _PREPARE_SECONDS."""
        waits = [one.wait for one in self._prerequisites]
        if self._adapter_loader is not None:
            waits.append(self._adapter_loader.wait)
        for wait in waits:
            wait(_PREPARE_SECONDS / len(waits))

    def _adapter_loaded(self, digest: str, error: str) -> None:
        now = self._clock()
        began = self._loading.pop(digest, now)
        if error:
            log.warning("an adapter was not loaded: %s", error)
        else:
            self._adapter_load_seconds += now - began
        self.scheduler.adapter_loaded(digest, error, now)

    def _start_loads(self) -> None:
        """Start the loads of adapters that the scheduler has decided, and forget requests that have begun."""
        for load in self.scheduler.take_adapter_loads():
            self._loading[load.adapter.digest] = self._clock()
            try:
                if self._adapter_loader is None:
                    raise RuntimeError("the engine has no loader of adapters")
                self._adapter_loader.start(load)
            except Exception as error:  # for example no memory for a thread
                self._adapter_loaded(
                    load.adapter.digest, f"the adapter {load.adapter.name!r} cannot be loaded: {error}"
                )
        for request_id in self.scheduler.take_begun():
            self._forget(request_id)

    def _num_to_commit(self, step: Step | None) -> int:
        """How many in-flight steps are committed before `step` is sampled. Without a step it is the oldest."""
        number = len(self._in_flight)
        if step is None:
            return min(1, number)
        if self._steps_in_flight > 2 and self.scheduler.samples_need_commits:
            return number
        return max(0, number + 2 - max(2, self._steps_in_flight))

    def _take_ended(self) -> list[Output]:
        """The outputs of sequences that ended outside of a commit. Requests that waited are forgotten."""
        outputs = self.scheduler.take_ended()
        for output in outputs:
            if output.seq_id == NO_SEQUENCE:
                self._forget(output.request_id)
        return outputs

    def _launch(self, step: Step, on_launch: Callable[[Step], None] | None) -> None:
        if on_launch is not None:
            on_launch(step)
        try:
            self.runner.launch(step)
        except Exception as error:  # an error of a kernel or allocator fails this step only
            self._record_failure(step.id, error)

    def _sample(self, step: Step) -> None:
        self._in_flight.append(step.id)
        if step.id in self._errors:
            return
        try:
            processors = self.scheduler.logits_processors(step) if self._uses_processors else ()
            self.runner.sample(step.id, self.scheduler.sampling_masks(step), processors)
        except Exception as error:
            self._record_failure(step.id, error)

    def _commit(self) -> list[Output]:
        step_id = self._in_flight.popleft()
        result = self._collect(step_id)
        self._num_steps += 1
        self._failed_steps += bool(result.error)
        self._failed_in_a_row = self._failed_in_a_row + 1 if result.error else 0
        self._last_step_seconds = result.seconds
        return self.scheduler.commit(result, self._clock())

    def _collect(self, step_id: int) -> StepResult:
        if step_id not in self._errors:
            try:
                result = self.runner.collect()
                if result.step_id == step_id:
                    return result
                raise RuntimeError(f"the runner returned step {result.step_id} instead of step {step_id}")
            except Exception as error:
                self._record_failure(step_id, error)
        return StepResult.failed(step_id, self._errors.pop(step_id))

    def _record_failure(self, step_id: int, error: Exception) -> None:
        log.exception("step %d failed", step_id)
        self._errors[step_id] = f"{type(error).__name__}: {error}"

    def _repair(self) -> None:
        """Log and repair errors in the block accounting, which must not end the engine."""
        log.error("KV block accounting error, repaired: %s", "; ".join(self.scheduler.check()))
        self.scheduler.repair()
