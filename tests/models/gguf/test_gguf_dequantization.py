"""Dequantization against the package `gguf`, bit for bit: random bytes, and quantized numbers."""

import gguf
import numpy as np
import pytest
import torch

from quire.models.gguf.quants import TENSOR_TYPES, UNSUPPORTED_TYPES, dequantize

QUANTIZED = {number: kind for number, kind in TENSOR_TYPES.items() if kind.decode is not None}
QUANTIZABLE = [2, 3, 6, 7, 8]  # types that the package can also write


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
    assert np.abs(found - numbers).max() < 0.4


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
