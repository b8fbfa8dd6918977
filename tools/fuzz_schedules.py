"""Random schedules of the scheduler under a virtual clock; a failing one is minimized.

    python -m tools.fuzz_schedules [--seeds 20000 | --seconds 60] [--first SEED] [--jobs N] [--save FOLDER]
                                    [--json FILE] [--replay FILE...]

A schedule is data: a configuration and events (requests, aborts, ends, steps, pauses). It runs on the scripted runner.
Every few steps the block accounting must be right. At the end every request must have ended, with the tokens that the
script gives to it alone; no block may be left allocated; and the journal must replay to the same Steps. A schedule
that fails is made smaller as long as it fails in the same way, and is written as JSON to `--save`.
"""

import argparse
import io
import json
import logging
import os
import random
import resource
import secrets
import sys
import time
import traceback
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any, NamedTuple, get_args

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.result_file import write_result
from quire.cache.kv_cache import KVCache
from quire.config import CacheConfig, Eviction, Policy, PreemptionMode, SchedulerConfig
from quire.core.kv_groups import KVGroup, kv_kind
from quire.core.output import Output
from quire.core.request import Beams, KnownOutput, Namespace, Request
from quire.core.scheduling_params import Program, Retention, SchedulingParams
from quire.core.states import StateGroup, StateKind
from quire.core.step import Move, Pooling
from quire.engine.engine import Engine
from quire.errors import RequestError
from quire.params import SamplingParams, StructuredOutputsParams
from quire.runner.scripted_runner import ScriptedRunner, script
from quire.scheduler import journal
from quire.scheduler.journal import JournalledScheduler

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "rigs"))
from scripted_constraints import ScriptedConstraints, ScriptedPrerequisite, expected_output

VOCAB_SIZE = 50
EOS = 0
MAX_IDLE_STEPS = 4000  # steps without an output, after which a schedule hangs; a beam search has none before its end
TENANTS = ("", "red", "blue")
_STEPS_PER_CHECK = 5
_SEEDS_PER_BATCH = 512
MINIMIZE_SECONDS = 60.0

Schedule = dict[str, Any]  # see `random_schedule`


class Fault(NamedTuple):
    """What is wrong. kind: the same for faults that minimization does not distinguish."""

    kind: str
    detail: str


class FaultFound(Exception):
    """A run of a schedule is wrong."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(*fault)
        self.fault = fault


def random_schedule(seed: int) -> Schedule:
    """A random schedule: cache, config (SchedulerConfig), ids of failing steps, delays of swaps, and events."""
    draw = random.Random(seed)
    index = draw.choice(["radix", "radix", "radix", "hash", "none"])
    block_size = draw.choice([1, 4, 16])
    num_blocks = draw.choice([12, 24, 64]) * (16 // block_size) // 2
    windows = draw.choice([[0], [0], [0], [0, 12]])
    max_num_seqs = draw.choice([2, 4, 8])
    schedule: Schedule = {
        "seed": seed,
        "cache": {
            "index": index,
            "block_size": block_size,
            "num_blocks": num_blocks,
            "num_host_blocks": draw.choice([0, 0, num_blocks]),
            "windows": windows,
            "eviction": draw.choice(get_args(Eviction)) if index == "radix" else "lru",
            "num_public": draw.choice([0, 0, 0, 19]) if index == "radix" else 0,
        },
        "config": {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": draw.choice([max_num_seqs, 16, 64, 256]),
            "max_model_len": min(num_blocks * block_size, 96),
            "step_seconds": draw.choice([0.005, 0.5]),
            "target_tpot_seconds": (None, 0.002, 0.005)[seed % 3],
            "watermark": draw.choice([0.0, 0.01, 0.1]),
            "steps_in_flight": draw.choice([1, 2]),
            "policy": draw.choice(get_args(Policy)),
            "preemption": draw.choice(get_args(PreemptionMode)),
            "max_queued_requests": draw.choice([None, None, 6]),
            "max_queued_tokens": draw.choice([None, None, 200]),
            "speculation": draw.choice([[], ["suffix"], ["answers"], ["prediction", "answers", "suffix"]]),
            "num_speculative_tokens": draw.choice([1, 3, 8]),
            "governs_speculation": draw.random() < 0.3,
        },
        "failing": sorted(draw.sample(range(200), 8)) if draw.random() < 0.2 else [],
        "swap_delays": [seed >> i & 3 for i in range(0, 8, 2)] if seed % 2 else [],  # in results, in turn by Move id
        "events": [],
    }
    num_requests, preempts = 0, draw.choice([0, 0, 20])
    if schedule["failing"]:
        preempts = 0  # the scheduler itself preempts while it plans: no step fails before the copies are launched
    # Most schedules are short: they find more faults per second. A few are long, for faults of rare combinations.
    for _ in range(2 + int(39 * draw.random() ** 6)):
        kinds = {"add": 20, "abort": 2, "finish": 2, "end_program": 1, "flush": 0.5, "pause": 1, "preempt": preempts}
        match draw.choices(list(kinds), weights=list(kinds.values()))[0]:
            case "add":
                for _ in range(draw.randint(1, 4)):
                    schedule["events"].append(["add", _random_request(draw, num_requests, schedule)])
                    num_requests += 1
            case "abort" if num_requests:
                schedule["events"].append(["abort", f"r{draw.randrange(num_requests)}"])
            case "finish" if num_requests:
                which = f"r{draw.randrange(num_requests)}", draw.choice([0, 0, 1])
                schedule["events"].append(["finish", *which, draw.randint(0, 10)])
            case "end_program":
                schedule["events"].append(["end_program", draw.choice(TENANTS), f"p{draw.randrange(3)}"])
            case "flush":
                schedule["events"].append(["flush"])
            case "preempt":
                schedule["events"].append(["preempt", draw.randrange(8)])
            case "pause":
                schedule["events"].append(["pause", round(draw.uniform(0, 3), 3)])
        if schedule["config"]["policy"] == "fair" and draw.random() < 0.2:
            schedule["events"].append(["served_elsewhere", draw.choice(TENANTS), draw.choice([1, 50, 2000])])
        schedule["events"].append(["step", draw.randint(0, 4)])
    _add_states(draw, schedule)
    return schedule


def _add_states(draw: random.Random, schedule: Schedule) -> None:
    """Let the model of some schedules have recurrent states."""
    if draw.random() < 0.4:
        num_rows = schedule["config"]["max_num_seqs"]
        schedule["cache"]["num_states"] = num_rows + draw.choice([-1, 0, 1, 8])
        schedule["cache"]["turn_ends"] = draw.choice([[], [5], [5, 6, 7]])


def _random_request(draw: random.Random, number: int, schedule: Schedule) -> dict[str, Any]:
    config = schedule["config"]
    length = draw.randint(1, config["max_model_len"] - 2)
    one: dict[str, Any] = {
        "id": f"r{number}",
        "prompt": [draw.choice([0, 0, 7, 100 * number]), length],
        "max_tokens": draw.randint(1, 24),
        "tenant": draw.choice(TENANTS),
    }
    kind = _add_kind(draw, one, has_windows=schedule["cache"]["windows"] != [0])
    if kind not in ("beams", "pooling") and draw.random() < 0.3:
        one |= draw.choice([{"logprobs": 2}, {"prompt_logprobs": 1}, {"ignore_eos": True}, {"min_tokens": 1}])
        if kind != "constrained" and draw.random() < 0.3:
            one["stop_token_ids"] = [draw.randrange(VOCAB_SIZE)]
    if kind not in ("beams", "pooling") and config["speculation"] and draw.random() < 0.5:
        one["predicted"] = draw.choice([1.0, 0.9, 0.5, 0.0])  # share of right tokens in the prediction
    if draw.random() < 0.2:
        one["salt"] = "pepper"
    if config["policy"] == "priority":
        one["priority"] = draw.randint(-2, 2)
    if draw.random() < 0.1:
        one["deadline"] = draw.choice([0.01, 0.2, 5.0])
    if draw.random() < 0.2:
        one["retention"] = draw.choice([{"priority": 90}, {"ttl": 1.0}, {"pin": True}, {"priority": 10}])
    if draw.random() < 0.2:
        branch = draw.choice(["", "a", "b"])
        one["program"] = {"id": f"p{draw.randrange(3)}", "branch": branch, "expects_more": draw.random() < 0.5}
    return one


def _add_kind(draw: random.Random, one: dict[str, Any], *, has_windows: bool) -> str:
    """Select the kind of a request, and add its fields."""
    kinds = {"plain": 10, "n": 3, "best_of": 1, "beams": 3, "pooling": 0.5, "constrained": 2, "known": 1}
    if has_windows:
        del kinds["constrained"]  # `expected_output` knows no windows
    kind = draw.choices(list(kinds), weights=list(kinds.values()))[0]
    match kind:
        case "n":
            one["n"] = draw.randint(2, 4)
        case "best_of":
            one["best_of"] = 2
        case "beams":
            one["beams"] = draw.randint(2, 4)
        case "pooling":
            one["pooling"] = draw.choice([int(Pooling.LAST), int(Pooling.MEAN)])
        case "constrained":
            one |= {"constrained": True, "n": draw.choice([1, 1, 2]), "ignore_eos": True}
        case "known":
            one["num_known"] = draw.randint(0, 8)
    return kind


class Run:
    """One run of a schedule. Raises FaultFound."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._now = 0.0
        self._draw = random.Random(schedule["seed"])
        self._file = io.BytesIO()
        self._requests: dict[str, dict[str, Any]] = {}  # accepted ones
        self._aborted: set[str] = set()
        self._finished: set[tuple[str, int]] = set()
        self._seq_ids: dict[tuple[str, int], int] = {}
        self._tokens: dict[tuple[str, int], list[int]] = {}
        self._ends: dict[tuple[str, int], Output] = {}
        self._beams_alone: dict[str, dict[int, list[int]]] = {}  # results by request
        self._num_failures = self._num_steps = 0
        self._has_preempted = False  # the journal does not record such preemptions
        self._windows = tuple(schedule["cache"]["windows"])
        self._has_states = bool(schedule["cache"].get("num_states"))  # saved schedules may have none
        speculation = tuple(schedule["config"].get("speculation", ()))
        config = SchedulerConfig(**schedule["config"] | {"speculation": speculation})
        cache = self._cache_config()
        self._constraints = ScriptedConstraints(ends_after=15, vocab_size=VOCAB_SIZE)
        self._scheduler = JournalledScheduler(config, KVCache(cache), self._file, self._constraints)
        self._engine = Engine(
            self._scheduler,
            ScriptedRunner(
                cache,
                max_num_seqs=config.max_num_seqs,
                max_model_len=config.max_model_len,
                vocab_size=VOCAB_SIZE,
                seconds_of=lambda num_tokens: self._draw.uniform(0.5, 2) * (1e-3 + 1e-4 * num_tokens),
                swap_delay_of=self._swap_delay,
                fails=lambda step: self._fails(step.id),
            ),
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS,),
            prerequisites=[ScriptedPrerequisite(steps=1)],
            clock=self._clock,
        )

    def run(self) -> None:
        """Run the schedule, and check everything."""
        self.drain()
        self._check_result()

    def drain(self) -> dict[tuple[str, int], list[int]]:
        """Run the events, then steps until no work is left. Returns the tokens by request id and index."""
        for event in self._schedule["events"]:
            self._event(event)
        idle = 0
        while self._engine.has_work:
            idle = 0 if self._step() else idle + 1
            if idle > MAX_IDLE_STEPS:
                _fail("hang", f"no output in {idle} steps; unfinished: {self._unfinished()}")
        return self._tokens

    def _check_result(self) -> None:
        if self._scheduler.leaks:
            _fail("leak", "blocks are allocated, and there is no work")
        if unfinished := self._unfinished():
            _fail("lost", f"ended without a finish reason: {unfinished}")
        if self._engine.stats().failed_steps > self._num_failures:
            _fail("failed step", "a step failed that the schedule does not fail")
        for key, tokens in self._tokens.items():
            self._compare(key, tokens)
        if self._has_preempted:
            return
        self._file.seek(0)
        if difference := journal.replay(journal.read_records(self._file)).difference:
            _fail("replay", difference[:2000])

    def _cache_config(self) -> CacheConfig:
        cache = self._schedule["cache"]
        sizes = ("float32", cache["num_blocks"], 64 * cache["block_size"], cache["num_host_blocks"])
        groups = tuple(KVGroup((0,), kv_kind(1, 8, window), *sizes) for window in self._windows)
        public = (tuple(range(1, 1 + cache["num_public"])),) if cache["num_public"] else ()
        states = None
        if num_states := cache.get("num_states", 0):
            num_host = num_states if cache["num_host_blocks"] else 0
            kind = StateKind("delta", 1, 4, 2, 1, 4)
            num_pending = 1 + self._schedule["config"]["num_speculative_tokens"]
            states = StateGroup(1, kind, "float32", num_states, num_pending, 64, num_host)
        turn_ends = frozenset(cache.get("turn_ends", ()))
        return CacheConfig(cache["block_size"], groups, cache["index"], public, cache["eviction"], states, turn_ends)

    def _clock(self) -> float:
        self._now += self._draw.random() * 1e-3
        return self._now

    def _fails(self, step_id: int) -> bool:
        failing = step_id in self._schedule["failing"]
        self._num_failures += failing
        return failing

    def _swap_delay(self, move: Move) -> int:
        delays = self._schedule.get("swap_delays")  # saved schedules may have none
        return delays[move.id % len(delays)] if delays else 0

    def _event(self, event: list[Any]) -> None:
        match event:
            case ["add", one]:
                self._add(one)
            case ["abort", str(request_id)]:
                self._engine.abort(request_id)
                self._aborted.add(request_id)
            case ["finish", str(request_id), int(index), int(num_tokens)]:
                self._finish((request_id, index), num_tokens)
            case ["end_program", str(tenant), str(program)]:
                self._engine.end_program(tenant, program)
            case ["served_elsewhere", str(tenant), int(tokens)]:
                self._engine.served_elsewhere({tenant: tokens})
            case ["flush"]:
                self._engine.flush_cache()
            case ["pause", float(seconds)]:
                self._now += seconds
            case ["preempt", int(place)]:
                self._preempt(place)
            case ["step", int(count)]:
                for _ in range(count):
                    self._step()

    def _preempt(self, place: int) -> None:
        """Preempt a running sequence, which the scheduler itself would do only if blocks or rows were short."""
        running = self._scheduler.state.running_queue.running
        if running and not (seq := running[place % len(running)]).is_swapping_in:
            self._has_preempted = True
            self._scheduler.state.preempt_one(seq, "chosen by the schedule", self._now)

    def _add(self, one: dict[str, Any]) -> None:
        try:
            self._engine.add(
                Request(
                    one["id"],
                    prompt_of(one),
                    self._params(one),
                    pooling=Pooling(one.get("pooling", 0)),
                    beams=_beams(one),
                    namespace=Namespace(one["tenant"], one.get("salt", "")),
                    scheduling_params=_scheduling_params(one),
                    known_outputs=self._known(one),
                    prediction=self._prediction(one),
                )
            )
        except RequestError:
            return
        self._requests[one["id"]] = one

    def _params(self, one: dict[str, Any]) -> SamplingParams:
        names = ("n", "best_of", "logprobs", "prompt_logprobs", "ignore_eos", "min_tokens", "stop_token_ids")
        params: dict[str, Any] = {name: one[name] for name in names if name in one}
        params |= {"max_tokens": one["max_tokens"], "temperature": 1.0, "seed": 0}
        if "beams" in one:
            params |= {"n": one["beams"], "logprobs": 2 * one["beams"], "temperature": 0.0}
        if "pooling" in one:
            params["max_tokens"] = 0
        if "constrained" in one:
            params["structured_outputs"] = StructuredOutputsParams(regex="scripted")
        return SamplingParams(**params)

    def _known(self, one: dict[str, Any]) -> tuple[KnownOutput, ...]:
        if "num_known" not in one:
            return ()
        return (KnownOutput(self._expected(one)[: one["num_known"]]),)

    def _prediction(self, one: dict[str, Any]) -> list[int]:
        if "predicted" not in one:
            return []
        draw = random.Random(one["id"])
        return [
            token if draw.random() < one["predicted"] else draw.randrange(VOCAB_SIZE) for token in self._expected(one)
        ]

    def _finish(self, key: tuple[str, int], num_tokens: int) -> None:
        """End a running sequence at most at its length, as the front end does at a stop string."""
        if key in self._ends or key not in self._seq_ids or "beams" in self._requests[key[0]]:
            return
        self._engine.finish(self._seq_ids[key], min(num_tokens, len(self._tokens[key])))
        self._finished.add(key)

    def _step(self) -> int:
        """Run one step. Returns the number of its outputs."""
        outputs = self._engine.step()
        for output in outputs:
            key = (output.request_id, output.index)
            if key in self._ends or key in self._finished or output.request_id in self._aborted:
                _fail("output after the end", f"{key}: {output.token_ids} {output.finish_reason}")
            self._seq_ids[key] = output.seq_id
            self._tokens.setdefault(key, []).extend(output.token_ids)
            if output.finish_reason:
                self._ends[key] = output
        self._num_steps += 1
        if self._num_steps % _STEPS_PER_CHECK == 0 or not self._engine.has_work:
            self._check_accounting()
        return len(outputs)

    def _check_accounting(self) -> None:
        if errors := self._scheduler.check():
            _fail("accounting", "; ".join(errors))

    def _unfinished(self) -> list[tuple[str, int]]:
        return [
            (request_id, index)
            for request_id, one in self._requests.items()
            if request_id not in self._aborted
            for index in range(one.get("beams") or one.get("best_of") or one.get("n") or 1)
            if (request_id, index) not in self._ends.keys() | self._finished
        ]

    def _expected(self, one: dict[str, Any]) -> list[int]:
        """The output of one sequence of a request without beams, up to its end."""
        prompt = prompt_of(one)
        most = min(one["max_tokens"], self._schedule["config"]["max_model_len"] - len(prompt))
        if "constrained" in one:
            return expected_output(prompt, self._constraints, most, has_states=self._has_states)[0]
        tokens = script(prompt, most, VOCAB_SIZE, self._windows, has_states=self._has_states)
        stops = _stop_ids(one)
        for count, token in enumerate(tokens, 1):
            if token in stops and count > one.get("min_tokens", 0):
                return tokens[:count]
        return tokens

    def _compare(self, key: tuple[str, int], tokens: list[int]) -> None:
        one, end = self._requests[key[0]], self._ends.get(key)
        if "pooling" in one:
            return
        if "beams" in one:
            if end is not None and end.finish_reason in ("stop", "length"):
                if key[0] not in self._beams_alone:
                    self._beams_alone[key[0]] = _beams_alone(one, self._schedule)
                alone = self._beams_alone[key[0]][key[1]]
                if tokens != alone:
                    _fail("tokens", f"{key}: {tokens}, alone {alone}")
            return
        expected = self._expected(one)[one.get("num_known", 0) :]
        whole = end is not None and end.finish_reason in ("stop", "length")
        if tokens != (expected if whole else expected[: len(tokens)]):
            _fail("tokens", f"{key}: {tokens}, the script has {expected}")


def prompt_of(one: dict[str, Any]) -> list[int]:
    """The prompt of a request: [start, length]. Prompts with one start share a prefix."""
    start, length = one["prompt"]
    return [1 + (i if i < length * 0.7 else 3 * i + start) % (VOCAB_SIZE - 1) for i in range(length)]


def _stop_ids(one: dict[str, Any]) -> set[int]:
    return {*one.get("stop_token_ids", ()), *(() if one.get("ignore_eos") else (EOS,))}


def _beams(one: dict[str, Any]) -> Beams | None:
    if "beams" not in one:
        return None
    return Beams(width=one["beams"], num_candidates=2 * one["beams"], length_penalty=1.0, early_stopping=False)


def _scheduling_params(one: dict[str, Any]) -> SchedulingParams:
    params: dict[str, Any] = {name: one[name] for name in ("priority", "deadline") if name in one}
    if "retention" in one:
        params["retention"] = Retention(**one["retention"])
    if "program" in one:
        params["program"] = Program(**one["program"])
    return SchedulingParams(**params)


def _beams_alone(one: dict[str, Any], schedule: Schedule) -> dict[int, list[int]]:
    """The results of a beam search without other requests, in memory that is never short."""
    cache = schedule["cache"] | {"num_blocks": 1000, "num_host_blocks": 0, "index": "none", "eviction": "lru"}
    cache["num_public"] = 0
    config = schedule["config"] | {"steps_in_flight": 1, "max_num_seqs": 8, "max_num_batched_tokens": 256}
    config |= {"policy": "fcfs", "max_queued_requests": None, "max_queued_tokens": None, "step_seconds": 1e9}
    alone = {name: value for name, value in one.items() if name not in ("deadline", "retention", "program")}
    only = {"seed": 0, "cache": cache, "config": config, "failing": [], "events": [["add", alone]]}
    return {index: tokens for (_, index), tokens in Run(only).drain().items()}


def _fail(kind: str, detail: str) -> None:
    raise FaultFound(Fault(kind, detail))


def fault_of(schedule: Schedule) -> Fault | None:
    """The fault of a schedule; None if everything is right."""
    try:
        Run(schedule).run()
    except FaultFound as found:
        return found.fault
    except Exception as error:  # whatever the scheduler raises is a fault
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return Fault(f"{type(error).__name__} in {frame.name}", str(error))
    return None


def minimized(schedule: Schedule, kind: str, seconds: float = MINIMIZE_SECONDS) -> Schedule:
    """A smaller schedule with a fault of the same kind. Stops after `seconds`."""
    until = time.monotonic() + seconds
    changed = True
    while changed:
        changed = False
        for smaller in _smaller(schedule):
            if time.monotonic() > until:
                return schedule
            found = fault_of(smaller)
            if found is not None and found.kind == kind:
                schedule, changed = smaller, True
                break
    return schedule


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    """Schedules with fewer events, then with simpler requests, then with a simpler configuration."""
    events = schedule["events"]
    size = len(events) // 2
    while size:
        for first in range(0, len(events), size):
            yield schedule | {"events": events[:first] + events[first + size :]}
        size //= 2
    for place, event in enumerate(events):
        for simpler in _simpler_events(event):
            yield schedule | {"events": [*events[:place], simpler, *events[place + 1 :]]}
    if schedule["failing"]:
        for place in range(len(schedule["failing"])):
            yield schedule | {"failing": schedule["failing"][:place] + schedule["failing"][place + 1 :]}
    if schedule.get("swap_delays"):
        yield schedule | {"swap_delays": []}
    for part in ("cache", "config"):
        for name, plain in _PLAIN[part].items():
            if schedule[part].get(name) != plain:
                yield schedule | {part: schedule[part] | {name: plain}}


_PLAIN: dict[str, dict[str, Any]] = {
    "cache": {"num_public": 0, "eviction": "lru", "num_host_blocks": 0, "windows": [0], "index": "none"},
    "config": {
        "max_queued_requests": None,
        "max_queued_tokens": None,
        "preemption": "recompute",
        "policy": "fcfs",
        "watermark": 0.0,
        "steps_in_flight": 1,
        "target_tpot_seconds": None,
        "speculation": [],
        "step_seconds": 0.5,
        "max_num_batched_tokens": 256,
    },
}
_NEEDED = ("id", "prompt", "max_tokens", "tenant")


def _simpler_events(event: list[Any]) -> Iterator[list[Any]]:
    match event:
        case ["step", int(count)] if count > 1:
            yield ["step", count // 2]
            yield ["step", count - 1]
        case ["add", one]:
            for name in one:
                if name not in _NEEDED:
                    yield ["add", {key: value for key, value in one.items() if key != name}]
            start, length = one["prompt"]
            for shorter in (length // 2, length - 1):
                if 0 < shorter < length:
                    yield ["add", one | {"prompt": [start, shorter]}]
            if start:
                yield ["add", one | {"prompt": [0, length]}]
            if one["tenant"]:
                yield ["add", one | {"tenant": ""}]
            for fewer in (one["max_tokens"] // 2, one["max_tokens"] - 1):
                if 0 < fewer < one["max_tokens"]:
                    yield ["add", one | {"max_tokens": fewer}]


def _fault_of_seed(seed: int) -> tuple[int, Fault | None]:
    return seed, fault_of(random_schedule(seed))


def _faults(pool: Pool, seeds: range, until: float) -> Iterator[tuple[int, Fault | None]]:
    """Each seed with its fault, in any order, until the time `until` of the monotonic clock."""
    for first in range(seeds.start, seeds.stop, _SEEDS_PER_BATCH):
        if time.monotonic() >= until:
            return
        yield from pool.imap_unordered(_fault_of_seed, seeds[first - seeds.start :][:_SEEDS_PER_BATCH])


def main(arguments: list[str] | None = None) -> None:
    """Run the seeds or files, print and save what fails. Exits with 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="tools.fuzz_schedules", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=1000, help="number of schedules")
    parser.add_argument("--seconds", type=float, help="as many schedules as run in this time, instead of --seeds")
    parser.add_argument("--first", type=int, help="the first seed; without it a random one")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes; by default one for each core")
    parser.add_argument("--save", type=Path, help="write minimized schedules to this folder")
    parser.add_argument("--json", type=Path, help="write counts and times to this file, also while it runs")
    parser.add_argument("--replay", type=Path, nargs="+", default=[], help="run these saved schedules instead")
    args = parser.parse_args(arguments)
    if args.replay:
        faults = [(path, fault_of(json.loads(path.read_text()))) for path in args.replay]
        for path, fault in faults:
            print(f"{path}: {'right' if fault is None else f'{fault.kind}: {fault.detail}'}")
        sys.exit(any(fault for _, fault in faults))
    first = secrets.randbelow(10**9) if args.first is None else args.first
    print(f"first seed {first}; again: python -m tools.fuzz_schedules --first {first}", flush=True)
    until = time.monotonic() + (args.seconds or float("inf"))
    num_seeds = args.seeds if args.seconds is None else sys.maxsize
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    failed = num_run = 0
    began = time.monotonic()

    def record(**times: int) -> None:
        if args.json is not None:
            counts = {"first_seed": first, "schedules": num_run, "failed": failed, "jobs": args.jobs}
            seconds = {"seconds": round(time.monotonic() - began)}
            write_result(args.json, counts | seconds | times)

    with (
        get_context("spawn").Pool(args.jobs, logging.disable) as pool,
        Progress(*columns, console=Console(stderr=True), transient=True) as progress,
    ):
        task = progress.add_task("schedules", total=None if args.seconds else num_seeds)
        for seed, fault in _faults(pool, range(first, first + num_seeds), until):
            if num_run % _SEEDS_PER_BATCH == 0:
                record()
            num_run += 1
            progress.advance(task)
            if fault is None:
                continue
            failed += 1
            print(f"seed {seed}: {fault.kind}: {fault.detail}", flush=True)
            if args.save is not None:
                args.save.mkdir(parents=True, exist_ok=True)
                path = args.save / f"{fault.kind.replace(' ', '_')}_{seed}.json"
                path.write_text(json.dumps(minimized(random_schedule(seed), fault.kind), indent=1) + "\n")
                print(f"  minimized: {path}", flush=True)
        seconds = time.monotonic() - began
        pool.close()
        pool.join()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = used.ru_utime + used.ru_stime
    print(f"{num_run} schedules, {failed} failed, in {seconds:.0f} s; {cpu_seconds:.0f} s of CPU time")
    record(cpu_seconds=round(cpu_seconds))
    sys.exit(failed > 0)


if __name__ == "__main__":
    logging.disable()  # failing steps are part of the schedules
    main()
