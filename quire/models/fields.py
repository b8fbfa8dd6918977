"""Reads config.json fields with their types checked, in the old spelling and in that of transformers 5.

What would silently change a model's output, and is not supported, is refused by name. No torch here.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from quire.errors import ModelError
from quire.models.families import DecoderConfig, Family

T = TypeVar("T")
_MOST = 1e30  # no number of a config.json is larger

# fields that make it another model, each with the test that says so
_UNSUPPORTED: Mapping[str, Callable[[object], bool]] = MappingProxyType(
    {
        "quantization_config": lambda value: value is not None,
        "use_sliding_window": lambda value: value is not False and value is not None,
        "layer_types": lambda value: value is not None and any(item != "full_attention" for item in _items(value)),
        "hidden_act": lambda value: value not in (None, "silu", "swish"),
        "partial_rotary_factor": lambda value: value not in (None, 1),
    }
)


class Fields:
    """One config.json."""

    def __init__(self, values: dict[str, object], path: Path) -> None:
        self._values = values
        self._path = path

    def error(self, message: str) -> ModelError:
        """An error that says which file it is about."""
        return ModelError(f"{self._path}: {message}")

    def optional(self, name: str, kind: type[T], default: T) -> T:
        """The field, or `default` where it is missing or null."""
        value = self._values.get(name)
        if value is None:
            return default
        if kind is float and isinstance(value, int) and abs(value) < _MOST:
            value = float(value)
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise self.error(f"{name} must be of type {kind.__name__}, not {value!r:.80}")
        return value

    def number(self, name: str, default: int | None = None) -> int:
        """A positive integer; an error where it is missing and has no default."""
        value = self.optional(name, int, 0 if default is None else default)
        if value < 1:
            missing = self._values.get(name) is None
            raise self.error(f"{name} is missing" if missing else f"{name} must be at least 1, not {value}")
        return value

    def flag(self, name: str) -> bool:
        """True or false; false where it is missing."""
        return bool(self.optional(name, bool, default=False))

    def decoder(self, family: Family) -> DecoderConfig:
        """The decoder that these fields describe. Raises ModelError naming what is wrong."""
        for name, changes_output in _UNSUPPORTED.items():
            value = self._values.get(name)
            if changes_output(value):
                raise self.error(f"{name} = {value!r:.80} is not supported; quire would compute something else")
        heads, hidden = self.number("num_attention_heads"), self.number("hidden_size")
        kv_heads = self.number("num_key_value_heads", heads)
        head_dim = self.number("head_dim", family.default_head_dim or hidden // heads)
        if heads % kv_heads:
            raise self.error(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})")
        if head_dim % 2:
            raise self.error(f"head_dim must be even for rotary embeddings, not {head_dim}")
        return DecoderConfig(
            vocab_size=self.number("vocab_size"),
            hidden_size=hidden,
            intermediate_size=self.number("intermediate_size"),
            num_layers=self.number("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=self._positive("rms_norm_eps", self._values.get("rms_norm_eps"), 1e-6),
            rope_theta=self._rope_theta(),
            max_positions=self.number("max_position_embeddings"),
            tied=self.flag("tie_word_embeddings"),
            qk_norm=family.qk_norm,
            attention_bias=self.flag("attention_bias"),
            mlp_bias=self.flag("mlp_bias"),
        )

    def _rope_theta(self) -> float:
        """From `rope_parameters`, or from `rope_theta` beside an old `rope_scaling`."""
        for name in ("rope_parameters", "rope_scaling"):
            rope = self.optional(name, dict, {})
            kind = rope.get("rope_type", rope.get("type", "default"))
            if kind != "default":
                raise self.error(f"{name} of type {kind!r} is not supported, only 'default'")
            if rope.get("partial_rotary_factor") not in (None, 1):
                raise self.error(
                    f"{name} with partial_rotary_factor {rope['partial_rotary_factor']!r} is not supported"
                )
        theta = self.optional("rope_parameters", dict, {}).get("rope_theta", self._values.get("rope_theta"))
        return self._positive("rope_theta", theta, 10000.0)

    def _positive(self, name: str, value: object, default: float) -> float:
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MOST:
            raise self.error(f"{name} must be a positive number, not {value!r:.80}")
        return float(value)


def _items(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]
