"""Engine: plan, run, commit. Knows token ids only; text is the front end's business.

Errors of the runner never leave `step`: the scheduler rolls the step back, and the request that
fails alone ends with the error.
"""

import logging
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar, Self

import msgspec

from quire.core.explanation import Explanation
from quire.core.output import Output
from quire.core.request import NO_NAMESPACE, Beams, Known, Namespace, Request, check_known, nth_seed, resolve
from quire.core.runner import Runner
from quire.core.scheduling_params import NO_TERMS, Terms
from quire.core.step import Pooling, Step, StepResult
from quire.cost.block_size import BlockFigures
from quire.cost.step_time import CostFigures
from quire.errors import RequestError
from quire.params import SamplingParams, is_unicode
from quire.scheduler.scheduler import Scheduler
from quire.structured_outputs.compile import Compiler

BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # tokens; vLLM's


class StepSizes:
    """Counts of steps, by the smallest of BOUNDS that is not below their tokens; the last one is of larger steps."""

    def __init__(self) -> None:
        self.num_tokens = 0  # of all steps
        self._counts = [0] * (len(BOUNDS) + 1)

    @property
    def counts(self) -> tuple[int, ...]:
        """(len(BOUNDS) + 1,): each step is in one of them."""
        return tuple(self._counts)

    def add(self, num_tokens: int) -> None:
        """A step computes so many tokens."""
        self.num_tokens += num_tokens
        self._counts[bisect_left(BOUNDS, num_tokens)] += 1


log = logging.getLogger(__name__)
_COMPILE_SECONDS = 0.005  # how long a step that has nothing to do waits for a constraint
_IDLE_PER_CHECK = 100  # a check may hold up a request that comes meanwhile: 1 % of the time at most


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """Where the engine stands. Counters count since its start and never fall."""

    GAUGES: ClassVar[frozenset[str]] = frozenset(  # all others are counters
        (
            *("num_running", "num_waiting", "kv_blocks_used", "kv_blocks_total", "failed_in_a_row"),
            *("last_step_seconds", "kv_blocks_cached", "host_blocks_used", "host_blocks_total"),
            *("num_step_tokens", "step_sizes", "waiting_because"),  # a histogram, which begins anew, is taken as it is
        )
    )

    num_running: int
    num_waiting: int
    kv_blocks_used: int  # by sequences that run
    kv_blocks_total: int
    num_preemptions: int
    num_steps: int
    failed_steps: int
    prompt_tokens: int
    generation_tokens: int  # put out, also those that a stop string made void
    failed_in_a_row: int  # steps, up to the last one
    last_step_seconds: float
    kv_blocks_cached: int  # in the prefix index, and used by nobody
    kv_blocks_evicted: int
    kv_tokens_copied: int  # from block to block
    prefix_query_tokens: int  # of prompts, when they were first admitted
    prefix_hit_tokens: int  # of those, whose KV was there
    host_blocks_used: int  # by sequences that were swapped out, and by copies to the host and back
    host_blocks_total: int
    num_swapped_out_blocks: int
    num_swapped_in_blocks: int
    num_admissions_slowed: int  # times that preemptions were too many, and sequences that wait were let in more slowly
    num_step_tokens: int = 0  # that steps computed
    step_sizes: tuple[int, ...] = ()  # counts of steps, as StepSizes has them
    waiting_because: str = "step"  # what held up those who wait, or who waited last: a WaitCause
    forced_tokens: int = 0  # of those put out, that a constraint forced

    @classmethod
    def nothing(cls) -> Self:
        """Of an engine of which nothing is known yet."""
        return msgspec.convert([0] * (len(cls.__struct_fields__) - len(cls.__struct_defaults__)), cls)


class Learnt(msgspec.Struct, frozen=True):
    """What the requests so far have taught about the machine and about themselves."""

    costs: CostFigures
    blocks: BlockFigures


class Engine:
    """One model, one scheduler, one thread: none of these methods may run at the same time as another."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        seed: int = 0,
        deterministic: bool = False,
        compiler: Compiler | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """compiler: of the constraints that `scheduler` asks; None where it has none."""
        self.vocab_size = vocab_size
        self.max_model_len = scheduler.config.max_model_len
        self.on_launch: Callable[[Step], None] | None = None  # hears of each step before the runner does
        self._scheduler = scheduler
        self._runner = runner
        self._eos_token_ids = tuple(token for token in eos_token_ids if 0 <= token < vocab_size)
        self._deterministic = deterministic  # whether the runner can keep such a promise
        self._seed = seed
        self._compiler = compiler
        self._clock = clock
        self._overlap = scheduler.config.steps_in_flight > 1
        self._uncollected: deque[int] = deque()  # steps launched and sampled
        self._errors: dict[int, str] = {}  # of those, the ones that failed on the way
        self._num_requests = self._num_steps = self._failed_steps = 0
        self._prompt_tokens = self._generation_tokens = self._forced_tokens = 0
        self._failed_in_a_row = self._checked_at = 0
        self._next_check = 0.0
        self._last_step_seconds = 0.0
        self._step_sizes = StepSizes()

    @property
    def num_end_tokens(self) -> int:
        """Tokens of the model that end a sequence."""
        return len(self._eos_token_ids)

    @property
    def predicted_seconds(self) -> float:
        """Of the step planned last; 0 where nothing is known."""
        return self._scheduler.predicted_seconds

    @property
    def newest_rows(self) -> list[tuple[str, int]]:
        """Of the step planned last: each chunk's request, and the position up to which it is computed."""
        return self._scheduler.newest_rows

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return self._scheduler.has_work

    def add(  # noqa: PLR0913 (the fields of NewRequest)
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        bad_words: Sequence[Sequence[int]] = (),
        pooling: Pooling = Pooling.NONE,
        namespace: Namespace = NO_NAMESPACE,
        beams: Beams | None = None,
        terms: Terms = NO_TERMS,
        known: Sequence[Known] = (),
        resumed: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        """Queue a request of token ids. bad_words: tokens of `params.bad_words`, in all ways to write them.

        A pooling in place of tokens needs `params.max_tokens` to be 0. namespace: whose cached KV it may use. beams:
        search for the `params.n` most likely sequences in place of sampling. terms: its place in the queue and in the
        memory. known: the output tokens of each sequence, of a request that goes on after another engine has begun it;
        its parameters have to be the same, with the seed that it had. resumed: it was accepted before, with known
        tokens or without, and is not refused for lack of room or time.
        Raises RequestError: empty, too long, ids out of range, id in use, a deadline that cannot be met.
        """
        if not is_unicode(request_id):
            raise RequestError("a request id must be valid Unicode", "request_id")
        if params.deterministic and not self._deterministic:
            raise RequestError("this model cannot be run deterministically; leave `deterministic` out", "deterministic")
        if pooling and (params.max_tokens != 0 or params.n != 1):
            raise ValueError("a request that is pooled has one sequence and generates no tokens")
        if beams is not None and (pooling or params.max_tokens == 0 or params.prompt_logprobs is not None):
            raise ValueError("a beam search generates tokens, and tells nothing about the prompt")
        if params.seed is None and params.temperature > 0 and any(one.token_ids and not one.finished for one in known):
            raise RequestError("a request that goes on needs the seed that it had", "seed")
        params = resolve(
            prompt,
            params,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            default_seed=nth_seed(self._seed, self._num_requests),
        )
        request = Request(
            id=request_id,
            prompt=prompt,
            params=params,
            eos_token_ids=self._eos_token_ids,
            bad_words=self._possible(bad_words),
            pooling=pooling,
            namespace=msgspec.structs.replace(namespace, deterministic=params.deterministic),
            beams=beams,
            terms=terms,
            known=tuple(known),
            resumed=resumed,
        )
        check_known(request, self.vocab_size)
        self._scheduler.add(request, self._clock())
        if request.is_constrained and self._compiler is not None and params.structured_outputs is not None:
            self._compiler.submit(request_id, params.structured_outputs)
        self._num_requests += 1
        if not request.was_accepted:  # or an engine before this one has counted them
            self._prompt_tokens += len(prompt)

    def _possible(self, words: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Those that could come up at all. Requests made together share one list, as long as nothing is left out."""
        if all(max(word) < self.vocab_size for word in words):
            return words
        return [word for word in words if max(word) < self.vocab_size]

    def abort(self, request_id: str) -> None:
        """Give up a request; its blocks are free within a step. An unknown id is ignored."""
        self._scheduler.abort(request_id, self._clock())
        if self._compiler is not None:
            self._compiler.forget(request_id)

    def finish(self, seq_id: int, num_tokens: int) -> None:
        """A stop string ended this sequence after `num_tokens` output tokens; no more is said about it."""
        self._scheduler.finish(seq_id, num_tokens, self._clock())

    def end_program(self, tenant: str, program: str, branch: str | None = None) -> None:
        """Nobody goes on from what a branch of a program left; None: any of its branches. Unknown ones are ignored."""
        self._scheduler.end_program(tenant, program, branch, self._clock())

    def step(self) -> list[Output]:
        """Plan a step, run it, and commit the oldest one that is due. Empty when there was nothing to do."""
        self._take_compiled()
        step = None
        if not self._errors:  # after a failure the runner's rows cannot be relied on until it is committed
            step = self._scheduler.plan(self._clock())
        if step is not None:
            self._step_sizes.add(step.num_tokens)
            self._launch(step)
        outputs = self._scheduler.missed()
        if self._uncollected:  # the step before this one
            outputs += self._commit()
        if step is not None:
            self._sample(step)
            if not self._overlap:
                outputs += self._commit()
        self._generation_tokens += sum(len(output.token_ids) for output in outputs)
        self._forced_tokens += sum(len(output.forced) for output in outputs)
        if step is None and not outputs and self._scheduler.is_compiling and self._compiler is not None:
            self._compiler.wait(_COMPILE_SECONDS)
        if not self._scheduler.has_work:
            self._runner.rest()
        if self._scheduler.leaks:
            self._repair()
        return outputs

    def stats(self) -> EngineStats:
        """Where the engine stands."""
        cache, accounts = self._scheduler.cache, self._scheduler.accounts
        return EngineStats(
            self._scheduler.num_running,
            self._scheduler.num_waiting,
            cache.pools.num_blocks - cache.pools.num_available,
            cache.pools.num_blocks,
            accounts.num_preemptions,
            self._num_steps,
            self._failed_steps,
            self._prompt_tokens,
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
            accounts.num_slowed,
            self._step_sizes.num_tokens,
            self._step_sizes.counts,
            accounts.wait_cause,
            self._forced_tokens,
        )

    def learnt(self) -> Learnt:
        """What steps cost, and how full blocks are."""
        return Learnt(self._scheduler.costs.figures(), self._scheduler.block_use.figures())

    def explain(self, request_id: str) -> Explanation | None:
        """What became of a request so far and why; None where it is unknown, or ended too long ago."""
        return self._scheduler.explain(request_id, self._clock())

    def flush_cache(self) -> int:
        """Forget all cached KV that no running request uses; how many blocks were freed."""
        return self._scheduler.flush(self._clock())

    def look_over(self) -> None:
        """Check the memory in full, which takes a while: for an idle moment. What is wrong is logged and mended."""
        now = self._clock()
        if self._num_steps == self._checked_at or now < self._next_check:
            return
        self._checked_at = self._num_steps
        if self._scheduler.check():
            self._repair()
        ended = self._clock()
        self._next_check = ended + _IDLE_PER_CHECK * (ended - now)

    def close(self) -> None:
        """The end: nothing may be called after it."""
        self._scheduler.close()
        if self._compiler is not None:
            self._compiler.close()

    def _take_compiled(self) -> None:
        """Requests whose constraint is compiled begin to wait for their turn."""
        if self._compiler is None:
            return
        for request_id, error in self._compiler.finished():
            self._scheduler.compiled(request_id, error, self._clock())
            self._compiler.forget(request_id)

    def _launch(self, step: Step) -> None:
        if self.on_launch is not None:
            self.on_launch(step)
        try:
            self._runner.launch(step)
        except Exception as error:  # whatever a kernel or allocator throws concerns this step only
            self._note_failure(step.id, error)

    def _sample(self, step: Step) -> None:
        self._uncollected.append(step.id)
        if step.id in self._errors:
            return
        try:
            self._runner.sample(step.id, self._scheduler.late(step))
        except Exception as error:
            self._note_failure(step.id, error)

    def _commit(self) -> list[Output]:
        step_id = self._uncollected.popleft()
        result = self._collect(step_id)
        self._num_steps += 1
        self._failed_steps += bool(result.error)
        self._failed_in_a_row = self._failed_in_a_row + 1 if result.error else 0
        self._last_step_seconds = result.seconds
        return self._scheduler.commit(result, self._clock())

    def _collect(self, step_id: int) -> StepResult:
        if step_id not in self._errors:
            try:
                result = self._runner.collect()
                if result.step_id == step_id:
                    return result
                raise RuntimeError(f"the runner brought step {result.step_id} in place of step {step_id}")
            except Exception as error:
                self._note_failure(step_id, error)
        return StepResult.failed(step_id, self._errors.pop(step_id))

    def _note_failure(self, step_id: int, error: Exception) -> None:
        log.exception("step %d failed", step_id)
        self._errors[step_id] = f"{type(error).__name__}: {error}"

    def _repair(self) -> None:
        """A leak is logged and mended, never fatal."""
        log.error("the memory does not add up and is repaired: %s", "; ".join(self._scheduler.check()))
        self._scheduler.repair()
