"""Weights from a checkpoint into a decoder, one tensor at a time, each directly into its place."""

from collections.abc import Mapping

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.kernels.contract import DTYPES
from quire.models.decoder import Decoder
from quire.models.description import ModelDescription
from quire.models.model import Progress
from quire.models.placements import Placement


def load(
    description: ModelDescription, *, dtype: str, device: str = "cpu", progress: Progress | None = None
) -> Decoder:
    """A decoder with the checkpoint's weights, cast to `dtype` ("float32", "float16" or "bfloat16").

    All names, shapes and types are checked before the first tensor is read. Raises ModelError naming
    the tensor, what was expected and what was found.
    """
    places = description.placements
    _check(description, places)
    with torch.device(device):
        model = Decoder(description.config, DTYPES[dtype])
    _fill(model, places, description, progress or _no_progress)
    return model.requires_grad_(requires_grad=False).eval()


def _check(description: ModelDescription, places: Mapping[str, Placement]) -> None:
    """Raise ModelError unless the checkpoint has exactly the tensors that the decoder needs."""
    found, architecture, place = description.checkpoint.tensors, description.architecture, description.checkpoint.place
    missing = [name for name in places if name not in found]
    if missing:
        raise ModelError(
            f"{place} lacks {len(missing)} of the {len(places)} tensors of its {architecture}: "
            f"expected {missing[0]} with shape {places[missing[0]].shape}, found nothing"
        )
    extra = [name for name in found if name not in places and not description.is_harmless(name)]
    if extra:
        raise ModelError(
            f"{place} has {len(extra)} tensors that its {architecture} has no place for: "
            f"found {extra[0]} with shape {found[extra[0]].shape}, expected nothing"
        )
    for name, placement in places.items():
        stored = found[name]
        if stored.shape != placement.shape:
            raise ModelError(f"{stored.file}: {name}: expected shape {placement.shape}, found {stored.shape}")
        if not stored.is_float:
            raise ModelError(
                f"{stored.file}: {name}: expected a floating point type, found {stored.dtype}; "
                f"quantized checkpoints are not supported yet"
            )


@torch.no_grad()
def _fill(model: Decoder, places: Mapping[str, Placement], description: ModelDescription, progress: Progress) -> None:
    checkpoint, parameters = description.checkpoint, dict(model.named_parameters())
    total = sum(checkpoint.tensors[name].num_bytes for name in places)
    done = 0
    progress(done, total)
    for name, tensor in checkpoint.read(places):
        put(tensor, parameters[places[name].parameter], places[name])
        done += checkpoint.tensors[name].num_bytes
        progress(done, total)


def put(tensor: Tensor, parameter: Tensor, place: Placement) -> None:
    """Write a checkpoint's tensor where it belongs in a parameter, in the parameter's type."""
    if place.transposed:
        tensor = tensor.T
    if place.order:
        tensor = tensor.reshape(len(place.order), -1)[list(place.order)].reshape(tensor.shape)
    if place.plus:
        tensor = tensor.float() + place.plus
    target = parameter if place.part is None else parameter[place.part]
    target.narrow(0, place.start, tensor.shape[0]).copy_(tensor)


def _no_progress(done: int, total: int) -> None:
    """Nobody watches."""
