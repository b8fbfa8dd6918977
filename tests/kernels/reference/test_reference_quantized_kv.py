"""KV in 8 and 4 bits: the quantization error, and that attention uses exactly the quantized values."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from kv_groups import kv_group

from quire.kernels import reference
from quire.kernels.contract import Batch
from quire.kernels.deterministic import DETERMINISTIC as deterministic
from quire.kernels.reference.quantized import (
    MAX_QUANTIZED,
    QUANTIZED,
    dequantize,
    from_stored,
    hadamard,
    quantize,
    stored_dtype_and_size,
)

CPU = torch.device("cpu")
TYPES = sorted(MAX_QUANTIZED)


@pytest.mark.parametrize("dtype", TYPES)
def test_the_rounding_error_of_quantized_kv_is_at_most_half_a_step(dtype):
    x = torch.randn(7, 5, 24, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 7)[:, None, None]
    stored = quantize(x, dtype)
    assert (stored.shape, stored.dtype) == ((7, 5, 28), torch.uint8)
    scales = x.abs().amax(-1, keepdim=True) / MAX_QUANTIZED[dtype]
    lost = (dequantize(stored, dtype) - x).abs()
    steps = scales.expand_as(x) if dtype == "int8" else torch.maximum(x.abs() / 8, scales * 2**-9)
    assert (lost <= 0.501 * steps).all()
    assert (lost > 0.2 * steps).any(), "so little is lost that this says nothing"


SIZES = [2, 16, 32, 48, 64, 80, 96, 128, 224, 256, 512]


@pytest.mark.parametrize("size", [32, 64, 96, 224, 256, 512])
def test_the_rotation_is_a_symmetric_orthogonal_matrix(size):
    matrix = hadamard(torch.eye(size, dtype=torch.float64))
    torch.testing.assert_close(matrix, matrix.T)
    torch.testing.assert_close(matrix @ matrix, torch.eye(size, dtype=torch.float64))
    longest = 1 << size.bit_length() - 1
    torch.testing.assert_close(matrix[:longest, :longest].abs(), torch.full((longest, longest), longest**-0.5).double())


@pytest.mark.parametrize("size", SIZES)
def test_int4_loses_less_than_half_a_step_of_the_rotated_head(size):
    x = torch.randn(7, 5, size, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 7)[:, None, None]
    stored = quantize(x, "int4")
    padded = -(-size // 32) * 32
    assert (stored.shape, stored.dtype) == ((7, 5, padded * 5 // 8 + 4), torch.uint8)
    assert stored_dtype_and_size("int4", size) == (torch.uint8, padded * 5 // 8 + 4)
    rotated = hadamard(torch.nn.functional.pad(x, (0, padded - size)))
    lost = (hadamard(dequantize(stored, "int4")) - rotated).abs()
    steps = rotated.abs().amax(-1, keepdim=True) / 15.5  # at most
    assert (lost <= 0.501 * steps).all()
    assert (lost > 0.2 * steps).any(), "so little is lost that this says nothing"


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("size", [32, 64, 128])
def test_int4_keeps_constant_heads(size, sign):
    x = torch.full((1, size), 3.5 * sign)
    torch.testing.assert_close(from_stored(quantize(x, "int4"), "int4", size), x, atol=1e-6, rtol=1e-6)


def test_an_outlier_costs_int4_little():
    """Beside a number that is 20 times as large as the others, steps of a 16th of it would leave nothing of them."""
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(1))
    x[:, 7] = 20
    lost = from_stored(quantize(x, "int4"), "int4", 64) - x
    assert lost.pow(2).mean() < 0.03 < 1 / 12 * (20 / 16) ** 2


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_head_of_int4_with_a_number_that_is_not_finite_is_nan(bad):
    x = torch.zeros(3, 2, 40)
    x[0, 1] = torch.arange(40.0)
    x[1, 0, 3] = bad
    found = from_stored(quantize(x, "int4"), "int4", 40)
    assert found[1, 0].isnan().all()
    assert torch.equal(found[2], torch.zeros(2, 40)) and torch.equal(found[1, 1], torch.zeros(40))
    torch.testing.assert_close(found[0, 1], x[0, 1], atol=6, rtol=0)
    assert dequantize(torch.zeros(4, 44, dtype=torch.uint8), "int4").eq(0).all()


@pytest.mark.parametrize("dtype", sorted(QUANTIZED))
def test_kv_of_no_tokens_is_quantized(dtype):
    stored = quantize(torch.zeros(0, 2, 40), dtype)
    assert (stored.dtype, stored.shape[-1]) == stored_dtype_and_size(dtype, 40)
    assert from_stored(stored, dtype, 40).shape == (0, 2, 40)


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
    group = kv_group((0, 1), 2, 16, dtype, 12, 1, window=window)
    few, many = (module.allocate(one, 16, CPU) for one in (group, replace(group, dtype="float32")))
    random = torch.Generator().manual_seed(2)
    batch = Batch(np.array([0, 0]), np.array([37, 20]), np.array([[3, 9, 1], [4, 7, 0]]))
    q, k, v = (torch.randn(57, heads, 16, generator=random) for heads in (4, 2, 2))
    plan = module.plan(batch, few)
    module.rotary_write(few, 1, q, k, v, None, plan)
    kept = reference.pack(few, torch.arange(12))
    reference.unpack(many, torch.arange(12), from_stored(kept, dtype, 16))
    expected = module.attention(many, 1, q, module.plan(batch, many), 0.25)
    torch.testing.assert_close(module.attention(few, 1, q, plan, 0.25), expected, atol=1e-6, rtol=1e-6)
    exact = module.allocate(replace(group, dtype="float32"), 16, CPU)
    module.rotary_write(exact, 1, q, k, v, None, module.plan(batch, exact))
    off = (module.attention(exact, 1, q, module.plan(batch, exact), 0.25) - expected).abs().max()
    assert 1e-4 < off < (0.2 if dtype == "int4" else 0.1)
