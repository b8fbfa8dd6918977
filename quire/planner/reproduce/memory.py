"""Rows about memory: M1 to M20 and P1."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from random import Random

from quire.cache.kv_cache import KVCache
from quire.config import CacheConfig, EngineOptions
from quire.core.request import NO_NAMESPACE
from quire.core.step import Chunks
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
    kv_bytes_of_layers,
    kv_bytes_per_token,
    run,
)
from quire.planner.reproduce.finding import (
    Context,
    Findings,
    arithmetic,
    computed,
    over_seeds,
    pending,
    simulated,
)
from quire.planner.reproduce.recorded import kernel_by_block_size, prefix_rows
from quire.planner.setup import plan_engine
from quire.planner.simulated_engine import SimulatedEngine
from quire.planner.simulation import Simulation
from quire.planner.workloads import Part, Session, Turn, make_workload
from quire.runner.rows import Rows

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
            said = reported.get(memory, {}).get(name)
            found.append(simulated(f"{memory}: {name}", share, "%", said, spread, "" if said is None else _OTHER_LIVE))
    context.charts["m2_waste.svg"] = stacked_bars("KV memory while requests wait (M2)", "% of the pool", bars)
    return found


_OTHER_LIVE = (
    "document 001 has 32 % live; document 004 has 20.4 % for this allocator on ShareGPT, which comes out here (M1). "
    "001 has 50 requests where 62 slabs fit (M8), so that its shares are not those of memory that is short"
)


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
    """KV of 4096 tokens by the number of KV heads."""
    heads = {"MHA-64": (64, 10.0), "GQA-8": (8, 1.25), "MQA-1": (1, 0.16)}
    return [
        computed(name, 4096 * kv_bytes_of_layers(80, count) / GIB, "GiB", said) for name, (count, said) in heads.items()
    ]


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
        arithmetic("live", live * each / GIB, "GiB", 1.82),
        computed("unused", 100 * (1 - live / held), "%", 81.8),
        computed("reserved with blocks of 16", paged * each / GIB, "GiB", None),
    ]


def _admit(cache: KVCache, number: int, length: int) -> bool:
    """Admit a request. False if it does not fit."""
    admission = cache.admit(number, [1] * length, NO_NAMESPACE, reusable=0, limit=length, max_new_positions=length)
    return admission is not None


def _num_admitted(cache: KVCache, length: int) -> int:
    """Requests of that length until the cache is full."""
    return next(number for number in count() if not _admit(cache, number, length))


def m8(_: Context) -> Findings:
    """Blocks, tokens and requests in 42 GB, and in what quire's memory plan leaves for them."""
    block, config = 16 * kv_bytes_per_token("llama-2-70b"), LLAMA_70B.setup().cache
    blocks = config.groups[0].num_blocks
    paged = _num_admitted(KVCache(config), 500)
    contiguous = _num_admitted(ContiguousCache(config, lambda _id, _tokens: 2048), 500)
    options = EngineOptions(model="llama-2-70b", quantization="int4", max_model_len=2048)
    (planned,) = plan_engine(options, "A100-80GB").memory.num_blocks
    note = "the document divides 42 000 MB by 5 MB; a block has 5 242 880 B"
    plan_note = (
        "quire's plan keeps 10 % of the device free, has the head and the embeddings in 8 and 16 bits, and counts "
        "working memory and graphs; the document has 35 GB of weights and 3 GB of the rest"
    )
    return [
        computed("blocks by quire's memory plan", planned, "", 8400, plan_note),
        arithmetic("blocks in 42 GB", blocks, "", 8400, note),
        arithmetic("blocks in 42 GiB", 42 * GIB // block, "", 8400, "if GB is read as GiB"),
        arithmetic("tokens in 42 GB", blocks * 16, "", 134_400, note),
        computed("requests of 500 tokens that 42 GB admit", paged, "", 268, "32 whole blocks each"),
        computed("requests in slabs of 2048 that 42 GB admit", contiguous, "", 65),
        computed("times as many", paged / contiguous, "x", 4.1),
    ]


def m9(_: Context) -> Findings:
    """Arithmetic of two ranks: the engine has no tensor parallelism yet."""
    each = 8192 * kv_bytes_per_token("llama-2-70b") / 2 / GIB
    why = "tensor parallelism is not there yet"
    return [
        arithmetic("per request and rank", each, "GiB", 1.30, "8192 tokens leave no block partly empty"),
        arithmetic("requests in 8 GiB", int(8 // each), "", 6),
        arithmetic("requests in 8 GiB, with 4 % for tails", int(8 // (1.04 * each)), "", 6),
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

    def count(engine: SimulatedEngine) -> None:
        tables = [table.blocks[0] for table in engine.scheduler.cache.tables.values()]
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

    def count(engine: SimulatedEngine) -> None:
        tables = [table.blocks[0][:63] for table in engine.scheduler.cache.tables.values()]
        if len(tables) == 100:
            distinct.append(len({block for blocks in tables for block in blocks}))

    setup = Engine("llama-2-70b", "A100-80GB", 200_000, max_num_seqs=128).setup(prefix_index=True)
    late = [Session(10.0, session.turns) for session in workload]
    Simulation(setup, on_step=count).run([first, *late])
    note = "62 whole blocks are shared; each request has its own copy of the 63rd, which holds its first own tokens too"
    return [
        arithmetic("blocks of a copy", -(-1000 // 16), "", 63),
        simulated("saved", 100 * (1 - distinct[0] / 6300), "%", 99.0, note=note),
    ]


def m13(_: Context) -> Findings:
    """Blocks that requests with a common prefix hold in the radix tree, against those that each would hold alone."""
    rows = {
        "chatbot": (500, 200, 64, 70), "RAG": (2000, 300, 32, 80), "code assistant": (800, 500, 48, 40),
        "translation": (100, 400, 64, 20), "nothing shared": (0, 500, 64, 0),
    }  # fmt: skip
    found = []
    for name, (shared, own, num_requests, listed) in rows.items():
        saved = 100 * _saved_by_prefix(shared, own, num_requests)
        by_formula = 100 * (1 - (1 + (num_requests - 1) * own / (shared + own)) / num_requests)
        note = "" if abs(by_formula - listed) < 1 else f"the document's own formula has {by_formula:.0f} % for {name}"
        found.append(computed(name, saved, "%", listed, note))
    return found


def _saved_by_prefix(shared: int, own: int, num_requests: int) -> float:
    """Share of the blocks that the radix tree saves while all requests run."""
    engine = Engine("llama-2-70b", "A100-80GB", (num_requests + 1) * (shared + own + 16), max_num_seqs=num_requests)
    cache, length = KVCache(engine.setup(prefix_index=True).cache), shared + own
    for number in range(num_requests):
        tokens = [1] * shared + [2 + number] * own
        admission = cache.admit(
            number, tokens, NO_NAMESPACE, reusable=length - 1, limit=length, max_new_positions=length
        )
        assert admission is not None, "the pool is large enough"
        cache.cache_blocks(admission.table, admission.num_tokens, length)
    tables = [table.blocks[0] for table in cache.tables.values()]
    return 1 - len({block for blocks in tables for block in blocks}) / sum(map(len, tables))


def m14(_: Context) -> Findings:
    """Blocks of a request while it grows, through the real cache."""
    cache = KVCache(OPT_13B.setup().cache)
    assert _admit(cache, 0, 45), "the pool is large enough"
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
        computed("saved against 2048", 100 * (1 - counts[112] * 16 / 2048), "%", 94.5),
    ]


def m15(_: Context) -> Findings:
    """KV of 1000 tokens of Llama-2-7B, and requests in 24 GB."""
    size = 1000 * kv_bytes_per_token("llama-2-7b")
    note = "24 GB / 524 MB is 45; the document divides by 0.5 GB"
    return [
        computed("KV", size / 1e6, "MB", 524),
        arithmetic("requests", int(24e9 // size), "", 48, note),
        arithmetic("requests with 75 % waste", int(24e9 // (4 * size)), "", 12, note),
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
    return [*found, simulated("mean", sum(shares) / len(shares), "%", 32, note="of the four shares above")]


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
                note = "" if memory == PAGED else _SLABS
                found.append(simulated(f"{what}: allocated - used", allocated - used, "points", gap, note=note))
                of_held = 100 * meter.shares.live_of_held
                found.append(simulated(f"{what}: used of allocated", of_held, "%", share, note=note))
    context.charts["m18_load.svg"] = line_chart("KV memory by load (M18)", "clients", "% of the pool", lines)
    return found


_SLABS = (
    "the document counts the whole pool as allocated at every load; here a slab is allocated when its request runs, "
    "so that few clients allocate little. The share in use follows from the lengths: 499 tokens at the end on average, "
    "in slabs of 2048 (M16 has the document's lengths)"
)


def m19(_: Context) -> Findings:
    """KV of three architectures by context."""
    said = {
        "32 layers, 8 heads": (32, 8, {4: 0.5, 32: 4.0}),
        "80 layers, 8 heads": (80, 8, {4: 1.25, 32: 10.0, 128: 40.0}),
        "96 layers, 96 heads": (96, 96, {4: 18.0, 32: 144.0}),
    }
    return [
        computed(f"{name}, {context}K", 1024 * context * kv_bytes_of_layers(layers, heads) / GIB, "GiB", reported)
        for name, (layers, heads, contexts) in said.items()
        for context, reported in contexts.items()
    ]


def m20(context: Context) -> Findings:
    """Fragmentation and block tables of 64 requests of 512 tokens on average, by block size, and of a full pool."""
    found: Findings = []
    said = {4: (40, 32), 8: (80, 16), 16: (160, 8), 32: (320, 4), 64: (640, 2)}
    for size, (fragmentation, table) in said.items():
        ours, spread = over_seeds(partial(_fragmentation, size), context.seeds)
        found.append(simulated(f"blocks of {size}: empty", ours, "MiB", fragmentation, spread, _HALF_BLOCK))
        kib = _table_bytes(LLAMA_70B.setup().cache, 64, 512, size) / 1024
        found.append(computed(f"blocks of {size}: tables", kib, "KiB", table, _TABLE_ENTRIES))
    cache = LLAMA_70B.setup().cache
    full = _table_bytes(cache, cache.groups[0].num_blocks, 16, 16) / 2**20
    note = "a pool of 42 GB has 8010 blocks; 128 MB would be the tables of thousands of pools"
    found.append(computed("tables of a full pool", full, "MiB", 128, note))
    return found + kernel_by_block_size(context)


_HALF_BLOCK = "the document counts half a block a request; the mean over lengths is half of a block less one token"
_TABLE_ENTRIES = "the document has 4 bytes an entry, as quire's rows; kernels get the rows of a step with 8"


def _fragmentation(block_size: int, seed: int) -> float:
    """MiB of positions that are empty in the last blocks of 64 requests of 1 to 1023 tokens."""
    engine = replace(LLAMA_70B, block_size=block_size)
    cache, rng = KVCache(engine.setup().cache), Random(seed)
    lengths = [rng.randint(1, 1023) for _ in range(64)]
    assert all(_admit(cache, number, length) for number, length in enumerate(lengths)), "the pool is large enough"
    held = block_size * sum(len(table.blocks[0]) for table in cache.tables.values())
    return (held - sum(lengths)) * kv_bytes_per_token("llama-2-70b") / 2**20


def _table_bytes(cache: CacheConfig, num_seqs: int, length: int, block_size: int) -> int:
    """Bytes of the block tables that a step of `num_seqs` sequences hands to the attention kernels."""
    rows = Rows(replace(cache, block_size=block_size), num_seqs, length, vocab_size=2)
    chunks = Chunks.of([(row, row, length - 1, length, 0, 0, 0) for row in range(num_seqs)])
    return sum(batch.tables.nbytes for batch in rows.batches(chunks))


def p1(_: Context) -> Findings:
    """Users whose KV fits beside fp16 weights of 140 GB on 640 GB."""
    each = kv_bytes_per_token("llama-2-70b")
    left = 640e9 - 140e9
    return [
        arithmetic("users at 8K", int(left // (8192 * each)), "", 200, "fp16 weights of 140 GB"),
        arithmetic("users at 128K", int(left // (131_072 * each)), "", 12),
    ]
