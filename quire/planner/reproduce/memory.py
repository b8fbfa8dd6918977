"""Rows about memory: M1 to M18 and P1."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random

from quire.cache.kv_cache import KVCache
from quire.core.request import NO_NAMESPACE
from quire.planner.baselines import ContiguousCache
from quire.planner.charts import line_chart, stacked_bars
from quire.planner.kv_meter import KVMeter, KVShares
from quire.planner.lengths import DOCUMENT_LENGTHS
from quire.planner.reproduce.engines import (
    LLAMA_70B,
    OPT_13B,
    PAGED,
    Engine,
    closed_loop,
    equal_requests,
    kv_bytes_per_token,
    run,
)
from quire.planner.reproduce.finding import Context, Findings, computed, over_seeds, pending, simulated
from quire.planner.reproduce.recorded import prefix_rows
from quire.planner.simulation import Simulation
from quire.planner.workloads import Part, Session, Turn, make_workload

GIB = 2**30
_REPORTED_LIVE = {"orca-max": 20.4, "orca-pow2": 26.8, "orca-oracle": 38.2, PAGED: 96.3}


def _shares(context: Context, memory: str, seed: int) -> KVShares:
    """Shares of the KV memory while requests wait for it: OPT-13B, ShareGPT-like, all requests at once."""
    key, kept = ("shares", memory, seed), context.simulations
    if key not in kept:
        meter = KVMeter()
        workload = make_workload("sharegpt", context.size(400, 14), max_model_len=2048, seed=seed)
        run(OPT_13B.setup(), memory, workload, meter=meter)
        kept[key] = meter.shares
    shares: KVShares = kept[key]
    return shares


_OF_THE_POOL = (
    "of the whole pool while a request waits for memory, as in the figure: its external fragmentation is memory that "
    "no sequence holds"
)
_KEPT_FREE = (
    "after preemptions, admission keeps blocks free, so that running sequences can grow: quire's paging holds fewer "
    "live tokens than is reported, and preempts less"
)


def _mean_shares(context: Context, memory: str) -> dict[str, tuple[float, float | None]]:
    """Of each field of KVShares: the mean over seeds in per cent, and half of its confidence interval."""
    by_seed = {seed: _shares(context, memory, seed) for seed in context.seeds}

    def share(name: str) -> Callable[[int], float]:
        return lambda seed: 100 * float(getattr(by_seed[seed], name))

    return {name: over_seeds(share(name), context.seeds) for name in KVShares._fields}


def m1(context: Context) -> Findings:
    """Live share of the KV memory by allocator."""
    found, reserved = [], []
    for memory, reported in _REPORTED_LIVE.items():
        shares = _mean_shares(context, memory)
        (live, spread), (of_held, held_spread) = shares["live"], shares["live_of_held"]
        found.append(simulated(f"{memory}: live", live, "%", reported, spread, _OF_THE_POOL))
        reserved.append(simulated(f"{memory}: live in what sequences hold", of_held, "%", None, held_spread))
    kept_free, spread = shares["kept_free"]  # of the last, which is paged memory
    return [*found, simulated("paged: kept free for growth", kept_free, "%", None, spread, _KEPT_FREE), *reserved]


def m2(context: Context) -> Findings:
    """Wastes by allocator."""
    reported = {"orca-max": {"live": 32.0, "internal": 45.0, "external": 13.0, "reservation": 10.0}}
    found: Findings = []
    bars: dict[str, dict[str, float]] = {}
    for memory in _REPORTED_LIVE:
        shares = _mean_shares(context, memory)
        parts = {name: shares[name] for name in ("live", "reservation", "internal", "external")}
        bars[memory] = {name: share for name, (share, _) in parts.items()}
        for name, (share, spread) in parts.items():
            found.append(simulated(f"{memory}: {name}", share, "%", reported.get(memory, {}).get(name), spread))
    context.charts["m2_waste.svg"] = stacked_bars("KV memory while requests wait (M2)", "% of the pool", bars)
    return found


def m3(context: Context) -> Findings:
    """Empty positions in the blocks that running sequences hold."""
    workload = make_workload("sharegpt", context.size(400, 14), max_model_len=2048, seed=1)
    meter = KVMeter(every=1, only_waiting=False)
    run(OPT_13B.setup(), PAGED, workload, meter=meter)
    waste = 100 * (1 - meter.shares.live_of_held)
    return [simulated("empty positions in held blocks", waste, "%", (0.0, 4.0), note="through the real block pool")]


def m4(_: Context) -> Findings:
    """KV bytes of Llama-2-70B."""
    return [computed("bytes per token", kv_bytes_per_token("llama-2-70b"), "B", 327_680)]


def m5(_: Context) -> Findings:
    """KV bytes of OPT-13B."""
    each = kv_bytes_per_token("opt-13b")
    return [
        computed("KB per token", each / 1e3, "KB", 800),
        computed("GB at 2048 tokens", each * 2048 / 1e9, "GB", 1.6),
    ]


def m6(_: Context) -> Findings:
    """KV of 4096 tokens by the number of KV heads: that of Llama-2-70B, times heads over its 8."""
    each = kv_bytes_per_token("llama-2-70b") // 8
    heads = {"MHA-64": (64, 10.0), "GQA-8": (8, 1.25), "MQA-1": (1, 0.16)}
    return [computed(name, 4096 * each * count / GIB, "GiB", said) for name, (count, said) in heads.items()]


def m7(_: Context) -> Findings:
    """Four requests in slabs of 8192 positions, through the contiguous memory manager."""
    setup = Engine("llama-2-70b", "A100-80GB", 4 * 8192, max_model_len=4096).setup()
    cache, each = ContiguousCache(setup.cache, lambda _id, _tokens: 8192), kv_bytes_per_token("llama-2-70b")
    lengths = (600, 1250, 4000, 128)
    for number, length in enumerate(lengths):
        _admit(cache, number, length)
    held = sum(len(table.blocks[0]) for table in cache.tables.values()) * cache.block_size
    live = sum(lengths)
    paged = sum(-(-length // 16) for length in lengths) * 16
    return [
        computed("reserved", held * each / GIB, "GiB", 10.0),
        computed("live", live * each / GIB, "GiB", 1.82),
        computed("unused", 100 * (1 - live / held), "%", 81.8),
        computed("reserved with blocks of 16", paged * each / GIB, "GiB", None),
    ]


def _admit(cache: KVCache, number: int, length: int) -> None:
    admission = cache.admit(number, [1] * length, NO_NAMESPACE, reusable=0, limit=length, max_new_positions=length)
    assert admission is not None, "the pool is large enough"


def m8(_: Context) -> Findings:
    """Blocks, tokens and requests in 42 GB."""
    block = 16 * kv_bytes_per_token("llama-2-70b")
    blocks = 42_000_000_000 // block
    note = "the document divides 42 000 MB by 5 MB; a block has 5 242 880 B"
    return [
        computed("blocks", blocks, "", 8400, note),
        computed("blocks in 42 GiB", 42 * GIB // block, "", 8400, "if GB is read as GiB"),
        computed("tokens", blocks * 16, "", 134_400, note),
        computed("requests of 500 tokens", blocks // -(-500 // 16), "", 268, "32 whole blocks each"),
        computed("contiguous requests of 2048", 42_000_000_000 // (2048 * block // 16), "", 65),
        computed("times as many", (blocks // 32) / (42_000_000_000 // (128 * block)), "x", 4.1),
    ]


def m9(_: Context) -> Findings:
    """Arithmetic of two ranks: the engine has no tensor parallelism yet."""
    each = 8192 * kv_bytes_per_token("llama-2-70b") / 2 / GIB
    why = "tensor parallelism is not there yet"
    return [
        computed(
            "per request and rank",
            each,
            "GiB",
            1.30,
            "8192 tokens leave no block partly empty",
        ),
        computed("requests in 8 GiB", int(8 // each), "", 6),
        computed("requests in 8 GiB, with 4 % for tails", int(8 // (1.04 * each)), "", 6),
        pending("two ranks", why),
    ]


def m10(context: Context) -> Findings:
    """Memory that the samples of a request share."""
    found = []
    for samples in (2, 4, 6):
        saved, spread = over_seeds(partial(_saved_by_sharing, context, samples), context.seeds)
        found.append(simulated(f"n={samples}", saved, "%", (6.1, 9.8) if samples == 6 else None, spread))
    return found


def _saved_by_sharing(context: Context, num_samples: int, seed: int) -> float:
    counts = [0, 0]

    def count(simulation: Simulation) -> None:
        tables = [table.blocks[0] for table in simulation.scheduler.cache.tables.values()]
        counts[0] += sum(map(len, tables))
        counts[1] += len({block for blocks in tables for block in blocks})

    setup = OPT_13B.setup(num_samples=num_samples)
    workload = make_workload("alpaca", context.size(120, 12), max_model_len=2048, seed=seed)
    Simulation(setup, on_step=count).run(workload)
    return 100 * (1 - counts[1] / counts[0])


def m11(context: Context) -> Findings:
    """Recorded: beam search on the embedded model."""
    return prefix_rows(context, "M11")


def m12(context: Context) -> Findings:
    """Blocks of a prefix that 100 running requests share."""
    workload = equal_requests(100, 1040, 4, shared=1000)
    first = Session(0.0, (Turn((Part(7, 1000),), 1),))
    distinct: list[int] = []

    def count(simulation: Simulation) -> None:
        tables = [table.blocks[0][:63] for table in simulation.scheduler.cache.tables.values()]
        if len(tables) == 100:
            distinct.append(len({block for blocks in tables for block in blocks}))

    setup = Engine("llama-2-70b", "A100-80GB", 200_000, max_num_seqs=128).setup(prefix_index=True)
    late = [Session(10.0, session.turns) for session in workload]
    Simulation(setup, on_step=count).run([first, *late])
    note = "62 whole blocks are shared; each request has its own copy of the 63rd, which holds its first own tokens too"
    return [
        computed("blocks of a copy", -(-1000 // 16), "", 63),
        simulated("saved", 100 * (1 - distinct[0] / 6300), "%", 99.0, note=note),
    ]


def m13(_: Context) -> Findings:
    """Savings of a prefix cache by the document's formula, and its table."""
    rows = {
        "chatbot": (500, 200, 64, 70), "RAG": (2000, 300, 32, 80), "code assistant": (800, 500, 48, 40),
        "translation": (100, 400, 64, 20), "nothing shared": (0, 500, 64, 0),
    }  # fmt: skip
    found = []
    for name, (shared, own, count, listed) in rows.items():
        saved = 100 * (1 - (1 + (count - 1) * own / (shared + own)) / count)
        note = "" if abs(saved - listed) < 1 else "the listed figure does not follow from the formula"
        found.append(computed(name, saved, "%", listed, note))
    return found


def m14(_: Context) -> Findings:
    """Blocks of a request while it grows, through the real cache."""
    cache = KVCache(OPT_13B.setup().cache)
    _admit(cache, 0, 45)
    table = cache.tables[0]
    counts = {45: len(table.blocks[0])}
    for length in range(46, 113):
        assert cache.grow(table, length) is not None, "the pool is large enough"
        counts[length] = len(table.blocks[0])
    fourth = min(length for length, count in counts.items() if count == 4)
    return [
        computed("blocks of the prompt", counts[45], "", 3),
        computed("blocks at 112 tokens", counts[112], "", 7),
        computed("the fourth block is for token", fourth, "", 48, "the document takes it one token too early"),
        computed("saved against 2048", 100 * (1 - 7 * 16 / 2048), "%", 94.5),
    ]


def m15(_: Context) -> Findings:
    """KV of 1000 tokens of Llama-2-7B, and requests in 24 GB."""
    size = 1000 * kv_bytes_per_token("llama-2-7b")
    note = "24 GB / 524 MB is 45; the document divides by 0.5 GB"
    return [
        computed("KV", size / 1e6, "MB", 524),
        computed("requests", int(24e9 // size), "", 48, note),
        computed("requests with 75 % waste", int(24e9 // (4 * size)), "", 12, note),
    ]


def m16(context: Context) -> Findings:
    """Live share of slabs for the longest sequence, with the document's mean lengths."""
    found: Findings = []
    for name, reported in {"chat": 28, "code": 32, "summarization": 38, "translation": 30}.items():
        ours, spread = over_seeds(partial(_used_share, context, name), context.seeds)
        lengths, longest = DOCUMENT_LENGTHS[name]
        mean = round(lengths.prompt.mean + lengths.output.mean)
        note = f"a mean of {mean} of {longest} tokens is {mean / longest:.0%}: the listed share does not follow from it"
        found.append(simulated(name, ours, "%", reported, spread, note))
    shares = [one.ours for one in found if one.ours is not None]
    return [*found, simulated("mean", sum(shares) / len(shares), "%", 32)]


def _used_share(context: Context, name: str, seed: int) -> float:
    """Live positions of slabs in per cent."""
    lengths, longest = DOCUMENT_LENGTHS[name]
    pairs = lengths.draw(Random(seed), context.size(300, 30), longest)
    workload = [Session(0.0, (Turn((Part(i, prompt),), output),)) for i, (prompt, output) in enumerate(pairs)]
    engine, meter = replace(LLAMA_70B, max_model_len=longest), KVMeter(every=1, only_waiting=False)
    run(engine.setup(), "orca-max", workload, meter=meter)
    return 100 * meter.shares.live_of_held


def m17(context: Context) -> Findings:
    """Recorded: block tables of beams, forked at the end of the prompt."""
    return prefix_rows(context, "M17")


def m18(context: Context) -> Findings:
    """Allocated and used memory by the number of clients."""
    loads = (10, 60) if context.quick else (10, 20, 40, 60, 80, 100, 120)
    found: Findings = []
    lines: dict[str, list[tuple[float, float]]] = {}
    for memory in (PAGED, "orca-max"):
        for clients in loads:
            workload = make_workload("sharegpt", clients * context.size(4, 2), max_model_len=2048, seed=3)
            meter = KVMeter(only_waiting=False)
            run(LLAMA_70B.setup(), memory, closed_loop(workload, clients), meter=meter, until=60.0)
            used = 100 * meter.shares.live
            allocated = used / meter.shares.live_of_held if meter.shares.live_of_held else 0.0
            lines.setdefault(f"{memory}: allocated", []).append((clients, allocated))
            lines.setdefault(f"{memory}: used", []).append((clients, used))
            if clients in (loads[0], loads[-1]):
                gap, share = ((0.0, 3.0), (1400 / 15, 9500 / 98)) if memory == PAGED else (67.0, 3100 / 98)
                what = f"{memory}, {clients} clients"
                found.append(simulated(f"{what}: allocated - used", allocated - used, "points", gap))
                found.append(simulated(f"{what}: used of allocated", 100 * meter.shares.live_of_held, "%", share))
    context.charts["m18_load.svg"] = line_chart("KV memory by load (M18)", "clients", "% of the pool", lines)
    return found


def p1(_: Context) -> Findings:
    """Users whose KV fits beside fp16 weights of 140 GB on 640 GB."""
    each = kv_bytes_per_token("llama-2-70b")
    left = 640e9 - 140e9
    return [
        computed("users at 8K", int(left // (8192 * each)), "", 200, "fp16 weights of 140 GB"),
        computed("users at 128K", int(left // (131_072 * each)), "", 12),
    ]
