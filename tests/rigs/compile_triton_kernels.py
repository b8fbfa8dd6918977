"""Compiles the Triton kernels for a GPU that is not present: every launch stops after the compilation.

A script. It runs steps on CPU tensors, at the sizes of a real model and in each KV type, and prints the names of the
compiled kernels. Tests in the interpreter check their results.
"""

import sys
from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import torch
from kv_groups import kv_group
from sampling_metadata_builders import draws, mask
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from quire.core.states import StateGroup, StateKind
from quire.kernels.contract import ACTIVATIONS, FP8, INT4, INT8, MXFP4, Batch, LowRank, Routing, Scheme
from quire.kernels.state_contract import RecurrenceWeights, StateBatch
from quire.kernels.triton.deterministic import TRITON_DETERMINISTIC as deterministic
from quire.kernels.triton.kernels import MAX_HEAD_DIM
from quire.kernels.triton.kernels import TRITON as ordinary

COMPUTE_CAPABILITY = 90
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
HIDDEN, INNER, VOCAB_SIZE = 4096, 1024, 128256
LENGTHS = (1, 1, 3, 200)  # of chunks: decode, verification, prompt
CONTEXT = 9000
SCHEMES = [
    *(INT8, INT4, Scheme(8, 16, torch.bfloat16, has_offsets=True), Scheme(4, 16, torch.float16)),
    *(Scheme(4, 128, torch.float16, has_offsets=True), Scheme(8, 256), MXFP4, Scheme(4, 128, grid="iq4_nl")),
    *(FP8, Scheme(8, 128, grid="e4m3"), Scheme(8, 32, torch.bfloat16, grid="e4m3")),
]
STATE_KINDS = [
    StateKind("delta", 32, 128, 4, num_key_heads=16, key_dim=128),
    StateKind("kda", 32, 128, 4, num_key_heads=32, key_dim=128),
    StateKind("mamba2", 64, 64, 4, num_key_heads=8, key_dim=128),
    StateKind("convolution", 1, 2048, 3),
]
SHARED_BYTES = 99 * 1024  # of a program with low-bit weights, on GPUs of compute capability 8.6 and 8.9
MOST_SHARED_BYTES = 163 * 1024  # of a program, on GPUs of compute capability 8.0
compiled: Counter[str] = Counter()


class NoDevice:
    """A Triton driver for the queries that Triton makes before a launch."""

    def get_current_target(self):
        return GPUTarget("cuda", COMPUTE_CAPABILITY, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_only(self, *args, grid, warmup, **options):
    """Replaces JITFunction.run."""
    kernel = _run(self, *args, grid=grid, warmup=True, **options)
    assert kernel.asm["cubin"]
    most = SHARED_BYTES if options.get("FLOATS") else MOST_SHARED_BYTES
    assert kernel.metadata.shared <= most, (self.__name__, kernel.metadata.shared)
    compiled[self.__name__] += 1
    return kernel


_run, JITFunction.run = JITFunction.run, compile_only


def step(kernels, dtype, kv_dtype, window=0, softcap=0.0, lengths=LENGTHS, head_dim=HEAD_DIM):
    """The KV operations of a layer, and copies of blocks."""
    group = kv_group((0,), KV_HEADS, head_dim, kv_dtype, 600, 1, window=window)
    storage = kernels.allocate(group, 16, torch.device("cpu"))
    stops = np.full(len(lengths), CONTEXT)
    tables = np.tile(np.arange(-(-CONTEXT // 16)), (len(lengths), 1))
    plan = kernels.plan(Batch(stops - np.array(lengths), stops, tables), storage)
    q, k, v = (torch.zeros(sum(lengths), heads, head_dim, dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    rotation = kernels.rotation(torch.arange(len(q)), torch.ones(head_dim // 2), 1.0)
    q = kernels.rotary_write(storage, 0, q, k, v, rotation, plan)
    kernels.attention(storage, 0, q, plan, head_dim**-0.5, softcap)
    kernels.copy_blocks(storage, torch.tensor([[0, 1], [2, 3]]), 7)


def rows(kernels, dtype):
    """Norms, products, experts."""
    for number in (1, 300):
        x = torch.zeros(number, HIDDEN, dtype=dtype)
        weight = torch.ones(HIDDEN, dtype=dtype)
        kernels.rms_norm(x, weight, 1e-6)
        kernels.rms_norm(x.view(number, -1, HEAD_DIM), weight[:HEAD_DIM], 1e-6)
        kernels.add_rms_norm(x, x, weight, 1e-6)
        kernels.layer_norm(x, weight, weight, 1e-5)
        matrix = torch.zeros(640, HIDDEN, dtype=dtype)
        kernels.linear(x, matrix, weight[:640])
        kernels.linear(x, matrix, weight[:640], adapters(kernels, x, matrix))
        kernels.embed(torch.arange(number), torch.zeros(1000, HIDDEN, dtype=dtype))
        kernels.multiply_add(x, 0.5, x)
        kernels.multiply_add(x, torch.zeros(number, HEADS, dtype=dtype))
        kernels.rotate(x.view(number, -1, HEAD_DIM), (torch.zeros(number, HEAD_DIM // 2),) * 2)
        ids, _ = kernels.route(torch.zeros(number, 4, dtype=dtype), 2, Routing(normalise=True))
        up, down = torch.zeros(4, 2 * INNER, HIDDEN, dtype=dtype), torch.zeros(4, HIDDEN, INNER, dtype=dtype)
        kernels.experts(x, ids, torch.ones(number, 2), up, down, "silu")
    kernels.xielu(x, torch.zeros(4))
    grouped = Routing(normalise=True, score="sigmoid", scale=2.5, num_groups=8, top_groups=4)
    for routing in (grouped, Routing(normalise=False, score="sigmoid"), replace(grouped, score="softmax")):
        kernels.route(torch.zeros(3, 256, dtype=dtype), 8, routing, torch.zeros(256))
    for activation in ACTIVATIONS if kernels is ordinary else ACTIVATIONS[:1]:
        kernels.activate(x, activation)
        kernels.gated_linear(x[:1], torch.zeros(256, HIDDEN, dtype=dtype), None, activation)


def adapters(kernels, x, weight):
    """The addend of a table with one adapter."""
    table = kernels.new_adapter_table(weight, 2)
    matrices = [LowRank(torch.zeros(16, HIDDEN), torch.zeros(640, 16), 0, 1.0)]
    kernels.set_adapter(table, 1, kernels.pack_adapter(weight, matrices))
    return kernels.low_rank(x, table, torch.zeros(len(x), dtype=torch.int32), 16)


def code_rows(kernels, dtype, schemes, sizes=(1, 16, 60, 300)):
    """Products with low-bit weights, row lookup, experts. sizes: numbers of rows, for each size of tiles."""
    for scheme in schemes:
        weight = kernels.allocate_weight((640, HIDDEN), dtype, scheme=scheme)
        for number in sizes if scheme in (INT8, INT4, FP8) else (1, 300):
            x, bias = torch.zeros(number, HIDDEN, dtype=dtype), torch.zeros(640, dtype=dtype)
            kernels.linear(x, weight, bias)
            if scheme in (INT4, FP8) and number == 60:
                kernels.linear(x, weight, bias, torch.zeros(number, 640))
        kernels.embed(torch.arange(3), weight)
    for number, scheme in product((1, 300), {INT4, FP8}.intersection(schemes)):
        up, down = (
            kernels.allocate_weight((4, *shape), dtype, scheme=scheme)
            for shape in ((2 * INNER, HIDDEN), (HIDDEN, INNER))
        )
        x, ids = torch.zeros(number, HIDDEN, dtype=dtype), torch.zeros(number, 2, dtype=torch.int64)
        kernels.experts(x, ids, torch.ones(number, 2), up, down, "silu")


def tokens(kernels, dtype):
    """Sampling with all parameters and with none; logprobs."""
    logits = torch.zeros(3, VOCAB_SIZE, dtype=dtype)
    kernels.sample(logits, draws(3, temperatures=0.0))
    asked = {"temperatures": 0.7, "top_ps": 0.9, "top_ks": 50, "min_ps": 0.01, "repetition": 1.1, "presence": 0.5}
    entries = {"edits": [(0, 5, 1.5)], "history": [(1, 7, True), (1, 9, False)]}
    kernels.sample(logits, draws(3, **asked, masked=[2], masks=mask([{1, 2}], VOCAB_SIZE), **entries))
    kernels.logprobs(logits, torch.zeros(3, 2, dtype=torch.int64), 5)


def states(kernels, dtype, state_dtype, kind):
    """The recurrence of a layer: a decoding sequence, and a prompt with a snapshot."""
    storage = kernels.allocate_states(StateGroup(1, kind, state_dtype, 4, 8, 0), torch.device("cpu"))
    starts, stops = (np.array(some) for some in ((90, 0), (91, 200)))
    batch = StateBatch(starts, stops, np.arange(2), starts, stops, np.array([(1, 100, 3)]))
    heads = [torch.zeros(kind.num_value_heads)] * 3
    conv_weight = torch.zeros(kind.num_channels, kind.conv_width, dtype=dtype)
    weights = RecurrenceWeights(conv_weight, conv_weight[:, 0].contiguous(), *heads)
    kernels.recur(storage, 0, torch.zeros(201, kind.width, dtype=dtype), weights, kernels.plan_states(batch, storage))


def main() -> None:
    """Compile all kernels in every variant and print their names."""
    driver.set_active(NoDevice())
    for kv_dtype in ("bfloat16", "fp8_e4m3", "int8"):
        step(ordinary, torch.bfloat16, kv_dtype)
    step(ordinary, torch.bfloat16, "bfloat16", window=1000, softcap=30.0)
    step(ordinary, torch.float32, "float32")
    step(ordinary, torch.float16, "float16", lengths=(1, 1))
    for kv_dtype in ("bfloat16", "fp8_e4m3"):
        step(ordinary, torch.bfloat16, kv_dtype, head_dim=MAX_HEAD_DIM)
    step(deterministic, torch.bfloat16, "bfloat16")
    for kernels in (ordinary, deterministic):
        rows(kernels, torch.bfloat16)
    states(ordinary, torch.bfloat16, "float32", STATE_KINDS[0])
    states(ordinary, torch.float32, "bfloat16", STATE_KINDS[1])
    states(ordinary, torch.bfloat16, "bfloat16", STATE_KINDS[2])
    states(ordinary, torch.bfloat16, "float32", STATE_KINDS[3])
    code_rows(ordinary, torch.bfloat16, SCHEMES)
    code_rows(ordinary, torch.float32, [FP8])
    code_rows(ordinary, torch.float16, [FP8], sizes=(1, 300))
    tokens(ordinary, torch.bfloat16)
    tokens(ordinary, torch.float32)
    print(*sorted(compiled))


if __name__ == "__main__":
    sys.exit(main())
