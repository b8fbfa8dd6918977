"""Description of a checkpoint that runs through transformers.

No weight is read: the model is built on the meta device, its tensors are compared with the checkpoint's, and it is
run once to record the attention calls of its layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from quire.core.kv_groups import StoredKind, kv_kind
from quire.core.states import StateKind
from quire.errors import ModelError
from quire.kernels.contract import DTYPES
from quire.models.config_fields import Fields
from quire.models.description import compute_dtype, sampling_defaults, token_ids
from quire.models.transformers.attention import TRACING_ATTENTION
from quire.models.transformers.construction import MetaTensor, construct, quiet
from quire.models.transformers.split_model import SplitModel
from quire.models.transformers.tracing import Layer, trace
from quire.weights.checkpoint import Checkpoint
from quire.weights.schemes import NO_SCHEMES, Schemes

_IGNORED_FIELDS = (  # fields that select code to run
    *("auto_map", "attn_implementation", "experts_implementation", "fusion_config", "distributed_config"),
    "transformers_weights",
)
_LAYER_TYPES = ("full_attention", "sliding_attention")
_ALIGNED = 8  # numbers in 16 bytes of the smallest type, of which the strides of grouped products are multiples
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")


@dataclass(frozen=True, eq=False)
class TransformersDescription:
    """A checkpoint that quire can load through transformers. See Description."""

    checkpoint: Checkpoint
    architecture: str
    kind: type[PreTrainedModel]
    config: PreTrainedConfig
    layers: tuple[Layer, ...]
    vocab_size: int
    hidden_size: int
    max_positions: int
    activations_per_token: int
    num_parameters: int
    has_aligned_experts: bool  # whether torch's grouped products take its experts, if it has any
    dtype: str  # compute dtype: "float32", "float16" or "bfloat16"
    eos_token_ids: tuple[int, ...]
    sampling_defaults: Mapping[str, float | int]  # by names of SamplingParams
    generates: bool = True
    classification: None = None  # classification heads are not loaded through transformers

    @property
    def kv_layers(self) -> Sequence[StoredKind]:
        """See Description."""
        return tuple(kv_kind(layer.params.num_kv_heads, layer.params.head_dim, layer.window) for layer in self.layers)

    @property
    def state_layers(self) -> Sequence[StateKind]:
        """See Description."""
        return ()

    def schemes(self, quantization: str | None) -> Schemes:
        """See Description."""
        if quantization in (None, "none"):
            return NO_SCHEMES
        raise ModelError(
            f"{self.architecture} runs with transformers as a backend, which keeps its weights in dtype; leave "
            "quantization out"
        )

    def weight_bytes(self, dtype: str, schemes: Schemes = NO_SCHEMES) -> int:
        """See Description. There are no schemes."""
        del schemes
        return self.num_parameters * DTYPES[dtype].itemsize


def describe_transformers(checkpoint: Checkpoint) -> TransformersDescription:
    """The description of a checkpoint whose model transformers has, with attention that quire supports.

    Raises ModelError with the reason for any other, and if the tensors are not those of the architecture.
    """
    fields = Fields(checkpoint.config, checkpoint.path)
    config = _config(fields)
    kind = _kind(fields, config)
    _check_supported(fields, kind, config)
    max_positions = _max_positions(fields, config)
    shapes = {name: MetaTensor(stored) for name, stored in checkpoint.tensors.items()}
    # this implementation of experts runs on the meta device
    model = construct(
        kind,
        config,
        shapes,
        checkpoint,
        dtype="float32",
        device="meta",
        attention=TRACING_ATTENTION,
        experts="batched_mm",
    )
    traced = trace(SplitModel(model), max_positions)
    return TransformersDescription(
        checkpoint,
        kind.__name__,
        kind,
        config,
        traced.layers,
        traced.vocab_size,
        traced.hidden_size,
        max_positions,
        _activations(model, config, traced.hidden_size, traced.layers),
        sum(parameter.numel() for parameter in model.parameters()),
        all(size % _ALIGNED == 0 for one in model.parameters() if one.dim() == 3 for size in one.shape[1:]),
        compute_dtype(fields, checkpoint),
        token_ids(checkpoint, "eos_token_id"),
        sampling_defaults(checkpoint.generation_config),
    )


def _config(fields: Fields) -> PreTrainedConfig:
    name = fields.optional("model_type", str, "")
    if name not in CONFIG_MAPPING:
        if fields.optional("auto_map", dict, {}):
            raise fields.error("the model needs code from its own folder, which quire never runs")
        raise fields.error(f"transformers {transformers.__version__} has no model of type {name!r:.80}")
    values = {
        key: value for key, value in fields.values.items() if key not in _IGNORED_FIELDS and not key.startswith("_")
    }
    try:
        with quiet():
            config: PreTrainedConfig = CONFIG_MAPPING[name].from_dict(_with_infinities(values))
    except Exception as error:  # each configuration has checks of its own
        raise fields.error(f"transformers does not accept the configuration: {error!s:.300}") from error
    return config


def _with_infinities(value: Any) -> Any:  # noqa: ANN401  (of JSON)
    """The value with floats in place of {"__float__": "Infinity"}, transformers' form of numbers that JSON lacks."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _with_infinities(one) for key, one in value.items()}
    return [_with_infinities(one) for one in value] if isinstance(value, list) else value


def _kind(fields: Fields, config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class of the model. Raises ModelError if it is no text decoder."""
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    names = fields.optional("architectures", list, [])
    if kind is None or kind.__name__ not in names:
        raise fields.error(f"architecture {', '.join(map(str, names))!r:.80} is not a decoder of transformers")
    found: type[PreTrainedModel] = kind
    return found


def _check_supported(fields: Fields, kind: type[PreTrainedModel], config: PreTrainedConfig) -> None:
    """Raise ModelError for features that are known not to work, with their name."""
    kinds = fields.optional("layer_types", list, getattr(config, "layer_types", None) or [])
    others = [str(one) for one in kinds if one not in _LAYER_TYPES]
    reasons = {
        "its weights are quantized": fields.values.get("quantization_config") is not None,
        "it has an encoder": bool(config.is_encoder_decoder),
        "it attends to another model's outputs": bool(getattr(config, "add_cross_attention", False)),
        "it has parts other than a text decoder": config.get_text_config() is not config,
        "it has a state other than keys and values": bool(kind._is_stateful) and not kinds,
        f"it has layers of type {', '.join(dict.fromkeys(others))}": bool(others),
        "its class does not support transformers' attention interface": not kind._supports_attention_backend,
        "its positions depend on the longest sequence of a batch (rope of type dynamic)": "dynamic" in _ropes(config),
    }
    for reason, applies in reasons.items():
        if applies:
            raise fields.error(f"{kind.__name__} cannot be run through transformers: {reason}")


def _ropes(config: PreTrainedConfig) -> dict[str, Mapping[str, Any]]:
    """The rope parameters by rope type. Some models have several."""
    given = getattr(config, "rope_parameters", None) or {}
    ropes = [given, *(value for value in given.values() if isinstance(value, Mapping))]
    return {str(rope.get("rope_type", "default")): rope for rope in ropes}


def _max_positions(fields: Fields, config: PreTrainedConfig) -> int:
    """max_position_embeddings, which yarn and linear scaling extend as in quire's decoder.

    With LongRoPE at most the positions of the training context: beyond these, one long position changes the rotation of
    all positions of a batch in transformers.
    """
    trained = getattr(config, "max_position_embeddings", None)
    if not isinstance(trained, int) or trained <= 0:
        raise fields.error("max_position_embeddings is missing")
    reach = trained
    for kind, values in _ropes(config).items():
        rope = Fields(values, fields.path)
        original = rope.integer("original_max_position_embeddings", default=trained)
        factor = rope.number("factor", default=1.0)
        if kind == "yarn":
            reach = max(int(original * factor), trained)
        elif kind == "linear":
            reach = int(trained * factor)
        elif kind == "longrope":
            reach = min(original, trained)
    by_layer = "default" in _ropes(config)  # if ropes differ, max_position_embeddings includes the scaling
    return min(reach, trained) if by_layer else reach


def _activations(model: PreTrainedModel, config: PreTrainedConfig, hidden: int, layers: Sequence[Layer]) -> int:
    """The most activation numbers of a token at the same time: hidden states and the widest layer's outputs."""
    tables = {id(table.weight) for table in model.modules() if isinstance(table, nn.Embedding)}
    outer: Any = model  # its methods are not annotated
    head = outer.get_output_embeddings()
    if head is not None:
        tables.add(id(head.weight))
    weights = [parameter for parameter in model.parameters() if id(parameter) not in tables]
    widest = max(_width(weight.shape, config) for weight in weights)
    queries = max(layer.params.num_heads * layer.params.head_dim for layer in layers)
    return 4 * hidden + 3 * widest + 3 * queries


def _width(shape: torch.Size, config: PreTrainedConfig) -> int:
    """Output numbers of a weight per token. A weight of stacked experts has three axes."""
    if len(shape) < 3:
        return max(shape, default=1)
    chosen = next((n for name in _EXPERTS_PER_TOKEN if isinstance(n := getattr(config, name, None), int)), shape[0])
    return chosen * max(shape[1:])
