"""Decode steps over long contexts with keys and values in 16, 8 and 4 bits, in turns.

    python -m benchmarks.kv_types [--shape 0.5b] [--rows 8] [--context 16384] [--quantization int8] [--rounds 15]
        [--models FOLDER] [--json FILE]

Measures attention alone (one layer), and whole steps of a model with random weights. Keys and values are random, and
the blocks of a sequence are in order. Layers are called from Python, one kernel after another. A ratio above 1 means
that the type is faster than bfloat16. `tokens` is the number of tokens whose keys and values fit into one GiB.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from benchmarks.cpu import machine
from benchmarks.cpu.checkpoints import SHAPES, VOCAB_SIZE, checkpoint
from benchmarks.result_file import write_result
from quire.config import EngineOptions, KVDType, Quantization
from quire.kernels.contract import Batch, Storage
from quire.layers.attend import PagedAttend
from quire.layers.context import ForwardContext
from quire.models.model import Model
from quire.startup.build import Prepared, prepare

KINDS: tuple[KVDType, ...] = ("auto", "int8", "fp8", "int4")
_FILL_TOKENS = 4096  # written at once


class Case:
    """A decode step of `rows` sequences at position `context` - 1, with one type of keys and values."""

    def __init__(self, prepared: Prepared, model: Model, num_heads: int, rows: int, context: int) -> None:
        self.kernels, self.model = prepared.kernels.kernels, model
        self.block_size = prepared.cache.block_size
        self.bytes_per_token = sum(group.bytes_per_block for group in prepared.cache.groups) // self.block_size
        width = -(-context // self.block_size)
        groups = [replace(group, num_blocks=rows * width) for group in prepared.cache.groups]
        self.storages = [self.kernels.allocate(group, self.block_size, torch.device("cpu")) for group in groups]
        for storage in self.storages:
            self._fill(storage)
        tables = np.arange(rows * width).reshape(rows, width)
        self.batch = Batch(np.full(rows, context - 1), np.full(rows, context), tables)
        self.attend = PagedAttend(self.kernels, self.storages, model.score_scaling)
        self.ids, self.positions = torch.randint(VOCAB_SIZE, (rows,)), torch.full((rows,), context - 1)
        self.plans = [self.kernels.plan(self.batch, storage) for storage in self.storages]
        self.q = torch.randn(rows, num_heads, groups[0].head_dim).bfloat16()

    def _fill(self, storage: Storage) -> None:
        """Random keys and values, the same in all layers."""
        group, size = storage.group, self.block_size
        for first in range(0, group.num_blocks * size, _FILL_TOKENS):
            slots = np.arange(first, min(first + _FILL_TOKENS, group.num_blocks * size))
            count, blocks = len(slots), np.arange(first // size, slots[-1] // size + 1)
            k, v = torch.randn(2, count, group.kind.num_kv_heads, group.kind.head_dim).bfloat16()
            plan = self.kernels.plan(Batch(np.zeros(1, np.int64), np.array([count]), blocks[None]), storage)
            self.kernels.rotary_write(storage, 0, k, k, v, None, plan)
        for layer in range(1, len(group.layers)):
            storage.data[layer] = storage.data[0]

    @torch.inference_mode()
    def attention(self) -> None:
        """Attention of one layer."""
        self.kernels.attention(self.storages[0], 0, self.q, self.plans[0], 0.125)

    @torch.inference_mode()
    def step(self) -> None:
        """A whole step, logits included."""
        self.attend.plan([self.batch] * len(self.storages))
        context = ForwardContext(self.kernels, self.attend, self.positions)
        self.model.logits(self.model.forward(self.ids, context), context)


def in_turns(runs: list[Callable[[], None]], rounds: int) -> np.ndarray:
    """Seconds (rounds, runs)."""
    seconds = np.empty((rounds + 1, len(runs)))
    for turn in track(range(rounds + 1), "rounds", console=Console(stderr=True), transient=True):
        for i, run in enumerate(runs):
            begin = time.perf_counter()
            run()
            seconds[turn, i] = time.perf_counter() - begin
    return seconds[1:]


def measured(cases: list[Case], run: Callable[[Case], None], rounds: int) -> list[dict[str, Any]]:
    """Milliseconds and ratios to the first case: medians, with the least and the most ratio."""
    seconds = in_turns([lambda case=case: run(case) for case in cases], rounds)
    ratios = seconds[:, :1] / seconds
    return [
        {
            "ms": round(float(np.median(seconds[:, i])) * 1e3, 3),
            "ratio": [round(float(x), 3) for x in (np.median(ratios[:, i]), ratios[:, i].min(), ratios[:, i].max())],
        }
        for i in range(len(cases))
    ]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_types", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", default="0.5b", choices=sorted(SHAPES))
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--quantization", default="int8", choices=["int8", "int4", "none"], help="of weights")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--models", type=Path, help="folder that keeps the checkpoint")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    quantization: Quantization | None = None if args.quantization == "none" else args.quantization
    with tempfile.TemporaryDirectory() as temporary:
        folder = checkpoint(args.shape, args.models or Path(temporary))
        num_heads = json.loads((folder / "config.json").read_text())["num_attention_heads"]
        cases: list[Case] = []
        model: Model | None = None
        for kind in KINDS:
            options = EngineOptions(
                model=str(folder),
                dtype="bfloat16",
                quantization=quantization,
                kv_cache_dtype=kind,
                memory="4GiB",
                speculation="off",
            )
            prepared = prepare(options, report=lambda line: None, progress=lambda done, total: None)
            if model is None:
                load = partial(prepared.files.load, prepared.dtype, prepared.device)
                model = load(prepared.kernels.kernels, prepared.schemes, lambda done, total: None)
            cases.append(Case(prepared, model, num_heads, args.rows, args.context))
        figures = {"attention": measured(cases, Case.attention, args.rounds)}
        figures["step"] = measured(cases, Case.step, args.rounds)
    print(f"{args.shape}, weights {args.quantization}, {args.rows} rows of {args.context} tokens")
    print("| KV | B/token | tokens in 1 GiB | attention, ms | ratio | step, ms | ratio |")
    print("|---|---:|---:|---:|---|---:|---|")
    rows = []
    for i, (kind, case) in enumerate(zip(KINDS, cases, strict=True)):
        tokens = 2**30 // case.bytes_per_token
        rows.append({"kv": kind, "bytes_per_token": case.bytes_per_token, "tokens": tokens})
        cells = []
        for name, some in figures.items():
            rows[-1][name] = some[i]
            middle, least, most = some[i]["ratio"]
            cells.append(f"{some[i]['ms']:.2f} | {middle:.2f} ({least:.2f}-{most:.2f})")
        print(f"| {kind} | {case.bytes_per_token} | {tokens} | {' | '.join(cells)} |")
    if args.json is not None:
        options = {name: getattr(args, name) for name in ("shape", "rows", "context", "quantization", "rounds")}
        write_result(args.json, {"machine": machine.describe(), **options, "types": rows})


if __name__ == "__main__":
    main()
