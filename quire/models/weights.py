"""Weight files of a checkpoint folder: which ones there are, and what their headers say. Reads no tensor."""

import math
from pathlib import Path

from safetensors import SafetensorError, safe_open

from quire.errors import ModelError
from quire.models.checkpoint import Stored
from quire.models.json_file import read_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_OTHER_FORMATS = ("*.bin", "*.pt", "*.pth")
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def find_weights(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a folder: one, or the shards that its index names.

    Raises ModelError when there are none and when shards are missing.
    """
    if (folder / SINGLE).exists():
        return (folder / SINGLE,)
    if (folder / INDEX).exists():
        return _shards(folder / INDEX)
    others = sorted(path.name for pattern in _OTHER_FORMATS for path in folder.glob(pattern))
    if others:
        raise ModelError(
            f"{folder} has weights only as {', '.join(others[:3])}; quire reads safetensors only, because the "
            f"others can run code or are not supported yet. Save the model with `save_pretrained` to convert it"
        )
    raise ModelError(f"{folder} has neither {SINGLE} nor {INDEX}; download the weights")


def _shards(index: Path) -> tuple[Path, ...]:
    try:
        names = sorted(set(read_object(index)["weight_map"].values()))
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is damaged ({type(error).__name__}: {error}); download it again") from error
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ModelError(f"{index} must name files of its own folder; download it again")
    missing = [name for name in names if not (index.parent / name).exists()]
    if missing:
        raise ModelError(
            f"{index.parent} is half-downloaded: {len(missing)} of {len(names)} weight files are missing, "
            f"the first is {missing[0]}. Download them again"
        )
    return tuple(index.parent / name for name in names)


def header(file: Path) -> dict[str, Stored]:
    """The tensors of a file by name. Raises ModelError where it is truncated or no safetensors file."""
    try:
        with safe_open(file, framework="numpy") as opened:
            tensors = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  (not a dict)
            return {
                name: _stored(file, tuple(tensor.get_shape()), tensor.get_dtype()) for name, tensor in tensors.items()
            }
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is damaged or truncated ({error}); delete it and download it again") from error


def _stored(file: Path, shape: tuple[int, ...], dtype: str) -> Stored:
    """Types that are no plain numbers belong to quantized checkpoints."""
    return Stored(file, shape, dtype, math.prod(shape) * _BYTES.get(dtype, 1), is_float=dtype in _BYTES)
