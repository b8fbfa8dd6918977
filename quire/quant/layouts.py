"""Published layouts of quantized linear layers: AWQ, GPTQ, compressed-tensors, and FP8 with scales of blocks.

A layer has several tensors, such as `qweight`, `qzeros` and `scales`. A layout checks their shapes before they are
read, and makes of them rows of codes, or numbers where no scheme holds them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from quire.kernels.contract import QuantizedRows, Scheme
from quire.kernels.reference.codes import dequantize

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of 8 neighbouring columns in a packed number
_SCALES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
_FLOAT8 = "F8_E4M3"


class Part(NamedTuple):
    """A tensor of a layer, as its header describes it."""

    shape: tuple[int, ...]
    dtype: str  # safetensors' name


class Layer(NamedTuple):
    """A quantized linear layer. scheme: of its rows of codes; None if no scheme holds them."""

    rows: int
    columns: int
    scheme: Scheme | None


Parts = Mapping[str, Part]
Tensors = Mapping[str, Tensor]  # by the last component of their names


class Layout(Protocol):
    """One layout. Methods raise ValueError for tensors that do not fit together."""

    marker: ClassVar[str]  # the last component of the name of a tensor that every quantized layer has
    others: ClassVar[tuple[str, ...]]  # those of the other tensors that it may have

    def layer(self, parts: Parts) -> Layer | None:
        """The layer that these tensors are; None for a layer that is not quantized."""

    def codes(self, tensors: Tensors, layer: Layer) -> QuantizedRows:
        """The rows of a layer in its scheme."""

    def numbers(self, tensors: Tensors, layer: Layer) -> Tensor:
        """The dequantized weight, float32 (rows, columns)."""


def layout_of(settings: Mapping[str, object]) -> Layout:
    """The layout of a `quantization_config`. Raises ValueError for one that is not supported, with what to use."""
    method = settings.get("quant_method")
    match method:
        case "awq":
            return _awq(settings)
        case "gptq":
            return _gptq(settings)
        case "compressed-tensors":
            return CompressedTensors(_compressed_bits(settings))
        case "fp8":
            return Fp8(_block(settings))
    raise ValueError(
        f"quant_method {method!r:.80} is not supported; use a checkpoint in AWQ, GPTQ, compressed-tensors, FP8 or "
        "GGUF, or one in 16 bits with --quantization int8 or int4"
    )


def _awq(settings: Mapping[str, object]) -> "Packed":
    if settings.get("bits", settings.get("w_bit")) != 4 or str(settings.get("version", "gemm")).lower() != "gemm":
        raise ValueError("AWQ has 4 bits and the version 'gemm' here; other versions are not supported")
    return Packed(4, _group_size(settings), awq=True)


def _gptq(settings: Mapping[str, object]) -> "Packed":
    bits = settings.get("bits")
    if bits not in (4, 8):
        raise ValueError(f"GPTQ with {bits!r:.20} bits is not supported; 4 and 8 are")
    lowest = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1
    return Packed(
        4 if bits == 4 else 8,
        _group_size(settings),
        lowest_zero=lowest,
        symmetric=settings.get("sym") is True,
        any_order=bool(settings.get("desc_act")),
    )


def _compressed_bits(settings: Mapping[str, object]) -> int:
    """The bits of weights, which must be the same in all groups of layers. Raises ValueError."""
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ValueError("config_groups must be an object with the weights of each group of layers")
    weights = [group.get("weights") if isinstance(group, dict) else None for group in groups.values()]
    bits = [one.get("num_bits") if isinstance(one, dict) else None for one in weights]
    if bits not in ([4] * len(bits), [8] * len(bits)):
        raise ValueError(f"weights must have 4 bits or 8 in all groups of layers, not {bits!r:.80}")
    return 4 if bits[0] == 4 else 8


def _group_size(settings: Mapping[str, object]) -> int:
    size = settings.get("group_size", settings.get("q_group_size", 128))
    if not isinstance(size, int) or size < -1 or (size % 8 and size != -1):
        raise ValueError(f"group_size must be -1 or a multiple of 8, not {size!r:.20}")
    return max(size, 0)


def _block(settings: Mapping[str, object]) -> tuple[int, int]:
    block = settings.get("weight_block_size") or [0, 0]
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(size, int) and size >= 0 for size in block):
        raise ValueError(f"weight_block_size must be two sizes, not {block!r:.80}")
    return block[0], block[1]


@dataclass(frozen=True, slots=True)
class Packed:
    """AWQ and GPTQ: codes of a column (in, out) packed into int32, value = scale * (code - zero)."""

    bits: int
    group_size: int  # 0: all columns
    awq: bool = False  # packed along `out`, in another order
    lowest_zero: int = 0  # added to stored zeros
    symmetric: bool = False  # whether all zeros are the code in the middle
    any_order: bool = False  # whether columns of a group are not neighbours

    marker: ClassVar[str] = "qweight"
    others: ClassVar[tuple[str, ...]] = ("qzeros", "scales", "g_idx")

    def layer(self, parts: Parts) -> Layer:
        """See Layout."""
        per_word = 32 // self.bits
        first, second = _matrix(parts, "qweight")
        columns, rows = (first, second * per_word) if self.awq else (first * per_word, second)
        size = self.group_size or columns
        groups = -(-columns // size)
        if columns % size:
            raise ValueError(f"{columns} columns cannot be divided into groups of {size}")
        _expect(parts, "scales", (groups, rows))
        _expect(parts, "qzeros", (groups, rows // per_word))
        if parts["scales"].dtype not in _SCALES:
            raise ValueError(f"scales must be floating point, not {parts['scales'].dtype}")
        scheme = Scheme(self.bits, self.group_size, _SCALES[parts["scales"].dtype], has_offsets=not self.symmetric)
        return Layer(rows, columns, None if self.any_order else scheme)

    def codes(self, tensors: Tensors, layer: Layer) -> QuantizedRows:
        """See Layout."""
        codes = self._unpacked(tensors["qweight"], along_rows=self.awq).T.to(torch.uint8).contiguous()
        scales, middles = tensors["scales"].T.contiguous(), (1 << (self.bits - 1)) - self._zeros(tensors)
        if not self.symmetric:
            return QuantizedRows(codes, scales, (scales.float() * middles).to(scales.dtype))
        if middles.any():
            raise ValueError("qzeros must all be the code in the middle, because the config says sym")
        return QuantizedRows(codes, scales)

    def numbers(self, tensors: Tensors, layer: Layer) -> Tensor:
        """See Layout."""
        codes = self._unpacked(tensors["qweight"], along_rows=self.awq).T
        scales, size = tensors["scales"].T.float(), self.group_size or layer.columns
        groups = tensors["g_idx"].long() if "g_idx" in tensors else torch.arange(layer.columns) // size
        if groups.shape != (layer.columns,) or not 0 <= int(groups.min()) <= int(groups.max()) < scales.shape[1]:
            raise ValueError("g_idx must have the group of each column")
        return (codes - self._zeros(tensors)[:, groups]) * scales[:, groups]

    def _zeros(self, tensors: Tensors) -> Tensor:
        """The zeros (rows, groups)."""
        return self._unpacked(tensors["qzeros"], along_rows=True).T + self.lowest_zero

    def _unpacked(self, packed: Tensor, *, along_rows: bool) -> Tensor:
        """int32 (first, second) as codes: (first, many * second), or (many * first, second)."""
        places = _AWQ_PLACES if self.awq else range(32 // self.bits)
        shifts = torch.tensor([self.bits * place for place in places], dtype=torch.int32)
        mask = (1 << self.bits) - 1
        if along_rows:
            return (packed[:, :, None] >> shifts & mask).flatten(1)
        return (packed[:, None, :] >> shifts[:, None] & mask).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """compressed-tensors: packed codes or int8 with scales for rows or groups, and float8 with scales for rows."""

    bits: int  # of packed codes

    marker: ClassVar[str] = "weight_scale"
    others: ClassVar[tuple[str, ...]] = (
        *("weight", "weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx"),
        "input_scale",
    )

    def layer(self, parts: Parts) -> Layer:
        """See Layout."""
        if "weight_g_idx" in parts:
            raise ValueError("columns in activation order (weight_g_idx) are not supported in this layout")
        if "weight_packed" in parts:
            rows, words = _matrix(parts, "weight_packed")
            return Layer(rows, words * 32 // self.bits, self._scheme(parts, rows, words * 32 // self.bits, self.bits))
        rows, columns = _matrix(parts, "weight")
        if parts["weight"].dtype == _FLOAT8:
            _expect_scales(parts, "weight_scale", rows)
            return Layer(rows, columns, None)
        if parts["weight"].dtype != "I8":
            raise ValueError(f"weight must be int8 or float8, not {parts['weight'].dtype}")
        return Layer(rows, columns, self._scheme(parts, rows, columns, 8))

    @staticmethod
    def _scheme(parts: Parts, rows: int, columns: int, bits: int) -> Scheme:
        found, groups = _matrix(parts, "weight_scale")
        dtype = _SCALES.get(parts["weight_scale"].dtype)
        if found != rows or not groups or columns % groups or dtype is None:
            shape = parts["weight_scale"].shape
            raise ValueError(f"weight_scale {shape} of {parts['weight_scale'].dtype} does not fit {(rows, columns)}")
        if "weight_zero_point" in parts:
            packed = parts["weight_zero_point"].dtype == "I32"  # along the rows
            _expect(parts, "weight_zero_point", (-(-rows * bits // 32) if packed else rows, groups))
        size = 0 if groups == 1 else columns // groups
        return Scheme(bits, size, dtype if size else torch.float32, has_offsets="weight_zero_point" in parts)

    def codes(self, tensors: Tensors, layer: Layer) -> QuantizedRows:
        """See Layout."""
        if layer.scheme is None:
            raise ValueError("no scheme holds float8")
        zero_point, scales = layer.scheme.zero_point, tensors["weight_scale"].to(layer.scheme.scale_dtype)
        if "weight_packed" in tensors:
            codes = _unpacked_rows(tensors["weight_packed"], layer.scheme.bits)
        else:
            codes = (tensors["weight"].to(torch.int16) + zero_point).to(torch.uint8)
        if not layer.scheme.has_offsets:
            return QuantizedRows(codes, scales)
        zeros = tensors["weight_zero_point"]
        if zeros.dtype == torch.int32:  # packed along the rows
            zeros = _unpacked_rows(zeros.T, layer.scheme.bits).T[: layer.rows].to(torch.int16) - zero_point
        return QuantizedRows(codes, scales, (scales.float() * -zeros.float()).to(scales.dtype))

    def numbers(self, tensors: Tensors, layer: Layer) -> Tensor:
        """See Layout."""
        if layer.scheme is not None:
            return dequantize(self.codes(tensors, layer), layer.scheme)
        return tensors["weight"].float() * tensors["weight_scale"].float().reshape(-1, 1)


@dataclass(frozen=True, slots=True)
class Fp8:
    """float8 weights with a scale for each block, or one for the weight. No scheme holds them."""

    block: tuple[int, int]  # rows and columns of a block; (0, 0): one scale

    marker: ClassVar[str] = "weight"
    others: ClassVar[tuple[str, ...]] = ("weight_scale_inv", "weight_scale", "input_scale")

    def layer(self, parts: Parts) -> Layer | None:
        """See Layout."""
        if parts["weight"].dtype != _FLOAT8:
            return None
        rows, columns = _matrix(parts, "weight")
        name = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
        if name not in parts:
            raise ValueError("a float8 weight needs weight_scale_inv or weight_scale")
        if self.block[0] and parts[name].shape != (-(-rows // self.block[0]), -(-columns // self.block[1])):
            raise ValueError(f"{name} of shape {parts[name].shape} does not fit blocks of {self.block}")
        if not self.block[0]:
            _expect_scales(parts, name, 1)
        return Layer(rows, columns, None)

    def codes(self, tensors: Tensors, layer: Layer) -> QuantizedRows:
        """Raises ValueError: no scheme holds float8."""
        raise ValueError("no scheme holds float8")

    def numbers(self, tensors: Tensors, layer: Layer) -> Tensor:
        """See Layout."""
        scales = tensors["weight_scale_inv" if "weight_scale_inv" in tensors else "weight_scale"].float()
        if self.block[0]:
            scales = scales.repeat_interleave(self.block[0], 0)[: layer.rows]
            scales = scales.repeat_interleave(self.block[1], 1)[:, : layer.columns]
        return tensors["weight"].float() * scales


def _matrix(parts: Parts, name: str) -> tuple[int, int]:
    """The shape of a part with two dimensions. Raises ValueError."""
    if name not in parts:
        raise ValueError(f"{name} is missing")
    shape = parts[name].shape
    if len(shape) != 2:
        raise ValueError(f"{name} must have two dimensions, not {len(shape)}")
    return shape[0], shape[1]


def _expect(parts: Parts, name: str, shape: tuple[int, int]) -> None:
    if _matrix(parts, name) != shape:
        raise ValueError(f"{name}: expected shape {shape}, found {parts[name].shape}")


def _expect_scales(parts: Parts, name: str, rows: int) -> None:
    """Raises ValueError unless a part has one number, or one for each row."""
    if prod(parts[name].shape) not in (1, rows):
        raise ValueError(f"{name}: expected one scale or {rows}, found shape {parts[name].shape}")


def _unpacked_rows(packed: Tensor, bits: int) -> Tensor:
    """int32 (rows, words) as codes uint8 (rows, words * 32 / bits), the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (packed[:, :, None] >> shifts & ((1 << bits) - 1)).flatten(1).to(torch.uint8)
