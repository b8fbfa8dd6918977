"""A plan in sentences: how sure it is, what limits it, and what would change it."""

from collections.abc import Iterator, Mapping
from math import inf
from types import MappingProxyType

from quire.cost.devices import DEVICES
from quire.cost.memory_plan import format_bytes
from quire.errors import ConfigError
from quire.planner.block_size import block_size_advice
from quire.planner.estimate import kv_rows
from quire.planner.plan import FULL, LOSSY, Plan, changed
from quire.planner.results import Metric, SimulationResult
from quire.planner.search import NO_HITS
from quire.planner.setup import PlannedEngine, plan_engine
from quire.planner.simulate import format_ms
from quire.planner.slo import METRIC_NAMES
from quire.planner.steady import SteadyRun

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


def run_lines(plan: Plan) -> Iterator[str]:
    """How long the runs are, and how sure the rate is."""
    best, above = plan.sustained.best, plan.sustained.above
    if best is None:
        return
    window, growth = best.window, best.growth
    length = window.stop - window.start
    yield (
        f"Runs of {window.stop:.0f} s: {window.start:.0f} s of warm-up, then {length:.0f} s that count, with "
        f"{len(best.result.requests)} requests: {length / best.longest:.1f} times the longest request "
        f"({best.longest:.1f} s)."
    )
    between = "" if above is None else f", {above.rate:.2f} do not"
    metric, share = min(best.kept.items(), key=lambda item: item[1].least)
    yield (
        f"{best.rate:.2f} requests/s hold{between}. {metric} is kept by {share.share:.2%} of the requests (by "
        f"{share.least:.2%} at least, with a confidence of 80 %). A backlog growing by {growth.detectable:.1%} of the "
        f"arrivals is found with a probability of 95 %; measured: {growth.share:+.1%}."
    )


def reasons_of(plan: Plan) -> Iterator[str]:
    """The plan in sentences."""
    memory = plan.engine.memory
    states = "" if memory.states is None else f" and {memory.states.num_blocks} blocks of recurrent states"
    yield (
        f"Memory: weights take {format_bytes(memory.profile.weight_bytes)}; "
        f"{sum(memory.num_blocks)} KV blocks of {memory.profile.block_size} tokens{states} remain."
    )
    if plan.sustained.best is None:
        yield from _why_no_rate(plan)
        return
    result = plan.sustained.best.result
    yield (
        f"At {plan.rate:.2f} requests/s, {result.mean_running:.1f} sequences run on average and hold "
        f"{result.mean_kv_use:.0%} of the KV blocks; {result.num_preemptions} preemptions; steps run "
        f"{result.busy_seconds / result.seconds / result.num_replicas:.0%} of the time."
    )
    yield f"With always enough requests, {plan.capacity:.2f} requests/s are completed, without regard to latency."
    above = next((point for point in plan.curve if point.rate > plan.rate), None)
    broken = {} if above is None else plan.slo.violations(above.result)
    if above is not None and broken:
        yield _why_not_faster(above, broken)
    elif above is not None and above.growth.is_trend:
        yield f"At {above.rate:.2f} requests/s the queue grows without end: more arrive than are completed."
    elif above is not None:
        yield f"At {above.rate:.2f} requests/s a short run keeps the SLO; a long one is not sure to keep it."
    pools = plan.pools
    yield (
        f"Separate pools: {pools.ratio:.2g} decode devices for each prefill device. A request takes "
        f"{1e3 * pools.prefill:.3g} ms of a device for its prompt, and {1e3 * pools.decode:.3g} ms for its output, at "
        f"{pools.rows} sequences per step."
    )
    yield from _nil_gains(plan, result)
    for choice in plan.choices:
        if choice.is_chosen and choice.gain is not None:
            gain = f"{choice.gain:+.0%}" if choice.gain < inf else "the SLO is met"
            yield f"{choice.option} {choice.value}: {gain}, because {_REASONS[choice.option]}."
    if plan.block_sizes:
        yield block_size_advice(plan.block_sizes, memory.profile.block_size)
    for option in LOSSY:
        worth = [one for one in plan.choices if one.option == option and one.gain and not one.is_chosen]
        for one in sorted(worth, key=lambda one: -(one.gain or 0.0))[:1]:
            yield f"{option} {one.value} would give {one.gain:+.0%}: {_REASONS[option]}."


def _nil_gains(plan: Plan, result: SimulationResult) -> Iterator[str]:
    """What quire has and this workload does not use."""
    memory = plan.engine.memory
    slabs = kv_rows(plan.engine.setup, memory.max_model_len)
    if result.most_running <= slabs:
        yield (
            f"Paging gains nothing here: contiguous memory of {slabs} sequences of {memory.max_model_len} tokens fits, "
            f"and at most {result.most_running} run at once."
        )
    if plan.engine.options.enable_prefix_caching and result.hit_rate < NO_HITS:
        yield f"The prefix cache gains nothing here: {result.hit_rate:.1%} of the prompt tokens are found in it."


def _why_no_rate(plan: Plan) -> Iterator[str]:
    """What breaks the SLO at the least rate, and what to change."""
    alone = plan.sustained.above
    if alone is None:
        return
    broken = plan.slo.violations(alone.result)
    lost = [one for one in alone.result.requests if one.reason and not one.is_complete]
    if lost:
        yield (
            f"No rate meets the SLO: {len(lost)} of {len(alone.result.requests)} requests are not completed even at "
            f"{alone.rate:.2g} requests/s ({', '.join(sorted({one.reason for one in lost}))}). Prompts of "
            f"more than {plan.engine.memory.max_model_len} tokens are rejected: raise max_model_len, or lower share."
        )
        return
    for metric, value in broken.items():
        devices = _fast_enough(plan, metric, plan.slo.limits[metric] / value)
        yield (
            f"No rate meets the SLO: the {METRIC_NAMES[metric]} is {format_ms(1e3 * value)} even at "
            f"{alone.rate:.2g} requests/s, and the limit is {1e3 * plan.slo.limits[metric]:g} ms. The nearest "
            f"limit that is met is {metric}={1e3 * value:.3g}ms. "
            + (f"Or take a faster device: {' or '.join(devices)}." if devices else "No known device is fast enough.")
        )


def _fast_enough(plan: Plan, metric: Metric, share: float) -> list[str]:
    """Devices on which a request alone takes at most `share` of the time that it takes on the plan's device."""
    options, model = plan.engine.options, plan.engine.model
    demand = plan.at_once.demand

    def seconds(engine: PlannedEngine) -> float:
        prompt = engine.setup.profile.prefill_seconds(max(1, round(demand.prompt)))
        token = engine.setup.profile.decode_seconds(1, round(demand.context))
        return {"ttft": prompt, "tpot": token, "latency": prompt + demand.output * token}[metric]

    limit = share * seconds(plan.engine)
    found = []
    for name in DEVICES:
        try:
            if seconds(plan_engine(changed(options, {"device": name}), name, model)) <= limit:
                found.append(name)
        except ConfigError:  # the model does not fit
            continue
    return found


def _why_not_faster(above: SteadyRun, broken: Mapping[Metric, float]) -> str:
    """Why a rate does not meet the SLO, in a sentence. broken: values that exceed their limits."""
    if inf in broken.values():
        lost = len(above.result.requests) - len(above.result.complete)
        return f"At {above.rate:.2f} requests/s {lost} requests are not completed: the queue is full."
    what = " and ".join(f"the {METRIC_NAMES[metric]} ({format_ms(1e3 * value)})" for metric, value in broken.items())
    waits = above.result.mean_kv_use > FULL
    why = "requests wait for KV blocks" if waits else "steps take longer, or requests wait for their turn"
    exceed = "exceeds its limit" if len(broken) == 1 else "exceed their limits"
    return f"At {above.rate:.2f} requests/s {what} {exceed}: {why}."
