"""The fields of PEFT's adapter_config.json that decide what an adapter computes."""

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from quire.errors import AdapterError
from quire.models.config_fields import Fields

T = TypeVar("T")

_MAX_INVOCATION_TOKENS = 1024
_MOST = 1e9  # size of a number
_MAX_PATTERNS = 4096  # of a field
_MAX_NAMES = 65536  # of a field
_MAX_PATTERN = 4096  # characters
_MAX_REPEATS = 8  # of a pattern; the time of a match grows with the length of a name to the power of their number

READ = (
    *("peft_type", "task_type", "r", "target_modules", "exclude_modules", "lora_alpha", "bias", "use_rslora"),
    *("init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "lora_bias"),
    "alora_invocation_tokens",
)
# of training or of the model's files, or of a method that another field selects
WITHOUT_EFFECT = (
    *("auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout"),
    *("fan_in_fan_out", "megatron_core", "qalora_group_size", "runtime_config"),
    *("eva_config", "corda_config", "lora_ga_config"),  # of the first values of matrices
    "ensure_weight_tying",  # of embeddings and heads, which are refused if they are tied
)
# refused unless null, false or empty -> why
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "use_dora": "DoRA changes the norms of the rows of weights",
        "modules_to_save": "it replaces whole weights of the model",
        "trainable_token_indices": "it changes embeddings of tokens",
        "target_parameters": "it adapts weights of stacked experts, or others that are no module",
        "layer_replication": "it changes the model's layers",
        "use_qalora": "QA-LoRA takes means of groups of inputs",
        "use_bdlora": "BD-LoRA has matrices of blocks",
        "megatron_config": "it is for modules of Megatron",
        "loftq_config": "LoftQ changes the model's weights",
        "kasa_config": "KaSA changes the model's weights",
        "velora_config": "VeLoRA has further tensors",
        "monteclora_config": "MonteCLoRA has further tensors",
        "arrow_config": "Arrow routes between adapters",
    }
)
_INIT = ("gaussian", "eva", "orthogonal")  # of `init_lora_weights`: those that leave the model's weights unchanged
_TASKS = ("CAUSAL_LM", "SEQ_CLS", "SEQ_2_SEQ_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION")
_CONVERT = (
    "the adapter belongs to changed weights of the model. Save it with PEFT's "
    "`path_initial_model_for_weight_conversion`, which converts it"
)


class AdapterFields(Fields):
    """The fields of one adapter_config.json. Methods raise AdapterError with the field's name."""

    def error(self, message: str) -> AdapterError:
        """An AdapterError with the file's path in front."""
        return AdapterError(f"{self.path}: {message}")

    def names(self, name: str) -> tuple[str, ...]:
        """A list of strings, or one string; empty if it is missing, null or an empty string."""
        value = self.values.get(name)
        found = ([value] if value else []) if isinstance(value, str) else self.optional(name, list, [])
        if len(found) > _MAX_NAMES or not all(isinstance(one, str) for one in found):
            raise self.error(f"{name} must have at most {_MAX_NAMES} strings, not {value!r:.80}")
        return tuple(found)

    def pattern(self, name: str, text: str) -> re.Pattern[str]:
        """A regular expression of the field `name`. Raises AdapterError if it is wrong, or its matches may be slow."""
        if _COMMENTED.search(text):
            raise self.error(f"the pattern {text!r:.80} of {name} has a comment; remove it")
        if len(text) > _MAX_PATTERN or _repeats(text) > _MAX_REPEATS:
            raise self.error(
                f"the pattern {text!r:.80} of {name} may take long; use at most {_MAX_REPEATS} of *, + and {{}}, none "
                f"of them behind a group that has another or an alternative, and {_MAX_PATTERN} characters"
            )
        try:
            return re.compile(text)
        except (re.error, OverflowError, RecursionError) as error:
            raise self.error(
                f"{name} has the pattern {text!r:.80}, which is not a regular expression: {error}"
            ) from error


@dataclass(frozen=True, slots=True)
class _Selection:
    """Names of modules: by a pattern of a whole name, or by names that are equal to the last parts of it."""

    pattern: re.Pattern[str] | None
    names: frozenset[str]

    def has(self, module: str) -> bool:
        """Whether a module is selected."""
        if self.pattern is not None:
            return self.pattern.fullmatch(module) is not None
        return not self.names.isdisjoint(_endings(module))


@dataclass(frozen=True)
class PeftConfig:
    """What adapter_config.json says about matrices. Modules are named as in the tensors, without PEFT's prefix."""

    rank: int
    alpha: float
    ranks: tuple[tuple[re.Pattern[str], int], ...]  # of modules that a pattern matches, the first that does
    alphas: tuple[tuple[re.Pattern[str], float], ...]
    divides_by_root: bool  # whether the scale is alpha / sqrt(rank), not alpha / rank
    has_bias: bool  # of `b`
    targets: _Selection | None  # None: all that the tensors have
    excluded: _Selection | None
    layers: frozenset[int] | None  # None: all
    layer_patterns: tuple[re.Pattern[str], ...]
    invocation_tokens: tuple[int, ...]

    def rank_of(self, module: str) -> int:
        """The rank of a module's matrices."""
        return _first_match(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """The factor of a module's product."""
        rank = self.rank_of(module)
        return _first_match(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.divides_by_root else rank)

    def is_target(self, module: str) -> bool:
        """Whether a module is adapted if the model has it."""
        if self.excluded is not None and self.excluded.has(module):
            return False
        if self.targets is None:
            return True
        if not self.targets.has(module):
            return False
        if self.layers is None or self.targets.pattern is not None or module in self.targets.names:
            return True
        found = next(filter(None, (pattern.match(module) for pattern in self.layer_patterns)), None)
        return found is not None and int(found["layer"]) in self.layers

    def names_without(self, modules: Collection[str]) -> list[str]:
        """The names of `target_modules` that match none of `modules`, and that are not excluded."""
        if self.targets is None:
            return []
        found = {ending for module in modules for ending in _endings(module)}
        missing = sorted(self.targets.names - found)
        return [name for name in missing if self.excluded is None or not self.excluded.has(name)]


def read_config(data: bytes, path: Path, vocab_size: int) -> PeftConfig:
    """The config in the bytes of an adapter_config.json. path: for messages. vocab_size: of the model.

    Raises AdapterError if it is damaged, wrong, or describes another method than LoRA.
    """
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path} is not valid JSON ({error}); save the adapter again") from error
    if not isinstance(values, dict):
        raise AdapterError(f"{path} must hold a JSON object; save the adapter again")
    fields = AdapterFields(values, path)
    _refuse(fields)
    targets, excluded = _selection(fields, "target_modules"), _selection(fields, "exclude_modules")
    if isinstance(targets, _Selection) and targets.pattern is None and not targets.names:
        raise fields.error("target_modules is empty, so that nothing is adapted")
    layers, layer_patterns = _layers(fields)
    if layers is not None and targets is not None and targets.pattern is not None:
        raise fields.error("layers_to_transform needs a list of target_modules, not a pattern; remove one of the two")
    return PeftConfig(
        rank=fields.integer("r", default=8),
        alpha=_finite(fields, "lora_alpha", 8.0),
        ranks=tuple(
            (pattern, AdapterFields({"rank_pattern": value}, path).integer("rank_pattern"))
            for pattern, value in _by_pattern(fields, "rank_pattern")
        ),
        alphas=tuple(
            (pattern, _finite(AdapterFields({"alpha_pattern": value}, path), "alpha_pattern", 8.0))
            for pattern, value in _by_pattern(fields, "alpha_pattern")
        ),
        divides_by_root=fields.optional("use_rslora", bool, default=False),
        has_bias=fields.optional("lora_bias", bool, default=False),
        targets=targets,
        excluded=excluded,
        layers=layers,
        layer_patterns=layer_patterns,
        invocation_tokens=_invocation_tokens(fields, vocab_size),
    )


def _refuse(fields: AdapterFields) -> None:
    """Raise AdapterError for all that is not plain LoRA."""
    kind = fields.optional("peft_type", str, "")
    if kind != "LORA":
        raise fields.error(f"peft_type is {kind!r:.80}; quire loads adapters of the type 'LORA' only")
    for name, why in REFUSED.items():
        if fields.values.get(name):
            raise fields.error(f"{name} is not supported: {why}; train the adapter without it")
    unknown = [name for name in fields.values if name not in {*READ, *WITHOUT_EFFECT, *REFUSED}]
    for name in unknown:
        if fields.values[name]:
            raise fields.error(f"{name!r:.80} is not a field that quire knows; remove it if it changes no result")
    bias = fields.optional("bias", str, "none")
    if bias != "none":
        raise fields.error(f"bias {bias!r:.80} is not supported: it changes biases of the model; train with 'none'")
    task = fields.optional("task_type", str, "CAUSAL_LM")
    if task not in _TASKS:
        raise fields.error(f"task_type must be null or one of {', '.join(_TASKS)}, not {task!r:.80}")
    init = fields.values.get("init_lora_weights", True)
    if not (init is None or isinstance(init, bool) or init in _INIT):
        raise fields.error(f"init_lora_weights {init!r:.80} is not supported: {_CONVERT}")


def _selection(fields: AdapterFields, name: str) -> _Selection | None:
    value = fields.values.get(name)
    if value is None or (name == "target_modules" and isinstance(value, str) and value.lower() == "all-linear"):
        return None
    if isinstance(value, str):
        return _Selection(fields.pattern(name, value), frozenset())
    return _Selection(None, frozenset(fields.names(name)))


def _layers(fields: AdapterFields) -> tuple[frozenset[int] | None, tuple[re.Pattern[str], ...]]:
    """The numbers of adapted layers, and the patterns whose group `layer` is such a number. None: all layers."""
    value = fields.values.get("layers_to_transform")
    numbers = [value] if isinstance(value, int) else fields.optional("layers_to_transform", list, [])
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in numbers):
        raise fields.error(f"layers_to_transform must be a number or a list of numbers, not {value!r:.80}")
    before = [
        rf"(?:^|.*?\.){text}" for text in fields.names("layers_pattern") if fields.pattern("layers_pattern", text)
    ]
    if before and not numbers:
        raise fields.error("layers_pattern needs layers_to_transform; remove it, or add that")
    patterns = tuple(re.compile(rf"{text}\.(?P<layer>\d+)\.") for text in before or (r".*?\.[^.]*",))
    return frozenset(numbers) if numbers else None, patterns


def _by_pattern(fields: AdapterFields, name: str) -> list[tuple[re.Pattern[str], object]]:
    """The entries of an object whose keys are patterns of the last parts of modules."""
    found = fields.optional(name, dict, {})
    if len(found) > _MAX_PATTERNS:
        raise fields.error(f"{name} has {len(found)} entries; the most is {_MAX_PATTERNS}")
    if None in found.values():
        raise fields.error(f"{name} must have a number for each pattern, not null")
    return [(re.compile(rf"(.*\.)?({fields.pattern(name, key).pattern})$"), value) for key, value in found.items()]


def _finite(fields: AdapterFields, name: str, default: float) -> float:
    value = fields.optional(name, float, default)
    if not abs(value) <= _MOST:  # also NaN
        raise fields.error(f"{name} must be a number of at most {_MOST:g}, not {value}")
    return value


def _invocation_tokens(fields: AdapterFields, vocab_size: int) -> tuple[int, ...]:
    if fields.values.get("alora_invocation_tokens") is None:
        return ()
    tokens = fields.optional("alora_invocation_tokens", list, [])
    if not 1 <= len(tokens) <= _MAX_INVOCATION_TOKENS:
        raise fields.error(f"alora_invocation_tokens has {len(tokens)} tokens; it needs 1 to {_MAX_INVOCATION_TOKENS}")
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise fields.error(
                f"alora_invocation_tokens has {token!r:.80}, which is no token of the model's {vocab_size} tokens"
            )
    return tuple(tokens)


def _first_match(patterns: tuple[tuple[re.Pattern[str], T], ...], module: str, default: T) -> T:
    return next((value for pattern, value in patterns if pattern.match(module)), default)


def _endings(module: str) -> list[str]:
    """A module's name, and what stands behind each of its dots."""
    parts = module.split(".")
    return [".".join(parts[first:]) for first in range(len(parts))]


def _repeats(pattern: str) -> int:
    """The number of repetitions in a regular expression. Nested ones, which can take exponential time, count as many.

    A group that is repeated and has alternatives is nested, too.
    """
    found, position = 0, 0
    groups = [False]  # of each open group, whether it has a repetition or an alternative
    closed = False  # whether the last item is a group that has one
    while position < len(pattern):
        token = _TOKEN.match(pattern, position)
        if token is None:
            return found
        text, position = token[0], token.end()
        if text == "(":
            groups.append(False)
        elif text == ")":
            closed = groups.pop() if len(groups) > 1 else False
            groups[-1] |= closed
            continue
        elif text == "|":
            groups[-1] = True
        elif text[0] in "*+{":
            found += _MAX_REPEATS + 1 if closed else 1
            groups[-1] = True
        closed = False
    return found


_COMMENTED = re.compile(r"\(\?(#|[a-zA-Z-]*x)")
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[*+][?+]?|\{[\d,]*\}\??|.", re.DOTALL)
