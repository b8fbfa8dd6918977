"""`quire plan`: what a model on a device can serve within an SLO, which options to use, and what each is worth."""

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from math import inf
from types import MappingProxyType
from typing import Any

from quire.config import DEFAULT_POLICY, EngineOptions
from quire.cost.devices import DEVICES
from quire.cost.memory_plan import format_bytes
from quire.errors import ConfigError, DoesNotFit
from quire.planner.block_size import SIZES, BlockSizeRow, compare_block_sizes
from quire.planner.estimate import Pools, pools_of
from quire.planner.options import WorkloadOptions
from quire.planner.search import GAIN_TOLERANCE, MOST_REQUESTS, NO_HITS, AtOnce, Requests, Runs, Search, Sustained
from quire.planner.setup import (
    GPU_MEMORY_SHARE,
    PlannedEngine,
    PlannedModel,
    find_model,
    known_configs,
    named_device,
    plan_engine,
)
from quire.planner.simulate import as_wanted, for_workload
from quire.planner.slo import SLO
from quire.planner.steady import SteadyRun
from quire.planner.workloads import num_requests

Advance = Callable[[int, int], None]
_ENOUGH = 0.95  # of the requests that a steady state needs
_LEAST_GAIN = 0.03  # of a choice that is recommended
_BLOCK_SIZE_REQUESTS = 400  # of each block size that is compared
FULL = 0.9  # share of KV blocks in use: requests wait for more
_CURVE = (0.5, 0.75, 1.0, 1.15)  # rates of the curve, as shares of the sustainable one
_EXPECTED_SIMULATIONS = 12, 45  # of a plan without a search of options, and with one

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


@dataclass(frozen=True, slots=True)
class Choice:
    """A value of an option, beside the values chosen before, in runs of few requests."""

    option: str
    value: object
    gain: float | None  # of the sustained rate; 0.1: 10 % more; None: at most _LEAST_GAIN, or it does not fit
    is_chosen: bool = False
    note: str = ""


@dataclass(slots=True, eq=False)
class Plan:
    """The result of `make_plan`."""

    engine: PlannedEngine  # with the recommended options
    slo: SLO
    at_once: AtOnce  # a few requests at once, with the options that were given
    sustained: Sustained  # with the recommended options
    curve: list[SteadyRun] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    block_sizes: list[BlockSizeRow] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    num_simulations: int = 0

    @property
    def rate(self) -> float:
        """Sustainable requests per second with the recommended options; 0 if no rate meets the SLO."""
        return self.sustained.rate

    @property
    def capacity(self) -> float:
        """Requests per second that are completed if there are always enough, without regard to latency."""
        return self.at_once.result.steady_rate

    @property
    def at_rate(self) -> SteadyRun | None:
        """The run at the sustainable rate, or at the least one that was tried."""
        return self.sustained.best or self.sustained.above

    @property
    def pools(self) -> Pools:
        """Device time of prompts and of decoding."""
        demand = self.at_once.demand
        return pools_of(self.engine.setup, demand, self.slo.limits.get("tpot", inf))

    def price(self, per_hour: float) -> dict[str, float]:
        """The price of a million output tokens, and of a million tokens with prompts, at the sustainable rate."""
        result = None if self.sustained.best is None else self.sustained.best.result
        if result is None or not result.token_rate:
            return {}
        output = 1e6 * self.engine.setup.num_replicas * per_hour / 3600 / result.token_rate
        prompts = sum(one.num_prompt for one in result.complete)
        share = result.token_rate * result.seconds / (prompts + result.token_rate * result.seconds)
        return {"per_million_output_tokens": output, "per_million_tokens": output * share}

    @property
    def command(self) -> str:
        """The recommended command line, of each replica: `quire serve` has no replicas on several devices."""
        return serve_command(self.engine.options)

    @property
    def notes(self) -> list[str]:
        """What the plan does not know, and what its command needs."""
        name, found = self.engine.options.model, [*self.engine.notes, *self.warnings]
        if self.engine.setup.num_replicas > 1:
            found.append("the plan assumes a router before all servers; quire has no router across servers")
        if name is not None and name.lower() in known_configs():
            found.append(f"in place of {name}, give `quire serve` the folder or the id of its checkpoint")
        return found


def make_plan(
    options: EngineOptions,
    workload: WorkloadOptions,
    slo: SLO,
    *,
    search: bool = True,
    allow_lossy: bool = False,
    workers: int = 1,
    advance: Advance = lambda _done, _total: None,
    tell: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Plan a model on a device for a workload within an SLO. options.device: a device or a profile.

    search: whether to try other values of options than the given ones. allow_lossy: whether the recommendation may
    change outputs (LOSSY); what these options would gain is listed in any case. workers: processes that simulate side
    by side; the plan is the same with any number. tell: called with what is simulated now.
    Raises ConfigError with what would make it fit if the model does not fit.
    """
    if workload.rate is not None:
        raise ConfigError("a plan searches for the rate; leave out rate, or use `quire simulate` for one rate")
    model = find_model(options)
    try:
        engine = _engine(options, workload, model)
    except DoesNotFit as error:
        hints = list(what_would_fit(options, model))
        if not hints:
            raise
        raise DoesNotFit(f"{error}.\nWhat would make it fit:\n" + "\n".join(f"  {hint}" for hint in hints)) from error
    with Runs(workers, tell, advance) as runs:
        runs.expected = _EXPECTED_SIMULATIONS[search]
        finder = Search(workload, slo, Requests(workload, model, options.seed), runs)
        at_once = finder.at_once(engine)
        start = finder.estimate(engine, at_once)
        plan = Plan(engine, slo, at_once, Sustained(None, None))
        if search:
            _try_knobs(plan, finder, lambda changed: _engine(changed, workload, model), start, allow_lossy=allow_lossy)
        if plan.sustained.best is None:
            plan.sustained = finder.sustainable(engine, start, "rate")
        plan.curve = _curve(plan, finder)
        plan.warnings += _warnings(plan, finder, workload)
        if search:
            sizes = sorted({*SIZES, plan.engine.memory.profile.block_size})
            tell(f"block sizes {', '.join(map(str, sizes))}")
            sessions = finder.requests.take(_BLOCK_SIZE_REQUESTS, plan.engine.memory.max_model_len)
            alone = replace(for_workload(plan.engine.setup, sessions), num_replicas=1)
            plan.block_sizes = compare_block_sizes(alone, sessions, sizes)
            runs.count(len(sizes))
        plan.num_simulations = runs.num_done
    advance(plan.num_simulations, plan.num_simulations)
    return plan


def _engine(options: EngineOptions, workload: WorkloadOptions, model: PlannedModel) -> PlannedEngine:
    """The engine of these options. Raises ConfigError if the model does not fit."""
    return as_wanted(plan_engine(options, options.device, model), workload)


def _curve(plan: Plan, finder: Search) -> list[SteadyRun]:
    """Short runs at rates around the sustainable one, and the run at that."""
    best, above = plan.sustained.best, plan.sustained.above
    if best is None:
        return [] if above is None else [above]
    rates = [plan.rate * share for share in _CURVE if share != 1]
    runs = finder.short_runs(plan.engine, rates, "latencies")
    return sorted([*runs, best], key=lambda one: one.rate)


def _warnings(plan: Plan, finder: Search, wanted: WorkloadOptions) -> Iterator[str]:
    """What the runs rest on, where it is not what was given, or not enough."""
    run, requests = plan.at_rate, finder.requests
    if run is None:
        return
    rate, limit = run.rate, plan.engine.memory.max_model_len
    sessions = requests.take(MOST_REQUESTS if requests.is_fixed else num_requests(run.task.sessions), limit)
    length, _ = finder.length(plan.engine, rate, sessions)
    few = num_requests(sessions)
    named, used = requests.num_in_trace, f"{length.num_requests} at {rate:.2f} requests/s"
    enough = (
        f"enough are {used}, so that a run is several times as long as its longest request ({length.longest:.0f} s)"
    )
    if few < _ENOUGH * length.num_requests:
        cause = "record a longer trace"
        if not requests.is_fixed and length.num_requests > MOST_REQUESTS:
            cause = f"a run has at most {MOST_REQUESTS} requests, so the rate is less sure; plan for shorter outputs"
        elif requests.is_fixed and (named is None or few < named):
            cause = "leave out num_requests"
        yield f"{few} requests are too few for a steady state: {enough}; {cause}"
    elif named is not None and named < few:
        short = (
            "" if named / rate >= length.longest else f", less than its longest request takes ({length.longest:.0f} s)"
        )
        yield (
            f"the {named} requests of the trace arrive within {named / rate:.1f} s{short}: they are repeated to {few}, "
            f"each repetition with a prefix cache of its own; record at least {length.num_requests} requests, so that "
            "nothing is repeated"
        )
    elif wanted.trace is not None and not requests.is_fixed:
        yield f"the first {few} requests of the trace were used, which are {enough[:-1]})"


def _try_knobs(
    plan: Plan, finder: Search, engine_of: Callable[[EngineOptions], PlannedEngine], start: float, *, allow_lossy: bool
) -> None:
    """Try the values of each option, and keep the best one before the next option is tried.

    Options are compared in runs of few requests. What they give together is searched in whole runs.
    """
    limit = plan.engine.memory.max_model_len
    has_outputs = any(turn.output for session in finder.requests.take(1000, limit) for turn in session.turns)
    given = plan.engine
    quick = finder.roughly(given, start, "rate in short runs", quick=True)
    for option, values in KNOBS.items():
        if option == "speculation" and not has_outputs:
            continue
        current = getattr(plan.engine.options, option)
        found: list[Choice] = []
        engines: dict[object, PlannedEngine] = {}
        for value in values:
            if value == (DEFAULT_POLICY if option == "policy" and current is None else current):
                continue
            if note := _no_gain(plan.engine, quick, option, value):
                found.append(Choice(option, value, 0.0, note=note))
                continue
            try:
                engines[value] = engine_of(changed(plan.engine.options, {option: value}))
            except ConfigError as error:
                note = "does not fit" if isinstance(error, DoesNotFit) else str(error)
                found.append(Choice(option, value, None, note=note))
        best = quick
        bound = finder.bound(plan.engine, plan.at_once)
        for value, engine, gains in _gaining(finder, quick, engines, option):
            if not gains:
                found.append(Choice(option, value, None, note=f"at most {_LEAST_GAIN:+.0%}"))
                continue
            what = f"{option.replace('_', '-')} {value}"
            may_choose = allow_lossy or option not in LOSSY
            if may_choose and best is not quick and not all(finder.hold([engine], best.rate * (1 + _LEAST_GAIN), what)):
                found.append(Choice(option, value, None, note="no more than the value before"))
                continue
            faster = max(1 + 2 * _LEAST_GAIN, finder.bound(engine, plan.at_once) / bound)
            from_rate = quick.rate * faster or start
            rates = finder.roughly(engine, from_rate, what, quick=True, tolerance=GAIN_TOLERANCE)
            found.append(Choice(option, value, rates.rate / quick.rate - 1 if quick.rate else inf))
            if may_choose and rates.rate > best.rate * (1 + _LEAST_GAIN):
                plan.engine, best = engine, rates
        quick = best
        chosen = getattr(plan.engine.options, option)
        plan.choices += [replace(one, is_chosen=one.value == chosen and chosen != current) for one in found]
    if plan.engine is not given:
        _confirm(plan, finder, given, quick.rate or start)


def _confirm(plan: Plan, finder: Search, given: PlannedEngine, start: float) -> None:
    """Search the rate of the chosen options in whole runs. Take the given ones if those sustain about as much."""
    together = finder.sustainable(plan.engine, start, "rate with the chosen options")
    least = together.rate / (1 + _LEAST_GAIN)
    if together.best is not None and not finder.surely_holds(given, least, "about this rate with the given options"):
        plan.sustained = together
        return
    plan.engine = given
    plan.choices = [
        replace(one, is_chosen=False, note="not confirmed by a whole run") if one.is_chosen else one
        for one in plan.choices
    ]


def _gaining(
    finder: Search, quick: Sustained, engines: Mapping[object, PlannedEngine], option: str
) -> Iterator[tuple[object, PlannedEngine, bool]]:
    """Each value, with its engine, and whether it sustains more than `quick` by _LEAST_GAIN."""
    if not engines:
        return
    holds = [True] * len(engines)
    if quick.rate:
        name = option.replace("_", "-")
        holds = finder.hold(
            list(engines.values()), quick.rate * (1 + _LEAST_GAIN), f"{name} {', '.join(map(str, engines))}"
        )
    yield from zip(engines, engines.values(), holds, strict=True)


def _no_gain(engine: PlannedEngine, sustained: Sustained, option: str, value: object) -> str:
    """Why another value of an option cannot change a run at the sustained rate, nor at one a little above; or ""."""
    results = [one.result for one in (sustained.best, sustained.above) if one is not None]
    if sustained.best is None or not results:
        return ""
    options, rows = engine.options, max(one.most_running for one in results)
    if option == "max_num_seqs" and isinstance(value, int) and rows < options.max_num_seqs < value:
        return f"at most {rows} sequences run at once"
    if option == "block_size" and isinstance(value, int) and value > engine.memory.profile.block_size:
        used = max(one.most_kv_use for one in results)
        return f"at most {used:.0%} of the KV blocks are in use" if used < FULL else ""
    if option == "policy" and all(one.hit_rate < NO_HITS for one in results):
        return "no prompts begin alike"
    if option == "eviction" and not any(one.num_evicted_blocks for one in results):
        return "no block is evicted"
    return ""


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

    for alternatives in _smaller(options, has_states=bool(model.description.state_layers)):
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


def _smaller(options: EngineOptions, *, has_states: bool) -> Iterator[list[dict[str, object]]]:
    """Changes of options that need less memory. Of each list, the first that suffices is the mildest."""
    if options.quantization is None:
        yield [{"quantization": scheme} for scheme in ("fp8", "int8", "int4")]
    if options.kv_cache_dtype == "auto":
        yield [{"kv_cache_dtype": kv_dtype} for kv_dtype in ("fp8", "int8")]
    if has_states and options.state_dtype == "float32":
        yield [{"state_dtype": "bfloat16"}]
    if options.max_model_len is not None:
        yield [{"max_model_len": options.max_model_len >> i} for i in range(1, 24) if options.max_model_len >> i >= 128]
    yield [{"max_num_batched_tokens": tokens, "max_num_seqs": rows} for tokens, rows in ((1024, 64), (512, 32))]
