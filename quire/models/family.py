"""Definition of an architecture: Llama, and how another family is derived from it.

Values from config.json are ConfigFields (`config_fields.py`). `config.py` describes the values.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from quire.models.config import DecoderConfig, TensorNames
from quire.models.config_fields import choice, flag, integer, number
from quire.models.recurrence_config import RecurrenceRule
from quire.models.rope_config import RopeRule


@dataclass(frozen=True, slots=True)
class WindowRule:
    """Which layers have a window if config.json has no `layer_types`. "none": a window is an error."""

    kind: Literal["none", "listed", "all", "always", "upper", "pattern"] = "none"  # "always": for all layers
    size: int = integer("sliding_window", default=0, least=0)  # positions; 0: all
    used: bool = True
    first: int = 0  # "upper": this layer and all after it
    pattern: int = 0  # "pattern": all layers but every pattern-th


@dataclass(frozen=True, slots=True)
class SparseRule:
    """Which layers have experts in place of an MLP, in families that have experts."""

    used: bool = True
    step: int = 1  # every step-th layer, counted from 1,
    first: int = 0  # from this one, counted from 0,
    last: int = -1  # to this one; -1: the last of all,
    dense: tuple[int, ...] = ()  # except these
    kinds: tuple[str, ...] = ()  # "dense" or "sparse" of each layer, in place of the other fields; empty: by these


@dataclass(frozen=True, slots=True)
class FullRule:
    """How layers without a window differ from the others. A zero: not at all."""

    head_dim: int = 0
    num_kv_heads: int = 0  # where values are keys
    values_are_keys: bool = False  # whether values are the keys before their norm
    layers: Mapping[str, object] = field(default_factory=dict)  # differences of single layers, in place of these


@dataclass(frozen=True, slots=True)
class SharingRule:
    """Layers that attend to the KV of the last layer of their kind that has its own."""

    num_layers: int = 0  # the last of all
    mlp_factor: int = 1  # of their intermediate size


@dataclass(frozen=True, slots=True)
class InnerSizeRule:
    """An intermediate size that is 2/3 of the field (LFM2), times a multiplier, up to a multiple of a number."""

    used: bool = False
    multiplier: float = 1.0  # 0: no multiplier and no multiple
    multiple_of: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """An architecture. `config` has no layers and ropes; they are derived from the rules in the other fields."""

    config: DecoderConfig
    names: TensorNames
    rope: RopeRule | None  # None: no rotary embedding
    windows: WindowRule
    sparse: SparseRule = SparseRule()
    full: FullRule = FullRule()
    sharing: SharingRule = SharingRule()
    recurrence: RecurrenceRule | None = None  # None: all layers attend
    inner_size: InnerSizeRule = InnerSizeRule()
    heads_of_layers: tuple[int, ...] = ()  # query heads of each layer; empty: all have `config.num_heads`
    scale: float = 0.0  # of attention scores; 0: 1 / sqrt(head_dim)
    scale_by_layer: bool = False  # whether the scale is divided by the layer's number, from 1
    softcap: float = 0.0  # of attention scores
    unused: tuple[str, ...] = ()  # fields that its configs have from another family, and that change nothing


WINDOW = integer("sliding_window", default=4096, null=0, least=0)  # where a missing one is 4096
MAX_PARTS = 4096  # layers of a model, heads or experts of a layer
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}

LLAMA = Family(
    config=DecoderConfig(
        vocab_size=integer("vocab_size"),
        hidden_size=integer("hidden_size"),
        intermediate_size=integer("intermediate_size"),
        num_layers=integer("num_hidden_layers", most=MAX_PARTS),
        num_heads=integer("num_attention_heads", most=MAX_PARTS),
        num_kv_heads=integer("num_key_value_heads", default=0),
        head_dim=integer("head_dim", default=0),
        max_positions=integer("max_position_embeddings"),
        tied=flag("tie_word_embeddings"),
        norm_eps=number("rms_norm_eps", default=1e-6),
        activation=choice("hidden_act", default="silu", value_map=ACTIVATIONS),
        qkv_bias=flag("attention_bias"),
        o_bias=flag("attention_bias"),
        mlp_bias=flag("mlp_bias"),
    ),
    names=TensorNames(),
    rope=RopeRule(),
    windows=WindowRule(),
)


def like(family: Family, *, rules: Mapping[str, Any] = MappingProxyType({}), **changes: Any) -> Family:  # noqa: ANN401
    """The family with other rules (fields of Family), and with `changes` in its config."""
    return replace(family, config=replace(family.config, **changes), **rules)
