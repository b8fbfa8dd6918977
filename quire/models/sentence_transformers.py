"""How an embedding model makes its vectors, by the files of a sentence-transformers folder or the keys of a GGUF file.

Each file and field of FIELDS is applied, irrelevant, or refused by name. A field that is in none of these files' lists
is refused unless it is null, false or empty: it could change the vectors. Imports no torch, because the HTTP process
makes the vectors of pooled states.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import msgspec
from safetensors import SafetensorError, safe_open

from quire.core.step import Pooling
from quire.errors import ModelError, nearest
from quire.models.config_fields import Fields
from quire.weights.gguf.reader import Metadata
from quire.weights.json_file import read_json_object

Verdict = Literal["applied", "irrelevant", "refused"]
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]

MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
INPUTS = "sentence_bert_config.json"
POOLING, DENSE, NORMALIZE, LAYER_NORM, DROPOUT = ("Pooling", "Dense", "Normalize", "LayerNorm", "Dropout")
_MODULE_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_MAX_FILE, _MAX_SIZE = 1 << 24, 1 << 16  # bytes of modules.json, numbers of a vector

# by file (of a module: the type of the module), then by field
FIELDS: Mapping[str, Mapping[str, Verdict]] = MappingProxyType(
    {
        MODULES: {"type": "applied", "path": "applied", "idx": "irrelevant", "name": "irrelevant", "kwargs": "refused"},
        POOLING: {
            "pooling_mode": "applied",
            "pooling_mode_cls_token": "applied",
            "pooling_mode_max_tokens": "applied",
            "pooling_mode_mean_tokens": "applied",
            "pooling_mode_mean_sqrt_len_tokens": "applied",
            "pooling_mode_weightedmean_tokens": "applied",
            "pooling_mode_lasttoken": "applied",
            "embedding_dimension": "applied",
            "word_embedding_dimension": "applied",
            "include_prompt": "applied",
        },
        DENSE: {
            "in_features": "applied",
            "out_features": "applied",
            "bias": "applied",
            "activation_function": "applied",
            "use_residual": "applied",
            "module_input_name": "applied",
            "module_output_name": "applied",
        },
        NORMALIZE: {"module_input_name": "applied", "module_output_name": "applied"},
        LAYER_NORM: {"dimension": "applied"},
        DROPOUT: {"dropout": "irrelevant"},
        SETTINGS: {
            "prompts": "applied",
            "default_prompt_name": "applied",
            "similarity_fn_name": "applied",
            "model_type": "applied",
            "__version__": "irrelevant",
            "requirements": "irrelevant",
        },
        INPUTS: {
            "max_seq_length": "applied",
            "do_lower_case": "applied",
            "transformer_task": "applied",
            "module_output_name": "applied",
            "modality_config": "applied",
            "unpad_inputs": "irrelevant",
            "processing_kwargs": "refused",
            "model_args": "refused",
            "tokenizer_args": "refused",
            "config_args": "refused",
            "query_length": "refused",
            "document_length": "refused",
            "query_expansion": "refused",
        },
        "tokenizer_config.json": {"model_max_length": "applied"},
        "config.json": {"is_matryoshka": "applied", "matryoshka_dimensions": "applied"},
        "GGUF": {".pooling_type": "applied", ".attention.causal": "applied"},
    }
)

_POOLINGS = {  # by the value of pooling_mode
    "cls": Pooling.CLS,
    "max": Pooling.MAX,
    "mean": Pooling.MEAN,
    "mean_sqrt_len_tokens": Pooling.MEAN_SQRT_LEN,
    "weightedmean": Pooling.WEIGHTED_MEAN,
    "lasttoken": Pooling.LAST,
}
_POOLING_FLAGS = {  # the same as flags, of which one is true
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_GGUF_POOLINGS = {1: Pooling.MEAN, 2: Pooling.CLS, 3: Pooling.LAST}
_GGUF_NO_POOLING, _GGUF_RANK = 0, 4
POOLING_NAMES: Mapping[Pooling, str] = MappingProxyType(
    {
        Pooling.LAST: "state of the last token",
        Pooling.CLS: "state of the first token",
        Pooling.MEAN: "mean of all states",
        Pooling.MAX: "maximum of all states",
        Pooling.MEAN_SQRT_LEN: "sum of all states by the root of their number",
        Pooling.WEIGHTED_MEAN: "mean of all states, weighted by position",
    }
)
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")
_SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
_STATES, _VECTOR = "token_embeddings", "sentence_embedding"  # sentence-transformers' names of what modules read
_FLOATS = ("F32", "F16", "BF16")
_FOLDER = re.compile(r"[A-Za-z0-9_][\w.-]*", re.ASCII)


class Dense(msgspec.Struct, frozen=True, tag=True):
    """A linear layer with an activation. residual: what is added to its result."""

    file: str  # of its weights, safetensors
    in_features: int
    out_features: int
    bias: bool
    activation: str
    residual: Literal["none", "input", "projection"] = "none"

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of its weights by name."""
        found: dict[str, tuple[int, ...]] = {"linear.weight": (self.out_features, self.in_features)}
        if self.bias:
            found["linear.bias"] = (self.out_features,)
        if self.residual == "projection":
            found["residual.weight"] = (self.out_features, self.in_features)
        return found

    def __str__(self) -> str:
        activation = "" if self.activation == "Identity" else f" with {self.activation}"
        return f"Dense {self.in_features} to {self.out_features}{activation}"


class LayerNorm(msgspec.Struct, frozen=True, tag=True):
    """A layer norm with weight and bias."""

    file: str  # of its weights, safetensors
    out_features: int

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of its weights by name."""
        return {"norm.weight": (self.out_features,), "norm.bias": (self.out_features,)}

    def __str__(self) -> str:
        return "LayerNorm"


class Normalize(msgspec.Struct, frozen=True, tag=True):
    """Scaling to length 1 in front of another module."""

    out_features: int

    def __str__(self) -> str:
        return "Normalize"


class EmbeddingConfig(msgspec.Struct, frozen=True):
    """How the vectors of a model are made.

    source: the file that says so; "": none, and the defaults apply. modules: behind the pooling. normalize: whether the
    result is scaled to length 1 unless a request says otherwise. dimensions: numbers of a vector that requests may ask
    for; None: any number, (): only all of them. max_length: the most tokens of a prompt; None: as many as the model
    supports.
    """

    size: int  # numbers of a vector
    source: str = ""
    pooling: Pooling = Pooling.LAST
    modules: tuple[Dense | LayerNorm | Normalize, ...] = ()
    normalize: bool = True
    dimensions: tuple[int, ...] | None = ()
    prompts: Mapping[str, str] = {}
    default_prompt: str | None = None  # a name of `prompts`
    lowercase: bool = False
    similarity: Similarity = "cosine"
    max_length: int | None = None

    def __str__(self) -> str:
        steps = [POOLING_NAMES[self.pooling], *map(str, self.modules), *(["of length 1"] if self.normalize else [])]
        prompt = f"; in front of each text: {self.prompts[self.default_prompt]!r:.60}" if self.default_prompt else ""
        return f"{', '.join(steps)} ({self.source or 'the model does not say'}){prompt}"


def read_folder(folder: Path, config: Mapping[str, object], hidden_size: int) -> EmbeddingConfig:
    """How the model of a folder makes vectors. config: the fields of its config.json.

    Raises ModelError for a file that is missing or damaged, and for everything that would change the vectors and is
    not supported.
    """
    dimensions = _matryoshka(Fields(config, folder / "config.json"), hidden_size)
    if not (folder / MODULES).is_file():
        for name in (SETTINGS, INPUTS, f"1_{POOLING}"):
            if (folder / name).exists():
                raise ModelError(
                    f"{folder} has {name}, but no {MODULES}, which says how its vectors are made; download it, or "
                    f"delete {name}"
                )
        return EmbeddingConfig(hidden_size, dimensions=dimensions)
    settings, inputs = _fields(folder / SETTINGS, SETTINGS), _fields(folder / INPUTS, INPUTS)
    prompts, default = _prompts(settings)
    made = _read_modules(folder, hidden_size, asks_for_prompts=any(prompts.values()))
    _check_inputs(inputs)
    if settings.optional("model_type", str, "SentenceTransformer") != "SentenceTransformer":
        raise settings.error(f"model_type {settings.values['model_type']!r:.80} is not supported")
    similarity = settings.optional("similarity_fn_name", str, "cosine")
    if similarity not in _SIMILARITIES:
        raise settings.error(f"similarity_fn_name must be one of {', '.join(_SIMILARITIES)}, not {similarity!r:.80}")
    size = made.size
    return msgspec.structs.replace(
        made,
        dimensions=None if dimensions is None else tuple(one for one in dimensions if one <= size),
        prompts=prompts,
        default_prompt=default,
        lowercase=inputs.optional("do_lower_case", bool, default=False),
        similarity=similarity,
        max_length=_max_length(folder, inputs),
    )


def read_gguf(metadata: Metadata, hidden_size: int) -> EmbeddingConfig:
    """How the model of a GGUF file makes vectors. Raises ModelError for what is not supported."""
    if not metadata.flag(".attention.causal", default=True):
        raise metadata.error(
            f"{metadata.architecture}.attention.causal is false; bidirectional models are not supported"
        )
    kind = metadata.number(".pooling_type", _GGUF_NO_POOLING)
    if kind == _GGUF_NO_POOLING:
        return EmbeddingConfig(hidden_size)
    if kind not in _GGUF_POOLINGS:
        what = "rank: a reranker" if kind == _GGUF_RANK else "unknown"
        raise metadata.error(f"{metadata.architecture}.pooling_type {kind} ({what}) is not supported")
    return EmbeddingConfig(hidden_size, f"{metadata.architecture}.pooling_type", _GGUF_POOLINGS[kind])


def _read_modules(folder: Path, hidden_size: int, *, asks_for_prompts: bool) -> EmbeddingConfig:
    """What modules.json says: pooling, modules behind it, normalization."""
    path = folder / MODULES
    pooling, size = None, hidden_size
    modules: list[Dense | LayerNorm | Normalize] = []
    for place, (kind, at) in enumerate(_module_list(path)):
        if (place == 0) is not (kind == "Transformer"):
            raise ModelError(
                f"{path}: module {place} has the type {kind!r:.80}; the first, and no other, is Transformer"
            )
        if place == 0:
            if at:
                raise ModelError(
                    f"{path}: the path of module 0 is {at!r:.80}; quire reads a model in the folder itself"
                )
            continue
        if (place == 1) is not (kind == POOLING):
            raise ModelError(f"{path}: module {place} has the type {kind!r:.80}; the second, and no other, is Pooling")
        if not at:
            raise ModelError(f"{path}: module {place} of type {kind} has no path, so it has no folder of its own")
        fields = _fields(folder / at / _MODULE_CONFIG, kind, needed=kind in (POOLING, DENSE, LAYER_NORM))
        if kind == POOLING:
            pooling = _pooling(fields, size, asks_for_prompts=asks_for_prompts)
        elif kind == NORMALIZE:
            _check_names(fields)
            modules.append(Normalize(size))
        elif kind == DENSE:
            modules.append(_dense(fields, size))
            size = modules[-1].out_features
        elif kind == LAYER_NORM:
            modules.append(_layer_norm(fields, size))
    if pooling is None:
        raise ModelError(f"{path} has no module Pooling, so it does not say how a vector is made")
    normalize = bool(modules) and isinstance(modules[-1], Normalize)
    kept = tuple(modules[:-1] if normalize else modules)
    return EmbeddingConfig(size, MODULES, pooling, kept, normalize)


def module_folders(path: Path) -> list[str]:
    """The names of the folders of modules in a modules.json, supported or not. Raises ModelError for a damaged file."""
    return [str(entry["path"]) for entry in _entries(path) if entry.get("path")]


def _entries(path: Path) -> list[dict[str, object]]:
    """The modules in a modules.json. Raises ModelError."""
    try:
        if path.stat().st_size > _MAX_FILE:
            raise ValueError(f"it has more than {_MAX_FILE} bytes")
        entries = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise ModelError(f"{path} is not valid JSON, or cannot be read ({error}); download it again") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ModelError(f"{path} must hold a JSON list of objects; download it again")
    return entries


def _module_list(path: Path) -> list[tuple[str, str]]:
    """Type and path of each module, in order. A type is the last component of a name in any version of the library."""
    found = []
    for entry in _entries(path):
        fields = Fields(entry, path)
        _check_known(fields, MODULES)
        full, at = fields.optional("type", str, ""), fields.optional("path", str, "")
        own, _, kind = full.rpartition(".")
        known = ("Transformer", POOLING, DENSE, NORMALIZE, LAYER_NORM, DROPOUT)
        if kind not in known or own.split(".")[0] != "sentence_transformers":
            raise fields.error(
                f"the module {full!r:.120} is not supported{nearest(kind, known)}; supported: {', '.join(known)} of "
                "sentence_transformers"
            )
        if at and not _FOLDER.fullmatch(at):
            raise fields.error(f"the path {at!r:.80} of a module is not the name of a folder beside it")
        found.append((kind, at))
    return found


def _fields(path: Path, kind: str, *, needed: bool = False) -> Fields:
    """The fields of a file; none if there is no file and it is not `needed`."""
    if not path.is_file():
        if needed:
            raise ModelError(f"{path} is missing, which {MODULES} beside its folder names; download it")
        return Fields({}, path)
    fields = Fields(read_json_object(path), path)
    _check_known(fields, kind)
    return fields


def _check_known(fields: Fields, kind: str) -> None:
    """Raise ModelError for a field that is refused or unknown, unless it is null, false or empty."""
    for name, value in fields.values.items():
        if FIELDS[kind].get(name, "refused") == "refused" and value not in (None, False, "", [], {}):
            raise fields.error(
                f"{name} = {value!r:.80} is not supported; the vectors would be wrong{nearest(name, FIELDS[kind])}"
            )


def _pooling(fields: Fields, size: int, *, asks_for_prompts: bool) -> Pooling:
    name = fields.values.get("pooling_mode")
    names = [name] if isinstance(name, str) else name
    if names is None:
        names = [mode for flag, mode in _POOLING_FLAGS.items() if fields.optional(flag, bool, default=False)] or [
            "mean"
        ]
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str) or names[0] not in _POOLINGS:
        raise fields.error(f"the pooling {names!r:.80} is not supported; supported: one of {', '.join(_POOLINGS)}")
    _check_size(fields, fields.integer("embedding_dimension", "word_embedding_dimension", default=size), size)
    pooling = _POOLINGS[names[0]]
    includes = fields.optional("include_prompt", bool, default=True)
    if not includes and asks_for_prompts and pooling is not Pooling.LAST:
        raise fields.error(
            f"include_prompt = False is not supported with the pooling {names[0]} and prompts in {SETTINGS}: the "
            "states of a prompt would be pooled"
        )
    return pooling


def _check_size(fields: Fields, given: int, size: int) -> None:
    if given != size:
        raise fields.error(f"the module takes vectors of {given} numbers, but gets {size}")


def _check_names(fields: Fields) -> None:
    """Raise ModelError for a module that reads or writes something other than the vector of a text."""
    for name in ("module_input_name", "module_output_name"):
        if fields.optional(name, str, _VECTOR) != _VECTOR:
            raise fields.error(f"{name} = {fields.values[name]!r:.80} is not supported; supported: {_VECTOR}")


def _dense(fields: Fields, size: int) -> Dense:
    _check_names(fields)
    columns, rows = (fields.integer(name, most=_MAX_SIZE) for name in ("in_features", "out_features"))
    _check_size(fields, columns, size)
    path = fields.optional("activation_function", str, "torch.nn.modules.activation.Tanh")
    origin, _, activation = path.rpartition(".")
    if activation not in ACTIVATIONS or origin.split(".")[:2] != ["torch", "nn"]:
        raise fields.error(
            f"activation_function {path!r:.80} is not supported; supported: {', '.join(ACTIVATIONS)} of torch.nn"
        )
    adds = fields.optional("use_residual", bool, default=False)
    residual: Literal["none", "input", "projection"] = (
        "none" if not adds else "input" if rows == columns else "projection"
    )
    bias = fields.optional("bias", bool, default=True)
    dense = Dense(str(fields.path.parent / _WEIGHTS), columns, rows, bias, activation, residual)
    _check_weights(Path(dense.file), dense.tensors)
    return dense


def _layer_norm(fields: Fields, size: int) -> LayerNorm:
    _check_size(fields, fields.integer("dimension", most=_MAX_SIZE), size)
    norm = LayerNorm(str(fields.path.parent / _WEIGHTS), size)
    _check_weights(Path(norm.file), norm.tensors)
    return norm


def _check_weights(file: Path, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ModelError unless a file has tensors of exactly these names and shapes."""
    if not file.is_file():
        pickle = next((path.name for path in file.parent.glob("*.bin")), None)
        why = f"quire does not read {pickle}, a pickle, which can run code; " if pickle else ""
        raise ModelError(
            f"{file} is missing, with the weights of a module; {why}save or download the module as safetensors"
        )
    try:
        with safe_open(file, framework="numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  (not a dict)
            found = {name: (tuple(one.get_shape()), one.get_dtype()) for name, one in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is damaged or truncated ({error}); delete it and download it again") from error
    for name in {**expected, **found}:
        shape, dtype = found.get(name, (None, ""))
        if shape != expected.get(name) or dtype not in _FLOATS:
            raise ModelError(
                f"{file}: {name}: expected shape {expected.get(name)} of {', '.join(_FLOATS)}, found {shape} {dtype}"
            )


def _prompts(settings: Fields) -> tuple[Mapping[str, str], str | None]:
    """Prompts by name, and the name of the one that applies to all texts."""
    prompts = settings.optional("prompts", dict, {})
    for name, text in prompts.items():
        if text is not None and not isinstance(text, str):
            raise settings.error(f"the prompt {name!r:.80} must be a text, not {text!r:.80}")
    known: dict[str, str] = {name: text or "" for name, text in prompts.items()}
    default = settings.optional("default_prompt_name", str, "")
    if default and default not in known:
        raise settings.error(f"default_prompt_name {default!r:.80} is not in prompts{nearest(default, known)}")
    return known, default if default and known[default] else None


def _check_inputs(inputs: Fields) -> None:
    """Raise ModelError for a Transformer module that does not yield the last hidden states of plain text."""
    wanted: Mapping[str, object] = {"transformer_task": "feature-extraction", "module_output_name": _STATES}
    for name, value in wanted.items():
        if inputs.values.get(name) not in (None, value):
            raise inputs.error(f"{name} = {inputs.values[name]!r:.80} is not supported; supported: {value}")
    modalities = inputs.optional("modality_config", dict, {})
    text: Any = modalities.get("text", {"method": "forward", "method_output_name": "last_hidden_state"})
    if text != {"method": "forward", "method_output_name": "last_hidden_state"}:
        raise inputs.error(f"modality_config has the text {text!r:.80}; supported: the last_hidden_state of forward")


def _max_length(folder: Path, inputs: Fields) -> int | None:
    """The most tokens of a text: those of the Transformer module, else those of the tokenizer."""
    if inputs.values.get("max_seq_length") is not None:
        return inputs.integer("max_seq_length")
    path = folder / "tokenizer_config.json"
    found = read_json_object(path).get("model_max_length") if path.is_file() else None
    if isinstance(found, bool) or not isinstance(found, int | float) or not 1 <= found < 2**31:
        return None  # a larger one means no limit
    return int(found)


def _matryoshka(fields: Fields, hidden_size: int) -> tuple[int, ...] | None:
    """The numbers of shorter vectors that requests may ask for; None: any."""
    given = fields.optional("matryoshka_dimensions", list, [])
    if any(not isinstance(one, int) or isinstance(one, bool) or one < 1 for one in given):
        raise fields.error(f"matryoshka_dimensions must be a list of positive whole numbers, not {given!r:.80}")
    if given:
        return tuple(sorted({*given}))
    return None if fields.optional("is_matryoshka", bool, default=False) else ()
