"""Rows about throughput and latency: T1 to T4, T6 to T11, O1 and D1."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from random import Random

from msgspec import structs

from quire.cost.devices import find_device
from quire.planner.block_size import compare_block_sizes
from quire.planner.charts import line_chart
from quire.planner.reproduce.engines import (
    LLAMA_70B,
    OPT_13B,
    OPT_175B,
    PAGED,
    QWEN_05B,
    Engine,
    closed_loop,
    equal_requests,
    kv_bytes_per_token,
    run,
    sustained,
)
from quire.planner.reproduce.finding import (
    Context,
    Finding,
    Findings,
    Reported,
    arithmetic,
    computed,
    over_seeds,
    pending,
    simulated,
)
from quire.planner.reproduce.recorded import hundred_blocks, paged_over_contiguous, short_behind_long
from quire.planner.results import SimulationResult
from quire.planner.simulated_engine import EngineSetup
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
    search = partial(sustained, start=start, quick=context.quick)
    ours = {seed: search(paged or setup, PAGED, some, seed=seed) for seed, some in requests.items()}

    def ratio(baseline: str, seed: int) -> float:
        few = _FEW_REQUESTS if baseline == "static" else None
        return ours[seed] / search(setup, baseline, requests[seed][:few], seed=seed)

    return {baseline: over_seeds(partial(ratio, baseline), context.seeds) for baseline in baselines}


_FEW_REQUESTS = 60  # of a static batch, which runs nearly alone at the rates that it sustains


def t1(context: Context) -> Findings:
    """Sustainable rate over each baseline."""
    setup, found = OPT_13B.setup(), list[Finding]()
    reported = {"orca-oracle": (1.7, 2.7), "orca-pow2": None, "orca-max": (2.7, 8.0), "static": 22.0}

    def requests(seed: int) -> Workload:
        return make_workload("sharegpt", context.size(400, 6), max_model_len=2048, seed=seed)

    ratios = _ratios(context, setup, list(reported), requests)
    for baseline, said in reported.items():
        note = _UP_TO if baseline == "static" else _RATES
        found.append(simulated(f"paged over {baseline}", ratios[baseline][0], "x", said, ratios[baseline][1], note))
    rates = (0.5, 1.0) if context.quick else (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
    lines = {
        memory: [(rate, _normalized(setup, memory, with_arrivals(requests(0)[:200], rate))) for rate in rates]
        for memory in (PAGED, *reported)
    }
    context.charts["t1_latency.svg"] = line_chart(
        "latency by rate, OPT-13B, A100-40GB (T1)", "requests/s", "s per output token", lines, log_y=True
    )
    return found


_UP_TO = (
    "the reported 22 is the largest of several cases. A static batch waits for its longest request and sustains so few "
    "requests that the ratio depends on which of them arrive together: see the interval"
)


def _normalized(setup: EngineSetup, memory: str, workload: Workload) -> float:
    return run(setup, memory, workload).normalized_latency


def t2(context: Context) -> Findings:
    """Running batch at 2 requests per second."""
    said: dict[str, float | tuple[float, float]] = {
        PAGED: 30.4,
        "orca-oracle": 13.6,
        "orca-pow2": (7.0, 13.6),
        "orca-max": 7.0,
    }
    found = []
    for memory, reported in said.items():
        ours, spread = over_seeds(partial(_batch, context, memory), context.seeds)
        found.append(simulated(memory, ours, "sequences", reported, spread, _BATCH))
    busy = run(
        OPT_13B.setup(), PAGED, make_workload("sharegpt", context.size(400, 10), max_model_len=2048)
    ).mean_running
    note = "admission keeps blocks free for growth: fewer sequences run than memory could hold (M1)"
    found.append(simulated("paged, with always enough requests", busy, "sequences", 30.4, note=note))
    return found


_BATCH = "2 requests per second, which are fewer than paging sustains on the modelled device: its batch is not full"


def _batch(context: Context, memory: str, seed: int) -> float:
    workload = make_workload("sharegpt", context.size(400, 10), max_model_len=2048, seed=seed)
    return run(OPT_13B.setup(), memory, with_arrivals(workload, 2.0, seed=seed)).mean_running


def t3(context: Context) -> Findings:
    """Parallel sampling and beam search over Orca (Oracle), Alpaca-like."""
    found = []
    cases: tuple[tuple[str, int, Reported], ...] = (
        ("samples", 1, 1.3),
        ("samples", 6, None),
        ("beams", 6, 2.3),
    )
    for kind, width, reported in cases:
        base = OPT_13B.setup()
        setup = replace(base, beam_width=width) if kind == "beams" else replace(base, num_samples=width)

        def requests(seed: int, count: int = context.size(1600 // width, 12)) -> Workload:
            return make_workload("alpaca", count, max_model_len=2048, seed=seed)

        ours, spread = _ratios(context, setup, ("orca-oracle",), requests, start=4.0 / width)["orca-oracle"]
        found.append(simulated(f"{width} {kind}", ours, "x", reported, spread, _BEAMS if kind == "beams" else _HOST))
        if width == 1:
            slowed, one_seed = _with_host_time(setup), replace(context, one_seed=True)
            ours, spread = _ratios(one_seed, slowed, ("orca-oracle",), requests, start=16.0)["orca-oracle"]
            found.append(simulated(f"{width} samples, {_HOST_TIME}", ours, "x", None, spread))
    return found


_HOST_SECONDS = 5e-4
_HOST_TIME = f"{1e3 * _HOST_SECONDS} ms of host time a sequence and step"
_HOST = (
    "memory alone decides in the modelled steps, which take no time on the host; where the host takes time for each "
    "sequence of a step, as in an engine of 2023, larger batches pay less: see the row with that time"
)


def _with_host_time(setup: EngineSetup) -> EngineSetup:
    return replace(setup, profile=structs.replace(setup.profile, per_chunk=_HOST_SECONDS))


_BEAMS = f"how early beams part is a property of the model; here candidates follow Zipf's law; {_HOST}"


def t4(context: Context) -> Findings:
    """A prefix of 341 tokens that all requests share."""

    def requests(seed: int) -> Workload:
        prefix = Part(7, 341)
        base = make_workload("alpaca", context.size(400, 8), max_model_len=1024, seed=seed)
        return [replace(one, turns=(replace(one.turns[0], new=(prefix, *one.turns[0].new)),)) for one in base]

    found, plain, cached = list[Finding](), OPT_13B.setup(), OPT_13B.setup(prefix_index=True)
    note = (
        "OPT-13B and Alpaca-like; the paper has LLaMA-13B and translations. Prefills decide: with the prefix cached a "
        f"request has 19 prompt tokens to compute instead of 360; {_HOST}"
    )
    for name, said, change in (("", 3.58, lambda setup: setup), (f", {_HOST_TIME}", None, _with_host_time)):
        seeds = context if said else replace(context, one_seed=True)
        ratios = _ratios(seeds, change(plain), ("orca-oracle",), requests, paged=change(cached), start=4.0)
        ours, spread = ratios["orca-oracle"]
        found.append(simulated(f"with a prefix cache, over orca-oracle{name}", ours, "x", said, spread, note))
    return found


def t6(context: Context) -> Findings:
    """Throughput by block size, and cached tokens by block size and index. Kernels have the same speed at all sizes."""
    sizes = (16, 128) if context.quick else (1, 4, 8, 16, 32, 64, 128, 256)
    found: Findings = []
    lines: dict[str, list[tuple[float, float]]] = {}
    reported = {4: 87.0, 8: 94.0, 32: 98.0, 64: 93.0}
    for name, best in (("sharegpt", (16.0, 128.0)), ("alpaca", (16.0, 32.0))):
        shares = _by_block_size(context, name, sizes)
        lines[name] = [(size, share) for size, (share, _) in shares.items()]
        highest = max(share for share, _ in shares.values())
        within = max(size for size, (share, _) in shares.items() if share >= 0.98 * highest)
        found.append(simulated(f"{name}: largest size within 2 % of the best", within, "tokens", best, note=_SPEED))
        for size, (share, spread) in shares.items():
            if size in reported and name == "sharegpt":
                found.append(simulated(f"{size} against 16", share, "%", reported[size], spread, _SPEED))
    context.charts["t6_block_size.svg"] = line_chart(
        "throughput by block size (T6)", "tokens in a block", "% of that with 16", lines
    )
    return found + _cached_by_block_size(context)


_SPEED = "the document's small sizes lose by its kernel; here kernels have one speed, so only empty positions count"


def _by_block_size(context: Context, name: str, sizes: Sequence[int]) -> dict[int, tuple[float, float | None]]:
    """Throughput in per cent of that with blocks of 16: mean over seeds, and half of the confidence interval."""
    rates: dict[int, dict[int, float]] = {}
    for seed in context.seeds:
        workload = make_workload(name, context.size(300, 10), max_model_len=2048, seed=seed)
        rows = compare_block_sizes(OPT_13B.setup(), workload, sizes)
        rates[seed] = {row.block_size: row.tokens_per_second for row in rows}

    def share(size: int, seed: int) -> float:
        return 100 * rates[seed][size] / rates[seed][16]

    return {size: over_seeds(partial(share, size), context.seeds) for size in sizes}


def _cached_by_block_size(context: Context) -> Findings:
    """Share of prompt tokens that are cached with blocks of 16 and of 128, by both indexes."""
    found = []
    for name in ("few-shot", "rag") if context.quick else ("few-shot", "rag", "chat", "agents"):
        workload = make_workload(name, context.size(300, 10), max_model_len=2048, seed=0)
        for index in ("radix", "hash"):
            setup = replace(OPT_13B, num_tokens=200_000).setup(prefix_index=True)
            cache = replace(setup.cache, prefix_index=index)
            for row in compare_block_sizes(replace(setup, cache=cache), workload, (16, 128)):
                what = f"{name}, {index} index, blocks of {row.block_size}: prompt tokens cached"
                found.append(simulated(what, 100 * row.cached_share, "%"))
    return found


def t7(context: Context) -> Findings:
    """Swap against recompute by length: copies over the A100's link, and prefills by its rooflines."""
    device = find_device(LLAMA_70B.device)
    each, profile = kv_bytes_per_token("llama-2-70b"), replace(LLAMA_70B, quantization=None).profile
    link = device.efficiency.link * device.host_link.bytes_per_second
    reported = {128: (3.2, 12), 512: (12.8, 48), 2048: (51.2, 190), 4096: (102.4, 380)}
    found, ratios = list[Finding](), []
    for length, (swap, again) in reported.items():
        copies = 2e3 * length * each / link
        seconds = 1e3 * (profile.prefill_seconds(length) - profile.fixed)
        ratios.append(seconds / copies)
        note = "the rate of the link, 25 GB/s, is the document's"
        found.append(arithmetic(f"{length} tokens: swap", copies, "ms", swap, note))
        note = "one A100; the document's 10 700 tokens/s need six of them at 80 % of their peak"
        found.append(computed(f"{length} tokens: recompute", seconds, "ms", again, note))
    note = "swap wins throughout"
    found.append(computed("least of recompute over swap", min(ratios), "x", (1.0, None), note))
    small = replace(OPT_13B, num_tokens=4096).profile
    for length in (128, 1024):
        copies = 2 * length * kv_bytes_per_token("opt-13b") / link
        ratio = (small.prefill_seconds(length) - small.fixed) / copies
        what = f"OPT-13B, {length} tokens: recompute over swap"
        note = "at 25 GB/s a swap wins here, too; the paper's swaps copy small blocks, which is slower"
        found.append(computed(what, ratio, "x", (0.0, 1.2), note))
    found.append(computed("100 blocks", 100 * 16 * each / 1e6, "MB", 500, "a block has 5.24 MB"))
    why = "quire gathers blocks before it copies them; no result file from a GPU says how much their size still matters"
    return [*found, *hundred_blocks(context), pending("swap by block size", why)]


def t8(context: Context) -> Findings:
    """Paged over contiguous where memory is not short. Reads of blocks cost what the H100's kernel pays (T5)."""
    count = context.size(60, 2)
    short = [Session(0.0, (Turn((Part(i, 40),), 4),)) for i in range(4 * count)]
    plenty = replace(OPT_13B, num_tokens=2048 * 64, max_num_seqs=32)
    spoken, fixed = equal_requests(count, 50, 250), equal_requests(count // 2, 1024, 1023)
    cases: dict[str, tuple[Engine, Callable[[Workload], Workload], tuple[float, float]]] = {
        "one local user": (OPT_13B, lambda chats: closed_loop(chats, 1), (-5.0, 0.0)),
        "one stream of speech": (OPT_13B, lambda _: closed_loop(spoken, 1), (-15.0, -15.0)),
        "short classification": (OPT_13B, lambda _: closed_loop(short, 6), (-0.5, 10.0)),  # 0 in whole per cents
        "a model below 1B": (QWEN_05B, lambda chats: chats, (-_NO_GAIN, _NO_GAIN)),
        "everything fits": (plenty, lambda chats: chats, (-_NO_GAIN, _NO_GAIN)),
        "fixed lengths that fill their slabs": (OPT_13B, lambda _: fixed, (-_NO_GAIN, _NO_GAIN)),
    }
    cells = paged_over_contiguous(context)
    dearest = max(cells.values()) if cells else 1.0
    return [_gain(context, name, dearest, *case) for name, case in cases.items()]


_NO_GAIN = 5.0  # per cent: where the documents say that there is none
_KERNEL = (
    "decode attention over blocks takes longer by the most that the H100's kernel was measured to (T5); the document's "
    "kernel loses more, and attention is a small part of a step. No gain is at most 5 % either way"
)


def _gain(
    context: Context,
    name: str,
    kernel: float,
    engine: Engine,
    workload_of: Callable[[Workload], Workload],
    reported: tuple[float, float],
) -> Finding:
    """Tokens per second of paging over Orca (Max) in per cent.

    kernel: time of attention over scattered blocks, over that of contiguous ones. workload_of: of single requests, as
    in ShareGPT.
    """
    setup = engine.setup()
    attention = tuple(structs.replace(one, per_kv_token=kernel * one.per_kv_token) for one in setup.profile.attention)
    scattered = replace(setup, profile=structs.replace(setup.profile, attention=attention))

    def gain(seed: int) -> float:
        workload = workload_of(make_workload("sharegpt", context.size(60, 2), max_model_len=2048, seed=seed))
        paged, contiguous = run(scattered, PAGED, workload), run(setup, "orca-max", workload)
        return 100 * (paged.token_rate / contiguous.token_rate - 1)

    ours, spread = over_seeds(gain, context.seeds)
    return simulated(f"{name}: gain", ours, "%", reported, spread, _KERNEL)


def t11(context: Context) -> Findings:
    """OPT-175B on eight A100, Alpaca-like: enough KV memory for deep batches without paging."""

    def requests(seed: int) -> Workload:
        return make_workload("alpaca", context.size(1600, 12), max_model_len=2048, seed=seed)

    ratios = _ratios(context, OPT_175B.setup(), ("orca-oracle", "orca-pow2"), requests, start=4.0)
    note = (
        "the curves converge: not further apart than those of OPT-13B in the paper, 1.3x (T3). Memory holds more than "
        "the 256 sequences that run at most, also in slabs of the right length"
    )
    return [
        simulated(f"paged over {name}", ours, "x", (1.0, 1.3), spread, note) for name, (ours, spread) in ratios.items()
    ]


def t9(context: Context) -> Findings:
    """Prefix cache on top of paging, by the number of clients. Prompts of 550 tokens, 500 of them shared."""
    batches = (1, 8) if context.quick else (1, 8, 16, 32, 64, 96, 128)
    found: Findings = []
    lines: dict[str, list[tuple[float, float]]] = {}
    for batch in batches:
        gain, spread = over_seeds(partial(_gain_by_prefix, context, batch), context.seeds)
        lines.setdefault("gain", []).append((batch, gain))
        if batch in (1, 32, 128):
            said = 1.28 if batch == 128 else 1.0
            found.append(simulated(f"batch {batch}", gain, "x", said, spread, _DECODE_ONLY))
    context.charts["t9_prefix.svg"] = line_chart("gain of the prefix cache (T9)", "clients", "x", lines)
    return found


_DECODE_ONLY = "the document counts decode steps; here the prompts of later requests count too"


def _gain_by_prefix(context: Context, clients: int, seed: int) -> float:
    rng = Random(seed)
    equal = equal_requests(clients * context.size(4, 2), 550, 200, shared=500)
    varied = [replace(one, turns=(replace(one.turns[0], num_output=rng.randint(100, 300)),)) for one in equal]
    workload = closed_loop(varied, clients)
    without, with_index = (run(LLAMA_70B.setup(prefix_index=index), PAGED, workload) for index in (False, True))
    return with_index.token_rate / without.token_rate


_T10_KINDS = {"contiguous": ("orca-max", False), "paged": (PAGED, False), "paged, prefix cache": (PAGED, True)}


def t10(context: Context) -> Findings:
    """Throughput, batch and latency of Llama-70B in 4 bits on 80 GB by the number of clients."""
    loads = (4,) if context.quick else (1, 4, 8, 16, 32, 64, 96, 128)
    results = {
        (name, seed): [_loaded(context, kind, clients, seed) for clients in loads]
        for name, kind in _T10_KINDS.items()
        for seed in context.seeds
    }
    rates: dict[str, Callable[[SimulationResult], float]] = {
        "output tokens/s": lambda result: result.token_rate,
        "requests/s": lambda result: result.request_rate,
    }
    for file, (axis, rate) in zip(("t10_throughput.svg", "t10_requests.svg"), rates.items(), strict=True):
        lines = {
            name: [(clients, rate(one)) for clients, one in zip(loads, results[name, 0], strict=True)]
            for name in _T10_KINDS
        }
        context.charts[file] = line_chart("Llama-70B in 4 bits on an A100-80GB (T10)", "clients", axis, lines)

    def peak(name: str, seed: int) -> float:
        return max(result.token_rate for result in results[name, seed])

    def over_contiguous(name: str, seed: int) -> float:
        return peak(name, seed) / peak("contiguous", seed)

    def at_most(name: str, value: Callable[[SimulationResult], float], seed: int) -> float:
        return value(results[name, seed][-1])

    found: Findings = []
    for name, said in {"contiguous": 1247.0, "paged": 6380.0, "paged, prefix cache": 8150.0}.items():
        ours, spread = over_seeds(partial(peak, name), context.seeds)
        found.append(simulated(f"{name}: peak", ours, "tokens/s", said, spread, _ROOFLINE))
    for name, gain in {"paged": (4.2, 5.1), "paged, prefix cache": (6.5, 6.5)}.items():
        ours, spread = over_seeds(partial(over_contiguous, name), context.seeds)
        found.append(simulated(f"{name}: peak over contiguous", ours, "x", gain, spread, _ROOFLINE))
    most = f"{loads[-1]} clients"
    sizes = {"contiguous": (16.0, 24.0), "paged": (64.0, 96.0), "paged, prefix cache": (96.0, 128.0)}
    for name, size in sizes.items():
        ours, spread = over_seeds(partial(at_most, name, lambda result: result.mean_running), context.seeds)
        found.append(simulated(f"{name}: running sequences, {most}", ours, "", size, spread, _ROOFLINE))
    latencies = {(0.5, "contiguous"): 42.0, (0.5, "paged"): 48.0, (0.99, "contiguous"): 89.0, (0.99, "paged"): 148.0}
    for (share, name), said in latencies.items():
        value = partial(SimulationResult.percentile, metric="tpot", share=share)
        ours, spread = over_seeds(partial(at_most, name, value), context.seeds)
        what = f"{name}: p{100 * share:.0f} per token, {most}"
        found.append(simulated(what, 1e3 * ours, "ms", said, _times(spread), _ROOFLINE))
    return found


_ROOFLINE = (
    "by the rooflines of one A100, where prompts take much of the time and all requests are of one system prompt; the "
    "document counts decode steps (T9) and does not say how it measured"
)


def _times(spread: float | None) -> float | None:
    """Seconds as milliseconds."""
    return None if spread is None else 1e3 * spread


def _loaded(context: Context, kind: tuple[str, bool], clients: int, seed: int) -> SimulationResult:
    """ShareGPT-like requests behind a system prompt of 500 tokens."""
    memory, index = kind
    base = make_workload("sharegpt", clients * context.size(4, 1), max_model_len=1500, seed=seed)
    prefixed = [replace(one, turns=(replace(one.turns[0], new=(Part(7, 500), *one.turns[0].new)),)) for one in base]
    return run(LLAMA_70B.setup(prefix_index=index), memory, closed_loop(prefixed, clients))


def o1(context: Context) -> Findings:
    """Continuous over static batching in equal memory, with outputs of which few are long."""

    def skewed(seed: int) -> list[Session]:
        count = context.size(400, 12)
        base = make_workload("alpaca", count, max_model_len=2048, seed=seed)
        return [
            replace(one, turns=(replace(one.turns[0], num_output=1000 if i % 10 == 0 else 20),))
            for i, one in enumerate(base)
        ]

    ours, spread = _ratios(context, OPT_13B.setup(), ("static",), skewed)["static"]
    rate = over_seeds(lambda seed: _at_once(skewed(seed), "orca-max") / _at_once(skewed(seed), "static"), context.seeds)
    note = (
        "Orca reports up to 36.9x over FasterTransformer at equal latency, for 175B; here one output in ten is 50 "
        "times as long as the others, and paging adds its own gain"
    )
    return [
        simulated("orca-max over static: requests per second, all at once", rate[0], "x", (1.0, None), rate[1], note),
        simulated("paged over static: sustained rate", ours, "x", 36.9, spread, note),
    ]


def _at_once(workload: Sequence[Session], memory: str) -> float:
    return run(OPT_13B.setup(), memory, workload).request_rate


_ONE_ENGINE = "in one engine the short prompt shares steps with the long one, or waits for them"


def d1(context: Context) -> Findings:
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
        simulated("alone, as in an engine of its own", alone, "ms", None),
        simulated("beside a prompt of 2000 tokens", beside, "ms", None),
        simulated("the same, in chunks of 512 tokens", chunked, "ms", None),
        simulated("beside over alone, in chunks", chunked / alone, "x", 1.0, note=_ONE_ENGINE),
        *short_behind_long(context),
        pending("hand-off of KV between two engines", "disaggregation is not there yet"),
    ]
