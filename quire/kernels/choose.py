"""Which kernel module runs: chosen once, by name or by trying them in order of speed; never silently."""

from collections.abc import Mapping
from types import MappingProxyType

import torch

from quire.errors import ConfigError, nearest
from quire.kernels import reference
from quire.kernels.contract import Kernels

MODULES: Mapping[str, Kernels] = MappingProxyType({reference.NAME: reference})  # the fastest first


def choose(name: str, device: str) -> tuple[Kernels, str]:
    """The kernel module called `name`, or for "auto" the first that can work on `device`, and why it is that one.

    Raises ConfigError for an unknown name, for a device that torch does not have, and when no module can
    work there, with what was tried and why each was refused.
    """
    place = _device(device)
    if name != "auto" and name not in MODULES:
        known = ["auto", *MODULES]
        raise ConfigError(f"there are no kernels {name!r}{nearest(name, known)}; known: {', '.join(known)}")
    refusals: list[str] = []
    for candidate, kernels in MODULES.items():
        if name not in ("auto", candidate):
            continue
        refusal = kernels.refusal(place)
        if refusal is None:
            reason = f"asked for by name, runs on {place}" if name == candidate else f"the fastest that runs on {place}"
            return kernels, f"{candidate}: {reason}" + "".join(f"; not {refused}" for refused in refusals)
        refusals.append(f"{candidate}: {refusal}")
    raise ConfigError(f"no kernels for {place}; tried {'; '.join(refusals)}")


def _device(device: str) -> torch.device:
    try:
        place = torch.device(device)
        if place.type not in ("cpu", "cuda"):
            raise RuntimeError(f"quire does not run on {place.type}")
        torch.empty(0, device=place)  # refuses what this build of torch or this machine does not have
        return place
    except (RuntimeError, AssertionError) as error:
        first_line = str(error).splitlines()[0]
        raise ConfigError(f"device {device!r} cannot be used: {first_line}. Use 'cpu' or 'cuda'") from error
