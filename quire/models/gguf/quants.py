"""GGUF's simple quantizations, in blocks of 32 numbers with one scale: number = scale * code (+ offset).

Each layout names the fields of a block, each function decodes blocks of that layout. The order of
operations is that of ggml's reference, so that results agree bit for bit.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[np.void]  # of one of the layouts below
Codes = NDArray[np.uint8]
Numbers = NDArray[np.floating[Any]]  # float32

Q4_0 = np.dtype([("scale", "<f2"), ("codes", "u1", 16)])
Q4_1 = np.dtype([("scale", "<f2"), ("offset", "<f2"), ("codes", "u1", 16)])
Q5_0 = np.dtype([("scale", "<f2"), ("high", "u1", 4), ("codes", "u1", 16)])
Q5_1 = np.dtype([("scale", "<f2"), ("offset", "<f2"), ("high", "u1", 4), ("codes", "u1", 16)])
Q8_0 = np.dtype([("scale", "<f2"), ("codes", "i1", 32)])


def q4_0(blocks: Blocks) -> Numbers:
    """4 bits, 8 means zero."""
    return _column(blocks["scale"]) * (_nibbles(blocks["codes"]).astype(np.int8) - np.int8(8))


def q4_1(blocks: Blocks) -> Numbers:
    """4 bits above an offset."""
    return _column(blocks["scale"]) * _nibbles(blocks["codes"]) + _column(blocks["offset"])


def q5_0(blocks: Blocks) -> Numbers:
    """5 bits, 16 means zero."""
    return _column(blocks["scale"]) * (_five_bits(blocks).astype(np.int8) - np.int8(16))


def q5_1(blocks: Blocks) -> Numbers:
    """5 bits above an offset."""
    return _column(blocks["scale"]) * _five_bits(blocks) + _column(blocks["offset"])


def q8_0(blocks: Blocks) -> Numbers:
    """8 bits with a sign."""
    codes: NDArray[np.int8] = blocks["codes"]
    return _column(blocks["scale"]) * codes


def _column(halves: NDArray[np.float16]) -> NDArray[np.float32]:
    return halves.astype(np.float32)[:, None]


def _nibbles(codes: Codes) -> Codes:
    """The low halves of all bytes, then the high ones."""
    return np.concatenate([codes & 15, codes >> 4], axis=1)


def _five_bits(blocks: Blocks) -> Codes:
    """Nibbles, each with its fifth bit from a mask."""
    fifth = np.unpackbits(blocks["high"], axis=1, bitorder="little")
    return _nibbles(blocks["codes"]) | fifth << np.uint8(4)
