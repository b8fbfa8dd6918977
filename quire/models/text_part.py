"""The text model in a multimodal checkpoint, as a Checkpoint of its own.

Other parts (vision towers, projectors) are not loaded. Such a model supports text only.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from torch import Tensor

from quire.errors import ModelError
from quire.kernels.contract import QuantizedRows, Scheme
from quire.weights.checkpoint import WHOLE, Checkpoint, Ranges, StoredTensor

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TextModel:
    """The architecture of a text model, and the fields that published configs omit."""

    architecture: str
    defaults: Mapping[str, object]


# architecture of the whole -> model_type of its text_config -> the text model; the first is that of a text_config
# without a model_type
TEXT_MODELS: Mapping[str, Mapping[str, TextModel]] = MappingProxyType(
    {
        "Gemma3ForConditionalGeneration": {
            "gemma3_text": TextModel(
                "Gemma3ForCausalLM",
                {
                    "vocab_size": 262208,
                    "num_attention_heads": 8,
                    "num_key_value_heads": 4,
                    "head_dim": 256,
                    "max_position_embeddings": 131072,
                    "tie_word_embeddings": True,
                },
            )
        },
        "Mistral3ForConditionalGeneration": {"mistral": TextModel("MistralForCausalLM", {})},
    }
)
# fields of the outer config that override those of text_config
_OUTER_FIELDS = ("dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings", "quantization_config")
_PREFIXES = ("language_model.", "model.language_model.")  # of published checkpoints, and of transformers 5


class TextCheckpoint:
    """Implements Checkpoint. The constructor raises ModelError if text_config is missing or of another model_type."""

    def __init__(self, checkpoint: Checkpoint, architecture: str) -> None:
        """architecture: of the whole, in TEXT_MODELS."""
        text = checkpoint.config.get("text_config")
        if not isinstance(text, dict):
            raise ModelError(f"{checkpoint.path}: text_config must be an object, not {text!r:.80}; download it again")
        known = TEXT_MODELS[architecture]
        kind = text.get("model_type", next(iter(known)))
        if not isinstance(kind, str) or kind not in known:
            raise ModelError(
                f"{checkpoint.path}: text_config.model_type {kind!r:.80} is not supported in {architecture}; "
                f"supported: {', '.join(known)}"
            )
        text_model = known[kind]
        outer = {name: checkpoint.config[name] for name in _OUTER_FIELDS if name in checkpoint.config}
        self._checkpoint = checkpoint
        self._config = {**text_model.defaults, **text, **outer, "architectures": [text_model.architecture]}
        self._names = {short: name for name in checkpoint.tensors if (short := _text_name(name))}

    @property
    def path(self) -> Path:
        """The folder or file of the outer checkpoint."""
        return self._checkpoint.path

    @property
    def config(self) -> Mapping[str, object]:
        """The config.json that the text model alone would have."""
        return self._config

    @property
    def generation_config(self) -> Mapping[str, object]:
        """The generation config of the outer checkpoint."""
        return self._checkpoint.generation_config

    @property
    def quant_method(self) -> str | None:
        """That of the outer checkpoint."""
        return self._checkpoint.quant_method

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The tensors of the text model, by its own names."""
        return {short: self._checkpoint.tensors[name] for short, name in self._names.items()}

    def read(self, names: Iterable[str], ranges: Mapping[str, Ranges] = WHOLE) -> Iterator[tuple[str, Tensor]]:
        """See Checkpoint."""
        shorts = {self._names[short]: short for short in names}
        for name, tensor in self._checkpoint.read(shorts, self._outer(ranges)):
            yield shorts[name], tensor

    def read_codes(
        self, schemes: Mapping[str, Scheme], ranges: Mapping[str, Ranges] = WHOLE
    ) -> Iterator[tuple[str, QuantizedRows]]:
        """See Checkpoint."""
        shorts = {self._names[short]: short for short in schemes}
        for name, rows in self._checkpoint.read_codes(self._outer(schemes), self._outer(ranges)):
            yield shorts[name], rows

    def _outer(self, by_name: Mapping[str, T]) -> Mapping[str, T]:
        """The same by the names of the outer checkpoint."""
        return {self._names[short]: value for short, value in by_name.items()}


def _text_name(name: str) -> str:
    """The text model's name for a tensor; "" for a tensor of another part."""
    if name == "lm_head.weight":
        return name
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
    if prefix is None:
        return ""
    short = name.removeprefix(prefix)
    return short if short.startswith(("model.", "lm_head.")) else f"model.{short}"
