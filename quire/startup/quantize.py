"""Quantization of a checkpoint: the weights of its layers are rounded and written in compressed-tensors' layout."""

import json
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.cost.memory_plan import format_bytes
from quire.errors import ConfigError, ModelError, QuireError
from quire.kernels.contract import FP8, INT4, INT8, MXFP4, NVFP4, QuantizedRows, Scheme
from quire.kernels.reference.codes import nvfp4_factor, quantize_rows
from quire.models.description import ModelDescription, describe
from quire.models.model import Progress
from quire.startup.build import Report
from quire.startup.gptq_calibration import CALIBRATION_TOKENS, calibrated_rows, evaluation_options
from quire.startup.perplexity import PERPLEXITY_TOKENS, perplexities
from quire.startup.token_windows import MIN_TOKENS, WINDOW, read_token_ids, token_windows
from quire.tokenizer.tokenizer import Tokenizer
from quire.weights.checkpoint import INDEX_FILE, FolderCheckpoint
from quire.weights.placement import Placement
from quire.weights.schemes import AT_LOAD

_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", INDEX_FILE, "config.json")
# names of the layouts of compressed-tensors
_FORMATS = {
    **{INT8: "int-quantized", FP8: "float-quantized", INT4: "pack-quantized"},
    **{MXFP4: "mxfp4-pack-quantized", NVFP4: "nvfp4-pack-quantized"},
}


def quantize(
    model: Path,
    out: Path,
    scheme: str,
    *,
    calibrate: Path | None = None,
    report: Report,
    progress: Progress,
    advance: Progress = lambda _done, _total: None,
) -> None:
    """Write the checkpoint in the folder `model` to the folder `out`, with the layers' weights in a scheme of AT_LOAD.

    Head, embedding, norms, biases and routers keep their type. calibrate: text file for GPTQ, whose first
    CALIBRATION_TOKENS tokens are used; the perplexity of the tokens after these is reported, under the model before and
    after. None: weights are rounded to nearest. report: receives lines. progress(done, total): bytes of the weights,
    counted from 0 for calibration and again for writing. advance(done, total): tokens of the perplexity.
    Raises ConfigError for an unknown scheme, an `out` that exists or a text that is too short, ModelError for a model
    that is damaged, quantized already, or that compressed-tensors' layout cannot have.
    """
    if scheme not in AT_LOAD:
        raise ConfigError(f"scheme {scheme!r:.40} is not supported; known: {', '.join(AT_LOAD)}")
    if calibrate is not None and AT_LOAD[scheme][0].bits != 4:
        raise ConfigError(f"calibration applies to schemes of 4 bits, not to {scheme}; leave it out")
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} exists and is not empty; name another folder")
    checkpoint = FolderCheckpoint(model)
    description = describe(checkpoint)
    chosen, _ = AT_LOAD[scheme]
    layers = _layers(checkpoint, description, chosen)
    schemes = {place.parameter: chosen for place in layers.values()}
    before, after = (description.weight_bytes(description.dtype, some) for some in ({}, schemes))
    report(f"{len(layers)} weights to {chosen}: {format_bytes(before)} -> {format_bytes(after)}")
    largest = _largest(checkpoint, layers) if chosen == NVFP4 else {}
    calibrated: Mapping[str, QuantizedRows] = {}
    text = None if calibrate is None else _Text.read(calibrate, model)
    if text is not None:
        length = min(WINDOW, description.max_positions)
        sequences = [torch.tensor(ids) for ids in token_windows(text.calibration, length, text.bos_token_id)]
        calibrated = calibrated_rows(checkpoint, layers, chosen, sequences, largest=largest, progress=progress)
        report(f"calibrated with {len(text.calibration)} tokens of {calibrate}, in sequences of up to {length}")
    out.mkdir(parents=True, exist_ok=True)
    for path in model.iterdir():
        if path.is_file() and not any(path.match(pattern) for pattern in _WEIGHT_FILES):
            shutil.copy2(path, out / path.name)

    def parts(name: str, weight: Tensor) -> dict[str, Tensor]:
        most = largest.get(layers[name].parameter)
        rows = calibrated.get(name) or quantize_rows(weight, chosen, positive=True, largest=most)
        return _parts(name, weight, rows, chosen, most)

    _write_weights(checkpoint, layers, parts, out, progress)
    config = {**checkpoint.config, "quantization_config": _settings(chosen)}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if text is not None:
        report(_perplexity_line(text, model, out, min(WINDOW, description.max_positions), advance))


class _Text(NamedTuple):
    """Token ids of a text: those that calibrate, and others after them; these are the same if the text is short."""

    calibration: list[int]
    others: list[int]
    is_short: bool  # too short to have others
    bos_token_id: int | None

    @classmethod
    def read(cls, text: Path, model: Path) -> Self:
        """Read a text file with the tokenizer in the folder `model`. Raises ConfigError, ModelError."""
        tokenizer = Tokenizer.from_folder(model)
        ids = read_token_ids(text, tokenizer, CALIBRATION_TOKENS + PERPLEXITY_TOKENS)
        first = ids[:1] if ids[0] == tokenizer.bos_token_id else []
        calibration, others = ids[:CALIBRATION_TOKENS], [*first, *ids[CALIBRATION_TOKENS:]]
        is_short = len(others) < MIN_TOKENS
        others = calibration[:PERPLEXITY_TOKENS] if is_short else others
        return cls(calibration, others, is_short, tokenizer.bos_token_id)


def _perplexity_line(text: _Text, model: Path, out: Path, length: int, advance: Progress) -> str:
    """The perplexity under the model and the written checkpoint, or why there is none: the checkpoint is usable."""
    try:
        models = [evaluation_options(folder, length) for folder in (model, out)]
        (before, after), window = perplexities(models, text.others, progress=advance)
    except QuireError as error:
        return f"perplexity was not computed: {error}"
    which = "after those of the calibration"
    if text.is_short:
        which = "of the calibration itself, as the text has too few others"
    return (
        f"perplexity {before:.4f} -> {after:.4f} ({after / before - 1:+.2%}): {len(text.others)} tokens {which}, in "
        f"windows of {window}"
    )


def _layers(checkpoint: FolderCheckpoint, description: ModelDescription, scheme: Scheme) -> Mapping[str, Placement]:
    """The weights to round, by name. Raises ModelError if one of them does not fit the layout."""
    chosen, tensors = description.schemes("int8"), checkpoint.tensors
    found = {
        name: place
        for name, place in description.weight_map.items()
        if place.parameter.startswith("layers.") and place.parameter in chosen
    }
    for name, place in found.items():
        if name not in tensors:
            raise ModelError(f"{checkpoint.path} is multimodal, which cannot be written; use --quantization")
        if place.is_stack:
            raise ModelError(f"{name} has all experts, which compressed-tensors does not have; use --quantization")
        columns = place.shape[0] if place.transposed else place.shape[1]
        if place.transposed:
            raise ModelError(f"{name} is stored transposed, which compressed-tensors does not have; use --quantization")
        if scheme.group_size and columns % scheme.group_size:
            raise ModelError(f"{name} has {columns} columns, not a multiple of {scheme.group_size}; use --quantization")
    return found


def _write_weights(
    checkpoint: FolderCheckpoint,
    layers: Collection[str],
    parts: Callable[[str, Tensor], dict[str, Tensor]],
    out: Path,
    progress: Progress,
) -> None:
    """Write one file for each file of the checkpoint, and the index. parts: the tensors of a weight in `layers`."""
    total, done = sum(stored.num_bytes for stored in checkpoint.tensors.values()), 0
    files: dict[Path, list[str]] = {}
    for name, stored in checkpoint.tensors.items():
        files.setdefault(stored.file, []).append(name)
    index: dict[str, str] = {}
    num_bytes = 0
    for file, names in files.items():
        tensors: dict[str, Tensor] = {}
        for name, tensor in checkpoint.read(names):
            tensors |= parts(name, tensor) if name in layers else {name: tensor}
            done += checkpoint.tensors[name].num_bytes
            progress(done, total)
        save_file(tensors, out / file.name, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file.name)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if len(files) > 1:
        content = {"metadata": {"total_size": num_bytes}, "weight_map": index}
        (out / INDEX_FILE).write_text(json.dumps(content, indent=2) + "\n")


def _largest(checkpoint: FolderCheckpoint, layers: Mapping[str, Placement]) -> Mapping[str, Tensor]:
    """The largest magnitude (1, 1) of each parameter. Its tensors share a factor, because vLLM has one for them all."""
    found: dict[str, Tensor] = {}
    for name, tensor in checkpoint.read(layers):
        most, parameter = tensor.float().abs().amax()[None, None], layers[name].parameter
        found[parameter] = torch.maximum(most, found.get(parameter, most))
    return found


def _parts(name: str, weight: Tensor, rows: QuantizedRows, scheme: Scheme, largest: Tensor | None) -> dict[str, Tensor]:
    """The tensors of a layer in compressed-tensors' layout. Scales of integers have the type of the weight.

    rows: the rounded weight. largest: magnitude of all weights with the same factor in NVFP4.
    """
    base = name.removesuffix("weight")
    if scheme.grid == "e2m1":
        pairs, scales = rows.codes.view(len(rows.codes), -1, 2), 2 * rows.scales.float()  # of the grid as it is
        packed = {f"{base}weight_packed": pairs[:, :, 0] | pairs[:, :, 1] << 4}
        if largest is None:
            return packed | {f"{base}weight_scale": scales.to(torch.float8_e8m0fnu).view(torch.uint8)}
        factor = nvfp4_factor(largest)
        return packed | {
            f"{base}weight_scale": (scales / factor).to(torch.float8_e4m3fn),
            f"{base}weight_global_scale": 1 / factor[0],
        }
    scales = rows.scales.to(weight.dtype)
    if scheme.grid == "e4m3":
        return {name: rows.codes.view(torch.float8_e4m3fn), f"{base}weight_scale": scales}
    if scheme.bits == 8:
        return {name: (rows.codes.to(torch.int16) - 128).to(torch.int8), f"{base}weight_scale": scales}
    shifts = torch.arange(0, 32, 4)
    words = (rows.codes.long().view(len(rows.codes), -1, 8) << shifts).sum(-1)
    return {
        f"{base}weight_packed": (words - (words >> 31 << 32)).to(torch.int32),
        f"{base}weight_scale": scales,
        f"{base}weight_shape": torch.tensor(weight.shape),
    }


def _settings(scheme: Scheme) -> dict[str, Any]:
    """The quantization_config of the checkpoint."""
    common: dict[str, Any] = {"type": "int" if scheme.grid == "int" else "float", "symmetric": True}
    grouped = {"strategy": "group", "group_size": scheme.group_size} if scheme.group_size else {"strategy": "channel"}
    if scheme == NVFP4:
        grouped |= {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
    if scheme == MXFP4:
        grouped |= {"scale_dtype": "torch.uint8"}
    activations = {"num_bits": 8, **common, "strategy": "token", "dynamic": True} if scheme.bits == 8 else None
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": scheme.bits, **common, **grouped, "dynamic": False},
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": _FORMATS[scheme],
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
