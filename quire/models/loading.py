"""Weights from safetensors into a decoder, one tensor at a time, each directly into its parameter."""

from collections.abc import Callable, Mapping

import torch
from safetensors import safe_open

from quire.errors import ModelError
from quire.kernels.contract import DTYPES, Kernels
from quire.models.decoder import Decoder
from quire.models.description import ModelDescription
from quire.models.names import Placement, is_harmless, placements
from quire.models.weights import Stored, header

Progress = Callable[[int, int], None]  # bytes read, bytes in all


def load(
    description: ModelDescription,
    kernels: Kernels,
    *,
    dtype: str,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Decoder:
    """A decoder with the checkpoint's weights, cast to `dtype` ("float32", "float16" or "bfloat16").

    All names, shapes and types are checked before the first tensor is read. Raises ModelError naming
    the tensor, what was expected and what was found.
    """
    places = placements(description.config)
    found: dict[str, Stored] = {}
    for file in description.weight_files:
        found |= header(file)
    _check(description, places, found)
    with torch.device("meta"):
        model = Decoder(description.config, kernels)
    model = model.to(DTYPES[dtype]).to_empty(device=device).requires_grad_(requires_grad=False)
    _fill(model, places, {name: found[name] for name in places}, progress or _no_progress)
    return model.eval()


def _check(description: ModelDescription, places: Mapping[str, Placement], found: Mapping[str, Stored]) -> None:
    """Raise ModelError unless the checkpoint has exactly the tensors that the decoder needs."""
    folder, architecture = description.folder, description.architecture
    missing = [name for name in places if name not in found]
    if missing:
        raise ModelError(
            f"{folder} lacks {len(missing)} of the {len(places)} tensors of its {architecture}: "
            f"expected {missing[0]} with shape {places[missing[0]].shape}, found nothing"
        )
    extra = [name for name in found if name not in places and not is_harmless(name, description.config)]
    if extra:
        raise ModelError(
            f"{folder} has {len(extra)} tensors that its {architecture} has no place for: "
            f"found {extra[0]} with shape {found[extra[0]].shape}, expected nothing"
        )
    for name, place in places.items():
        stored = found[name]
        if stored.shape != place.shape:
            raise ModelError(f"{stored.file}: {name}: expected shape {place.shape}, found {stored.shape}")
        if not stored.is_float:
            raise ModelError(
                f"{stored.file}: {name}: expected a floating point type, found {stored.dtype}; "
                f"quantized checkpoints are not supported yet"
            )


def _fill(model: Decoder, places: Mapping[str, Placement], tensors: Mapping[str, Stored], progress: Progress) -> None:
    parameters = dict(model.named_parameters())
    total = sum(stored.num_bytes for stored in tensors.values())
    done = 0
    progress(done, total)
    for file in dict.fromkeys(stored.file for stored in tensors.values()):
        with safe_open(file, framework="pt") as opened, torch.no_grad():
            for name, stored in tensors.items():
                if stored.file != file:
                    continue
                place = places[name]
                rows = parameters[place.parameter].narrow(0, place.start, place.shape[0])
                rows.copy_(opened.get_tensor(name))
                done += stored.num_bytes
                progress(done, total)


def _no_progress(done: int, total: int) -> None:
    """Nobody watches."""
