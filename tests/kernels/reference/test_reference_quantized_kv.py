"""KV in 8 and 4 bits: the quantization error, and that attention uses exactly the quantized values."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from quire.config import KVGroup
from quire.kernels import deterministic, reference
from quire.kernels.contract import Batch
from quire.kernels.reference.quantized import MAX_QUANTIZED, QUANTIZED, dequantize, from_stored, quantize

CPU = torch.device("cpu")
TYPES = sorted(MAX_QUANTIZED)


@pytest.mark.parametrize("dtype", TYPES)
def test_what_is_lost_is_less_than_half_a_step(dtype):
    x = torch.randn(7, 5, 24, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 7)[:, None, None]
    stored = quantize(x, dtype)
    assert (stored.shape, stored.dtype) == ((7, 5, 28), torch.uint8)
    scales = x.abs().amax(-1, keepdim=True) / MAX_QUANTIZED[dtype]
    lost = (dequantize(stored, dtype) - x).abs()
    steps = scales.expand_as(x) if dtype == "int8" else torch.maximum(x.abs() / 8, scales * 2**-9)
    assert (lost <= 0.501 * steps).all()
    assert (lost > 0.2 * steps).any(), "so little is lost that this says nothing"


@pytest.mark.parametrize("size", [32, 80])
def test_int4_has_sixteen_steps_from_the_least_to_the_largest_number_of_a_group(size):
    x = torch.randn(7, 5, size, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 7)[:, None, None]
    stored = quantize(x, "int4")
    num_groups = -(-size // 32)
    assert (stored.shape, stored.dtype) == ((7, 5, num_groups * 20), torch.uint8)
    lost = (from_stored(stored, "int4", size) - x).abs()
    for first in range(0, size, 32):
        group = torch.nn.functional.pad(x[..., first : first + 32], (0, max(0, first + 32 - size)))
        low, high = group.amin(-1, keepdim=True), group.amax(-1, keepdim=True)
        of_bfloat16 = 2**-8 * torch.maximum(low.abs(), high.abs())  # of scales and offsets
        assert (lost[..., first : first + 32] <= 0.501 * (high - low) / 15 + 2 * of_bfloat16).all()
    assert from_stored(quantize(torch.full((1, 1, size), 3.5), "int4"), "int4", 32).eq(3.5).all()


@pytest.mark.parametrize("dtype", TYPES)
def test_zeros_stay_zeros_and_one_bad_head_spoils_no_other(dtype):
    x = torch.zeros(3, 2, 8)
    x[0, 1] = torch.arange(8.0)
    x[1, 0, 3] = torch.nan
    found = dequantize(quantize(x, dtype), dtype)
    assert found[1, 0].isnan().all()
    found[1, 0] = 0
    assert torch.equal(found[2], torch.zeros(2, 8))
    torch.testing.assert_close(found[0, 1], x[0, 1], atol=0.25, rtol=0)
    assert torch.equal(dequantize(torch.zeros(4, 12, dtype=torch.uint8), dtype), torch.zeros(4, 8))


@pytest.mark.parametrize("module", [reference, deterministic])
@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("window", [0, 9])
def test_attention_sees_the_numbers_that_are_left(module, dtype, window):
    kind = "window" if window else "full"
    group = KVGroup((0, 1), kind, 2, 16, dtype, 12, 1, window)
    few, many = (module.allocate(one, 16, CPU) for one in (group, replace(group, dtype="float32")))
    random = torch.Generator().manual_seed(2)
    batch = Batch(np.array([0, 0]), np.array([37, 20]), np.array([[3, 9, 1], [4, 7, 0]]))
    q, k, v = (torch.randn(57, heads, 16, generator=random) for heads in (4, 2, 2))
    plan = module.plan(batch, few)
    module.write_kv(few, 1, k, v, plan)
    kept = reference.pack(few, torch.arange(12))
    reference.unpack(many, torch.arange(12), from_stored(kept, dtype, 16))
    expected = module.attention(many, 1, q, module.plan(batch, many), 0.25)
    torch.testing.assert_close(module.attention(few, 1, q, plan, 0.25), expected, atol=1e-6, rtol=1e-6)
    exact = module.allocate(replace(group, dtype="float32"), 16, CPU)
    module.write_kv(exact, 1, k, v, module.plan(batch, exact))
    off = (module.attention(exact, 1, q, module.plan(batch, exact), 0.25) - expected).abs().max()
    assert 1e-4 < off < (0.3 if dtype == "int4" else 0.1)
