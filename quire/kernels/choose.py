"""Choice of the kernel module, by name or the fastest that runs. The reason is returned for the log."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import NamedTuple

import torch

from quire.errors import ConfigError, nearest
from quire.kernels.contract import Kernels, Requirements
from quire.kernels.cpu import EXTENSION
from quire.kernels.cpu.deterministic import CPU_DETERMINISTIC
from quire.kernels.cpu.kernels import CPU, description
from quire.kernels.deterministic import DETERMINISTIC
from quire.kernels.reference import REFERENCE


class Candidate(NamedTuple):
    """A kernel module, or the reason why it is unavailable."""

    kernels: Kernels | None
    deterministic: Kernels | None  # deterministic kernels, for the same blocks and weights
    description: str  # the build that it uses, or why it is unavailable
    skip_reason: str | None = None  # why "auto" skips it although it runs


def _cpu() -> Candidate:
    if EXTENSION is not None:
        return Candidate(None, None, EXTENSION)
    return Candidate(CPU, CPU_DETERMINISTIC, description())


def _triton() -> Candidate:
    if find_spec("triton") is None:
        return Candidate(None, None, "the package triton is not installed")
    from quire.kernels.triton.deterministic import TRITON_DETERMINISTIC  # noqa: PLC0415  (an optional package)
    from quire.kernels.triton.kernels import TRITON  # noqa: PLC0415
    from quire.kernels.triton.launch import INTERPRETED  # noqa: PLC0415

    if INTERPRETED:
        why = "Triton is interpreted, which is for tests only"
        return Candidate(TRITON, TRITON_DETERMINISTIC, "interpreted", skip_reason=why)
    return Candidate(TRITON, TRITON_DETERMINISTIC, "compiled when first used")


def _reference() -> Candidate:
    return Candidate(REFERENCE, DETERMINISTIC, "plain torch")


# The fastest first.
MODULES: Mapping[str, Callable[[], Candidate]] = MappingProxyType(
    {"cpu": _cpu, "triton": _triton, "reference": _reference}
)

# Kernel names of other engines, with the error text.
OTHER_ENGINES_KERNELS: Mapping[str, str] = MappingProxyType(
    {
        name: f"quire has no kernels of {name}. On NVIDIA GPUs use 'triton', quire's own, or 'auto'"
        for name in ("flashinfer", "flash-attn", "xformers")
    }
    | {"torch": "plain torch is called 'reference' here; it is the specification, and slow"}
)


class Chosen(NamedTuple):
    """The kernels of an engine."""

    kernels: Kernels
    deterministic: Kernels
    reason: str


def unsupported_reason(name: str, requirements: Requirements) -> str | None:
    """Why the module called `name` does not meet the requirements, or None if it does."""
    return _unsupported_reason(MODULES[name](), requirements)


def _unsupported_reason(candidate: Candidate, requirements: Requirements) -> str | None:
    if (kernels := candidate.kernels) is None:
        return candidate.description
    return kernels.unsupported_reason(requirements)


def choose(name: str, requirements: Requirements) -> Chosen:
    """The kernel module called `name`, or for "auto" the first that meets the requirements, with the reason.

    Raises ConfigError for an unknown name, or if no module meets the requirements, with the reason of each module.
    """
    if name.lower() in OTHER_ENGINES_KERNELS:
        raise ConfigError(OTHER_ENGINES_KERNELS[name.lower()])
    if name != "auto" and name not in MODULES:
        known = ["auto", *MODULES]
        raise ConfigError(f"there are no kernels {name!r}{nearest(name, known)}; known: {', '.join(known)}")
    refusals: list[str] = []
    for tried, make in MODULES.items():
        if name not in ("auto", tried):
            continue
        kernels, deterministic, about, passed_by = candidate = make()
        refused = _unsupported_reason(candidate, requirements) or (passed_by if name == "auto" else None)
        if refused is None and kernels is not None and deterministic is not None:
            why = "asked for by name" if name == tried else f"the fastest that runs on {requirements.device}"
            reason = f"{tried} ({about}): {why}" + "".join(f"; not {other}" for other in refusals)
            return Chosen(kernels, deterministic, reason)
        refusals.append(f"{tried}: {refused}")
    raise ConfigError(f"no kernels for {requirements.dtype} on {requirements.device}; tried {'; '.join(refusals)}")


def usable_device(name: str) -> torch.device:
    """The device called `name`. Raises ConfigError unless it is a CPU or CUDA device that torch can use."""
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError(f"quire does not run on {device.type}")
        torch.empty(0, device=device)  # raises if this build of torch or this machine lacks the device
        return device
    except (RuntimeError, AssertionError) as error:
        first_line = str(error).splitlines()[0]
        raise ConfigError(f"device {name!r} cannot be used: {first_line}. Use 'cpu' or 'cuda'") from error
