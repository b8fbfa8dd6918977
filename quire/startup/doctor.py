"""Report on installation, hardware, kernels, and whether a model fits. Loads no weights."""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from platform import python_version
from typing import NamedTuple

import torch

from quire.config import EngineOptions
from quire.cost.block_size import CANDIDATES
from quire.cost.memory_plan import format_bytes
from quire.errors import QuireError
from quire.kernels.choose import MODULES, choose, unsupported_reason, usable_device
from quire.kernels.contract import Requirements
from quire.models.model import Progress
from quire.startup.build import prepare
from quire.startup.calibration import lookup_seconds
from quire.startup.hardware import available_memory, cpu_description, gpu_description, pick_device

_REQUIRED = ("quire", "torch", "numpy", "safetensors", "tokenizers", "jinja2", "msgspec", "huggingface_hub", "fastapi")
_USUAL_DTYPE, _USUAL_HEAD_DIM = "bfloat16", 64  # assumed for the check of kernels, which is before the model's
_USUAL_PROMPT = 512  # tokens
_OPTIONAL = {"transformers": "hf"}  # package -> extra


class Finding(NamedTuple):
    """One line of the report. `problem`: it prevents serving."""

    topic: str
    text: str
    problem: bool = False


def examine(options: EngineOptions, progress: Progress = lambda _done, _total: None) -> Iterator[Finding]:
    """Findings about versions, hardware, kernels, block sizes, and the model's files and memory plan.

    A model that is not on this machine is downloaded. progress(done, total): receives downloaded bytes.
    """
    yield from _versions()
    yield Finding("hardware", f"CPU: {cpu_description()}; torch uses {torch.backends.cpu.get_cpu_capability()}")
    yield Finding("hardware", f"GPU: {gpu_description()}")
    device = pick_device(options.device)
    try:
        demands = Requirements(
            usable_device(device), _USUAL_DTYPE, _USUAL_DTYPE, options.block_size, (_USUAL_HEAD_DIM,)
        )
        chosen = choose(options.kernels, demands).reason
    except QuireError as error:
        yield Finding("kernels", str(error), problem=True)
        return
    yield Finding("hardware", f"memory: {format_bytes(available_memory(device))} available on {device}")
    for name in MODULES:
        refused = unsupported_reason(name, demands)
        yield Finding("kernels", f"{name}: {f'not on {device}, {refused}' if refused else f'runs on {device}'}")
    yield Finding("kernels", f"chosen: {chosen}")
    yield from _block_sizes(options)
    yield from _model(options, progress)


def _versions() -> Iterator[Finding]:
    yield Finding("versions", f"Python {python_version()}")
    for package in _REQUIRED:
        found = _version(package)
        yield Finding("versions", f"{package} {found or 'is missing; install quire again'}", problem=found is None)
    for package, extra in _OPTIONAL.items():
        found = _version(package)
        yield Finding("versions", f"{package} {found or f'not installed (optional: pip install quire[{extra}])'}")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _model(options: EngineOptions, progress: Progress) -> Iterator[Finding]:
    lines: list[str] = []
    try:
        prepared = prepare(options, report=lines.append, progress=progress)
    except QuireError as error:
        yield from (Finding("model", line) for line in lines)
        yield Finding("model", str(error), problem=True)
        return
    yield from (Finding("model", line) for line in lines)
    tokenizer, description = prepared.files.tokenizer, prepared.files.description
    template = "with" if tokenizer.has_chat_template else "without"
    yield Finding("model", f"tokenizer of {tokenizer.vocab_size} tokens, {template} a chat template")
    ends = ", ".join(f"{token} {tokenizer.token_text(token)!r}" for token in description.eos_token_ids)
    yield Finding("model", f"end tokens: {ends or 'none: outputs run to max_tokens'}")
    defaults = ", ".join(f"{name} {value}" for name, value in description.sampling_defaults.items())
    yield Finding("model", f"sampling unless a request says otherwise: {defaults or 'temperature 1'}")
    yield Finding("model", f"{prepared.name} can be served")


def _block_sizes(options: EngineOptions) -> Iterator[Finding]:
    """Unused slots and lookup time per block size, for a prompt of _USUAL_PROMPT tokens."""
    kind = options.prefix_index if options.enable_prefix_caching else "none"
    lookup = lookup_seconds(kind, CANDIDATES, _USUAL_PROMPT)
    for number in CANDIDATES:
        empty = (number - 1) / 2
        found = f", finding {_USUAL_PROMPT} tokens takes {1e6 * lookup[number]:.0f} us" if lookup else ""
        yield Finding(
            "block size",
            f"{number:>3}: a sequence leaves {empty:g} slots empty on average, {empty / (_USUAL_PROMPT + empty):.1%} "
            f"of {_USUAL_PROMPT} tokens{found}",
        )
    yield Finding(
        "block size",
        f"{options.block_size} is used; /get_server_info of a running server recommends a size",
    )
