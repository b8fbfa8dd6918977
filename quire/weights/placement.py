"""Placement: where the numbers of a checkpoint's tensor go in a parameter of a model."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import itemgetter

from torch import Tensor

from quire.kernels.contract import Kernels, PackedWeight, QuantizedRows, Weight
from quire.kernels.reference import REFERENCE
from quire.weights.checkpoint import Ranges
from quire.weights.latent import Latent


@dataclass(frozen=True, slots=True)
class Placement:
    """The shape of a checkpoint's tensor, the part of it that is read, and the part of a parameter that this fills."""

    shape: tuple[int, ...]
    parameter: str
    start: int = 0  # first row in the parameter
    part: int | None = None  # index on the parameter's first axis if that is not rows: an expert, a head
    row_order: tuple[int, ...] = ()  # indices of the rows that are read in the parameter's order; (): unchanged
    is_stack: bool = False  # whether the first axis of tensor and parameter are parts, all of which it fills
    transposed: bool = False
    offset: float = 0.0  # added to each element
    is_log: bool = False  # whether the parameter is -exp(element), and float32
    is_float32: bool = False  # whether the parameter is float32 in models of any type
    latent: Latent | None = None  # of a weight that is expanded: see Latent.expanded
    ranges: Ranges = ()  # on each axis of the tensor, what is read; (): the whole

    @property
    def read_shape(self) -> tuple[int, ...]:
        """The shape of the part that is read, before it is transposed."""
        return tuple(map(len, self.ranges)) or self.shape


def ranges_of(places: Mapping[str, Placement]) -> Mapping[str, Ranges]:
    """The ranges of the tensors that are read in part."""
    return {name: place.ranges for name, place in places.items() if place.ranges}


def write_weight(
    tensor: Tensor | QuantizedRows, weight: Weight, place: Placement, kernels: Kernels = REFERENCE
) -> None:
    """Write the part of a checkpoint's tensor that was read into its place in a weight, cast to the weight's type."""
    if place.is_stack:
        for part in range(place.shape[0]):
            one = tensor.map_rows(itemgetter(part)) if isinstance(tensor, QuantizedRows) else tensor[part]
            write_weight(one, weight, replace(place, is_stack=False, part=part), kernels)
        return
    if isinstance(tensor, QuantizedRows):
        if not isinstance(weight, PackedWeight):
            raise TypeError(f"{place.parameter} has no scheme for rows of codes")
        rows = tensor.map_rows(itemgetter(list(place.row_order))) if place.row_order else tensor
        kernels.write_rows(weight, rows, place.start, place.part or 0)
        return
    if place.transposed:
        tensor = tensor.T
    if place.latent is not None:
        tensor = place.latent.expanded(tensor)
    if place.row_order:
        tensor = tensor.reshape(len(place.row_order), -1)[list(place.row_order)].reshape(tensor.shape)
    if place.offset:
        tensor = tensor.float() + place.offset
    if place.is_log:
        tensor = -tensor.float().exp()
    if isinstance(weight, PackedWeight):
        kernels.write_rows(weight, tensor, place.start, place.part or 0)
        return
    target = weight if place.part is None else weight[place.part]
    tensor = tensor.flatten() if target.dim() == 1 else tensor.reshape(-1, *target.shape[1:])
    target.narrow(0, place.start, tensor.shape[0]).copy_(tensor)
