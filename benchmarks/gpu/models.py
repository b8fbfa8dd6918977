"""Checkpoints of random numbers, drawn on the device that is measured."""

import gc
from pathlib import Path

import torch

from benchmarks.cpu.checkpoints import checkpoint
from benchmarks.gpu.processes import Settings


def model_folder(shape: str, settings: Settings) -> Path:
    """The shape's checkpoint, made unless it is there. The device's memory is free again."""
    folder = checkpoint(shape, settings.models, settings.device)
    gc.collect()
    if settings.device.startswith("cuda"):
        torch.cuda.empty_cache()
    return folder
