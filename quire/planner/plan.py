"""`quire plan`: what a model on a device can serve within an SLO, which options to use, and what each is worth."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import inf
from types import MappingProxyType
from typing import Any

from quire.config import DEFAULT_POLICY, EngineOptions
from quire.cost.devices import DEVICES
from quire.cost.memory_plan import format_bytes
from quire.errors import ConfigError, DoesNotFit
from quire.planner.block_size import SIZES, BlockSizeRow, block_size_advice, compare_block_sizes
from quire.planner.options import WorkloadOptions
from quire.planner.setup import (
    GPU_MEMORY_SHARE,
    PlannedEngine,
    PlannedModel,
    find_model,
    known_configs,
    named_device,
    plan_engine,
)
from quire.planner.simulate import for_workload, format_ms, has_times, load_workload, with_sequences
from quire.planner.simulation import Metric, Simulation, SimulationResult
from quire.planner.slo import METRIC_NAMES, SLO
from quire.planner.workloads import Session, num_requests, with_arrivals, with_rate

Advance = Callable[[int, int], None]
_LEAST_REQUESTS = 400  # of each simulation,
_REQUESTS_PER_ROW = 6  # and so many for each sequence that runs at once: arrivals then last several latencies
_MOST_GROWTH = 0.1  # of open requests in the second half of the arrivals: beyond it, they would grow without end
_TOLERANCE = 0.04  # of the sustainable rate
_LEAST_GAIN = 0.03  # of a choice that is recommended
_MOST_DOUBLINGS = 6  # of a rate that meets the SLO
_LEAST_SHARE = 64  # of the rate at which everything is completed at once: the least rate that is tried,
_FEW_REQUESTS = 32  # with as many requests, because they run one by one
_FULL = 0.9  # share of KV blocks in use: requests wait for more
_CURVE = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25)  # rates of the curve, as shares of the sustainable one

# Options that are tried, one after the other. The first value of each is the default of `quire serve`.
KNOBS: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "max_num_batched_tokens": (2048, 512, 1024, 4096, 8192),
        "max_num_seqs": (128, 32, 64, 256, 512),
        "block_size": (16, 32, 64, 128),
        "policy": ("fcfs", "lpm"),
        "eviction": ("lru", "cost"),
        "speculation": ("auto", "off"),
        "kv_cache_dtype": ("auto", "fp8", "int8"),
        "quantization": (None, "fp8", "int8", "int4"),
    }
)
LOSSY = ("kv_cache_dtype", "quantization")  # they change outputs
_REASONS: Mapping[str, str] = MappingProxyType(
    {
        "max_num_batched_tokens": "it bounds the tokens of a step, and so how long a prompt delays the others",
        "max_num_seqs": "it bounds the sequences that run at once; each step reads the weights once for all of them",
        "block_size": "it decides how many positions of the last blocks stay empty, and which prefixes are reused",
        "policy": "lpm runs requests with cached prefixes first",
        "eviction": "cost keeps the KV that is expensive to compute again",
        "speculation": "accepted drafts save steps; rejected ones cost tokens of steps",
        "kv_cache_dtype": "fewer bytes of KV: more sequences fit, and attention reads less; outputs change slightly",
        "quantization": "fewer bytes of weights: steps with few tokens are faster, and more KV fits; outputs change",
    }
)


@dataclass(frozen=True, slots=True)
class RatePoint:
    """One rate of the latency curve."""

    rate: float  # requests per second that arrive
    result: SimulationResult


@dataclass(frozen=True, slots=True)
class Choice:
    """A value of an option, and the rate that is sustained with it, beside the values chosen before."""

    option: str
    value: object
    rate: float  # requests per second; 0 if the SLO is never met or the model does not fit
    gain: float  # over the rate with the value chosen before; 0.1: 10 % more
    is_chosen: bool = False
    note: str = ""


@dataclass(slots=True, eq=False)
class Plan:
    """The result of `make_plan`."""

    engine: PlannedEngine  # with the recommended options
    slo: SLO
    capacity: float  # requests per second that are completed if all arrive at once
    rate: float  # sustainable requests per second with the recommended options; 0 if no rate meets the SLO
    base_rate: float  # the same with the options that were given
    curve: list[RatePoint] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    block_sizes: list[BlockSizeRow] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    num_simulations: int = 0

    @property
    def at_rate(self) -> SimulationResult | None:
        """The simulation at the sustainable rate, or at the least one of the curve."""
        best = [point for point in self.curve if point.rate <= self.rate * 1.001] or self.curve[:1]
        return best[-1].result if best else None

    @property
    def command(self) -> str:
        """The recommended command line."""
        return serve_command(self.engine.options)

    @property
    def notes(self) -> list[str]:
        """What the plan does not know, and what its command needs."""
        name = self.engine.options.model
        if name is None or name.lower() not in known_configs():
            return [*self.engine.notes, *self.warnings]
        return [
            *self.engine.notes,
            *self.warnings,
            f"in place of {name}, give `quire serve` the folder or the id of its checkpoint",
        ]


class _Search:
    """Runs simulations of one workload at many rates and with many options."""

    def __init__(self, workload: WorkloadOptions, slo: SLO, model: PlannedModel, advance: Advance) -> None:
        self.num_simulations = 0
        self.enough = _LEAST_REQUESTS  # requests of a simulation in which a queue that grows without end shows
        self._wanted = workload
        self._slo = slo
        self._model = model
        self._advance = advance
        self._num_requests = workload.num_requests or _LEAST_REQUESTS
        self._sessions: dict[int, list[Session]] = {}  # by the longest sequence

    def engine(self, options: EngineOptions) -> PlannedEngine:
        """The engine of these options. Raises ConfigError if the model does not fit."""
        return with_sequences(plan_engine(options, options.device, self._model), self._wanted)

    def sessions(self, engine: PlannedEngine) -> list[Session]:
        """The workload for this engine."""
        length = engine.memory.max_model_len
        if length not in self._sessions:
            wanted = replace(self._wanted, num_requests=self._num_requests, rate=None, burstiness=None)
            self._sessions[length] = load_workload(wanted, engine)
        return self._sessions[length]

    def run(self, engine: PlannedEngine, rate: float, most: int | None = None) -> SimulationResult:
        """The workload at a rate, or its first `most` sessions. Infinite: everything at once."""
        sessions = self.sessions(engine)[:most]
        if rate == inf:
            arriving = [replace(session, at=0.0) for session in sessions]
        elif has_times(sessions) and self._wanted.burstiness is None:
            arriving = with_rate(sessions, rate)
        else:
            arriving = with_arrivals(
                sessions, rate, burstiness=self._wanted.burstiness or 1.0, seed=engine.options.seed
            )
        setup = for_workload(engine.setup, sessions)
        if rate == inf:  # a queue of everything is no overload here
            limits = replace(setup.scheduler, max_queued_requests=None, max_queued_tokens=None)
            setup = replace(setup, scheduler=limits)
        result = Simulation(setup).run(arriving)
        self.num_simulations += 1
        self._advance(self.num_simulations, max(_EXPECTED_SIMULATIONS, self.num_simulations + 1))
        return result

    def capacity(self, engine: PlannedEngine) -> float:
        """Requests per second if there are always enough. Sets the number of requests of further simulations."""
        at_once = self.run(engine, inf)
        self.enough = max(_LEAST_REQUESTS, round(_REQUESTS_PER_ROW * at_once.mean_running))
        if self._wanted.num_requests is None:
            self._num_requests = self.enough
            self._sessions.clear()
        return at_once.steady_rate

    def block_sizes(self, engine: PlannedEngine, sizes: Sequence[int]) -> list[BlockSizeRow]:
        """The workload with several block sizes."""
        self.num_simulations += len(sizes)
        sessions = self.sessions(engine)
        return compare_block_sizes(for_workload(engine.setup, sessions), sessions, sizes)

    def meets(self, engine: PlannedEngine, rate: float, most: int | None = None) -> bool:
        """Whether the SLO is met at a rate, by the first `most` sessions, without a queue that grows and grows."""
        result = self.run(engine, rate, most)
        return not self._slo.violations(result) and result.backlog_growth <= _MOST_GROWTH

    def sustainable(self, engine: PlannedEngine, start: float) -> float:
        """The highest rate that meets the SLO, within _TOLERANCE, searched from `start`; 0 if none does."""
        low, high = start, inf
        if self.meets(engine, start):
            for _ in range(_MOST_DOUBLINGS):
                if not self.meets(engine, 2 * low):
                    high = 2 * low
                    break
                low *= 2
        elif self.meets(engine, start / _LEAST_SHARE, _FEW_REQUESTS):
            low, high = start / _LEAST_SHARE, start
        else:
            return 0.0
        while high < inf and high / low > 1 + _TOLERANCE:
            middle = (low * high) ** 0.5
            if self.meets(engine, middle):
                low = middle
            else:
                high = middle
        return low


_EXPECTED_SIMULATIONS = 150  # of a plan with a search


def make_plan(
    options: EngineOptions,
    workload: WorkloadOptions,
    slo: SLO,
    *,
    search: bool = True,
    allow_lossy: bool = False,
    advance: Advance = lambda _done, _total: None,
) -> Plan:
    """Plan a model on a device for a workload within an SLO. options.device: a device or a profile.

    search: whether to try other values of options than the given ones. allow_lossy: whether the recommendation may
    change outputs (LOSSY); what these options would gain is listed in any case.
    Raises ConfigError with what would make it fit if the model does not fit.
    """
    if workload.rate is not None:
        raise ConfigError("a plan searches for the rate; leave out rate, or use `quire simulate` for one rate")
    model = find_model(options)
    finder = _Search(workload, slo, model, advance)
    try:
        engine = finder.engine(options)
    except DoesNotFit as error:
        hints = list(what_would_fit(options, model))
        if not hints:
            raise
        raise DoesNotFit(f"{error}.\nWhat would make it fit:\n" + "\n".join(f"  {hint}" for hint in hints)) from error
    capacity = finder.capacity(engine)
    rate = finder.sustainable(engine, capacity)
    plan = Plan(engine, slo, capacity, rate, rate)
    if (few := num_requests(finder.sessions(engine))) < finder.enough:
        plan.warnings.append(
            f"{few} requests are too few: a queue that would grow without end may not show. {finder.enough} are enough"
        )
    if search:
        _try_knobs(plan, finder, allow_lossy=allow_lossy)
    if plan.rate:
        plan.curve = [RatePoint(plan.rate * each, finder.run(plan.engine, plan.rate * each)) for each in _CURVE]
    else:
        least = capacity / _LEAST_SHARE
        plan.curve = [RatePoint(least, finder.run(plan.engine, least, _FEW_REQUESTS))]
    if search:
        size = plan.engine.memory.profile.block_size
        plan.block_sizes = finder.block_sizes(plan.engine, sorted({*SIZES, size}))
    plan.num_simulations = finder.num_simulations
    plan.reasons = list(_reasons(plan))
    advance(plan.num_simulations, plan.num_simulations)
    return plan


def _try_knobs(plan: Plan, finder: _Search, *, allow_lossy: bool) -> None:
    """Try the values of each option, and keep the best one before the next option is tried."""
    has_outputs = any(turn.output for session in finder.sessions(plan.engine) for turn in session.turns)
    for option, values in KNOBS.items():
        if option == "speculation" and not has_outputs:
            continue
        current = getattr(plan.engine.options, option)
        before, best = plan.rate, plan.engine
        found: list[Choice] = []
        for value in values:
            if value == (DEFAULT_POLICY if option == "policy" and current is None else current):
                continue
            try:
                engine = finder.engine(changed(plan.engine.options, {option: value}))
            except ConfigError as error:
                note = "does not fit" if isinstance(error, DoesNotFit) else str(error)
                found.append(Choice(option, value, 0.0, -1.0, note=note))
                continue
            rate = finder.sustainable(engine, before or plan.capacity)
            gain = rate / before - 1 if before else (inf if rate else 0.0)
            found.append(Choice(option, value, rate, gain))
            if rate > plan.rate * (1 + _LEAST_GAIN) and (allow_lossy or option not in LOSSY):
                plan.rate, best = rate, engine
        plan.engine = best
        chosen = getattr(best.options, option)
        plan.choices += [replace(one, is_chosen=one.value == chosen and chosen != current) for one in found]


def changed(options: EngineOptions, values: Mapping[str, Any]) -> EngineOptions:
    """The options with some values replaced."""
    return replace(options, **values)


def serve_command(options: EngineOptions) -> str:
    """The command line of `quire serve` with the options that differ from their defaults."""
    parts = ["quire", "serve", *([options.model] if options.model else [])]
    for one in fields(options):
        value: Any = getattr(options, one.name)
        if one.name in ("model", "device", "journal") or value == one.default:
            continue
        flag = one.name.replace("_", "-")
        if isinstance(value, bool):
            parts.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            parts += [f"--{flag}", str(value)]
    return shlex.join(parts)


def what_would_fit(options: EngineOptions, model: PlannedModel) -> Iterator[str]:
    """Changes after each of which alone the model fits on the device, and devices on which it fits unchanged."""

    def fits(**values: object) -> bool:
        try:
            plan_engine(changed(options, values), str(values.get("device", options.device)), model)
        except ConfigError:
            return False
        return True

    for alternatives in _smaller(options):
        found = next((values for values in alternatives if fits(**values)), None)
        if found is not None:
            yield " ".join(f"--{name.replace('_', '-')} {value}" for name, value in found.items())
    devices = [name for name in DEVICES if fits(device=name)]
    if devices:
        yield f"--device {' or '.join(devices)}"
    device = named_device(options.device)
    if device is not None:
        size = model.description.weight_bytes(model.description.dtype)
        usable = GPU_MEMORY_SHARE * device.memory_bytes
        yield f"its weights of {format_bytes(size)} need {int(-(-size // usable))} such devices; quire uses one"


def _smaller(options: EngineOptions) -> Iterator[list[dict[str, object]]]:
    """Changes of options that need less memory. Of each list, the first that suffices is the mildest."""
    if options.quantization is None:
        yield [{"quantization": scheme} for scheme in ("fp8", "int8", "int4")]
    if options.kv_cache_dtype == "auto":
        yield [{"kv_cache_dtype": kv_dtype} for kv_dtype in ("fp8", "int8")]
    if options.max_model_len is not None:
        yield [{"max_model_len": options.max_model_len >> i} for i in range(1, 24) if options.max_model_len >> i >= 128]
    yield [{"max_num_batched_tokens": tokens, "max_num_seqs": rows} for tokens, rows in ((1024, 64), (512, 32))]


def _reasons(plan: Plan) -> Iterator[str]:
    """The plan in sentences."""
    result, slo = plan.at_rate, plan.slo
    memory = plan.engine.memory
    yield (
        f"Memory: weights take {format_bytes(memory.profile.weight_bytes)}; "
        f"{sum(memory.num_blocks)} KV blocks of {memory.profile.block_size} tokens remain."
    )
    if not plan.rate:
        alone = plan.curve[0].result
        lost = [one for one in alone.requests if not one.is_complete]
        broken = slo.violations(alone)
        if inf in broken.values():
            yield (
                f"No rate meets the SLO: {len(lost)} of {len(alone.requests)} requests are not completed even at "
                f"{plan.curve[0].rate:.2g} requests/s ({', '.join(sorted({one.reason for one in lost}))}). Prompts of "
                f"more than {memory.max_model_len} tokens are rejected."
            )
            return
        for metric, value in broken.items():
            yield (
                f"No rate meets the SLO: the {METRIC_NAMES[metric]} is {format_ms(1e3 * value)} even at "
                f"{plan.curve[0].rate:.2g} requests/s, and the limit is {1e3 * slo.limits[metric]:g} ms. The nearest "
                f"limit that is met is {metric}={1e3 * value:.3g}ms."
            )
        return
    if result is not None:
        yield (
            f"At {plan.rate:.2f} requests/s, {result.mean_running:.1f} sequences run on average and hold "
            f"{result.mean_kv_use:.0%} of the KV blocks; {result.num_preemptions} preemptions; steps run "
            f"{result.busy_seconds / result.seconds:.0%} of the time."
        )
        yield f"With always enough requests, {plan.capacity:.2f} requests/s are completed, without regard to latency."
    above = next((point for point in plan.curve if point.rate > plan.rate), None)
    broken = {} if above is None else slo.violations(above.result)
    if above is not None and not broken:
        yield f"At {above.rate:.2f} requests/s the queue grows without end: more arrive than are completed."
    elif above is not None:
        yield _why_not_faster(above, broken)
    for choice in plan.choices:
        if choice.is_chosen:
            yield f"{choice.option} {choice.value}: {choice.gain:+.0%}, because {_REASONS[choice.option]}."
    if plan.block_sizes:
        yield block_size_advice(plan.block_sizes, memory.profile.block_size)
    for option in LOSSY:
        worth = [one for one in plan.choices if one.option == option and one.gain > _LEAST_GAIN and not one.is_chosen]
        for one in sorted(worth, key=lambda one: -one.gain)[:1]:
            yield f"{option} {one.value} would give {one.gain:+.0%}: {_REASONS[option]}."


def _why_not_faster(above: RatePoint, broken: Mapping[Metric, float]) -> str:
    """Why a rate does not meet the SLO, in a sentence. broken: values that exceed their limits."""
    if inf in broken.values():
        lost = len(above.result.requests) - len(above.result.complete)
        return f"At {above.rate:.2f} requests/s {lost} requests are not completed: the queue is full."
    what = " and ".join(f"the {METRIC_NAMES[metric]} ({format_ms(1e3 * value)})" for metric, value in broken.items())
    waits = above.result.mean_kv_use > _FULL
    why = "requests wait for KV blocks" if waits else "steps take longer, or requests wait for their turn"
    exceed = "exceeds its limit" if len(broken) == 1 else "exceed their limits"
    return f"At {above.rate:.2f} requests/s {what} {exceed}: {why}."


def verdict(plan: Plan, point: RatePoint) -> str:
    """Whether the SLO is met at a rate, in a word or two."""
    if plan.slo.violations(point.result):
        return "missed"
    return "met" if point.result.backlog_growth <= _MOST_GROWTH else "queue grows"


def figures(plan: Plan) -> dict[str, object]:
    """The plan as plain data, for JSON."""
    memory = plan.engine.memory
    return {
        "model": plan.engine.model.name,
        "device": plan.engine.device,
        "slo": {"share": plan.slo.share, **{f"{name}_seconds": limit for name, limit in plan.slo.limits.items()}},
        "memory": [{"name": line.name, "bytes": line.bytes, "reason": line.reason} for line in memory.lines],
        "num_blocks": list(memory.num_blocks),
        "block_size": memory.profile.block_size,
        "max_model_len": memory.max_model_len,
        "requests_per_second": plan.rate,
        "requests_per_second_as_given": plan.base_rate,
        "requests_per_second_at_once": plan.capacity,
        "command": plan.command,
        "curve": [{"rate": point.rate, **_finite(point.result.figures())} for point in plan.curve],
        "choices": [
            {
                "option": one.option,
                "value": one.value,
                "requests_per_second": one.rate,
                "gain": one.gain if abs(one.gain) < inf else None,
                "is_chosen": one.is_chosen,
                "note": one.note,
            }
            for one in plan.choices
        ],
        "block_sizes": [asdict(row) for row in plan.block_sizes],
        "reasons": plan.reasons,
        "notes": plan.notes,
        "simulations": plan.num_simulations,
    }


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """Infinite values as None, which JSON has."""
    return {name: value if abs(value) < inf else None for name, value in values.items()}


def curve_lines(points: Sequence[RatePoint]) -> dict[str, list[tuple[float, float]]]:
    """The latency curve as lines of a chart, in milliseconds."""
    return {
        f"{metric} p{round(100 * share)}": [
            (point.rate, 1e3 * point.result.percentile(metric, share)) for point in points
        ]
        for metric in ("ttft", "tpot")
        for share in (0.5, 0.99)
    }
