"""Recurrent states on this machine's CPU beside transformers' gated delta rule: `python -m benchmarks.states`.

    python -m benchmarks.states [--tokens 512] [--rows 1,8,32] [--heads 16] [--head-dim 128] [--state-dtype float32]
                                [--threads N] [--clock wall] [--json FILE]

A layer has as many key heads as value heads. quire's times are those of convolutions, gates and the rule, with inputs
in bfloat16; those of transformers are of the rule alone, in float32. Prompts use its torch_chunk_gated_delta_rule, and
decode steps its torch_recurrent_gated_delta_rule.

Decode steps go over layers whose states are together larger than any cache. "pending" means behind a token whose inputs
are beside the state: the step applies it, and leaves its own token beside the state. GB/s count states, read and
written. Times are the least of several rounds in which all take turns: wall times, or with `--clock cpu` those of all
threads together, which other work on the machine changes less.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from benchmarks.result_file import write_result
from quire.core.states import StateGroup, StateKind
from quire.kernels.cpu import _C
from quire.kernels.cpu.kernels import CPU, use_threads
from quire.kernels.state_contract import STATE_DTYPES, RecurrenceWeights, StateBatch, StateStorage

CODE = ("quire/kernels/cpu/states.py", "quire/kernels/cpu/csrc/states.cpp")
STATE_BYTES = 2**27  # of a decode step over all layers, at least
ROUNDS = 7
CLOCKS: Mapping[str, Callable[[], float]] = MappingProxyType({"wall": time.perf_counter, "cpu": time.process_time})


def best(clock: Callable[[], float], runs: Sequence[Callable[[], object]]) -> list[float]:
    """The least seconds of each, measured in turns, after a first run that is not counted."""
    seconds = [float("inf")] * len(runs)
    for turn in range(ROUNDS + 1):
        for i, run in enumerate(runs):
            start = clock()
            run()
            if turn:
                seconds[i] = min(seconds[i], clock() - start)
    return seconds


def batch_of(chunk: tuple[int, int, int, int], num_chunks: int) -> StateBatch:
    """Equal chunks (start, stop, settled, settles) of several blocks."""
    start, stop, settled, settles = (np.full(num_chunks, value, np.int64) for value in chunk)
    return StateBatch(start, stop, np.arange(num_chunks), settled, settles, np.zeros((0, 3), np.int64))


def weights_of(kind: StateKind) -> RecurrenceWeights:
    """Random weights."""
    heads = kind.num_value_heads
    conv = torch.randn(kind.num_channels, kind.conv_width).mul_(0.5).to(torch.bfloat16)
    return RecurrenceWeights(conv, None, -torch.rand(heads), torch.randn(heads))


def storage_of(kind: StateKind, dtype: str, rows: int) -> StateStorage:
    """Blocks of `rows` sequences, with layers enough for STATE_BYTES."""
    each = STATE_DTYPES[dtype].itemsize * kind.numbers(1)
    layers = -(-STATE_BYTES // (rows * each))
    return CPU.allocate_states(StateGroup(layers, kind, dtype, rows, 1, layers * each), torch.device("cpu"))


def rule_inputs(kind: StateKind, rows: int, tokens: int) -> dict[str, Any]:
    """Arguments of transformers' rules."""
    heads = (rows, tokens, kind.num_value_heads)
    query, key, value = (torch.randn(*heads, kind.value_dim) for _ in range(3))
    return {"query": query, "key": key, "value": value, "g": -torch.rand(heads), "beta": torch.rand(heads)} | {
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }


def prompt(clock: Callable[[], float], kind: StateKind, dtype: str, tokens: int) -> dict[str, float]:
    """Microseconds of a token of a prompt in one layer."""
    storage, weights = storage_of(kind, dtype, 1), weights_of(kind)
    inputs = torch.randn(tokens, kind.width).to(torch.bfloat16)
    plan, theirs = CPU.plan_states(batch_of((0, tokens, 0, tokens), 1), storage), rule_inputs(kind, 1, tokens)
    seconds = best(
        clock,
        [
            lambda: CPU.recur(storage, 0, inputs, weights, plan),
            lambda: torch_chunk_gated_delta_rule(**theirs),
        ],
    )
    ours, other = (1e6 * some / tokens for some in seconds)
    return {"quire_us": ours, "transformers_us": other}


def decode(clock: Callable[[], float], kind: StateKind, dtype: str, rows: int) -> dict[str, float]:
    """Microseconds of a decode step in one layer, and GB/s of states."""
    storage, weights = storage_of(kind, dtype, rows), weights_of(kind)
    layers = storage.group.num_layers
    inputs = torch.randn(rows, kind.width).to(torch.bfloat16)
    plans = [CPU.plan_states(batch_of(chunk, rows), storage) for chunk in ((100, 101, 100, 101), (101, 102, 100, 101))]
    states = torch.zeros(layers, rows, kind.num_value_heads, kind.key_dim, kind.value_dim)
    theirs = rule_inputs(kind, rows, 1)

    def recur(plan: object) -> None:
        for layer in range(layers):
            CPU.recur(storage, layer, inputs, weights, plan)

    def transformers_recur() -> None:
        state: Tensor
        for state in states:
            state.copy_(torch_recurrent_gated_delta_rule(**theirs, initial_state=state)[1])

    runs = [lambda plan=plan: recur(plan) for plan in plans]
    settled, pending, other = (1e6 * some / layers for some in best(clock, [*runs, transformers_recur]))
    num_bytes = 2 * rows * kind.num_recurrent * STATE_DTYPES[dtype].itemsize
    return {
        "settled_us": settled,
        "pending_us": pending,
        "settled_gb_per_second": num_bytes / settled / 1e3,
        "pending_gb_per_second": num_bytes / pending / 1e3,
        "transformers_us": other,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="benchmarks.states", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, default=512, help="of the prompt")
    parser.add_argument("--rows", default="1,8,32", help="of decode steps")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--state-dtype", choices=tuple(STATE_DTYPES), default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall", help="cpu: of all threads together")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(arguments)
    use_threads(args.threads)
    torch.manual_seed(0)
    kind = StateKind("delta", args.heads, args.head_dim, 4, num_key_heads=args.heads, key_dim=args.head_dim)
    shape = f"{args.heads} heads of {args.head_dim} x {args.head_dim}"
    print(f"{shape}, states in {args.state_dtype}, {args.threads} threads, {args.clock} times, build {_C.builds()[0]}")
    first = prompt(CLOCKS[args.clock], kind, args.state_dtype, args.tokens)
    ratio = first["transformers_us"] / first["quire_us"]
    print(f"prompt of {args.tokens}: {first['quire_us']:.1f} us a token and layer", end="")
    print(f", transformers {first['transformers_us']:.1f} us, {ratio:.1f} x")
    columns = (("settled us", 12), ("GB/s", 7), ("pending us", 12), ("GB/s", 7), ("transformers us", 17), ("ratio", 7))
    print(f"{'decode rows':>11}" + "".join(f"{name:>{width}}" for name, width in columns))
    steps = []
    for rows in map(int, args.rows.split(",")):
        one = decode(CLOCKS[args.clock], kind, args.state_dtype, rows)
        steps.append({"rows": rows} | one)
        print(f"{rows:>11}{one['settled_us']:>12.0f}{one['settled_gb_per_second']:>7.1f}", end="")
        print(f"{one['pending_us']:>12.0f}{one['pending_gb_per_second']:>7.1f}", end="")
        print(f"{one['transformers_us']:>17.0f}{one['transformers_us'] / one['settled_us']:>7.1f}")
    if args.json:
        about = {"shape": shape, "state_dtype": args.state_dtype, "threads": args.threads, "clock": args.clock}
        about["build"] = _C.builds()[0]
        write_result(args.json, about | {"prompt": {"tokens": args.tokens} | first, "decode": steps}, CODE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
