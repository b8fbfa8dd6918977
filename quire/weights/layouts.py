"""Published layouts of quantized linear layers: AWQ, GPTQ, compressed-tensors, ModelOpt, and FP8 with scales of blocks.

A layer has several tensors, such as `qweight`, `qzeros` and `scales`. A layout checks their shapes before they are
read, and makes of them rows of codes, or numbers where no scheme holds them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from quire.kernels.contract import MXFP4, NVFP4, QuantizedRows, Scheme
from quire.kernels.reference.codes import dequantize
from quire.weights.settings import FIELDS, check_settings

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of 8 neighbouring columns in a packed number
_FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}  # of scales, and of plain weights
_FLOAT8 = "F8_E4M3"
_E8M0 = ("U8", "F8_E8M0")  # types of scales that are powers of two: the code is the exponent + 127
_MXFP8_GROUP = 32  # columns with one scale
_NVFP4 = replace(NVFP4, scale_dtype=torch.float32)  # because a stored factor is any float32
_MODELOPT = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4", "MXFP8", "MIXED_PRECISION")


class Part(NamedTuple):
    """A tensor of a layer, as its header describes it."""

    shape: tuple[int, ...]
    dtype: str  # safetensors' name
    values: Tensor | None = None  # of a part in `Layout.indices`


class Layer(NamedTuple):
    """A quantized linear layer, or a stack of them. scheme: of the rows of codes; None if no scheme holds them."""

    rows: int
    columns: int
    scheme: Scheme | None
    experts: int = 0  # layers of a stack, whose tensors have one more dimension in front; 0: not a stack


Parts = Mapping[str, Part]
Tensors = Mapping[str, Tensor]  # by the last component of their names


class Layout(Protocol):
    """One layout. Methods raise ValueError for tensors that do not fit together."""

    separator: ClassVar[str]  # before the last component of a name
    marker: ClassVar[str]  # the last component of the name of a tensor that every quantized layer has
    others: ClassVar[tuple[str, ...]]  # those of the other tensors that it may have
    indices: ClassVar[tuple[str, ...]]  # those of small tensors whose values `layer` needs

    def layer(self, parts: Parts) -> Layer | None:
        """The layer that these tensors are; None for a layer that is not quantized."""

    def codes(self, tensors: Tensors, layer: Layer) -> QuantizedRows:
        """The rows of a layer, or of one layer of a stack, in its scheme."""

    def numbers(self, tensors: Tensors, layer: Layer) -> Tensor:
        """The dequantized weight, float32 (rows, columns)."""


def layout_of(settings: Mapping[str, object]) -> Layout:
    """The layout of a `quantization_config`. Raises ValueError for a field that is not supported, with what to use."""
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in FIELDS:
        raise ValueError(
            f"quant_method {method!r:.80} is not supported; use a checkpoint in AWQ, GPTQ, compressed-tensors, "
            "ModelOpt, FP8, MXFP4 or GGUF, or one in 16 bits with --quantization int8 or int4"
        )
    check_settings(settings, FIELDS[method])
    match method:
        case "awq":
            return _awq(settings)
        case "gptq":
            return _gptq(settings)
        case "compressed-tensors":
            return _compressed_tensors(settings)
        case "modelopt" | "modelopt_fp4":
            return _modelopt(settings)
        case "mxfp4":
            return Mxfp4()
    return Fp8(_block(settings.get("weight_block_size")))


def _awq(settings: Mapping[str, object]) -> "Packed":
    if settings.get("bits", settings.get("w_bit")) != 4:
        raise ValueError("AWQ has 4 bits here: bits or w_bit must say so")
    return Packed((4,), (_group_size(settings),), awq=True)


def _gptq(settings: Mapping[str, object]) -> "Packed":
    each = [settings, *_overrides(settings, "dynamic"), *_overrides(settings, "extra_config")]
    bits = [settings.get("bits"), *(one["bits"] for one in each[1:] if "bits" in one)]
    if not all(isinstance(some, int) and some in (4, 8) for some in bits):
        raise ValueError(f"GPTQ with {', '.join(map(str, bits)):.80} bits is not supported; 4 and 8 are")
    formats = [settings.get(name) for name in ("checkpoint_format", "format")]
    return Packed(
        tuple(dict.fromkeys(8 if some == 8 else 4 for some in bits)),
        tuple(dict.fromkeys(_group_size(one) for one in each if one is settings or "group_size" in one)),
        lowest_zero=0 if "gptq_v2" in formats else 1,
        symmetric=settings.get("sym") is True and not any(one.get("sym") is False for one in each),
        needs_index=bool(settings.get("desc_act")),
    )


def _overrides(settings: Mapping[str, object], name: str) -> list[Mapping[str, object]]:
    """The settings of some layers, by a pattern of their names. A pattern of layers that are not quantized has none."""
    found = settings.get(name) or {}
    if not isinstance(found, dict) or not all(isinstance(one, dict | None) for one in found.values()):
        raise ValueError(f"{name} must be an object of objects, not {found!r:.80}")
    return [one for pattern, one in found.items() if one and not pattern.startswith("-:")]


def _compressed_tensors(settings: Mapping[str, object]) -> "CompressedTensors":
    groups = settings.get("config_groups")
    if not groups and settings.get("kv_cache_scheme"):  # a checkpoint with scales of KV alone
        return CompressedTensors(8)
    if not isinstance(groups, dict) or not groups:
        raise ValueError("config_groups must be an object with the weights of each group of layers")
    weights = [group.get("weights") if isinstance(group, dict) else None for group in groups.values()]
    each = [one if isinstance(one, dict) else {} for one in weights]
    bits = [one.get("num_bits") for one in each]
    packed = [one.get("num_bits") for one in each if one.get("type") != "float"]
    if any(some not in (4, 8) for some in bits) or any(some != packed[0] for some in packed):
        raise ValueError(f"weights must have 4 bits or 8 in all groups of layers, not {bits!r:.80}")
    blocks = [one["block_structure"] for one in each if one.get("block_structure")]
    if any(block != blocks[0] for block in blocks):
        raise ValueError("block_structure must be the same in all groups of layers")
    return CompressedTensors(
        8 if 8 in packed else 4,
        _block(blocks[0] if blocks else None),
        _columns_of_scales(each),
        tuple({str(one.get("type", "int")) for one in each}),
        needs_zeros=all(one.get("symmetric") is False for one in each),
        needs_index=all(one.get("actorder") in ("group", "dynamic", True) for one in each),
    )


def _columns_of_scales(weights: list[dict[str, object]]) -> tuple[int, ...]:
    """How many columns may share a scale, 0: all; (): the settings do not say it."""
    found = []
    for one in weights:
        size, strategy = one.get("group_size"), one.get("strategy")
        if isinstance(size, int) and size > 0:
            found.append(size)
        elif strategy in ("channel", "tensor"):
            found.append(0)
        else:
            return ()
    return tuple(found)


def _modelopt(settings: Mapping[str, object]) -> "ModelOpt":
    algorithm = settings.get("quant_algo")
    if algorithm not in _MODELOPT and (algorithm or not settings.get("kv_cache_quant_algo")):
        raise ValueError(f"quant_algo {algorithm!r:.80} is not supported; {', '.join(_MODELOPT)} are")
    return ModelOpt()


def _is_plain(parts: Parts) -> bool:
    """Whether the weight is not quantized, whatever other tensors the layer has."""
    return "weight" in parts and parts["weight"].dtype in _FLOATS


def _group_size(settings: Mapping[str, object]) -> int:
    size = settings.get("group_size", settings.get("q_group_size", 128))
    if not isinstance(size, int) or size < -1 or (size % 8 and size != -1):
        raise ValueError(f"group_size must be -1 or a multiple of 8, not {size!r:.20}")
    return max(size, 0)


def _block(block: object) -> tuple[int, int]:
    block = block or [0, 0]
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(size, int) and size >= 0 for size in block):
        raise ValueError(f"weight_block_size must be two sizes, not {block!r:.80}")
    return block[0], block[1]


@dataclass(frozen=True, slots=True)
class Packed:
    """AWQ and GPTQ: codes of a column (in, out) packed into int32, value = scale * (code - zero)."""

    bits: tuple[int, ...]  # that a layer may have, and columns of its groups, 0: all; the shapes of a layer decide
    group_sizes: tuple[int, ...]
    awq: bool = False  # packed along `out`, in another order
    lowest_zero: int = 0  # added to stored zeros
    symmetric: bool = False  # whether all zeros are the code in the middle
    needs_index: bool = False  # whether every layer needs `g_idx`, because columns of a group may not be neighbours

    separator: ClassVar[str] = "."
    marker: ClassVar[str] = "qweight"
    others: ClassVar[tuple[str, ...]] = ("qzeros", "scales", "g_idx")
    indices: ClassVar[tuple[str, ...]] = ("g_idx",)

    def layer(self, parts: Parts) -> Layer:
        """See Layout."""
        _expect_type(parts, "qweight", "I32")
        _expect_type(parts, "qzeros", "I32")
        _expect_type(parts, "scales", *_FLOATS)
        errors = []
        for bits, group_size in product(self.bits, self.group_sizes):
            try:
                return self._layer(parts, bits, group_size)
            except ValueError as error:
                errors.append(error)
        raise errors[0]

    def _layer(self, parts: Parts, bits: int, group_size: int) -> Layer:
        per_word = 32 // bits
        first, second = _matrix(parts, "qweight")
        columns, rows = (first, second * per_word) if self.awq else (first * per_word, second)
        size = group_size or columns
        if not columns or columns % size:
            raise ValueError(f"{columns} columns cannot be divided into groups of {size}")
        _expect(parts, "scales", (columns // size, rows))
        _expect(parts, "qzeros", (columns // size, rows // per_word))
        scheme = Scheme(bits, group_size, _FLOATS[parts["scales"].dtype], has_offsets=not self.symmetric)
        return Layer(rows, columns, scheme if self._is_in_order(parts, columns, size) else None)

    def _is_in_order(self, parts: Parts, columns: int, size: int) -> bool:
        """Whether the columns of each group are neighbours, by `g_idx`, whatever the settings say.

        Some writers leave it zero if columns are in order; with several groups, zeros cannot be an order.
        """
        if "g_idx" not in parts:
            if self.needs_index and size < columns:
                raise ValueError("g_idx is missing, although desc_act is true")
            return True
        found = parts["g_idx"].values
        _expect_type(parts, "g_idx", "I32", "I64")
        if found is None or found.shape != (columns,):
            raise ValueError(f"g_idx: expected shape {(columns,)}, found {parts['g_idx'].shape}")
        if not 0 <= int(found.min()) <= int(found.max()) < columns // size:
            raise ValueError(f"g_idx must have the group of each column, from 0 to {columns // size - 1}")
        return not found.any() or torch.equal(found.long(), torch.arange(columns) // size)

    @staticmethod
    def _bits(tensors: Tensors, layer: Layer) -> int:
        """The bits of a layer, which has a zero for each row."""
        return 32 * tensors["qzeros"].shape[1] // layer.rows

    def codes(self, tensors: Tensors, layer: Layer) -> QuantizedRows:
        """See Layout."""
        bits = self._bits(tensors, layer)
        codes = self._unpacked(tensors["qweight"], bits, along_rows=self.awq).T.to(torch.uint8).contiguous()
        scales, middles = tensors["scales"].T.contiguous(), (1 << (bits - 1)) - self._zeros(tensors, bits)
        if not self.symmetric:
            return QuantizedRows(codes, scales, (scales.float() * middles).to(scales.dtype))
        if middles.any():
            raise ValueError("qzeros must all be the code in the middle, because the config says sym")
        return QuantizedRows(codes, scales)

    def numbers(self, tensors: Tensors, layer: Layer) -> Tensor:
        """See Layout."""
        bits = self._bits(tensors, layer)
        codes = self._unpacked(tensors["qweight"], bits, along_rows=self.awq).T
        scales = tensors["scales"].T.float()
        size = layer.columns // scales.shape[1]
        groups = torch.arange(layer.columns) // size if layer.scheme else tensors["g_idx"].long()
        return (codes - self._zeros(tensors, bits)[:, groups]) * scales[:, groups]

    def _zeros(self, tensors: Tensors, bits: int) -> Tensor:
        """The zeros (rows, groups)."""
        return self._unpacked(tensors["qzeros"], bits, along_rows=True).T + self.lowest_zero

    def _unpacked(self, packed: Tensor, bits: int, *, along_rows: bool) -> Tensor:
        """int32 (first, second) as codes: (first, many * second), or (many * first, second)."""
        places = _AWQ_PLACES if self.awq else range(32 // bits)
        shifts = torch.tensor([bits * place for place in places], dtype=torch.int32)
        mask = (1 << bits) - 1
        if along_rows:
            return (packed[:, :, None] >> shifts & mask).flatten(1)
        return (packed[:, None, :] >> shifts[:, None] & mask).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """compressed-tensors: packed codes, int8 or float8 with scales for rows, groups or blocks; NVFP4, MXFP4, MXFP8."""

    bits: int  # of packed integers
    block: tuple[int, int] = (0, 0)  # rows and columns of a block of float8; (0, 0): no blocks
    columns_of_scales: tuple[int, ...] = ()  # columns that may share a scale, 0: all; (): any number
    types: tuple[str, ...] = ("int", "float")  # of codes
    needs_zeros: bool = False  # whether every layer needs `weight_zero_point`
    needs_index: bool = False  # whether every layer needs `weight_g_idx`

    separator: ClassVar[str] = "."
    marker: ClassVar[str] = "weight_scale"
    indices: ClassVar[tuple[str, ...]] = ("weight_g_idx", "weight_shape")
    others: ClassVar[tuple[str, ...]] = (
        *("weight", "weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx"),
        *("weight_global_scale", "input_global_scale", "input_scale"),
    )

    def layer(self, parts: Parts) -> Layer | None:
        """See Layout."""
        if _is_plain(parts):
            return None
        if "weight_packed" in parts and parts["weight_packed"].dtype == "U8":
            return _fp4_layer(parts, "weight_packed", "weight_global_scale")
        if "weight_packed" in parts:
            _expect_type(parts, "weight_packed", "I32")
            rows, words = _matrix(parts, "weight_packed")
            return self._integers(parts, rows, words * 32 // self.bits, self.bits)
        rows, columns = _matrix(parts, "weight")
        _expect_type(parts, "weight", *(_FLOAT8 if each == "float" else "I8" for each in self.types))
        if parts["weight"].dtype == _FLOAT8:
            scheme = _float8_scheme(parts, "weight_scale", rows, columns, self.block)
            if not self.block[0]:
                self._check_columns(scheme.group_size, columns)
            return Layer(rows, columns, scheme)
        return self._integers(parts, rows, columns, 8)

    def _integers(self, parts: Parts, rows: int, columns: int, bits: int) -> Layer:
        if "weight_shape" in parts:
            _expect_type(parts, "weight_shape", "I32", "I64")
            shape = parts["weight_shape"].values
            if shape is None or shape.tolist() != [rows, columns]:
                said = parts["weight_shape"].shape if shape is None else shape.tolist()
                raise ValueError(f"weight_shape is {said}, but the codes have {rows} rows and {columns} columns")
        scheme = self._scheme(parts, rows, columns, bits)
        self._check_order(parts, columns, scheme.group_size)
        return Layer(rows, columns, scheme)

    def _check_columns(self, size: int, columns: int) -> None:
        """Raise ValueError unless the settings say this size of groups, 0: all columns, which may be one group."""
        if self.columns_of_scales and (size or columns) not in [each or columns for each in self.columns_of_scales]:
            raise ValueError(
                f"weight_scale has a scale for {size or 'all'} columns, but the settings say "
                f"{' or '.join(str(each or 'all') for each in self.columns_of_scales)}"
            )

    def _check_order(self, parts: Parts, columns: int, size: int) -> None:
        """Raise ValueError unless the columns of each group are neighbours. Numbers of -1 say so, too."""
        if "weight_g_idx" not in parts:
            if self.needs_index and size:
                raise ValueError("weight_g_idx is missing, although actorder is 'group'")
            return
        found = parts["weight_g_idx"].values
        _expect_type(parts, "weight_g_idx", "I32", "I64")
        if found is None or found.shape != (columns,):
            raise ValueError(f"weight_g_idx: expected shape {(columns,)}, found {parts['weight_g_idx'].shape}")
        if not (found == -1).all() and not torch.equal(found.long(), torch.arange(columns) // (size or columns)):
            raise ValueError("columns in activation order (weight_g_idx) are not supported in this layout")

    def _scheme(self, parts: Parts, rows: int, columns: int, bits: int) -> Scheme:
        found, groups = _matrix(parts, "weight_scale")
        dtype = _FLOATS.get(parts["weight_scale"].dtype)
        if found != rows or not groups or columns % groups or dtype is None:
            shape = parts["weight_scale"].shape
            raise ValueError(f"weight_scale {shape} of {parts['weight_scale'].dtype} does not fit {(rows, columns)}")
        self._check_columns(columns // groups, columns)
        if self.needs_zeros and "weight_zero_point" not in parts:
            raise ValueError("weight_zero_point is missing, although symmetric is false")
        if "weight_zero_point" in parts:
            _expect_type(parts, "weight_zero_point", "I8", "I32")
            packed = parts["weight_zero_point"].dtype == "I32"  # along the rows
            _expect(parts, "weight_zero_point", (-(-rows * bits // 32) if packed else rows, groups))
        size = 0 if groups == 1 else columns // groups
        return Scheme(bits, size, dtype if size else torch.float32, has_offsets="weight_zero_point" in parts)

    def codes(self, tensors: Tensors, layer: Layer) -> QuantizedRows:
        """See Layout."""
        scheme = require_scheme(layer)
        if scheme.grid == "e2m1":
            scales = _float_scales(tensors["weight_scale"])
            if "weight_global_scale" in tensors:
                scales = scales.float() / tensors["weight_global_scale"]
            return _fp4_rows(tensors["weight_packed"], scales)
        if scheme.grid == "e4m3":
            return _float8_rows(tensors["weight"], tensors["weight_scale"], scheme, self.block)
        scales = tensors["weight_scale"].to(scheme.scale_dtype)
        if "weight_packed" in tensors:
            codes = _unpacked_rows(tensors["weight_packed"], scheme.bits)
        else:
            codes = (tensors["weight"].to(torch.int16) + scheme.zero_point).to(torch.uint8)
        if not scheme.has_offsets:
            return QuantizedRows(codes, scales)
        zeros = tensors["weight_zero_point"]
        if zeros.dtype == torch.int32:  # packed along the rows
            zeros = _unpacked_rows(zeros.T, scheme.bits).T[: layer.rows].to(torch.int16) - scheme.zero_point
        return QuantizedRows(codes, scales, (scales.float() * -zeros.float()).to(scales.dtype))

    def numbers(self, tensors: Tensors, layer: Layer) -> Tensor:
        """See Layout."""
        return dequantize(self.codes(tensors, layer), require_scheme(layer))


@dataclass(frozen=True, slots=True)
class ModelOpt:
    """NVIDIA's Model Optimizer: NVFP4, MXFP8, and float8 with one scale or one for each row."""

    separator: ClassVar[str] = "."
    marker: ClassVar[str] = "weight_scale"
    others: ClassVar[tuple[str, ...]] = ("weight", "weight_scale_2", "input_scale", "pre_quant_scale")
    indices: ClassVar[tuple[str, ...]] = ()

    def layer(self, parts: Parts) -> Layer | None:
        """See Layout."""
        if _is_plain(parts):
            return None
        if "pre_quant_scale" in parts:
            raise ValueError("scales of the columns of x (pre_quant_scale) are not supported")
        rows, columns = _matrix(parts, "weight")
        if parts["weight"].dtype == _FLOAT8:
            return Layer(rows, columns, _float8_scheme(parts, "weight_scale", rows, columns, (0, 0)))
        if "weight_scale_2" not in parts:
            raise ValueError("weight_scale_2 is missing")
        return _fp4_layer(parts, "weight", "weight_scale_2")

    def codes(self, tensors: Tensors, layer: Layer) -> QuantizedRows:
        """See Layout."""
        scheme = require_scheme(layer)
        if scheme.grid == "e4m3":
            return _float8_rows(tensors["weight"], tensors["weight_scale"], scheme, (0, 0))
        return _fp4_rows(tensors["weight"], tensors["weight_scale"].float() * tensors["weight_scale_2"])

    def numbers(self, tensors: Tensors, layer: Layer) -> Tensor:
        """See Layout."""
        return dequantize(self.codes(tensors, layer), require_scheme(layer))


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """MXFP4 as in gpt-oss: stacks of experts, with tensors `gate_up_proj_blocks` and `gate_up_proj_scales`."""

    separator: ClassVar[str] = "_"
    marker: ClassVar[str] = "blocks"
    others: ClassVar[tuple[str, ...]] = ("scales",)
    indices: ClassVar[tuple[str, ...]] = ()

    def layer(self, parts: Parts) -> Layer:
        """See Layout."""
        blocks, scales = parts["blocks"], parts.get("scales")
        if len(blocks.shape) != 4 or blocks.shape[3] != MXFP4.group_size // 2 or blocks.dtype != "U8":
            raise ValueError(f"blocks must be uint8 (experts, rows, groups, 16), not {blocks.dtype} {blocks.shape}")
        experts, rows, groups, _ = blocks.shape
        if scales is None:
            raise ValueError("scales is missing")
        if scales.shape != (experts, rows, groups) or scales.dtype not in _E8M0:
            raise ValueError(f"scales must be uint8 {(experts, rows, groups)}, not {scales.dtype} {scales.shape}")
        return Layer(rows, groups * MXFP4.group_size, MXFP4, experts)

    def codes(self, tensors: Tensors, layer: Layer) -> QuantizedRows:
        """See Layout."""
        return _fp4_rows(tensors["blocks"].flatten(1), _float_scales(tensors["scales"]))

    def numbers(self, tensors: Tensors, layer: Layer) -> Tensor:
        """See Layout."""
        return dequantize(self.codes(tensors, layer), require_scheme(layer))


@dataclass(frozen=True, slots=True)
class Fp8:
    """float8 weights with a scale for each block, or one for the weight."""

    block: tuple[int, int]  # rows and columns of a block; (0, 0): one scale

    separator: ClassVar[str] = "."
    marker: ClassVar[str] = "weight"
    others: ClassVar[tuple[str, ...]] = ("weight_scale_inv", "weight_scale", "input_scale")
    indices: ClassVar[tuple[str, ...]] = ()

    def layer(self, parts: Parts) -> Layer | None:
        """See Layout."""
        name = self._scales(parts)
        if name not in parts and parts["weight"].dtype != _FLOAT8:
            return None
        if _is_plain(parts):
            return None
        _expect_type(parts, "weight", _FLOAT8)
        rows, columns = _matrix(parts, "weight")
        if name not in parts:
            raise ValueError("a float8 weight needs weight_scale_inv or weight_scale")
        return Layer(rows, columns, _float8_scheme(parts, name, rows, columns, self.block))

    @staticmethod
    def _scales(parts: Mapping[str, object]) -> str:
        return "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"

    def codes(self, tensors: Tensors, layer: Layer) -> QuantizedRows:
        """See Layout."""
        return _float8_rows(tensors["weight"], tensors[self._scales(tensors)], require_scheme(layer), self.block)

    def numbers(self, tensors: Tensors, layer: Layer) -> Tensor:
        """See Layout."""
        return dequantize(self.codes(tensors, layer), require_scheme(layer))


def require_scheme(layer: Layer) -> Scheme:
    """The scheme of a layer. Raises ValueError if no scheme holds it."""
    if layer.scheme is None:
        raise ValueError("no scheme holds its codes")
    return layer.scheme


def _fp4_layer(parts: Parts, codes: str, factor: str) -> Layer:
    """A layer in NVFP4 if it has the part `factor`, else in MXFP4. codes: name of the part with two codes in a byte."""
    rows, num_bytes = _matrix(parts, codes)
    scales, columns = parts["weight_scale"], 2 * num_bytes
    name, scheme, known = ("NVFP4", _NVFP4, (_FLOAT8,)) if factor in parts else ("MXFP4", MXFP4, _E8M0)
    if parts[codes].dtype != "U8" or scales.dtype not in known:
        raise ValueError(f"{name} has uint8 and scales of {known[0]}, not {parts[codes].dtype} and {scales.dtype}")
    if columns % scheme.group_size or scales.shape != (rows, columns // scheme.group_size):
        raise ValueError(f"weight_scale {scales.shape} does not fit {(rows, columns)} in groups of {scheme.group_size}")
    if factor in parts and (prod(parts[factor].shape) != 1 or parts[factor].dtype != "F32"):
        raise ValueError(f"{factor} must be one float32, not {parts[factor].shape} of {parts[factor].dtype}")
    return Layer(rows, columns, scheme)


def _fp4_rows(packed: Tensor, scales: Tensor) -> QuantizedRows:
    """uint8 (rows, columns / 2), the first column in the low bits, as rows. Scales are halved: the grid is doubled."""
    return QuantizedRows(torch.stack((packed & 15, packed >> 4), -1).flatten(1), scales * 0.5)


def _float_scales(scales: Tensor) -> Tensor:
    """Scales as numbers: codes of e8m0 become bfloat16, which has all of its powers of two. Code 255 is NaN."""
    if scales.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        return scales
    return scales.view(torch.float8_e8m0fnu).to(torch.bfloat16)


def _float8_scheme(parts: Parts, name: str, rows: int, columns: int, block: tuple[int, int]) -> Scheme:
    """The scheme of float8 with the scales in the part `name`: of blocks, of groups, of rows, or one."""
    shape, dtype = parts[name].shape, parts[name].dtype
    if dtype not in (*_FLOATS, *_E8M0):
        raise ValueError(f"{name} must be floating point or uint8, not {dtype}")
    scale_dtype, size = _FLOATS.get(dtype, torch.bfloat16), 0
    if block[0]:
        if shape != (-(-rows // block[0]), -(-columns // block[1])):
            raise ValueError(f"{name} of shape {shape} does not fit blocks of {block}")
        size = block[1]
    elif prod(shape) not in (1, rows):
        if len(shape) != 2 or shape[0] != rows or not shape[1] or columns % shape[1]:
            raise ValueError(f"{name}: expected one scale or {rows}, or groups of columns, found shape {shape}")
        size = columns // shape[1]
    if dtype in _E8M0 and not block[0] and (size or columns) != _MXFP8_GROUP:
        raise ValueError(f"{name}: expected a scale for {_MXFP8_GROUP} columns, found shape {shape}")
    return Scheme(8, size, scale_dtype, grid="e4m3")


def _float8_rows(weight: Tensor, scales: Tensor, scheme: Scheme, block: tuple[int, int]) -> QuantizedRows:
    scales, (rows, columns) = _float_scales(scales), weight.shape
    if block[0]:
        scales = scales.repeat_interleave(block[0], 0)[:rows]
    elif scales.numel() == 1:
        scales = scales.reshape(1, 1).expand(rows, 1)
    return QuantizedRows(weight.view(torch.uint8), scales.reshape(rows, scheme.num_groups(columns)))


def _matrix(parts: Parts, name: str) -> tuple[int, int]:
    """The shape of a part with two dimensions. Raises ValueError."""
    if name not in parts:
        raise ValueError(f"{name} is missing")
    shape = parts[name].shape
    if len(shape) != 2:
        raise ValueError(f"{name} must have two dimensions, not {len(shape)}")
    return shape[0], shape[1]


def _expect_type(parts: Parts, name: str, *dtypes: str) -> None:
    """Raise ValueError unless the part has one of these types."""
    if name not in parts:
        raise ValueError(f"{name} is missing")
    if parts[name].dtype not in dtypes:
        raise ValueError(f"{name}: expected type {' or '.join(dtypes)}, found {parts[name].dtype}")


def _expect(parts: Parts, name: str, shape: tuple[int, int]) -> None:
    if _matrix(parts, name) != shape:
        raise ValueError(f"{name}: expected shape {shape}, found {parts[name].shape}")


def _unpacked_rows(packed: Tensor, bits: int) -> Tensor:
    """int32 (rows, words) as codes uint8 (rows, words * 32 / bits), the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (packed[:, :, None] >> shifts & ((1 << bits) - 1)).flatten(1).to(torch.uint8)
