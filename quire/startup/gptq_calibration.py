"""GPTQ of a checkpoint's weights with the model's activations on a calibration text."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from quire.config import EngineOptions
from quire.errors import ModelError
from quire.kernels.contract import QuantizedRows, Scheme
from quire.models.description import describe
from quire.models.hessians import layer_hessians
from quire.models.loading import load
from quire.models.model import Progress
from quire.startup.build import prepare
from quire.weights.checkpoint import FolderCheckpoint
from quire.weights.gptq import error_factors, quantize_with_feedback
from quire.weights.placement import Placement

CALIBRATION_TOKENS = 32768  # of the text, at most


def evaluation_options(model: Path, length: int) -> EngineOptions:
    """Options of an engine on the CPU that computes one sequence of up to `length` tokens, in one step."""
    return EngineOptions(
        model=str(model),
        device="cpu",
        enable_prefix_caching=False,
        memory="0.9",
        max_model_len=length,
        max_num_seqs=1,
        max_num_batched_tokens=length,
    )


def calibrated_rows(
    checkpoint: FolderCheckpoint,
    layers: Mapping[str, Placement],
    scheme: Scheme,
    sequences: Sequence[Tensor],
    *,
    largest: Mapping[str, Tensor],
    progress: Progress,
) -> dict[str, QuantizedRows]:
    """The rows of the weights `layers`, by name, rounded by GPTQ on the CPU.

    Inputs of a layer are those of the model before rounding. The memory is that of the model in its own type, of one
    layer's Hessians, and of a byte for each rounded weight. sequences: token ids, int64. largest: see `quantize_rows`,
    by parameter. progress(done, total): bytes of the weights. Raises ConfigError, ModelError.
    """
    description = describe(checkpoint)
    if description.state_layers:
        raise ModelError(
            f"{checkpoint.path} has layers with recurrent states, of which calibration keeps none; quantize without "
            "calibration"
        )
    if not all(mixer.has_own_kv for mixer in description.config.attentions):
        raise ModelError(
            f"{checkpoint.path} has layers that attend to the KV of other layers, of which calibration keeps that of "
            "one sequence; quantize without calibration"
        )
    options = evaluation_options(checkpoint.path, max(map(len, sequences)))
    prepared = prepare(options, report=_ignore, progress=_ignore)
    kernels, cache = prepared.kernels.kernels, prepared.cache
    model = load(description, dtype=prepared.dtype, kernels=kernels)
    parameters = {place.parameter for place in layers.values()}
    names: dict[tuple[str, int], list[str]] = {}
    for name, place in layers.items():
        names.setdefault((place.parameter, place.part or 0), []).append(name)
    done, total = 0, sum(checkpoint.tensors[name].num_bytes for name in layers)
    rows: dict[str, QuantizedRows] = {}
    for hessians in layer_hessians(model, sequences, parameters, kernels=kernels, cache=cache):
        for key, hessian in hessians.items():
            try:
                factors = error_factors(hessian)
            except ValueError as error:
                raise ModelError(f"{names[key][0]}: {error}; quantize without calibration") from error
            for name, weight in checkpoint.read(names[key]):
                rows[name] = quantize_with_feedback(weight, factors, scheme, largest=largest.get(key[0]))
                done += checkpoint.tensors[name].num_bytes
                progress(done, total)
    return rows


def _ignore(*_: object) -> None:
    """Ignore a line, or the progress."""
