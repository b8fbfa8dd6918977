"""Checkpoints of training runs: safetensors with a line of JSON.

Data need no state, because the rows of a step depend only on the seed and the number of the step.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn import Parameter
from torch.optim import Optimizer

WEIGHT = "weight"  # besides what the optimizers keep about a parameter
Parameters = Mapping[str, Parameter]


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a run: its next step and its seed."""

    step: int
    seed: int


def save(file: Path, progress: Progress, parameters: Parameters, optimizers: Sequence[Optimizer]) -> None:
    """Write parameters and optimizer states. The file is replaced atomically."""
    tensors = {f"{WEIGHT}/{name}": parameter.detach() for name, parameter in parameters.items()}
    for optimizer in optimizers:
        for name, parameter in parameters.items():
            tensors |= {f"{key}/{name}": value for key, value in optimizer.state.get(parameter, {}).items()}
    unfinished = file.with_suffix(".unfinished")
    save_file(tensors, unfinished, metadata={"progress": json.dumps(asdict(progress))})
    unfinished.replace(file)


@torch.no_grad()
def restore(file: Path, seed: int, parameters: Parameters, optimizers: Sequence[Optimizer]) -> int:
    """Load parameters and optimizer states. Returns the next step, which is 0 without a file.

    Raises ValueError for the checkpoint of a run with another seed.
    """
    if not file.exists():
        return 0
    owner = {id(p): optimizer for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    with safe_open(file, "pt") as kept:
        progress = Progress(**json.loads(kept.metadata()["progress"]))
        if progress.seed != seed:
            raise ValueError(
                f"{file} is from a run with seed {progress.seed}, not {seed}: remove it, or take that seed"
            )
        for key in kept.keys():  # noqa: SIM118  (a handle, not a dict)
            what, name = key.split("/")
            parameter, value = parameters[name], kept.get_tensor(key)
            if what == WEIGHT:
                parameter.copy_(value)
            else:
                owner[id(parameter)].state[parameter][what] = value.to(parameter.device)
        return progress.step
