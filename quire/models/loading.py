"""Loading of a checkpoint's weights into the shared decoder, one tensor at a time, each into its final place."""

from collections.abc import Mapping

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.kernels import reference
from quire.kernels.contract import DTYPES, Kernels, PackedWeight, Weight
from quire.models.decoder import Decoder
from quire.models.description import ModelDescription
from quire.models.model import Progress
from quire.models.weight_map import Placement
from quire.quant.schemes import Quantization


def load(
    description: ModelDescription,
    *,
    dtype: str,
    device: str = "cpu",
    kernels: Kernels = reference,
    quantization: Quantization | None = None,
    progress: Progress | None = None,
) -> Decoder:
    """A decoder with the checkpoint's weights, cast to `dtype` ("float32", "float16" or "bfloat16").

    kernels: the kernel module that will compute it; weights are written in its layout. All modules can read the
    reference's layout. quantization: schemes to which weights are rounded, if they are not kept in `dtype`.
    Names, shapes and types are checked before the first tensor is read. Raises ModelError with the tensor's name, what
    was expected and what was found.
    """
    places = description.weight_map
    _check(description, places)
    with torch.device(device):
        model = Decoder(description.config, DTYPES[dtype])
        model.use_kernel_layout(kernels, quantization)
    _load_weights(model, description, kernels, progress or _no_progress)
    return model.requires_grad_(requires_grad=False).eval()


def _check(description: ModelDescription, places: Mapping[str, Placement]) -> None:
    """Raise ModelError unless the checkpoint has the decoder's tensors, and no others but redundant ones."""
    found, architecture, place = description.checkpoint.tensors, description.architecture, description.checkpoint.path
    missing = [name for name in places if name not in found]
    if missing:
        raise ModelError(
            f"{place} lacks {len(missing)} of the {len(places)} tensors of its {architecture}: "
            f"expected {missing[0]} with shape {places[missing[0]].shape}, found nothing"
        )
    extra = [name for name in found if name not in places and not description.is_redundant(name)]
    if extra:
        raise ModelError(
            f"{place} has {len(extra)} tensors that its {architecture} does not have: "
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
def _load_weights(model: Decoder, description: ModelDescription, kernels: Kernels, progress: Progress) -> None:
    checkpoint, places = description.checkpoint, description.weight_map
    total = sum(checkpoint.tensors[name].num_bytes for name in places)
    done = 0
    progress(done, total)
    for name, tensor in checkpoint.read(places):
        write_weight(tensor, _weight(model, places[name].parameter), places[name], kernels)
        done += checkpoint.tensors[name].num_bytes
        progress(done, total)


def _weight(model: Decoder, name: str) -> Weight:
    module, _, attribute = name.rpartition(".")
    weight: Weight = getattr(model.get_submodule(module), attribute)
    return weight


def write_weight(tensor: Tensor, weight: Weight, place: Placement, kernels: Kernels = reference) -> None:
    """Write a checkpoint's tensor into its place in a weight, cast to the weight's type."""
    if place.transposed:
        tensor = tensor.T
    if place.row_order:
        tensor = tensor.reshape(len(place.row_order), -1)[list(place.row_order)].reshape(tensor.shape)
    if place.offset:
        tensor = tensor.float() + place.offset
    if isinstance(weight, PackedWeight):
        kernels.write_rows(weight, tensor, place.start, place.part or 0)
        return
    target = weight if place.part is None else weight[place.part]
    target.narrow(0, place.start, tensor.shape[0]).copy_(tensor)


def _no_progress(done: int, total: int) -> None:
    """Ignore the progress."""
