"""What a checkpoint says about how it wants to be run, whatever its architecture: type, end tokens, sampling."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from quire.errors import ModelError, RequestError
from quire.kernels.contract import DTYPES
from quire.models.checkpoint import Checkpoint
from quire.models.config_fields import Fields
from quire.params import SamplingParams

_QUANTIZED = re.compile(r"(float|F)[468](_|$)|u?int\d|[IU]\d")  # as torch and safetensors call such types
_STORED_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SAMPLING: Mapping[str, str] = MappingProxyType(  # names of generation_config.json -> of SamplingParams
    {
        "temperature": "temperature",
        "top_p": "top_p",
        "top_k": "top_k",
        "min_p": "min_p",
        "repetition_penalty": "repetition_penalty",
        "max_new_tokens": "max_tokens",
    }
)


def compute_dtype(fields: Fields, checkpoint: Checkpoint) -> str:
    """As config.json says under its new or old name, else as the first weight is stored."""
    name = fields.optional("dtype", str, fields.optional("torch_dtype", str, ""))
    if not name:
        stored = next(iter(checkpoint.tensors.values()), None)
        if stored is None:
            raise fields.error("the weights hold no tensors; download them again")
        name = _STORED_DTYPES.get(stored.dtype, stored.dtype)
    if name not in DTYPES:
        why = ", as quantized checkpoints are not yet" if _QUANTIZED.match(name) else ""
        raise fields.error(f"dtype {name!r:.80} is not supported{why}; supported: {', '.join(DTYPES)}")
    return name


def token_ids(checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
    """From generation_config.json, else from config.json; a number, a list or nothing."""
    value = checkpoint.generation_config.get(name)
    if value is None:
        value = checkpoint.config.get(name)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ModelError(f"{checkpoint.place}: {name} must be a token id or a list of them, not {value!r:.80}")
    return tuple(ids)


def sampling_defaults(generation: Mapping[str, object]) -> Mapping[str, float | int]:
    """Those of generation_config.json that a request could ask for."""
    found: dict[str, float | int] = {}
    for theirs, ours in _SAMPLING.items():
        value = generation.get(theirs)
        if isinstance(value, int | float) and _is_valid(ours, value):
            found[ours] = value
    return found


def _is_valid(name: str, value: float | int) -> bool:
    wish: dict[str, Any] = {name: value}
    try:
        SamplingParams(**wish)
    except RequestError:
        return False
    return True
