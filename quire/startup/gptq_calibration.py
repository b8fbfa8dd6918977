"""GPTQ of a checkpoint's weights with the model's activations on a calibration text."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from quire.config import EngineOptions
from quire.errors import ConfigError, ModelError
from quire.kernels.contract import QuantizedRows, Scheme
from quire.models.checkpoint import FolderCheckpoint
from quire.models.description import describe
from quire.models.hessians import layer_hessians
from quire.models.loading import load
from quire.models.model import Progress
from quire.models.weight_map import Placement
from quire.quant.gptq import error_factors, quantize_with_feedback
from quire.startup.build import Report, prepare
from quire.tokenizer.tokenizer import Tokenizer

CALIBRATION_TOKENS = 32768  # of the text, at most
_MIN_TOKENS = 1024
_SEQUENCE_TOKENS = 2048  # of one sequence, at most
_MAX_CHARACTERS = 32 * CALIBRATION_TOKENS  # read from the text, so that a large file is not tokenized


def calibrated_rows(
    checkpoint: FolderCheckpoint,
    layers: Mapping[str, Placement],
    scheme: Scheme,
    text: Path,
    *,
    largest: Mapping[str, Tensor],
    report: Report,
    progress: Progress,
) -> dict[str, QuantizedRows]:
    """The rows of the weights `layers`, by name, rounded by GPTQ on the CPU.

    Inputs of a layer are those of the model before rounding. The memory is that of the model in its own type, of one
    layer's Hessians, and of a byte for each rounded weight. largest: see `quantize_rows`, by parameter. report:
    receives a line. progress(done, total): bytes of the weights. Raises ConfigError, ModelError.
    """
    description = describe(checkpoint)
    length = min(_SEQUENCE_TOKENS, description.max_positions)
    options = EngineOptions(
        model=str(checkpoint.path),
        device="cpu",
        enable_prefix_caching=False,
        memory="0.9",
        max_model_len=length,
        max_num_seqs=1,
        max_num_batched_tokens=length,
    )
    prepared = prepare(options, report=_ignore, progress=_ignore)
    sequences = read_sequences(text, prepared.files.tokenizer, length)
    report(f"calibrated with {sum(map(len, sequences))} tokens of {text}, in sequences of up to {length}")
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


def read_sequences(text: Path, tokenizer: Tokenizer, length: int) -> list[Tensor]:
    """The first CALIBRATION_TOKENS tokens of a text file, int64, in sequences of `length` tokens and a shorter one.

    Each sequence begins with the token with which the tokenizer begins a text, if it has one.
    Raises ConfigError for a file that cannot be read or is too short.
    """
    try:
        with text.open(encoding="utf-8") as file:
            ids = tokenizer.encode(file.read(_MAX_CHARACTERS))[:CALIBRATION_TOKENS]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"calibration text {text} cannot be read as UTF-8 text: {error}") from error
    if len(ids) < _MIN_TOKENS:
        raise ConfigError(
            f"calibration text {text} has {len(ids)} tokens, but at least {_MIN_TOKENS} are needed; "
            "use text like the model's prompts and answers"
        )
    first = ids[:1] if ids[0] == tokenizer.bos_token_id else []
    rest, step = ids[len(first) :], length - len(first)
    return [torch.tensor(first + rest[start : start + step]) for start in range(0, len(rest), step)]


def _ignore(*_: object) -> None:
    """Ignore a line, or the progress."""
