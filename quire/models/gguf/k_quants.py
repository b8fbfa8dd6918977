"""GGUF's K quantizations: blocks of 256 numbers in groups with quantized scales of their own.

number = (scale * group scale) * code, in some types - (low * group low); see `quants` for the rules.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.models.gguf.quants import Blocks, Codes, Numbers

Q2_K = np.dtype([("groups", "u1", 16), ("codes", "u1", 64), ("scale", "<f2"), ("low", "<f2")])
Q3_K = np.dtype([("mask", "u1", 32), ("codes", "u1", 64), ("groups", "u1", 12), ("scale", "<f2")])
Q4_K = np.dtype([("scale", "<f2"), ("low", "<f2"), ("groups", "u1", 12), ("codes", "u1", 128)])
Q5_K = np.dtype([("scale", "<f2"), ("low", "<f2"), ("groups", "u1", 12), ("high", "u1", 32), ("codes", "u1", 128)])
Q6_K = np.dtype([("codes", "u1", 128), ("high", "u1", 64), ("groups", "i1", 16), ("scale", "<f2")])


def q2_k(blocks: Blocks) -> Numbers:
    """16 groups of 16 numbers of 2 bits, each with a scale and a low of 4 bits."""
    scales = _scaled(blocks["scale"], blocks["groups"] & 15)
    lows = _scaled(blocks["low"], blocks["groups"] >> 4)
    codes = _fields(blocks["codes"].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    return (scales * codes - lows).reshape(-1, 256)


def q3_k(blocks: Blocks) -> Numbers:
    """16 groups of 16 numbers of 3 bits with a sign, each with a scale of 6 bits."""
    packed = blocks["groups"]
    groups = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1) | _fields(packed[:, 8:], 2) << 4
    scales = _scaled(blocks["scale"], groups.astype(np.int8) - np.int8(32))
    codes = _fields(blocks["codes"].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    absent = (_fields(blocks["mask"], 1) ^ 1).reshape(-1, 16, 16)  # a bit of the mask that is not set takes 4 off
    return (scales * (codes.astype(np.int8) - (absent << 2).astype(np.int8))).reshape(-1, 256)


def q4_k(blocks: Blocks) -> Numbers:
    """8 groups of 32 numbers of 4 bits, each with a scale and a low of 6 bits."""
    scales, lows = _six_bits(blocks)
    codes = _fields(blocks["codes"].reshape(-1, 4, 32), 4).reshape(-1, 8, 32)
    return (scales * codes - lows).reshape(-1, 256)


def q5_k(blocks: Blocks) -> Numbers:
    """As q4_k, with a fifth bit."""
    scales, lows = _six_bits(blocks)
    codes = _fields(blocks["codes"].reshape(-1, 4, 32), 4).reshape(-1, 8, 32)
    codes |= _fields(blocks["high"], 1).reshape(-1, 8, 32) << 4
    return (scales * codes - lows).reshape(-1, 256)


def q6_k(blocks: Blocks) -> Numbers:
    """16 groups of 16 numbers of 6 bits, 32 means zero, each group with a scale of 8 bits."""
    codes = _fields(blocks["codes"].reshape(-1, 2, 64), 4) | _fields(blocks["high"].reshape(-1, 2, 32), 2) << 4
    centred = codes.reshape(-1, 16, 16).astype(np.int8) - np.int8(32)
    return (_scaled(blocks["scale"], blocks["groups"]) * centred).reshape(-1, 256)


def _scaled(scale: NDArray[np.float16], groups: NDArray[np.integer[Any]]) -> Numbers:
    """One factor for each group, from the block's: (blocks, groups, 1)."""
    return (scale.astype(np.float32)[:, None] * groups)[:, :, None]


def _fields(packed: Codes, bits: int) -> Codes:
    """The lowest `bits` of every byte of a row, then the next higher ones, ...: (..., 8 / bits * bytes)."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields = (packed[..., None, :] >> shifts) & np.uint8((1 << bits) - 1)
    return fields.reshape(*packed.shape[:-1], -1)


def _six_bits(blocks: Blocks) -> tuple[Numbers, Numbers]:
    """Scales and lows of 8 groups: the first 4 of each plain, the high bits of the others above them."""
    first, second, rest = (blocks["groups"][:, i : i + 4] for i in (0, 4, 8))
    scales = np.concatenate([first & 63, rest & 15 | first >> 2 & 48], axis=1)
    lows = np.concatenate([second & 63, rest >> 4 | second >> 2 & 48], axis=1)
    return _scaled(blocks["scale"], scales), _scaled(blocks["low"], lows)
