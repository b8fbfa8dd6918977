"""Swap against recompute after preemption, by sequence length and block size.

    python -m benchmarks.swap [--model FOLDER ...] [--lengths 16,64,256,1024] [--blocks 16,32,64,128]
        [--repeats 5] [--json FILE]

Measures the embedded model and those in the folders. The engine's own KV store copies scattered blocks to the host pool
and back. The recompute time is the time from a request to its first token on an idle engine. The fastest repeat counts,
because other work can only slow a run down. Afterwards, the engine's cost model is evaluated with the figures of the
documents' hardware.
"""

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.cpu.machine import describe
from benchmarks.result_file import write_result
from quire.config import CacheConfig, EngineOptions
from quire.core.kv_groups import KVGroup, kv_kind
from quire.core.request import Request
from quire.core.step import Move
from quire.cost.step_time import CostModel
from quire.engine.engine import Engine
from quire.kv_store.device import DeviceStore
from quire.params import SamplingParams
from quire.startup.build import build, prepare

PCIE = 25e9  # bytes per second in each direction, "effective", of document 001


class Hardware(NamedTuple):
    """A document's figures of a model on its machine."""

    name: str
    bytes_per_token: int
    prefill_rate: float | None  # tokens per second, of its text; None if not given
    reported: dict[int, tuple[float, float]]  # length -> milliseconds of a swap out and in, and of recompute


LLAMA_70B = Hardware(
    "Llama-2-70B, A100, PCIe 4 (001)",
    327_680,
    500 / 115e-3,  # its text: 80 to 150 ms for 500 tokens; not taken from the table that is checked
    {
        128: (3.2, 12),
        256: (6.4, 24),
        512: (12.8, 48),
        1024: (25.6, 95),
        2048: (51.2, 190),
        4096: (102.4, 380),
    },
)
OPT_13B = Hardware("OPT-13B, A100 (000, 004)", 819_200, None, {})


def options(model: str | None, block_size: int, length: int) -> EngineOptions:
    """Options for one sequence at a time, without prefix caching, swap and calibration."""
    return EngineOptions(
        model=model,
        dtype="bfloat16",
        memory="4GiB",
        block_size=block_size,
        max_model_len=length + 8,
        max_num_seqs=1,
        enable_prefix_caching=False,
        step_seconds=1e9,
        preemption="recompute",
        calibration=0,
        speculation="off",
    )


def silent(*_: object) -> None:
    """Ignore reports."""


def swap_seconds(store: DeviceStore, cache: CacheConfig, length: int, repeats: int) -> tuple[float, float]:
    """Seconds of copying blocks out and in. The blocks are scattered."""
    rng, found = random.Random(length), []
    for repeat in range(repeats + 1):
        out, back = [], []
        for group, one in enumerate(cache.groups):
            count = cache.num_blocks(group, length)
            device, again, host = (
                rng.sample(range(size), count) for size in (one.num_blocks,) * 2 + (one.num_host_blocks,)
            )
            out.append(Move(2 * group, group, "device", "host", list(zip(device, host, strict=True)), cache.block_size))
            back.append(
                Move(2 * group + 1, group, "host", "device", list(zip(host, again, strict=True)), cache.block_size)
            )
        store.execute(repeat, [*out, *back])
        found.append(store.end_swaps(repeat, wait=True)[1:])
    left, came = zip(*found[1:], strict=True)  # the first copy touches new memory
    return min(left), min(came)


def hundred_blocks(repeats: int) -> dict[str, float]:
    """Copies of 100 blocks of Llama-2-70B, each of 16 tokens in 16 bits, between the block pool and the host pool."""
    kernels = prepare(options(None, 16, 16), report=silent, progress=silent).kernels.kernels
    shape = KVGroup(
        tuple(range(80)), kv_kind(8, 128), "bfloat16", 200, 16 * LLAMA_70B.bytes_per_token, num_host_blocks=100
    )
    cache = CacheConfig(16, (shape,))
    store = DeviceStore(kernels, cache, torch.device("cpu"))
    for storage in store.storages:
        storage.data.fill_(1)
    out, back = swap_seconds(store, cache, 1600, repeats)
    size = 100 * shape.bytes_per_block
    print(f"\n100 blocks of Llama-2-70B, {size / 1e6:.0f} MB: out {1e3 * out:.1f} ms, in {1e3 * back:.1f} ms")
    return {"bytes": size, "out_ms": 1e3 * out, "in_ms": 1e3 * back}


def recompute_seconds(engine: Engine, length: int, repeats: int) -> float:
    """Seconds from the arrival of a prompt to its first token."""
    rng, found = random.Random(length), []
    for repeat in range(repeats + 1):
        prompt = [rng.randrange(3, engine.vocab_size) for _ in range(length)]
        began = time.perf_counter()
        engine.add(Request(f"{length} {repeat}", prompt, SamplingParams(max_tokens=1, temperature=0.0)))
        while engine.has_work:
            engine.step()
        found.append(time.perf_counter() - began)
    return min(found[1:])


def measure(model: str | None, blocks: Sequence[int], lengths: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """A row for each block size and length."""
    rows = []
    for block_size in blocks:
        chosen = options(model, block_size, max(lengths))
        prepared = prepare(chosen, report=silent, progress=silent)
        most = 2 * max(-(-length // block_size) for length in lengths)
        groups = tuple(replace(one, num_blocks=most, num_host_blocks=most) for one in prepared.cache.groups)
        cache = replace(prepared.cache, groups=groups)
        store = DeviceStore(prepared.kernels.kernels, cache, torch.device(prepared.device))
        for storage in store.storages:
            storage.data.fill_(1)
        engine = build(chosen, report=silent, progress=silent).engine
        for length in lengths:
            out, back = swap_seconds(store, cache, length, repeats)
            again = recompute_seconds(engine, length, repeats)
            size = sum(cache.num_blocks(i, length) * one.bytes_per_block for i, one in enumerate(cache.groups))
            rows.append(
                {
                    "model": prepared.name,
                    "block_size": block_size,
                    "length": length,
                    "bytes": size,
                    "out_ms": 1e3 * out,
                    "in_ms": 1e3 * back,
                    "recompute_ms": 1e3 * again,
                }
            )
    return rows


def crossover(rows: Sequence[dict[str, Any]]) -> int | None:
    """The least of the lengths from which on swap is faster; None if there is none."""
    best = None
    for row in sorted(rows, key=lambda row: -row["length"]):
        if row["out_ms"] + row["in_ms"] >= row["recompute_ms"]:
            break
        best = row["length"]
    return best


def show(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print the table of one model. Returns the crossover by block size."""
    print(f"\n{rows[0]['model']}: milliseconds")
    print(f"{'block':>6}{'tokens':>8}{'MB':>9}{'out':>9}{'in':>9}{'swap':>9}{'again':>9}{'again/swap':>12}")
    for row in rows:
        swap = row["out_ms"] + row["in_ms"]
        print(
            f"{row['block_size']:>6}{row['length']:>8}{row['bytes'] / 1e6:>9.2f}{row['out_ms']:>9.3f}"
            f"{row['in_ms']:>9.3f}{swap:>9.3f}{row['recompute_ms']:>9.2f}{row['recompute_ms'] / swap:>12.1f}"
        )
    found = []
    for block_size in dict.fromkeys(row["block_size"] for row in rows):
        length = crossover([row for row in rows if row["block_size"] == block_size])
        found.append({"model": rows[0]["model"], "block_size": block_size, "swap_wins_from": length})
        print(
            f"  block {block_size}: a swap is faster {'at no length' if length is None else f'from {length} tokens on'}"
        )
    return found


def documents(blocks: Sequence[int]) -> list[dict[str, Any]]:
    """Predictions of the cost model with the documents' figures, beside the reported times."""
    rows = []
    print(f"\n{LLAMA_70B.name}: milliseconds, reported and ours")
    print(f"{'tokens':>8}{'swap':>9}{'ours':>9}{'again':>9}{'ours':>9}{'again/swap':>12}")
    costs = CostModel()
    costs.observe_copies(int(PCIE), 1.0, int(PCIE), 1.0)
    assert LLAMA_70B.prefill_rate is not None
    costs.observe_step(int(LLAMA_70B.prefill_rate), int(LLAMA_70B.prefill_rate) / LLAMA_70B.prefill_rate)
    for length, (swap, again) in LLAMA_70B.reported.items():
        ours = 1e3 * sum(costs.copy_seconds(-(-length // 16) * 16 * LLAMA_70B.bytes_per_token))
        also = 1e3 * costs.recompute_seconds(length)
        rows.append({"length": length, "reported": [swap, again], "swap_ms": ours, "recompute_ms": also})
        print(f"{length:>8}{swap:>9.1f}{ours:>9.1f}{again:>9.0f}{also:>9.0f}{also / ours:>12.1f}")
    print("  both rise with the length alone: there is no crossover by length, a swap wins throughout.")
    print("  the rate is that of its text, 115 ms for 500 tokens; its table has 47. See also `quire reproduce T7`.")
    for one in (LLAMA_70B, OPT_13B):
        rate = PCIE / (2 * one.bytes_per_token)
        said = "says nothing" if one.prefill_rate is None else f"has {one.prefill_rate:,.0f}"
        print(f"  {one.name}: computing again is faster above {rate:,.0f} prompt tokens a second; the document {said}")
        rows.append({"name": one.name, "breakeven_tokens_per_second": rate, "reported_rate": one.prefill_rate})
    print(
        "  004 has both within a few percent for OPT-13B at block 16, 000 computing at most 1.2 of a swap. At 25 GB/s"
    )
    for block_size in blocks:
        size = block_size * OPT_13B.bytes_per_token / 40 / 2  # keys or values of one layer: the unit of a copy in vLLM
        print(
            f"    block {block_size:>3}: a copy of one layer's keys is {size / 1e3:,.0f} kB, {1e6 * size / PCIE:.1f} us"
        )
        rows.append({"name": OPT_13B.name, "block_size": block_size, "copy_us": 1e6 * size / PCIE})
    print("  beside what starting each copy takes: it decides at small blocks. On a GPU quire starts few.")
    return rows


def numbers(text: str) -> list[int]:
    """The integers of an option."""
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", action="append", default=[], help="folder of a checkpoint, beside the embedded one")
    parser.add_argument("--lengths", type=numbers, default=[16, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--blocks", type=numbers, default=[16, 32, 64, 128])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    figures: dict[str, Any] = {"machine": describe(), "measured": [], "crossover": []}
    for model in (None, *args.model):
        rows = measure(model, args.blocks, args.lengths, args.repeats)
        figures["measured"] += rows
        figures["crossover"] += show(rows)
    figures["hundred_blocks"] = hundred_blocks(args.repeats)
    figures["documents"] = documents(args.blocks)
    if args.json:
        write_result(args.json, figures)


if __name__ == "__main__":
    main()
