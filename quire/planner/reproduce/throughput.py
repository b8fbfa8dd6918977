"""Rows about throughput and latency: T1 to T10, O1 and D1."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from quire.cost.devices import LINKS
from quire.planner.block_size import compare_block_sizes
from quire.planner.charts import line_chart
from quire.planner.reproduce.engines import (
    LLAMA_70B,
    OPT_13B,
    PAGED,
    closed_loop,
    equal_requests,
    kv_bytes_per_token,
    run,
    sustained,
)
from quire.planner.reproduce.finding import Context, Finding, Findings, over_seeds, pending
from quire.planner.simulation import EngineSetup
from quire.planner.workloads import Part, Session, Turn, Workload, make_workload, with_arrivals

_RATES = "highest rate with a mean latency of 0.1 s per output token; requests arrive at random"


def _ratios(
    context: Context,
    setup: EngineSetup,
    baselines: Sequence[str],
    workload: Callable[[int], Workload],
    *,
    paged: EngineSetup | None = None,
    start: float = 1.0,
) -> dict[str, tuple[float, float | None]]:
    """The rate that paging sustains over that of each baseline: mean over seeds, and half the confidence interval."""
    requests = {seed: workload(seed) for seed in context.seeds}
    ours = {seed: sustained(paged or setup, PAGED, some, start=start, seed=seed) for seed, some in requests.items()}

    def ratio(baseline: str, seed: int) -> float:
        few = _FEW_REQUESTS if baseline == "static" else None
        return ours[seed] / sustained(setup, baseline, requests[seed][:few], start=start, seed=seed)

    return {baseline: over_seeds(partial(ratio, baseline), context.seeds) for baseline in baselines}


_FEW_REQUESTS = 60  # of a static batch, which runs nearly alone at the rates that it sustains


def t1(context: Context) -> Findings:
    """Sustainable rate over each baseline."""
    setup, found = OPT_13B.setup(), list[Finding]()
    reported = {"orca-oracle": (1.7, 2.7), "orca-pow2": None, "orca-max": (2.7, 8.0), "static": (1.0, 22.0)}

    def requests(seed: int) -> Workload:
        return make_workload("sharegpt", context.size(400, 30), max_model_len=2048, seed=seed)

    ratios = _ratios(context, setup, list(reported), requests)
    for baseline, said in reported.items():
        found.append(_simulated(f"paged over {baseline}", ratios[baseline][0], "x", said, ratios[baseline][1], _RATES))
    rates = (0.5, 1.0) if context.quick else (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
    lines = {
        memory: [(rate, _normalized(setup, memory, with_arrivals(requests(0)[:200], rate))) for rate in rates]
        for memory in (PAGED, *reported)
    }
    context.charts["t1_latency.svg"] = line_chart(
        "latency by rate, OPT-13B, A100-40GB (T1)", "requests/s", "s per output token", lines, log_y=True
    )
    return found


def _normalized(setup: EngineSetup, memory: str, workload: Workload) -> float:
    return run(setup, memory, workload).normalized_latency


def t2(context: Context) -> Findings:
    """Running batch at 2 requests per second."""
    said = {PAGED: (30.4, 30.4), "orca-oracle": (13.6, 13.6), "orca-pow2": (7.0, 13.6), "orca-max": (7.0, 7.0)}
    found = []
    for memory, reported in said.items():
        ours, spread = over_seeds(partial(_batch, context, memory), context.seeds)
        found.append(_simulated(memory, ours, "sequences", reported, spread, _BATCH))
    busy = run(
        OPT_13B.setup(), PAGED, make_workload("sharegpt", context.size(400, 10), max_model_len=2048)
    ).mean_running
    found.append(_simulated("paged, with always enough requests", busy, "sequences", (30.4, 30.4)))
    return found


_BATCH = "2 requests per second, which are fewer than paging sustains on the modelled device: its batch is not full"


def _batch(context: Context, memory: str, seed: int) -> float:
    workload = make_workload("sharegpt", context.size(400, 10), max_model_len=2048, seed=seed)
    return run(OPT_13B.setup(), memory, with_arrivals(workload, 2.0, seed=seed)).mean_running


def t3(context: Context) -> Findings:
    """Parallel sampling over Orca (Oracle), Alpaca-like."""
    found = []
    for samples, reported in ((1, 1.3), (2, None), (6, 2.3)):
        setup, count = OPT_13B.setup(num_samples=samples), context.size(1600 // samples, 30)

        def requests(seed: int, count: int = count) -> Workload:
            return make_workload("alpaca", count, max_model_len=2048, seed=seed)

        ours, spread = _ratios(context, setup, ("orca-oracle",), requests, start=4.0 / samples)["orca-oracle"]
        note = "the document's 2.3x is that of beam search, whose beams share more than samples" if samples == 6 else ""
        given = None if reported is None else (reported, reported)
        found.append(_simulated(f"{samples} samples", ours, "x", given, spread, note))
    return found


def t4(context: Context) -> Findings:
    """A prefix of 341 tokens that all requests share."""

    def requests(seed: int) -> Workload:
        prefix = Part(7, 341)
        base = make_workload("alpaca", context.size(400, 30), max_model_len=1024, seed=seed)
        return [replace(one, turns=(replace(one.turns[0], new=(prefix, *one.turns[0].new)),)) for one in base]

    cached = OPT_13B.setup(prefix_index=True)
    ratios = _ratios(context, OPT_13B.setup(), ("orca-oracle",), requests, paged=cached, start=4.0)
    ours, spread = ratios["orca-oracle"]
    note = "OPT-13B and Alpaca-like; the paper has LLaMA-13B and translations. Outputs are short: prefills decide"
    return [_simulated("with a prefix cache, over orca-oracle", ours, "x", (3.58, 3.58), spread, note)]


def t6(context: Context) -> Findings:
    """Throughput by block size, and cached tokens by block size and index. Kernels have the same speed at all sizes."""
    sizes = (16, 128) if context.quick else (1, 4, 8, 16, 32, 64, 128, 256)
    found: Findings = []
    lines: dict[str, list[tuple[float, float]]] = {}
    for name, best in (("sharegpt", (16, 128)), ("alpaca", (16, 32))):
        workload = make_workload(name, context.size(300, 10), max_model_len=2048, seed=0)
        rates = {row.block_size: row.tokens_per_second for row in compare_block_sizes(OPT_13B.setup(), workload, sizes)}
        lines[name] = [(size, 100 * rate / rates[16]) for size, rate in rates.items()]
        within = max(size for size, rate in rates.items() if rate >= 0.98 * max(rates.values()))
        what = f"{name}: largest size within 2 % of the best"
        found.append(_simulated(what, within, "tokens", (float(best[0]), float(best[1]))))
        reported = {4: 87.0, 8: 94.0, 32: 98.0, 64: 93.0} if name == "sharegpt" else {}
        for size, said in reported.items():
            if size in rates:
                ours = 100 * rates[size] / rates[16]
                found.append(_simulated(f"{size} against 16", ours, "%", (said, said), None, _SPEED))
    context.charts["t6_block_size.svg"] = line_chart(
        "throughput by block size (T6)", "tokens in a block", "% of that with 16", lines
    )
    return found + _cached_by_block_size(context)


_SPEED = "the document's small sizes lose by its kernel; here kernels have one speed, so only empty positions count"


def _cached_by_block_size(context: Context) -> Findings:
    """Share of prompt tokens that are cached with blocks of 16 and of 128, by both indexes."""
    found = []
    for name in ("few-shot", "rag") if context.quick else ("few-shot", "rag", "chat", "agents"):
        workload = make_workload(name, context.size(300, 10), max_model_len=2048, seed=0)
        for index in ("radix", "hash"):
            setup = replace(OPT_13B, num_tokens=200_000).setup(prefix_index=True)
            cache = replace(setup.cache, prefix_index=index)
            small, large = compare_block_sizes(replace(setup, cache=cache), workload, (16, 128))
            for row in (small, large):
                what = f"{name}, {index} index, blocks of {row.block_size}: prompt tokens cached"
                found.append(_simulated(what, 100 * row.cached_share, "%", None))
    return found


def t7(_: Context) -> Findings:
    """Swap against recompute for Llama-70B: 25 GB/s as in the document, prefill by rooflines of 1 and of 8 A100."""
    each, profile = kv_bytes_per_token("llama-2-70b"), replace(LLAMA_70B, quantization=None).profile
    link = 0.8 * LINKS["PCIe 4"].bytes_per_second
    reported = {128: (3.2, 12), 512: (12.8, 48), 2048: (51.2, 190), 4096: (102.4, 380)}
    found = []
    for length, (swap, again) in reported.items():
        copies = 2e3 * length * each / link
        seconds = 1e3 * (profile.prefill_seconds(length) - profile.fixed)
        found.append(_computed(f"{length} tokens: swap", copies, "ms", (swap, swap)))
        note = "one A100; the document's 10 700 tokens/s need six of them at 80 % of their peak"
        found.append(_computed(f"{length} tokens: recompute", seconds, "ms", (again, again), note))
    rate = link / (2 * each)
    found.append(
        _computed(
            "prefill rate above which recompute wins", rate, "tokens/s", None, "beyond any A100: swap wins throughout"
        )
    )
    small = replace(OPT_13B, num_tokens=4096).profile
    for length in (128, 1024):
        copies = 2 * length * kv_bytes_per_token("opt-13b") / link
        ratio = (small.prefill_seconds(length) - small.fixed) / copies
        what = f"OPT-13B, {length} tokens: recompute over swap"
        note = "at 25 GB/s a swap wins here, too; the paper's swaps copy small blocks, which is slower"
        found.append(_computed(what, ratio, "x", (0.0, 1.2), note))
    return found


def t8(context: Context) -> Findings:
    """Paged over contiguous where memory is not short, without the cost of the kernel (T5)."""
    count = context.size(60, 2)
    short = [Session(0.0, (Turn((Part(i, 40),), 4),)) for i in range(4 * count)]
    chats = make_workload("sharegpt", count, max_model_len=2048, seed=0)
    plenty = replace(OPT_13B, num_tokens=2048 * 64, max_num_seqs=32)
    cases = {
        "one local user": (OPT_13B, closed_loop(chats, 1), (-5.0, 0.0)),
        "short classification": (OPT_13B, closed_loop(short, 6), (0.0, 10.0)),
        "everything fits": (plenty, chats, (0.0, 0.0)),
        "fixed lengths that fill their slabs": (OPT_13B, equal_requests(count // 2, 1024, 1023), (0.0, 0.0)),
    }
    found = []
    for name, (engine, workload, reported) in cases.items():
        paged, contiguous = (run(engine.setup(), memory, workload).token_rate for memory in (PAGED, "orca-max"))
        found.append(_simulated(f"{name}: gain", 100 * (paged / contiguous - 1), "%", reported))
    return found


def t9(context: Context) -> Findings:
    """Prefix cache on top of paging, by the number of clients. Prompts of 550 tokens, 500 of them shared."""
    batches = (1, 8) if context.quick else (1, 8, 16, 32, 64, 96, 128)
    found: Findings = []
    lines: dict[str, list[tuple[float, float]]] = {}
    for batch in batches:
        workload = closed_loop(equal_requests(batch * context.size(4, 2), 550, 200, shared=500), batch)
        rates = [run(LLAMA_70B.setup(prefix_index=index), PAGED, workload).token_rate for index in (False, True)]
        lines.setdefault("gain", []).append((batch, rates[1] / rates[0]))
        if batch in (1, 32, 128):
            said = 1.28 if batch == 128 else 1.0
            found.append(_simulated(f"batch {batch}", rates[1] / rates[0], "x", (said, said), note=_DECODE_ONLY))
    context.charts["t9_prefix.svg"] = line_chart("gain of the prefix cache (T9)", "clients", "x", lines)
    return found


_DECODE_ONLY = "the document counts decode steps; here the prompts of later requests count too"


def t10(context: Context) -> Findings:
    """Throughput of Llama-70B in 4 bits on 80 GB by the number of clients."""
    batches = (4,) if context.quick else (1, 4, 8, 16, 32, 64, 96, 128)
    kinds = {"contiguous": ("orca-max", False), "paged": (PAGED, False), "paged, prefix cache": (PAGED, True)}
    lines: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    latencies = {}
    for name, (memory, index) in kinds.items():
        for batch in batches:
            base = make_workload("sharegpt", batch * context.size(4, 1), max_model_len=1500, seed=0)
            prefixed = [
                replace(one, turns=(replace(one.turns[0], new=(Part(7, 500), *one.turns[0].new)),)) for one in base
            ]
            result = run(LLAMA_70B.setup(prefix_index=index), memory, closed_loop(prefixed, batch))
            lines[name].append((batch, result.token_rate))
            latencies[name] = result
    context.charts["t10_throughput.svg"] = line_chart(
        "Llama-70B in 4 bits on an A100-80GB (T10)", "clients", "output tokens/s", lines
    )
    said = {"contiguous": 1247.0, "paged": 6380.0, "paged, prefix cache": 8150.0}
    found = [
        _simulated(
            f"{name}: peak", max(rate for _, rate in points), "tokens/s", (said[name], said[name]), note=_ROOFLINE
        )
        for name, points in lines.items()
    ]
    peaks = {name: max(rate for _, rate in points) for name, points in lines.items()}
    found.append(_simulated("paged over contiguous", peaks["paged"] / peaks["contiguous"], "x", (4.2, 5.1)))
    found.append(
        _simulated(
            "with prefix cache, over contiguous", peaks["paged, prefix cache"] / peaks["contiguous"], "x", (6.5, 6.5)
        )
    )
    for share, times in ((0.5, {"contiguous": 42.0, "paged": 48.0}), (0.99, {"contiguous": 89.0, "paged": 148.0})):
        for name, reported in times.items():
            ours = 1e3 * latencies[name].percentile("tpot", share)
            found.append(_simulated(f"{name}: p{100 * share:.0f} per token", ours, "ms", (reported, reported)))
    return found


_ROOFLINE = "by the rooflines of one A100; the document does not say how it measured"


def o1(context: Context) -> Findings:
    """Continuous over static batching in equal memory, with outputs of which few are long."""

    def skewed(seed: int) -> list[Session]:
        count = context.size(400, 40)
        base = make_workload("alpaca", count, max_model_len=2048, seed=seed)
        return [
            replace(one, turns=(replace(one.turns[0], num_output=1000 if i % 10 == 0 else 20),))
            for i, one in enumerate(base)
        ]

    ours, spread = _ratios(context, OPT_13B.setup(), ("static",), skewed)["static"]
    rate = over_seeds(lambda seed: _at_once(skewed(seed), "orca-max") / _at_once(skewed(seed), "static"), context.seeds)
    note = "Orca reports up to 36.9x over FasterTransformer at equal latency, for 175B"
    return [
        _simulated("orca-max over static: requests per second, all at once", rate[0], "x", (1.0, 36.9), rate[1], note),
        _simulated("paged over static: sustained rate", ours, "x", (1.0, 36.9), spread, note),
    ]


def _at_once(workload: Sequence[Session], memory: str) -> float:
    return run(OPT_13B.setup(), memory, workload).request_rate


def d1(_: Context) -> Findings:
    """First token of a short prompt beside a long one: in one engine, and with a prefill engine of its own."""
    setup = replace(OPT_13B, num_tokens=8192).setup()
    whole = replace(setup.scheduler, max_num_batched_tokens=4096)
    long, short = Session(0.0, (Turn((Part(1, 2000),), 8),)), Session(1e-3, (Turn((Part(2, 50),), 8),))

    def first_token(workload: Workload, engine: EngineSetup) -> float:
        return 1e3 * run(engine, PAGED, workload).requests[-1].ttft

    alone = first_token([short], setup)
    beside = first_token([long, short], replace(setup, scheduler=whole))
    chunked = first_token([long, short], replace(setup, scheduler=replace(whole, max_num_batched_tokens=512)))
    return [
        _simulated("alone, as in an engine of its own", alone, "ms", None),
        _simulated("beside a prompt of 2000 tokens", beside, "ms", None),
        _simulated("the same, in chunks of 512 tokens", chunked, "ms", None),
        pending("hand-off of KV between two engines", "disaggregation is not there yet"),
    ]


def _simulated(
    what: str,
    ours: float,
    unit: str,
    reported: tuple[float, float] | None,
    spread: float | None = None,
    note: str = "",
) -> Finding:
    return Finding(what=what, ours=ours, unit=unit, kind="simulated", reported=reported, spread=spread, note=note)


def _computed(what: str, ours: float, unit: str, reported: tuple[float, float] | None, note: str = "") -> Finding:
    return Finding(what=what, ours=ours, unit=unit, kind="computed", reported=reported, note=note)
