"""Products with low-bit weights by the Triton kernels, against plain torch."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triton_device import DEVICE
from triton_random_tensors import DTYPES, ROUNDING, SEEDS, drawn, normal, poisoned_empty

from quire.kernels import reference
from quire.kernels.contract import INT4, INT8, QuantizedRows, Scheme
from quire.kernels.reference.codes import dequantize, quantize_activations, quantize_rows

pytest.importorskip("triton")
code_products = pytest.importorskip("quire.kernels.triton.code_products")
kernels = pytest.importorskip("quire.kernels.triton.kernels")
deterministic = pytest.importorskip("quire.kernels.triton.deterministic")

BF16, F16 = torch.bfloat16, torch.float16
SCHEMES = st.sampled_from(
    [
        *(INT8, Scheme(8, 0, F16, has_offsets=True), Scheme(8, 16, BF16, has_offsets=True), Scheme(8, 32, F16)),
        *(Scheme(8, 128), Scheme(8, 12), INT4, Scheme(4), Scheme(4, 16, F16, has_offsets=True), Scheme(4, 64)),
        *(Scheme(4, 32, F16, has_offsets=True), Scheme(4, 128, BF16, has_offsets=True), Scheme(4, 0, has_offsets=True)),
    ]
)
ROWS = st.sampled_from([1, 2, 5, 16, 17, 70])
WIDTHS = st.sampled_from([1, 3, 20, 33, 65])
SIZES = st.sampled_from([1, 3, 16, 31, 33, 64, 100, 130, 200, 300])


@pytest.fixture(scope="module", autouse=True)
def poison():
    """torch.empty gives NaN and -1, so that values which a kernel does not write are found."""
    with patch.object(torch, "empty", poisoned_empty):
        yield


def on_device(rows):
    return rows.map_rows(lambda part: part.to(DEVICE))


def drawn_rows(seed, n, k, scheme):
    """Random codes with scales and offsets, as a checkpoint has them, on the CPU."""
    codes = torch.randint(0, 1 << scheme.bits, (n, k), generator=torch.Generator().manual_seed(seed))
    scales, offsets = (normal(seed + i, n, scheme.num_groups(k), dtype=scheme.scale_dtype).cpu() / 8 for i in (1, 2))
    return QuantizedRows(codes.to(torch.uint8), scales, offsets if scheme.has_offsets else None)


def both(rows, scheme, dtype, parts=1):
    """A weight of these rows in the layout of the Triton kernels, and in that of the reference, on the CPU."""
    shape, found = rows.codes.shape, []
    for module, device in ((kernels, DEVICE), (reference, "cpu")):
        with torch.device(device):
            room = module.allocate_weight(shape, dtype, parts, scheme)
        found.append(room)
        for first in (0, shape[0] // 2):  # a weight is written in pieces
            end = shape[0] if first else shape[0] // 2 or shape[0]
            if first < end and (first or end):
                module.write_rows(room, rows.map_rows(lambda part, a=first, b=end: part[a:b]), first)
    return found


def bound(x, rows, scheme):
    """A bound for the error of float32 sums over groups."""
    codes, scales = quantize_activations(x.cpu())
    values = dequantize(rows, scheme).double().abs()
    if scheme.has_offsets:  # terms that cancel
        values += 2 * dequantize(rows._replace(offsets=None), scheme).double().abs()
    return (2 * scheme.num_groups(rows.codes.shape[1]) + 4) * 2**-23 * ((codes * scales).double().abs() @ values.T)


def assert_near(found, expected, error):
    """Asserts that `found` differs from `expected` by at most `error` and the rounding of both."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    distance = (found.cpu().double() - expected.double()).abs()
    assert (distance <= error + 2.02 * ROUNDING[found.dtype] * expected.double().abs() + 1e-7).all(), distance.max()


@drawn
@given(SEEDS, ROWS, WIDTHS, SIZES, SCHEMES, DTYPES, st.booleans())
def test_products_are_those_of_plain_torch(seed, num_rows, n, k, scheme, dtype, biased):
    x, rows = normal(seed, num_rows, k, dtype=dtype), drawn_rows(seed, n, k, scheme)
    bias = normal(seed + 2, n, dtype=dtype) if biased else None
    packed, plain = both(rows, scheme, dtype)
    expected = reference.linear(x.cpu(), plain, None if bias is None else bias.cpu())
    assert_near(kernels.linear(x, packed, bias), expected, bound(x, rows, scheme) + 2**-22)
