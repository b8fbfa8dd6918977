"""The types of GGUF's tensors by number: how many numbers a block holds, how it lies in memory, how it is decoded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from quire.models.gguf import k_quants, quants


@dataclass(frozen=True, slots=True)
class TensorType:
    """Numbers in blocks of equal size; a row of a tensor is a whole number of blocks."""

    name: str
    block_size: int  # numbers
    layout: np.dtype  # of one block
    decode: Callable[[np.ndarray], np.ndarray] | None  # (blocks,) -> (blocks, block_size) float32; None: as stored

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.layout.itemsize


TENSOR_TYPES: Mapping[int, TensorType] = MappingProxyType(
    {
        0: TensorType("F32", 1, np.dtype("<f4"), None),
        1: TensorType("F16", 1, np.dtype("<f2"), None),
        30: TensorType("BF16", 1, np.dtype("<i2"), None),  # its bits: numpy has no such type
        2: TensorType("Q4_0", 32, quants.Q4_0, quants.q4_0),
        3: TensorType("Q4_1", 32, quants.Q4_1, quants.q4_1),
        6: TensorType("Q5_0", 32, quants.Q5_0, quants.q5_0),
        7: TensorType("Q5_1", 32, quants.Q5_1, quants.q5_1),
        8: TensorType("Q8_0", 32, quants.Q8_0, quants.q8_0),
        10: TensorType("Q2_K", 256, k_quants.Q2_K, k_quants.q2_k),
        11: TensorType("Q3_K", 256, k_quants.Q3_K, k_quants.q3_k),
        12: TensorType("Q4_K", 256, k_quants.Q4_K, k_quants.q4_k),
        13: TensorType("Q5_K", 256, k_quants.Q5_K, k_quants.q5_k),
        14: TensorType("Q6_K", 256, k_quants.Q6_K, k_quants.q6_k),
    }
)

REFUSED: Mapping[int, str] = MappingProxyType(
    {
        **{9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 34: "TQ1_0", 35: "TQ2_0"},
        **{16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S"},
        **{23: "IQ4_XS", 29: "IQ1_M", 39: "MXFP4", 40: "NVFP4"},
    }
)
