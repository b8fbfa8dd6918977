"""Calibration cache: measured costs of an earlier start, in the folder of the weight cache.

A file belongs to a machine, a model's shape, options, and versions of the code and of libraries.
"""

import hashlib
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from quire.config import EngineOptions
from quire.cost.step_time import Calibration
from quire.startup.hardware import cpu_description, gpu_description
from quire.weights.checkpoint import Checkpoint
from quire.weights.weight_cache import code_digest, environment, stored_layout


def calibration_file(folder: str, checkpoint: Checkpoint, options: EngineOptions) -> Path:
    """The file of costs. options: resolved. Those that do not change the time of steps do not change the name.

    Costs depend on the shape of a model and not on its numbers, so the name has its layout and not its content.
    """
    some = replace(options, model=None, weight_cache=None, journal=None, seed=0)
    device = cpu_description() if some.device == "cpu" else f"{cpu_description()}; {gpu_description()}"
    model = (str(checkpoint.path.resolve()), stored_layout(checkpoint))
    key = repr((device, model, some, code_digest(), environment()))
    return Path(folder).expanduser() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.costs.json"


def read_calibration(file: Path) -> Calibration | None:
    """The costs in a file; None without a file that has some."""
    with suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(file.read_bytes(), type=Calibration)
    return None


def write_calibration(file: Path, calibration: Calibration) -> None:
    """Replace the file. Errors are not raised, because the weight cache reports a folder that cannot be written."""
    temporary = file.with_suffix(f".{os.getpid()}.tmp")
    with suppress(OSError):
        temporary.write_bytes(msgspec.json.encode(calibration))
        temporary.replace(file)
