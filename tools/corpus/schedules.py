"""Digests of seeded random schedules on the scripted runner.

A schedule has a random configuration (policy, prefix index, eviction, preemption, windows, steps in flight, budgets)
and random events: requests of all kinds, aborts, finishes, ends of programs, flushes and failing steps. The digest
covers the bytes of each Step and each Output. Logprobs and pooled states, whose last bits depend on the processor, and
error texts are left out; cumulative logprobs are rounded.
"""

import io
import random
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import msgspec

from quire.cache.kv_cache import KVCache
from quire.config import CacheConfig, Eviction, Policy, PreemptionMode, SchedulerConfig
from quire.core import codec
from quire.core.kv_groups import KVGroup, kv_kind
from quire.core.output import Output
from quire.core.request import Beams, Namespace, Request
from quire.core.scheduling_params import Program, Retention, SchedulingParams
from quire.core.step import Pooling
from quire.engine.engine import Engine
from quire.errors import RequestError
from quire.params import SamplingParams
from quire.runner.scripted_runner import ScriptedRunner
from quire.scheduler import journal
from quire.scheduler.journal import JournalledScheduler

NUM_SCHEDULES = 500
VOCAB_SIZE = 50
MAX_STEPS = 300  # a schedule that is not done by then is cut off
TENANTS = ("", "red", "blue")
# Fixed, so that a new policy leaves the recorded schedules as they are.
POLICIES: tuple[Policy, ...] = ("fcfs", "lpm", "cache-aware", "priority", "fair")
EVICTIONS: tuple[Eviction, ...] = ("lru", "lfu", "priority", "cost")
MODES: tuple[PreemptionMode, ...] = ("auto", "recompute", "swap")


class Schedule:
    """The configuration, engine and events of one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._now = 0.0
        self._file = io.BytesIO()
        self._digest = sha256()
        self._live: dict[int, int] = {}  # output tokens of sequences that have not ended, by sequence id
        self._requests: list[str] = []
        cache, self._config = self._configuration()
        scheduler = JournalledScheduler(self._config, KVCache(cache), self._file)
        failing = self.random.random() < 0.2
        runner = ScriptedRunner(
            cache,
            max_num_seqs=self._config.max_num_seqs,
            max_model_len=self._config.max_model_len,
            vocab_size=VOCAB_SIZE,
            seconds_of=lambda num_tokens: self.random.uniform(0.5, 2) * (1e-3 + 1e-4 * num_tokens),
            fails=lambda step: failing and self.random.random() < 0.05,
        )
        self._engine = Engine(scheduler, runner, vocab_size=VOCAB_SIZE, eos_token_ids=(0,), clock=self._clock)

    def run(self) -> dict[str, Any]:
        """Run the schedule. Returns its number of steps that are not empty, and its digest."""
        for _ in range(self.random.randint(5, 40)):
            self._event()
            for _ in range(self.random.randint(0, 4)):
                self._step()
        most = MAX_STEPS
        while self._engine.has_work and most:
            self._step()
            most -= 1
        self._file.seek(0)
        plans = [record for record in journal.read_records(self._file) if isinstance(record, journal.Plan)]
        for plan in plans:
            self._add(plan.step)
        return {"steps": sum(bool(plan.step) for plan in plans), "digest": self._digest.hexdigest()[:24]}

    def _configuration(self) -> tuple[CacheConfig, SchedulerConfig]:
        draw = self.random
        index = draw.choice(["radix", "radix", "radix", "hash", "none"])
        block_size = draw.choice([1, 4, 16])
        num_blocks = draw.choice([12, 24, 64]) * (16 // block_size) // 2
        swap = draw.choice([0, 0, num_blocks])
        windows = draw.choice([(0,), (0,), (0,), (0, 12)])
        sizes = ("float32", num_blocks, 64 * block_size, swap)
        groups = tuple(KVGroup((0,), kv_kind(1, 8, window), *sizes) for window in windows)
        eviction = draw.choice(EVICTIONS) if index == "radix" else "lru"
        public = (tuple(range(1, 20)),) if index == "radix" and draw.random() < 0.2 else ()
        policies = list(POLICIES)
        if index == "radix" and len(windows) == 1:
            policies.insert(2, "lpm")  # was `dfs-weight`; the policies of the other cases stay the same
        max_num_seqs = draw.choice([2, 4, 8])
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=draw.choice([max_num_seqs, 16, 64, 256]),
            max_model_len=min(num_blocks * block_size, 96),
            step_seconds=draw.choice([0.005, 0.5]),
            watermark=draw.choice([0.0, 0.01, 0.1]),
            steps_in_flight=draw.choice([1, 2]),
            policy=draw.choice(policies),
            preemption=draw.choice(MODES),
            max_queued_requests=draw.choice([None, None, 6]),
            max_queued_tokens=draw.choice([None, None, 200]),
        )
        return CacheConfig(block_size, groups, index, public, eviction), config

    def _event(self) -> None:
        kind = self.random.choices(
            ["add", "abort", "finish", "end program", "flush", "pause"], weights=[20, 2, 2, 1, 0.5, 1]
        )[0]
        match kind:
            case "add":
                for _ in range(self.random.randint(1, 4)):
                    self._add_request()
            case "abort" if self._requests:
                self._engine.abort(self.random.choice(self._requests))
            case "finish" if self._live:
                seq_id = self.random.choice(sorted(self._live))
                self._engine.finish(seq_id, self.random.randint(0, self._live.pop(seq_id)))
            case "end program":
                self._engine.end_program(self.random.choice(TENANTS), f"p{self.random.randrange(3)}")
            case "flush":
                self._engine.flush_cache()
            case "pause":
                self._now += self.random.uniform(0, 3)

    def _add_request(self) -> None:
        draw = self.random
        request_id = f"r{len(self._requests)}"
        start = draw.choice([0, 0, 7, 100 * len(self._requests)])
        length = draw.randint(1, self._config.max_model_len - 2)
        prompt = [1 + (i if i < length * 0.7 else 3 * i + start) % (VOCAB_SIZE - 1) for i in range(length)]
        params: dict[str, Any] = {"max_tokens": draw.randint(1, 24), "temperature": 0.0}
        pooling, beams = Pooling.NONE, None
        match draw.choices(["plain", "n", "best_of", "beams", "pooling"], weights=[10, 3, 1, 2, 0.5])[0]:
            case "n":
                params |= {"n": draw.randint(2, 4), "temperature": 1.0, "seed": draw.randrange(100)}
            case "best_of":
                params |= {"n": 1, "best_of": 2, "temperature": 1.0, "seed": draw.randrange(100)}
            case "beams":
                width = draw.randint(2, 4)
                beams = Beams(width=width, num_candidates=2 * width, length_penalty=1.0, early_stopping=False)
                params |= {"n": width, "logprobs": 2 * width}
            case "pooling":
                pooling = draw.choice([Pooling.LAST, Pooling.MEAN])
                params |= {"max_tokens": 0}
        if beams is None and pooling is Pooling.NONE and draw.random() < 0.3:
            params |= draw.choice([{"logprobs": 2}, {"prompt_logprobs": 1}, {"ignore_eos": True}, {"min_tokens": 1}])
            if draw.random() < 0.3:
                params |= {"stop_token_ids": [draw.randrange(VOCAB_SIZE)]}
        try:
            self._engine.add(
                Request(
                    request_id,
                    prompt,
                    SamplingParams(**params),
                    pooling=pooling,
                    beams=beams,
                    namespace=Namespace(tenant=draw.choice(TENANTS), salt=draw.choice(["", "", "pepper"])),
                    scheduling_params=self._terms(),
                )
            )
        except RequestError as error:
            self._add(f"{request_id} refused: {type(error).__name__}".encode())
            return
        finally:
            self._requests.append(request_id)

    def _terms(self) -> SchedulingParams:
        draw = self.random
        asked: dict[str, Any] = {}
        if self._config.policy == "priority":
            asked["priority"] = draw.randint(-2, 2)
        if draw.random() < 0.1:
            asked["deadline"] = draw.choice([0.01, 0.2, 5.0])
        if draw.random() < 0.2:
            asked["retention"] = draw.choice(
                [Retention(priority=90), Retention(ttl=1.0), Retention(pin=True), Retention(ttl=1e6)]
            )
        if draw.random() < 0.2:
            asked["program"] = Program(
                id=f"p{draw.randrange(3)}", branch=draw.choice(["", "a", "b"]), expects_more=draw.random() < 0.5
            )
        return SchedulingParams(**asked)

    def _step(self) -> None:
        for output in self._engine.step():
            self._add(codec.encode(_without_logprobs(output)))
            if output.finish_reason:
                self._live.pop(output.seq_id, None)
            elif output.seq_id >= 0:
                self._live[output.seq_id] = self._live.get(output.seq_id, 0) + len(output.token_ids)

    def _add(self, data: bytes) -> None:
        self._digest.update(len(data).to_bytes(4, "little") + data)

    def _clock(self) -> float:
        self._now += self.random.random() * 1e-3
        return self._now


def _without_logprobs(output: Output) -> Output:
    likely = output.cumulative_logprob
    rounded = None if likely is None else round(likely, 3)
    return msgspec.structs.replace(
        output, logprobs=None, prompt_logprobs=None, pooled=None, cumulative_logprob=rounded, error=""
    )


def record(seeds: range = range(NUM_SCHEDULES)) -> Iterator[dict[str, Any]]:
    """The result of the schedule of each seed."""
    for seed in seeds:
        yield {"seed": seed, **Schedule(seed).run()}


__all__ = ["NUM_SCHEDULES", "Schedule", "record"]
