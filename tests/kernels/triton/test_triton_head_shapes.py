"""Head shapes of real models in every kernel with heads, and reproducible bits of every kernel."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from triton_attention_cases import Case
from triton_device import DEVICE
from triton_kernel_pairs import Pair, group_of

from quire.kernels import reference
from quire.kernels.contract import Batch, Routing
from quire.kernels.triton import attention as module
from quire.kernels.triton import blocks
from quire.kernels.triton.deterministic import TRITON_DETERMINISTIC as deterministic
from quire.kernels.triton.kernels import TRITON as kernels

# head_dim, heads per KV head, tokens per block. Each head size and each ratio occurs with both block sizes.
HEADS = [(64, 1, 16), (64, 8, 32), (80, 4, 16), (80, 1, 32), (96, 8, 16), (96, 4, 32), (128, 4, 16), (128, 8, 32)]
HEADS += [(256, 1, 16), (256, 4, 32), (512, 1, 16), (512, 8, 32)]
IN_8_BITS = {64: "fp8_e4m3", 128: "int8", 512: "fp8_e4m3"}


@pytest.fixture(autouse=True)
def poisoned():
    """torch.empty gives NaN, so that values which a kernel does not write are found."""
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=False)


@pytest.mark.parametrize(
    ("dim", "shared", "size", "stored"),
    [(*heads, None) for heads in HEADS] + [(*heads, IN_8_BITS[heads[0]]) for heads in HEADS if heads[0] in IN_8_BITS],
)
def test_attention(dim, shared, size, stored):
    """A decoding sequence, one that verifies three tokens, and a chunk of a prompt behind a cached prefix."""
    case = Case(dim, [(66, 67), (30, 33), (20, 40)], kv_heads=1, shared=shared, dim=dim, size=size, stored=stored)
    case.check()
    case.check(strict=True)


@pytest.mark.parametrize(("dim", "shared", "size"), HEADS)
def test_keys_and_values_are_rotated_written_and_copied(dim, shared, size):
    pair = Pair(group_of("bfloat16", layers=1, heads=2, head_dim=dim), size, seed=dim)
    start = size - 2
    batch = Batch(np.array([start, 0]), np.array([start + 3, 2]), np.array([[4, 9], [7, -1]]))
    pair.write(batch, 2 * shared, dim // (4 if size == 32 else 2), torch.bfloat16)
    pairs = torch.tensor([[4, 1], [9, 4]])
    blocks.copy_blocks(pair.fast, pairs, 5)
    reference.copy_blocks(pair.slow, pairs, 5)
    pair.check()


@pytest.mark.parametrize("dim", sorted({dim for dim, _, _ in HEADS}))
def test_heads_are_normalised(dim):
    """As in Qwen3, on views of one product."""
    product = torch.randn(3, 7 * dim, generator=torch.Generator().manual_seed(dim)).to(torch.bfloat16).to(DEVICE)
    weight = torch.linspace(0.5, 2, dim).to(torch.bfloat16).to(DEVICE)
    heads = product[:, dim : 6 * dim].unflatten(1, (5, dim))
    expected = reference.rms_norm(heads.cpu(), weight.cpu(), 1e-6)
    torch.testing.assert_close(kernels.rms_norm(heads, weight, 1e-6).cpu(), expected, rtol=2**-7, atol=1e-3)


def every_kernel(kernels, random):
    """Results of one run of each kernel. The inputs are the same every time."""

    def normal(*shape):
        return torch.from_numpy(random.standard_normal(shape)).to(torch.bfloat16).to(DEVICE)

    x, weight, logits = normal(9, 64), normal(64), normal(9, 4)
    up, down = normal(4, 32, 64), normal(4, 64, 16)
    ids, shares = kernels.route(logits, 2, Routing(normalise=True))
    yield from (ids, shares, kernels.experts(x, ids, shares, up, down, "silu"))
    yield kernels.linear(x, normal(48, 64), normal(48))
    yield kernels.gated_linear(x, normal(48, 64), None, "silu")
    yield kernels.embed(torch.arange(5, device=DEVICE), x)
    yield kernels.rms_norm(x, weight, 1e-6)
    yield from kernels.add_rms_norm(x, normal(9, 64), weight, 1e-6)
    yield kernels.layer_norm(x, weight, weight, 1e-6)
    yield from kernels.rotation(torch.arange(9, device=DEVICE), torch.ones(8, device=DEVICE), 1.0)
    yield from kernels.logprobs(logits, ids, 3)


@pytest.mark.parametrize("strict", [False, True])
def test_repeated_runs_have_the_same_bits(strict, monkeypatch):
    for name, value in {"MIN_SPLIT_KEYS": 8, "KEY_BYTES": 1, "WAVES": 1000}.items():  # contexts are split and merged
        monkeypatch.setattr(module, name, value)
    case = Case(7, [(60, 61), (40, 42)], kv_heads=1, shared=4, dim=20, dtype="bfloat16")
    ours = deterministic if strict else kernels
    first, second = (list(every_kernel(ours, np.random.default_rng(3))) for _ in range(2))
    first.append(case.run(strict=strict))
    second.append(case.run(strict=strict))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
    assert len(first) == 17
