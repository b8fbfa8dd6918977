"""Dequantization of GGUF's tensor types, and their codes as torch tensors.

Each function decodes blocks of the layout of its name in `tensor_types`. The order of operations is that of ggml's
reference, so that dequantized numbers are equal bit for bit.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.contract import GRIDS, Grid, QuantizedRows, Scheme
from quire.weights.gguf.tensor_types import TensorType

Blocks = NDArray[np.void]  # of one of the layouts of tensor_types
Codes = NDArray[np.integer[Any]]  # uint8
Numbers = NDArray[np.floating[Any]]  # float32; float16 for factors
Integers = NDArray[np.int8]


class Decoded(NamedTuple):
    """Blocks in groups of numbers with one scale: number = scale * (code - zero) + offset.

    With a 4-bit grid, number = scale * GRIDS[grid][code]. With factors, scales and offsets are integers, which are
    multiplied by the factors of their block.
    """

    codes: Codes  # (blocks, groups, group_size)
    zero: int  # 0 with a grid
    scales: Numbers | Integers  # (blocks, groups)
    offsets: Numbers | Integers | None = None  # (blocks, groups)
    factors: tuple[Numbers, ...] = ()  # (blocks,), of scales and of offsets
    grid: Grid = "int"


def q4_0(blocks: Blocks) -> Decoded:
    """4 bits; code 8 is zero."""
    return Decoded(_one_group(_nibbles(blocks["codes"])), 8, _column(blocks["scale"]))


def q4_1(blocks: Blocks) -> Decoded:
    """4 bits and an offset."""
    return Decoded(_one_group(_nibbles(blocks["codes"])), 0, _column(blocks["scale"]), _column(blocks["offset"]))


def q5_0(blocks: Blocks) -> Decoded:
    """5 bits; code 16 is zero."""
    return Decoded(_one_group(_five_bits(blocks)), 16, _column(blocks["scale"]))


def q5_1(blocks: Blocks) -> Decoded:
    """5 bits and an offset."""
    return Decoded(_one_group(_five_bits(blocks)), 0, _column(blocks["scale"]), _column(blocks["offset"]))


def q8_0(blocks: Blocks) -> Decoded:
    """8 bits, signed."""
    return Decoded(_one_group(blocks["codes"].view(np.uint8) ^ np.uint8(128)), 128, _column(blocks["scale"]))


def mxfp4(blocks: Blocks) -> Decoded:
    """4 bits of e2m1. The exponent e means the scale 2**(e - 127), which is halved for the doubled grid."""
    scales = np.ldexp(np.float32(1), blocks["exponent"].astype(np.int32) - 128).astype(np.float32)
    return Decoded(_one_group(_nibbles(blocks["codes"])), 0, scales[:, None], grid="e2m1")


def iq4_nl(blocks: Blocks) -> Decoded:
    """4 bits of the grid iq4_nl."""
    return Decoded(_one_group(_nibbles(blocks["codes"])), 0, _column(blocks["scale"]), grid="iq4_nl")


def iq4_xs(blocks: Blocks) -> Decoded:
    """8 groups of 32 numbers of the grid iq4_nl, each with a scale of 6 bits, signed."""
    high = blocks["scales_high"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = (blocks["scales_low"][:, :, None] >> np.array([0, 4], np.uint8) & 15).reshape(-1, 8)
    scales = (low | high << 4).astype(np.int8) - np.int8(32)
    codes = _fields(blocks["codes"].reshape(-1, 8, 16), 4)
    return Decoded(codes, 0, scales, factors=(blocks["scale"],), grid="iq4_nl")


def _one_group(codes: Codes) -> Codes:
    return codes[:, None, :]


def _column(halves: NDArray[np.float16]) -> NDArray[np.float32]:
    return halves.astype(np.float32)[:, None]


def _nibbles(codes: Codes) -> Codes:
    """The low 4 bits of all bytes, then the high 4 bits."""
    found = np.empty((len(codes), 2, codes.shape[1]), np.uint8)
    np.bitwise_and(codes, 15, out=found[:, 0])
    np.right_shift(codes, 4, out=found[:, 1])
    return found.reshape(len(codes), -1)


def _five_bits(blocks: Blocks) -> Codes:
    """5-bit codes: nibbles, with the fifth bit from the mask `high`."""
    fifth = np.unpackbits(blocks["high"], axis=1, bitorder="little")
    return _nibbles(blocks["codes"]) | fifth << np.uint8(4)


def q2_k(blocks: Blocks) -> Decoded:
    """16 groups of 16 numbers of 2 bits, each with a scale and a low of 4 bits."""
    codes = _fields(blocks["codes"].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    return _with_lows(blocks, codes, blocks["groups"] & 15, blocks["groups"] >> 4)


def q3_k(blocks: Blocks) -> Decoded:
    """16 groups of 16 numbers of 3 bits, signed, each group with a scale of 6 bits."""
    packed = blocks["groups"]
    groups = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1) | _fields(packed[:, 8:], 2) << 4
    codes = _fields(blocks["codes"].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    present = _fields(blocks["mask"], 1).reshape(-1, 16, 16)  # if the mask's bit is 0, 4 is subtracted
    return Decoded(codes | present << 2, 4, groups.astype(np.int8) - np.int8(32), factors=(blocks["scale"],))


def q4_k(blocks: Blocks) -> Decoded:
    """8 groups of 32 numbers of 4 bits, each with a scale and a low of 6 bits."""
    codes = _fields(blocks["codes"].reshape(-1, 4, 32), 4).reshape(-1, 8, 32)
    return _with_lows(blocks, codes, *_six_bits(blocks))


def q5_k(blocks: Blocks) -> Decoded:
    """As q4_k, with a fifth bit."""
    codes = _fields(blocks["codes"].reshape(-1, 4, 32), 4).reshape(-1, 8, 32)
    codes |= _fields(blocks["high"], 1).reshape(-1, 8, 32) << 4
    return _with_lows(blocks, codes, *_six_bits(blocks))


def q6_k(blocks: Blocks) -> Decoded:
    """16 groups of 16 numbers of 6 bits; code 32 is zero. Each group has a scale of 8 bits."""
    codes = _fields(blocks["codes"].reshape(-1, 2, 64), 4) | _fields(blocks["high"].reshape(-1, 2, 32), 2) << 4
    return Decoded(codes.reshape(-1, 16, 16), 32, blocks["groups"], factors=(blocks["scale"],))


def _with_lows(blocks: Blocks, codes: Codes, scales: Codes, lows: Codes) -> Decoded:
    """Blocks whose groups have scales, and lows that are subtracted."""
    return Decoded(codes, 0, scales.astype(np.int8), lows.astype(np.int8), (blocks["scale"], -blocks["low"]))


def _fields(packed: Codes, bits: int) -> Codes:
    """The lowest `bits` bits of every byte of a row, then the next higher bits, ...: (..., 8 / bits * bytes)."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields = (packed[..., None, :] >> shifts) & np.uint8((1 << bits) - 1)
    return fields.reshape(*packed.shape[:-1], -1)


def _six_bits(blocks: Blocks) -> tuple[Codes, Codes]:
    """6-bit scales and lows of 8 groups. The high 2 bits of the last 4 are in the bytes of the first 4."""
    first, second, rest = (blocks["groups"][:, i : i + 4] for i in (0, 4, 8))
    scales = np.concatenate([first & 63, rest & 15 | first >> 2 & 48], axis=1)
    lows = np.concatenate([second & 63, rest >> 4 | second >> 2 & 48], axis=1)
    return scales, lows


class Coding(NamedTuple):
    """How the codes of a tensor type are decoded and stored."""

    decode: Callable[[np.ndarray], Decoded]
    scheme: Scheme  # that holds its codes


def _scheme(bits: int, group_size: int, *, offsets: bool = False, factors: bool = False, grid: Grid = "int") -> Scheme:
    return Scheme(bits, group_size, torch.float16, offsets, grid, factors)


# by the name of the type; types that are not here have plain numbers
CODINGS: Mapping[str, Coding] = MappingProxyType(
    {
        "Q4_0": Coding(q4_0, _scheme(4, 32)),
        "Q4_1": Coding(q4_1, _scheme(4, 32, offsets=True)),
        "Q5_0": Coding(q5_0, _scheme(6, 32)),
        "Q5_1": Coding(q5_1, _scheme(6, 32, offsets=True)),
        "Q8_0": Coding(q8_0, _scheme(8, 32)),
        "Q2_K": Coding(q2_k, _scheme(4, 16, offsets=True, factors=True)),
        "Q3_K": Coding(q3_k, _scheme(4, 16, factors=True)),
        "Q4_K": Coding(q4_k, _scheme(4, 32, offsets=True, factors=True)),
        "Q5_K": Coding(q5_k, _scheme(6, 32, offsets=True, factors=True)),
        "Q6_K": Coding(q6_k, _scheme(6, 16, factors=True)),
        "IQ4_NL": Coding(iq4_nl, _scheme(4, 32, grid="iq4_nl")),
        "IQ4_XS": Coding(iq4_xs, _scheme(4, 32, factors=True, grid="iq4_nl")),
        "MXFP4": Coding(mxfp4, Scheme(4, 32, torch.bfloat16, grid="e2m1")),
    }
)


def scheme_of(kind: TensorType) -> Scheme | None:
    """The scheme that holds the codes of a type; None for plain numbers."""
    coding = CODINGS.get(kind.name)
    return None if coding is None else coding.scheme


_CHUNK = 1 << 16  # numbers decoded at a time


def dequantize(data: np.ndarray, kind: TensorType, shape: tuple[int, ...]) -> Tensor:
    """A tensor of this shape from `data` (bytes). F16 and BF16 keep their type; all other types become float32."""
    blocks, coding = data.view(kind.layout), CODINGS.get(kind.name)
    if coding is None:
        plain = torch.from_numpy(blocks.copy())  # a copy: the file is mapped read-only, and only until it is read
        return (plain.view(torch.bfloat16) if kind.name == "BF16" else plain).view(shape)
    numbers = np.empty((len(blocks), kind.block_size), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # an invalid scale gives inf or NaN
        for some in _chunks(len(blocks), kind):
            numbers[some] = _numbers(coding.decode(blocks[some])).reshape(-1, kind.block_size)
    return torch.from_numpy(numbers).view(shape)


def _numbers(decoded: Decoded) -> Numbers:
    """The numbers of decoded blocks, float32."""
    if decoded.grid == "int":
        units = decoded.codes.astype(np.int16) - np.int16(decoded.zero)
    else:
        units = np.array(GRIDS[decoded.grid], np.int16)[decoded.codes]
    scales, offsets = decoded.scales, decoded.offsets
    if decoded.factors:
        scale, *low = (factor.astype(np.float32)[:, None] for factor in decoded.factors)
        scales, offsets = scale * scales, None if offsets is None else low[0] * offsets
    numbers: Numbers = scales[:, :, None] * units
    return numbers if offsets is None else numbers + offsets[:, :, None]


def quantized_rows(data: np.ndarray, kind: TensorType, shape: tuple[int, ...]) -> QuantizedRows:
    """A tensor (rows, columns) in the scheme of its type, from `data` (bytes). Its numbers stay the same, but for Q4_1.

    Raises ValueError for a type without a scheme.
    """
    if kind.name not in CODINGS:
        raise ValueError(f"the type {kind.name} has no scheme")
    decode, scheme = CODINGS[kind.name]
    (rows, _), blocks = shape, data.view(kind.layout)
    num_groups = kind.block_size // scheme.group_size
    codes = np.empty((len(blocks), num_groups, scheme.group_size), np.uint8)
    dtype: type = np.int8 if scheme.has_factors else np.float16 if scheme.scale_dtype == torch.float16 else np.float32
    scales: NDArray[np.generic] = np.empty((len(blocks), num_groups), dtype)
    offsets = np.empty_like(scales)
    factors = np.empty((len(blocks), 1 + scheme.has_offsets), np.float16)
    with np.errstate(over="ignore", invalid="ignore"):
        for some in _chunks(len(blocks), kind):
            decoded = decode(blocks[some])
            shift = scheme.zero_point - decoded.zero if scheme.grid == "int" else 0
            moves_offsets = scheme.bits == 4 and scheme.has_offsets  # moved codes would need a fifth bit
            codes[some] = decoded.codes if moves_offsets else decoded.codes + np.uint8(shift)
            scales[some] = decoded.scales
            if decoded.offsets is not None:
                offsets[some] = decoded.offsets + decoded.scales * shift if moves_offsets else decoded.offsets
            if scheme.has_factors:
                factors[some] = np.stack(decoded.factors, 1)
    return QuantizedRows(
        torch.from_numpy(codes).view(rows, -1),
        _rows(scales, rows) if scheme.has_factors else _rows(scales, rows).to(scheme.scale_dtype),
        _rows(offsets, rows) if scheme.has_offsets else None,
        torch.from_numpy(factors).view(rows, -1, factors.shape[1]) if scheme.has_factors else None,
    )


def _rows(values: np.ndarray, rows: int) -> Tensor:
    return torch.from_numpy(values).view(rows, -1)


def _chunks(num_blocks: int, kind: TensorType) -> Iterator[slice]:
    """Slices of the blocks that are decoded at a time, so that intermediate arrays fit the CPU cache."""
    step = _CHUNK // kind.block_size
    return (slice(start, min(start + step, num_blocks)) for start in range(0, num_blocks, step))
