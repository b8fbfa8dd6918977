"""Calibration cache: measured costs of an earlier start, in the folder of the weight cache.

A file belongs to a machine, a model, options and a version of the code.
"""

import hashlib
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from quire.config import EngineOptions
from quire.cost.step_time import Calibration
from quire.models.weight_cache import code_digest
from quire.startup.hardware import cpu_description


def calibration_file(folder: str, model: Path, options: EngineOptions) -> Path:
    """The file of costs. options: resolved. Those that do not change the time of steps do not change the name."""
    some = replace(options, model=None, weight_cache=None, journal=None, seed=0)
    key = repr((cpu_description(), str(model.resolve()), some, code_digest()))
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
