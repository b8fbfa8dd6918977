"""The schemes of a model's weights: chosen at load, or those of the checkpoint.

Weights of the layers' projections are stored in few bits. At load, the head, or the embedding table that is also the
head, has 8 bits at least, because its errors go into every logit. Norms, biases, routers and gates of experts keep the
model's type.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import gcd
from operator import itemgetter
from types import MappingProxyType

import torch
from torch import Tensor

from quire.kernels.contract import FACTOR_COLUMNS, FP8, INT4, INT8, MXFP4, NVFP4, QuantizedRows, Scheme
from quire.kernels.reference.codes import numbers_of, scales_of
from quire.weights.checkpoint import Ranges
from quire.weights.placement import Placement

Schemes = Mapping[str, Scheme]  # by parameter of the decoder; other parameters keep the model's type
NO_SCHEMES: Schemes = MappingProxyType({})

_LAYERS = {"int8": INT8, "int4": INT4, "fp8": FP8, "mxfp4": MXFP4, "nvfp4": NVFP4}
# schemes of projections, and of the head
AT_LOAD: Mapping[str, tuple[Scheme, Scheme]] = MappingProxyType({name: (one, INT8) for name, one in _LAYERS.items()})

_PROJECTIONS = (
    "qkv.weight",
    "inputs.weight",
    "o.weight",
    "up.weight",
    "down.weight",
    "mlp.up",
    "mlp.down",
    "experts.up",
    "experts.down",
    "latent_in.weight",
    "latent_out.weight",
)


def schemes_at_load(name: str, parameters: Iterable[str], *, tied: bool) -> Schemes:
    """The schemes to which weights are rounded at load. name: of AT_LOAD. tied: whether the embedding is the head."""
    layers, head = AT_LOAD[name]
    found = {parameter: layers for parameter in parameters if _is_projection(parameter)}
    return found | {"embed.weight" if tied else "head.weight": head}


def schemes_of_checkpoint(places: Mapping[str, Placement], stored: Mapping[str, Scheme | None]) -> Schemes:
    """The schemes that hold the codes of a checkpoint as they are. places, stored: by name of a tensor.

    A parameter that several tensors fill has the widest of their schemes. It keeps the model's type if one of them has
    no scheme, if no scheme holds them all, if its rows are columns of a tensor, or if its columns are part of a group.
    """
    tensors: dict[str, list[Scheme | None]] = {}
    for name, place in places.items():
        if _is_projection(place.parameter) or place.parameter in ("embed.weight", "head.weight"):
            scheme = stored[name]
            if place.transposed or (scheme and place.ranges and not has_whole_groups(place, scheme)):
                scheme = None
            tensors.setdefault(place.parameter, []).append(scheme)
    complete = {parameter: [one for one in some if one is not None] for parameter, some in tensors.items() if all(some)}
    found = {parameter: widest(some) for parameter, some in complete.items()}
    return {parameter: scheme for parameter, scheme in found.items() if scheme is not None}


def _is_projection(parameter: str) -> bool:
    return parameter.startswith("layers.") and parameter.endswith(_PROJECTIONS)


def widest(schemes: Iterable[Scheme]) -> Scheme | None:
    """A scheme that holds rows of all the given ones. One scale for a row counts as a scale for each group.

    Different 4-bit grids become int8, whose codes have all their numbers. Scales keep factors if all of them have some.
    None: float8 and another grid.
    """
    first, *others = dict.fromkeys(schemes)
    for other in others:
        if first.grid != other.grid or not (first.has_factors and other.has_factors):
            first, other = without_factors(first), without_factors(other)
        same_grid, same_scales = first.grid == other.grid, first.scale_dtype == other.scale_dtype
        if not same_grid and "e4m3" in (first.grid, other.grid):
            return None
        first = Scheme(
            max(first.bits, other.bits) if same_grid else 8,
            gcd(first.group_size, other.group_size),
            first.scale_dtype if same_scales else torch.float32,
            first.has_offsets or other.has_offsets,
            first.grid if same_grid else "int",
            first.has_factors,
        )
    return first


def without_factors(scheme: Scheme) -> Scheme:
    """The scheme with a scale for each group instead of integers with factors. iq4_nl has scales that need float32."""
    if not scheme.has_factors:
        return scheme
    dtype = torch.float32 if scheme.grid == "iq4_nl" else scheme.scale_dtype
    return replace(scheme, has_factors=False, scale_dtype=dtype)


def simpler(scheme: Scheme) -> Iterator[Scheme]:
    """Schemes that hold the given one, the smallest first, for kernels that do not multiply it."""
    plain = without_factors(scheme)
    if plain != scheme:
        yield plain
    if plain.bits == 6:
        yield replace(plain, bits=8)


def has_whole_groups(place: Placement, scheme: Scheme) -> bool:
    """Whether the columns that are read of a matrix begin and end with groups of scales, and of factors."""
    columns, unit = place.ranges[1], _columns_together(scheme)
    return columns.start % unit == 0 and (columns.stop % unit == 0 or columns.stop == place.shape[1])


def part_of_rows(rows: QuantizedRows, scheme: Scheme, ranges: Ranges | None) -> QuantizedRows:
    """Part of the rows in a scheme; all of them without ranges. Raises ValueError for columns in part of a group."""
    if ranges is None:
        return rows
    within, columns = ranges
    if not has_whole_groups(Placement(tuple(rows.codes.shape), "", ranges=ranges), scheme):
        raise ValueError(f"columns {columns.start} to {columns.stop} are no whole groups of {scheme}")
    rows = rows.map_rows(itemgetter(slice(within.start, within.stop)))

    def cut(values: Tensor, unit: int) -> Tensor:
        """The values of the columns, of which `unit` have one."""
        return values[:, columns.start // unit : -(-columns.stop // unit)]

    group = scheme.group_size or rows.codes.shape[1]
    offsets = None if rows.offsets is None else cut(rows.offsets, group)
    factors = None if rows.factors is None else cut(rows.factors, FACTOR_COLUMNS)
    return QuantizedRows(cut(rows.codes, 1), cut(rows.scales, group), offsets, factors)


def _columns_together(scheme: Scheme) -> int:
    """Columns that must stay together, because they share a factor or, in a group, a scale. Rows may be cut."""
    return FACTOR_COLUMNS if scheme.has_factors else scheme.group_size or 1


def holds(scheme: Scheme, stored: Scheme) -> bool:
    """Whether `convert` can convert rows in the scheme `stored` to `scheme` without a change of their values.

    Scales without the factors that they had are rounded once.
    """
    needed = stored if scheme.has_factors else without_factors(stored)
    exact = scheme.scale_dtype in (needed.scale_dtype, torch.float32) and stored.has_factors >= scheme.has_factors
    grouped = stored.group_size == scheme.group_size or (
        scheme.group_size > 0 and stored.group_size % scheme.group_size == 0
    )
    is_int8 = scheme.grid == "int" and scheme.bits == 8
    coded = scheme.bits >= stored.bits if scheme.grid == stored.grid else is_int8 and stored.grid != "e4m3"
    return exact and grouped and coded and (scheme.has_offsets or not stored.has_offsets)


def convert(rows: QuantizedRows, stored: Scheme, scheme: Scheme) -> QuantizedRows:
    """Rows in the scheme `stored`, in `scheme`, which holds them: with the same values.

    Offsets that are moved get the factors of scales, times -8 or -32. These overflow float16 if a factor is above 2047.
    """
    columns = rows.codes.shape[1]
    times = (stored.group_size or columns) // scheme.group_size if scheme.group_size else 1
    if stored.group_size == 0 and scheme.group_size:
        times = scheme.num_groups(columns)

    def spread(values: Tensor) -> Tensor:
        return values.repeat_interleave(times, 1)[:, : scheme.num_groups(columns)]

    factors = rows.factors if scheme.has_factors else None
    scales, offsets = (rows.scales, rows.offsets) if factors is not None else scales_of(rows, stored)
    codes, shift = _moved_codes(rows.codes, stored, scheme)
    if scheme.has_offsets:
        offsets = torch.zeros_like(scales) if offsets is None else offsets
        if factors is None:
            offsets = offsets + shift * scales
        elif factors.shape[2] == 1:  # scale * shift, as an offset with a factor of its own
            offsets, factors = scales, torch.cat((factors, shift * factors), 2)
    if factors is not None:
        return QuantizedRows(codes, spread(scales), None if offsets is None else spread(offsets), factors)
    kept = None if offsets is None or not scheme.has_offsets else spread(offsets).to(scheme.scale_dtype)
    return QuantizedRows(codes, spread(scales).to(scheme.scale_dtype), kept)


def _moved_codes(codes: Tensor, stored: Scheme, scheme: Scheme) -> tuple[Tensor, int]:
    """Codes of the scheme `stored` in `scheme`, and by how many scales the offsets move. They move if codes cannot."""
    if stored.grid != scheme.grid:
        return (numbers_of(codes, stored) + scheme.zero_point).to(torch.uint8), 0
    shift = scheme.zero_point - stored.zero_point
    if 0 <= shift <= (1 << scheme.bits) - (1 << stored.bits):
        return codes + shift if shift else codes, 0
    return codes, shift


def summary(schemes: Schemes) -> str:
    """How many weights have which scheme, in words: "96 in int4, groups of 32; 1 in int8, one scale a row"."""
    counts: dict[Scheme, int] = {}
    for scheme in schemes.values():
        counts[scheme] = counts.get(scheme, 0) + 1
    return "; ".join(f"{count} in {scheme}" for scheme, count in counts.items())
