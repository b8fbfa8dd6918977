"""Dequantization against the package `gguf`, bit for bit: random bytes, and quantized numbers."""

import gguf
import numpy as np
import pytest
import torch

from quire.kernels.reference import codes
from quire.weights.gguf.quants import CODINGS, dequantize, quantized_rows, scheme_of
from quire.weights.gguf.tensor_types import TENSOR_TYPES, UNSUPPORTED_TYPES

QUANTIZED = {number: kind for number, kind in TENSOR_TYPES.items() if kind.name in CODINGS}
QUANTIZABLE = [2, 3, 6, 7, 8, 39]  # types that the package can also write


def theirs(data, number):
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(data, gguf.GGMLQuantizationType(number))


def same_bits(found, expected):
    nan = np.isnan(expected)
    return np.array_equal(np.isnan(found), nan) and np.array_equal(
        found[~nan].view(np.uint32), expected[~nan].view(np.uint32)
    )


@pytest.mark.parametrize("number", QUANTIZED, ids=lambda number: TENSOR_TYPES[number].name)
@pytest.mark.parametrize("blocks", [1, 7, 3000])
def test_random_bytes(number, blocks):
    kind = QUANTIZED[number]
    data = np.random.default_rng(blocks).integers(0, 256, blocks * kind.block_bytes, dtype=np.uint8)
    found = dequantize(data, kind, (blocks, kind.block_size))
    assert found.dtype == torch.float32
    assert same_bits(found.numpy().ravel(), theirs(data, number).ravel())


@pytest.mark.parametrize("number", QUANTIZABLE, ids=lambda number: TENSOR_TYPES[number].name)
def test_quantized_numbers_come_back_near_what_they_were(number):
    numbers = np.random.default_rng(0).normal(size=(33, 64)).astype(np.float32)
    data = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType(number))
    found = dequantize(data.reshape(-1), TENSOR_TYPES[number], numbers.shape).numpy()
    assert same_bits(found, theirs(data, number))
    assert np.abs(found - numbers).max() < (1 if number == 39 else 0.4)


@pytest.mark.parametrize(("number", "dtype"), [(0, torch.float32), (1, torch.float16), (30, torch.bfloat16)])
def test_plain_numbers_keep_their_type(number, dtype):
    numbers = torch.randn(5, 3).to(dtype)
    found = dequantize(numbers.view(torch.uint8).numpy().reshape(-1), TENSOR_TYPES[number], (5, 3))
    assert found.dtype == dtype
    assert torch.equal(found, numbers)
    found.zero_()  # it is a copy, not a view of the file


def test_every_type_has_the_number_and_the_size_that_the_package_gives_it():
    for number, kind in TENSOR_TYPES.items():
        theirs = gguf.GGMLQuantizationType(number)
        assert kind.name == theirs.name
        assert (kind.block_size, kind.block_bytes) == gguf.GGML_QUANT_SIZES[theirs]
    for number, name in UNSUPPORTED_TYPES.items():
        assert gguf.GGMLQuantizationType(number).name == name


@pytest.mark.parametrize("number", QUANTIZED, ids=lambda number: TENSOR_TYPES[number].name)
def test_rows_of_codes_have_the_dequantized_numbers(number):
    """Exactly, but for Q4_1, whose offsets are moved and rounded to float16."""
    kind, draw = QUANTIZED[number], np.random.default_rng(number)
    blocks = draw.integers(0, 256, 30 * kind.block_bytes, dtype=np.uint8).view(kind.layout)
    for name in ("scale", "low", "offset"):
        if name in (kind.layout.names or ()):
            blocks[name] = draw.normal(size=30).astype(np.float16)
    shape, scheme = (5, 6 * kind.block_size), scheme_of(kind)
    expected = dequantize(blocks.view(np.uint8), kind, shape)
    rows = quantized_rows(blocks.view(np.uint8), kind, shape)
    assert int(rows.codes.max()) < 1 << scheme.bits
    assert (rows.offsets is not None) == scheme.has_offsets
    found = codes.dequantize(rows, scheme)
    if kind.name != "Q4_1":
        assert torch.equal(found, expected)
        return
    size = scheme.group_size
    width = expected.view(5, -1, size).abs().amax(-1) + 16 * rows.scales.float().abs()
    assert ((found - expected).view(5, -1, size).abs() <= 2**-9 * width[:, :, None]).all()


def test_every_type_has_codes_or_plain_numbers():
    assert {kind.name for kind in TENSOR_TYPES.values()} == {*CODINGS, "F32", "F16", "BF16"}


def test_plain_types_have_no_codes():
    with pytest.raises(ValueError, match="F32 has no scheme"):
        quantized_rows(np.zeros(16, np.uint8), TENSOR_TYPES[0], (2, 2))
