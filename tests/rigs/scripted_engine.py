"""An engine over the scripted runner and a simulated clock. Everything is checked after each step."""

import io
import random
from dataclasses import replace

from hybrid_shape import state_group
from scripted_adapters import ScriptedLoader

from quire.cache.kv_cache import KVCache
from quire.config import CacheConfig, SchedulerConfig
from quire.core.kv_groups import KVGroup, kv_kind
from quire.core.output import EndCause, Output
from quire.core.request import Namespace, Request
from quire.core.scheduling_params import DEFAULT_SCHEDULING_PARAMS
from quire.core.step import Pooling
from quire.engine.engine import Engine
from quire.params import SamplingParams
from quire.runner.scripted_runner import ScriptedRunner
from quire.scheduler import journal
from quire.scheduler.journal import JournalledScheduler

VOCAB = 50
ANYBODY = Namespace()


def cache_config(
    num_blocks: int,
    block_size: int = 4,
    windows: tuple[int, ...] = (0,),
    prefix_index: str = "none",
    num_host_blocks: int = 0,
    states: int = 0,
) -> CacheConfig:
    """One KV group per window; 0 means no window. states: number of state blocks; 0 means no recurrence."""
    sizes = ("float32", num_blocks, 64 * block_size, num_host_blocks)
    groups = (KVGroup((0,), kv_kind(1, 8, window), *sizes) for window in windows)
    blocks = state_group(states, num_host_blocks) if states else None
    return CacheConfig(block_size, tuple(groups), prefix_index, states=blocks)


class Buffer(io.BytesIO):
    """A file in memory. Tests may replace its methods."""


class CheckedScheduler(JournalledScheduler):
    """Checks every step before the runner, because the engine would take an assertion in a runner for its failure."""

    sizes: list[int]  # tokens of each step
    slots: dict[int, str]  # digests of the adapters in slots, as the runner has them

    def plan(self, now):
        step = super().plan(now)
        if step is None:
            return None
        self.sizes = [*getattr(self, "sizes", []), step.num_tokens]
        self._check_slots(step)
        rows = dict(zip(step.chunks.rows.tolist(), step.chunks.seq_ids.tolist(), strict=True))
        assert len(rows) == len(step.chunks), "two chunks in one row"
        written = [step.opens.rows, step.tokens.rows, *(writes.rows for writes in step.blocks), step.chunks.rows]
        assert all((column >= 0).all() for column in written), "a row that is none"
        opened = step.opens.rows.tolist()
        assert len(set(opened)) == len(opened), "two sequences in one row"
        for seq in self.state.running_queue.running:
            assert rows.get(seq.row, seq.id) == seq.id
            assert not seq.is_swapping_in or seq.row not in rows, "it is computed from what is still on its way"
        assert step.num_tokens <= max(self.config.max_num_batched_tokens, len(step.chunks))
        return step

    def _check_slots(self, step) -> None:
        """The slots of running sequences and of steps in flight keep their adapter."""
        slots = dict(step.adapters) if step.reset else {**getattr(self, "slots", {}), **dict(step.adapters)}
        chunks = [chunk.seq for one in self.state.in_flight for chunk in one.scheduled]
        for seq in (*chunks, *self.state.running_queue.running):
            adapter = seq.request.adapter
            if adapter is not None and not seq.finished:
                assert slots[self.state.adapters.slot_of(adapter)] == adapter.digest, "another adapter is in its slot"
        in_use = {seq.request.adapter.digest for seq in chunks if seq.request.adapter is not None}
        assert in_use <= set(slots.values()), "the slot of a step in flight was taken"
        self.slots = slots


class Rig:
    """Runs requests to their end. `tokens[request id, index]` and `reasons[...]` are their outputs.

    `scored[request id]` has prompt tokens with their positions, `pooled[...]` number and sum of pooled tokens.
    """

    def __init__(
        self,
        *,
        num_blocks=64,
        block_size=4,
        windows=(0,),
        groups=None,
        prefix_index="none",
        num_host_blocks=0,
        states=0,
        turn_ends=(),
        eviction="lru",
        seed=0,
        swap_delay_of=lambda move: 0,
        fails=lambda step: False,
        new_cache=None,
        load_steps_of=lambda adapter: 1,
        load_errors=(),
        **scheduler,
    ):
        options = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": num_blocks * block_size}
        options |= {"step_seconds": 0.5, "watermark": 0.01, "steps_in_flight": 1}
        self.config = SchedulerConfig(**(options | scheduler))
        config = (
            CacheConfig(block_size, groups, prefix_index)
            if groups
            else cache_config(num_blocks, block_size, windows, prefix_index, num_host_blocks, states)
        )
        self.cache = (new_cache or KVCache)(replace(config, eviction=eviction, turn_ends=frozenset(turn_ends)))
        self.file = Buffer()
        self.scheduler = CheckedScheduler(self.config, self.cache, self.file)
        self.rng = random.Random(seed)
        self.now = 0.0
        self.on_launch = None  # called with each step before it is launched
        runner = ScriptedRunner(
            self.cache.config,
            max_num_seqs=self.config.max_num_seqs,
            max_model_len=self.config.max_model_len,
            vocab_size=VOCAB,
            seconds_of=lambda n: self.rng.uniform(0.5, 2) * (1e-3 + 1e-4 * n),
            swap_delay_of=swap_delay_of,
            fails=self.failing(fails),
        )
        budget = self.config.max_loras, self.config.lora_bytes
        self.loader = ScriptedLoader(*budget, self.adapters_in_use, steps_of=load_steps_of, errors=load_errors)
        self.engine = Engine(
            self.scheduler,
            runner,
            vocab_size=VOCAB,
            eos_token_ids=(),
            adapter_loader=self.loader,
            clock=self.clock,
        )
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.drafted: dict[tuple[str, int], list[int]] = {}  # indices in `tokens` of the accepted drafts
        self.reasons: dict[tuple[str, int], str] = {}
        self.ends: dict[tuple[str, int], EndCause] = {}
        self.errors: dict[tuple[str, int], str] = {}
        self.scored: dict[str, list[tuple[int, int]]] = {}
        self.pooled: dict[str, tuple[int, int]] = {}
        self.cached: dict[tuple[str, int], int] = {}
        self.logprobs: dict[tuple[str, int], list[list[int]]] = {}  # tokens with logprobs, for each sampled token

    def failing(self, fails):
        """Count the failures that a test causes; no other step may fail."""
        self.num_failures = 0
        self.only_scripted = True

        def counted(step) -> bool:
            failing = fails(step)
            self.num_failures += bool(failing)
            return failing

        return counted

    def adapters_in_use(self) -> set[str]:
        """Digests of the adapters of running sequences and of steps in flight."""
        state = self.scheduler.state
        seqs = [*state.running_queue.running, *(chunk.seq for one in state.in_flight for chunk in one.scheduled)]
        return {seq.request.adapter.digest for seq in seqs if seq.request.adapter is not None}

    def clock(self) -> float:
        self.now += self.rng.random() * 1e-3
        return self.now

    def add(
        self,
        request_id: str,
        prompt: list[int],
        *,
        pooling=Pooling.NONE,
        namespace=ANYBODY,
        beams=None,
        scheduling_params=DEFAULT_SCHEDULING_PARAMS,
        prediction=(),
        adapter=None,
        **params,
    ) -> None:
        params = SamplingParams(**({"temperature": 0.0, "max_tokens": 8} | params))
        self.engine.add(
            Request(
                request_id,
                prompt,
                params,
                pooling=pooling,
                namespace=namespace,
                beams=beams,
                scheduling_params=scheduling_params,
                prediction=prediction,
                adapter=adapter,
            )
        )

    def abort(self, request_id: str) -> None:
        self.engine.abort(request_id)
        assert self.scheduler.check() == []

    def finish(self, seq_id: int, num_tokens: int) -> None:
        self.engine.finish(seq_id, num_tokens)
        assert self.scheduler.check() == []

    def step(self) -> list[Output]:
        outputs = self.engine.step(self._launched)
        for output in outputs:
            key = (output.request_id, output.index)
            assert key not in self.reasons, "output after the end"
            tokens = self.tokens.setdefault(key, [])
            self.drafted.setdefault(key, []).extend(len(tokens) + place for place in output.drafted)
            tokens.extend(output.token_ids)
            self.cached[key] = output.num_cached_tokens
            self.note(output)
            if output.finish_reason:
                self.reasons[key] = output.finish_reason
                self.ends[key] = output.end
                self.errors[key] = output.error
        assert self.scheduler.check() == []
        assert self.loader.faults == []
        return outputs

    def _launched(self, step) -> None:
        assert {digest for _, digest in step.adapters} <= self.loader.memory.keys(), "an adapter that is not in memory"
        if self.on_launch is not None:
            self.on_launch(step)

    def note(self, output: Output) -> None:
        if output.logprobs is not None:
            rows = [[token for token in row if token >= 0] for row in output.logprobs.ids.tolist()]
            self.logprobs.setdefault((output.request_id, output.index), []).extend(rows)
        if output.prompt_logprobs is not None:
            ids, positions = output.prompt_logprobs.ids[:, 0].tolist(), (-output.prompt_logprobs.values[:, 0]).tolist()
            self.scored.setdefault(output.request_id, []).extend(zip(ids, map(int, positions), strict=True))
        if output.pooled is not None:
            number, total = self.pooled.get(output.request_id, (0, 0))
            self.pooled[output.request_id] = (number + int(output.pooled[0]), total + int(output.pooled[1]))

    def run(self, most: int = 10_000) -> None:
        while self.engine.has_work:
            self.step()
            most -= 1
            assert most > 0, "the engine makes no progress"
        assert self.cache.pools.num_available + self.cache.num_pinned == self.cache.pools.num_blocks
        assert self.cache.host_pools.num_free == self.cache.host_pools.num_blocks
        assert not self.scheduler.leaks
        if self.only_scripted:
            assert self.engine.stats().failed_steps <= self.num_failures, "a step failed that was not meant to"

    def replay(self) -> journal.ReplayReport:
        self.file.seek(0)
        return journal.replay(journal.read_records(self.file))
