"""Tensor types of GGUF: plain numbers, blocks of 32 numbers with one scale, and K-quants with blocks of 256.

A layout has the fields of a block; `quants` decodes blocks. Imports no torch, because the HTTP process reads the
tokenizer of a file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

Q4_0 = np.dtype([("scale", "<f2"), ("codes", "u1", 16)])
Q4_1 = np.dtype([("scale", "<f2"), ("offset", "<f2"), ("codes", "u1", 16)])
Q5_0 = np.dtype([("scale", "<f2"), ("high", "u1", 4), ("codes", "u1", 16)])
Q5_1 = np.dtype([("scale", "<f2"), ("offset", "<f2"), ("high", "u1", 4), ("codes", "u1", 16)])
Q8_0 = np.dtype([("scale", "<f2"), ("codes", "i1", 32)])

MXFP4 = np.dtype([("exponent", "u1"), ("codes", "u1", 16)])
IQ4_NL = Q4_0
IQ4_XS = np.dtype([("scale", "<f2"), ("scales_high", "<u2"), ("scales_low", "u1", 4), ("codes", "u1", 128)])

Q2_K = np.dtype([("groups", "u1", 16), ("codes", "u1", 64), ("scale", "<f2"), ("low", "<f2")])
Q3_K = np.dtype([("mask", "u1", 32), ("codes", "u1", 64), ("groups", "u1", 12), ("scale", "<f2")])
Q4_K = np.dtype([("scale", "<f2"), ("low", "<f2"), ("groups", "u1", 12), ("codes", "u1", 128)])
Q5_K = np.dtype([("scale", "<f2"), ("low", "<f2"), ("groups", "u1", 12), ("high", "u1", 32), ("codes", "u1", 128)])
Q6_K = np.dtype([("codes", "u1", 128), ("high", "u1", 64), ("groups", "i1", 16), ("scale", "<f2")])


@dataclass(frozen=True, slots=True)
class TensorType:
    """A tensor type of GGUF. A row of a tensor is a whole number of blocks."""

    name: str
    block_size: int  # numbers
    layout: np.dtype  # of one block

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.layout.itemsize


TENSOR_TYPES: Mapping[int, TensorType] = MappingProxyType(
    {
        0: TensorType("F32", 1, np.dtype("<f4")),
        1: TensorType("F16", 1, np.dtype("<f2")),
        30: TensorType("BF16", 1, np.dtype("<i2")),  # as int16, because numpy has no bfloat16
        2: TensorType("Q4_0", 32, Q4_0),
        3: TensorType("Q4_1", 32, Q4_1),
        6: TensorType("Q5_0", 32, Q5_0),
        7: TensorType("Q5_1", 32, Q5_1),
        8: TensorType("Q8_0", 32, Q8_0),
        10: TensorType("Q2_K", 256, Q2_K),
        11: TensorType("Q3_K", 256, Q3_K),
        12: TensorType("Q4_K", 256, Q4_K),
        13: TensorType("Q5_K", 256, Q5_K),
        14: TensorType("Q6_K", 256, Q6_K),
        20: TensorType("IQ4_NL", 32, IQ4_NL),
        23: TensorType("IQ4_XS", 256, IQ4_XS),
        39: TensorType("MXFP4", 32, MXFP4),
    }
)

UNSUPPORTED_TYPES: Mapping[int, str] = MappingProxyType(
    {
        **{9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 34: "TQ1_0", 35: "TQ2_0"},
        **{16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S"},
        **{29: "IQ1_M", 40: "NVFP4"},
    }
)
