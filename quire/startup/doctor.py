"""Report on installation, hardware, kernels, and whether a model fits. Loads weights for a perplexity only."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from typing import Literal, NamedTuple

import torch

from quire.config import EngineOptions
from quire.cost.memory_plan import MemoryPlan, format_bytes
from quire.errors import QuireError
from quire.kernels.choose import MODULES, choose, unsupported_reason, usable_device
from quire.kernels.contract import Requirements
from quire.lora.peft import load_adapter, read_adapter
from quire.models.model import Description, Progress
from quire.startup.build import OpenFiles, open_files, prepare_files
from quire.startup.hardware import available_memory, cpu_description, gpu_description, pick_device
from quire.startup.perplexity import PERPLEXITY_TOKENS, perplexities
from quire.startup.token_windows import read_token_ids

_REQUIRED = ("quire", "torch", "numpy", "safetensors", "tokenizers", "jinja2", "msgspec", "huggingface_hub", "fastapi")
_USUAL_DTYPE, _USUAL_HEAD_DIM = "bfloat16", 64  # assumed for the check of kernels, which is before the model's
_USUAL_LENGTH = 512  # tokens of a sequence
_BLOCK_SIZES = (8, 16, 32, 64, 128)  # compared
_MIN_SAVING = 0.01  # share of the KV pool that another block size has to save
_USUAL_CONTEXT = 8192  # tokens that a sequence should be able to have
# quantization and kv_cache_dtype, in the order of accuracy
_PRECISIONS: tuple[tuple[Literal["int8", "int4"] | None, Literal["auto", "int8"]], ...] = (
    *((None, "auto"), (None, "int8"), ("int8", "auto"), ("int8", "int8"), ("int4", "auto"), ("int4", "int8")),
)
_OPTIONAL = {"transformers": "hf"}  # package -> extra


class Finding(NamedTuple):
    """One line of the report. `problem`: it prevents serving."""

    topic: str
    text: str
    problem: bool = False


def examine(
    options: EngineOptions,
    progress: Progress = lambda _done, _total: None,
    *,
    adapter: Path | None = None,
    perplexity: Path | None = None,
    advance: Progress = lambda _done, _total: None,
) -> Iterator[Finding]:
    """Findings about versions, hardware, kernels, block sizes, and the model's files and memory plan.

    A model that is not on this machine is downloaded. progress(done, total): receives downloaded bytes.
    adapter: the folder of a LoRA adapter, which is checked against the model.
    perplexity: a text file, whose perplexity under the model is computed. advance(done, total): receives its tokens.
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
    yield from _block_sizes(options, demands)
    healthy = True
    for finding in _model(options, progress, adapter):
        healthy = healthy and not finding.problem
        yield finding
    if perplexity is not None and healthy:
        yield from _perplexity(options, perplexity, advance)
    elif perplexity is not None:
        yield Finding("perplexity", "not computed, because the model cannot be served")


def _versions() -> Iterator[Finding]:
    yield Finding("versions", f"Python {python_version()}")
    for package in _REQUIRED:
        found = _version(package)
        yield Finding("versions", f"{package} {found or 'is missing; install quire again'}", problem=found is None)
    for package, extra in _OPTIONAL.items():
        found = _version(package)
        yield Finding("versions", f"{package} {found or f'not installed (optional: the extra {extra})'}")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _model(options: EngineOptions, progress: Progress, adapter: Path | None) -> Iterator[Finding]:
    lines: list[str] = []
    opened: OpenFiles | None = None
    try:
        opened = open_files(options, report=lines.append, progress=progress)
        prepared = prepare_files(options, opened, report=lines.append)
    except QuireError as error:
        if opened is not None:
            yield from _precisions(options, opened)
        yield from (Finding("model", line) for line in lines)
        yield Finding("model", str(error), problem=True)
        return
    yield from _precisions(options, opened)
    yield from (Finding("model", line) for line in lines)
    tokenizer, description = prepared.files.tokenizer, prepared.files.description
    template = "with" if tokenizer.has_chat_template else "without"
    yield Finding("model", f"tokenizer of {tokenizer.vocab_size} tokens, {template} a chat template")
    for name, problem in tokenizer.template_errors.items():
        text = f"conversations with the template {name!r:.80} are refused: {problem}"
        yield Finding("model", text, problem=True)
    ends = ", ".join(f"{token} {tokenizer.token_text(token)!r}" for token in description.eos_token_ids)
    yield Finding("model", f"end tokens: {ends or 'none: outputs run to max_tokens'}")
    defaults = ", ".join(f"{name} {value}" for name, value in description.sampling_defaults.items())
    yield Finding("model", f"sampling unless a request says otherwise: {defaults or 'temperature 1'}")
    yield Finding("model", f"{prepared.name} can be served")
    if adapter is not None:
        yield from _adapter(adapter, description, prepared.dtype)


def _adapter(folder: Path, description: Description, dtype: str) -> Iterator[Finding]:
    """What an adapter is, from all of its bytes, or why the model cannot have it."""
    try:
        found = read_adapter(folder, folder.name, description, dtype)
        matrices = load_adapter(found, description, dtype)
    except QuireError as error:
        yield Finding("adapter", str(error), problem=True)
        return
    number = sum(map(len, matrices.values()))
    yield Finding("adapter", f"{folder} has the digest {found.digest}")
    yield Finding("adapter", f"rank {found.rank}, {number} adapted weights, {format_bytes(found.num_bytes)} in {dtype}")
    tokens = ", ".join(map(str, found.invocation_tokens))
    yield Finding(
        "adapter", f"invocation tokens {tokens}: it applies from there on" if tokens else "it applies to all tokens"
    )


def _perplexity(options: EngineOptions, text: Path, advance: Progress) -> Iterator[Finding]:
    """The perplexity of a text as the model would be served, beside that of weights and KV in the model's type.

    The latter may not fit into memory. This is no problem.
    """
    exact = replace(
        options, quantization="none", kv_cache_dtype="auto", state_dtype="float32", weight_cache=None, journal=None
    )
    try:
        opened = open_files(options, report=_ignore, progress=lambda _done, _total: None)
        ids = read_token_ids(text, opened.files.tokenizer, PERPLEXITY_TOKENS)
        (served,), window = perplexities([replace(options, journal=None)], ids, progress=advance)
    except QuireError as error:
        yield Finding("perplexity", f"not computed: {error}", problem=True)
        return
    tokens = f"{len(ids)} tokens of {text}, in windows of {window}"
    yield Finding("perplexity", f"{served:.4f} as served with these options: {tokens}")
    plain = "with weights, keys and values in the model's type"
    try:
        (before,), _ = perplexities([exact], ids, progress=advance)
    except QuireError as error:
        yield Finding("perplexity", f"{plain} it is not computed: {error}")
        return
    yield Finding("perplexity", f"{before:.4f} {plain}: as served it changes by {served / before - 1:+.2%}")


def _precisions(options: EngineOptions, opened: OpenFiles) -> Iterator[Finding]:
    """The memory of weights and KV in several types, and a recommendation.

    It is the first of _PRECISIONS that holds _USUAL_CONTEXT tokens, else the one that holds the most.
    """
    stored = opened.files.description.checkpoint.quant_method
    plans: dict[str, MemoryPlan] = {}
    for quantization, kv_dtype in _PRECISIONS:
        if stored is not None and quantization is not None:
            continue
        flags = [f"--quantization {quantization}"] if quantization else []
        flags += [] if kv_dtype == "auto" else [f"--kv-cache-dtype {kv_dtype}"]
        try:
            asked = replace(options, quantization=quantization, kv_cache_dtype=kv_dtype)
            prepared = prepare_files(asked, opened, report=_ignore)
        except QuireError as error:
            reason = str(error).partition(". ")[0]
            yield Finding("precision", f"{' '.join(flags) or 'as stored'}: {reason}")
            continue
        plan, label = prepared.plan, " ".join(flags) or f"weights in {stored or prepared.dtype}"
        plans[label] = plan
        profile, length = plan.profile, plan.max_model_len
        whole = "" if length == profile.model_max_len else f" of the model's {profile.model_max_len}"
        weights, kv = (format_bytes(size) for size in (profile.weight_bytes, profile.kv_bytes(length)))
        yield Finding(
            "precision",
            f"{label}: weights {weights}, KV of {length} tokens{whole} {kv}, {plan.concurrency(length)} at once",
        )
    if plans:
        yield Finding("precision", f"recommended: {_recommended(plans)}")
    else:
        yield Finding("precision", "none of these can be used, for the reasons beside them")


def _recommended(plans: Mapping[str, MemoryPlan]) -> str:
    """The recommended one of `plans`, which are in the order of accuracy, and the reason."""
    for label, plan in plans.items():
        usual = min(_USUAL_CONTEXT, plan.profile.model_max_len)
        if plan.max_model_len >= usual:
            return f"{label}, the most accurate that holds a sequence of {usual} tokens"
    longest = max(plans, key=lambda label: plans[label].max_model_len)
    return f"{longest}, which holds the longest sequence"


def _ignore(line: str) -> None:
    """Ignore a line."""


def _block_sizes(options: EngineOptions, demands: Requirements) -> Iterator[Finding]:
    """The kernels and the empty slots of each block size, and a recommendation.

    A size with slower kernels is never recommended. The speed of one kernel module at different sizes is unknown here.
    """
    modules = list(MODULES)
    ranks: dict[int, int] = {}  # block size -> rank of its kernels, 0 for the fastest
    for size in sorted({*_BLOCK_SIZES, options.block_size}):
        try:
            name = choose(options.kernels, replace(demands, block_size=size)).kernels.NAME
        except QuireError:
            reason = unsupported_reason(options.kernels, replace(demands, block_size=size))
            yield Finding("block size", f"{size:>3}: not with {options.kernels} kernels, {reason}")
            continue
        ranks[size] = modules.index(name)
        yield Finding(
            "block size",
            f"{size:>3}: {name} kernels; sequences of {_USUAL_LENGTH} tokens leave {_empty_share(size):.1%} of their "
            f"slots empty",
        )
    current = options.block_size
    best = min(ranks, key=lambda size: (ranks[size], size))
    if ranks[best] < ranks[current]:
        advice = f"{best} is recommended, because the faster {modules[ranks[best]]} kernels run with it"
    elif _empty_share(current) - _empty_share(best) > _MIN_SAVING:
        advice = f"{best} leaves fewer slots empty with the same kernels"
    else:
        advice = "no other size with these kernels leaves clearly fewer slots empty"
    yield Finding("block size", f"{current} is used; {advice}")


def _empty_share(block_size: int) -> float:
    """Share of slots behind the last token, half a block per sequence of _USUAL_LENGTH tokens."""
    empty = (block_size - 1) / 2
    return empty / (_USUAL_LENGTH + empty)
