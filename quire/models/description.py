"""What a checkpoint folder holds, learnt without reading a weight. No torch here.

`describe` finds what would go wrong later: missing and half-downloaded files, architectures and
options that quire does not run.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from quire.errors import ModelError, nearest
from quire.models.families import FAMILIES, DecoderConfig
from quire.models.fields import Fields
from quire.models.json_file import read_object
from quire.models.names import placements
from quire.models.weights import find_weights, header

_DTYPES = ("float32", "float16", "bfloat16")
_STORED_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A checkpoint that quire can load."""

    folder: Path
    architecture: str
    config: DecoderConfig
    dtype: str  # "float32", "float16" or "bfloat16": what the checkpoint asks to be computed in
    eos_token_ids: tuple[int, ...]
    weight_files: tuple[Path, ...]

    @property
    def num_parameters(self) -> int:
        """Numbers in the weights; a tied head counts once."""
        return sum(math.prod(placement.shape) for placement in placements(self.config).values())


def describe(folder: Path) -> ModelDescription:
    """Read config.json, generation_config.json and the headers of the weights of a Hugging Face folder.

    Raises ModelError, saying what to do, when the folder or a file is missing, incomplete or damaged,
    and when the model is not one that quire runs.
    """
    if not folder.is_dir():
        raise ModelError(
            f"there is no model folder {str(folder)!r}. Give the path of a local folder; "
            f"`hf download OWNER/NAME --local-dir FOLDER` makes one from a Hugging Face id"
        )
    path = folder / "config.json"
    if not path.exists():
        raise ModelError(f"{folder} has no config.json, so it is not the folder of a Hugging Face checkpoint")
    values = read_object(path)
    fields = Fields(values, path)
    architecture = _architecture(fields)
    config = fields.decoder(FAMILIES[architecture])
    weight_files = find_weights(folder)
    for file in weight_files:
        header(file)
    return ModelDescription(
        folder, architecture, config, _dtype(fields, weight_files), _eos_token_ids(folder, values), weight_files
    )


def _architecture(fields: Fields) -> str:
    names = [str(name) for name in fields.optional("architectures", list, [])]
    supported = ", ".join(FAMILIES)
    if not names:
        raise fields.error(f"architectures is missing; supported: {supported}")
    for name in names:
        if name in FAMILIES:
            return name
    raise fields.error(
        f"architecture {names[0]!r:.80} is not supported{nearest(names[0], FAMILIES)}; supported: {supported}"
    )


def _dtype(fields: Fields, weight_files: tuple[Path, ...]) -> str:
    """As config.json says under its new or old name, else as the first weight is stored."""
    name = fields.optional("dtype", str, fields.optional("torch_dtype", str, ""))
    if not name:
        stored = next(iter(header(weight_files[0]).values()), None)
        if stored is None:
            raise fields.error(f"{weight_files[0]} holds no tensors; download it again")
        name = _STORED_DTYPES.get(stored.dtype, stored.dtype)
    if name not in _DTYPES:
        raise fields.error(f"dtype {name!r} is not supported; supported: {', '.join(_DTYPES)}")
    return name


def _eos_token_ids(folder: Path, config: dict[str, object]) -> tuple[int, ...]:
    """From generation_config.json, else from config.json; a number, a list or nothing."""
    path = folder / "generation_config.json"
    generation = read_object(path) if path.exists() else {}
    value = generation.get("eos_token_id")
    if value is None:
        value = config.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ModelError(f"{folder}: eos_token_id must be a token id or a list of them, not {value!r:.80}")
    return tuple(ids)
