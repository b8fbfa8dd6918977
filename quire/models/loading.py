"""Loading of a checkpoint's weights into the shared decoder, one tensor at a time, each into its final place."""

from collections.abc import Iterator, Mapping
from itertools import chain

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.kernels.contract import DTYPES, Kernels, QuantizedRows, Weight
from quire.kernels.reference import REFERENCE
from quire.models.decoder import Decoder
from quire.models.description import ModelDescription
from quire.models.model import Progress
from quire.weights.placement import Placement, ranges_of, write_weight
from quire.weights.schemes import NO_SCHEMES, Schemes, holds
from quire.weights.weight_cache import Identity, WeightCache, load_through


def load(
    description: ModelDescription,
    *,
    dtype: str,
    device: str = "cpu",
    kernels: Kernels = REFERENCE,
    schemes: Schemes = NO_SCHEMES,
    progress: Progress | None = None,
    cache: WeightCache | None = None,
) -> Decoder:
    """A decoder with the checkpoint's weights, cast to `dtype` ("float32", "float16" or "bfloat16").

    kernels: the kernel module that will compute it; weights are written in its layout. All modules can read the
    reference's layout. schemes: of low-bit weights. A tensor whose codes the scheme holds keeps them; others are
    rounded. cache: of weights in host memory. Names, shapes and types are checked before the first tensor is read.
    Raises ModelError with the tensor's name, what was expected and what was found.
    """
    places = description.weight_map
    _check(description, places)
    with torch.device(device):
        model = Decoder(description.config, DTYPES[dtype])
        model.use_kernel_layout(kernels, schemes)

    def read() -> None:
        _load_weights(model, description, kernels, schemes, progress or _no_progress)

    if cache is None:
        read()
    elif torch.device(device).type != "cpu":
        cache.report(f"weights    not cached, because they are on {device}")
        read()
    else:
        identity = Identity(description.checkpoint, dtype, kernels.NAME, schemes, ranges_of(places))
        load_through(cache, model, identity, read)
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
def _load_weights(
    model: Decoder, description: ModelDescription, kernels: Kernels, schemes: Schemes, progress: Progress
) -> None:
    checkpoint, places = description.checkpoint, description.weight_map
    wanted = {name: schemes.get(place.parameter) for name, place in places.items()}
    kept = {
        name: scheme
        for name, scheme in wanted.items()
        if scheme is not None and (stored := checkpoint.tensors[name].scheme) is not None and holds(scheme, stored)
    }
    total = sum(checkpoint.tensors[name].num_bytes for name in places)
    done = 0
    progress(done, total)
    ranges = ranges_of(places)
    rest = [name for name in places if name not in kept]
    plain: Iterator[tuple[str, Tensor | QuantizedRows]] = checkpoint.read(rest, ranges)
    for name, tensor in chain(plain, checkpoint.read_codes(kept, ranges)):
        if places[name].is_log and isinstance(tensor, Tensor) and not tensor.float().exp().isfinite().all():
            raise ModelError(
                f"{checkpoint.tensors[name].file}: {name} has numbers that are NaN or beyond the range of float32; "
                "download it again"
            )
        write_weight(tensor, weight_of(model, places[name].parameter), places[name], kernels)
        done += checkpoint.tensors[name].num_bytes
        progress(done, total)


def weight_of(model: Decoder, name: str) -> Weight:
    """The weight of a parameter, by its name in the weight map."""
    module, _, attribute = name.rpartition(".")
    weight: Weight = getattr(model.get_submodule(module), attribute)
    return weight


def _no_progress(done: int, total: int) -> None:
    """Ignore the progress."""
