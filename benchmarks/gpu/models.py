"""Checkpoints with random weights, drawn on the measured device."""

import gc
from pathlib import Path

import torch

from benchmarks.cpu.checkpoints import checkpoint
from benchmarks.gpu.processes import Settings


def model_folder(shape: str, settings: Settings) -> Path:
    """The folder of the shape's checkpoint. Creates it unless it exists, and frees the device memory afterwards."""
    folder = checkpoint(shape, settings.models, settings.device)
    gc.collect()
    if settings.device.startswith("cuda"):
        torch.cuda.empty_cache()
    return folder
