"""The text model in a multimodal checkpoint, as a Checkpoint of its own.

Other parts (vision towers, projectors) are not loaded. Such a model supports text only.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from quire.errors import ModelError
from quire.models.checkpoint import Checkpoint, Stored


@dataclass(frozen=True, slots=True)
class Inner:
    """The architecture of a text model, and the fields that published configs omit."""

    architecture: str
    defaults: Mapping[str, object]


INNER: Mapping[str, Inner] = MappingProxyType(
    {
        "Gemma3ForConditionalGeneration": Inner(
            "Gemma3ForCausalLM",
            {
                "vocab_size": 262208,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "max_position_embeddings": 131072,
                "tie_word_embeddings": True,
            },
        ),
        "Mistral3ForConditionalGeneration": Inner("MistralForCausalLM", {}),
    }
)
# fields of the outer config that override those of text_config
_OUTER = ("dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings", "quantization_config")
_PREFIXES = ("language_model.", "model.language_model.")  # of published checkpoints, and of transformers 5


class TextPart:
    """Implements Checkpoint. The constructor raises ModelError if the config has no text_config."""

    def __init__(self, whole: Checkpoint, inner: Inner) -> None:
        text = whole.config.get("text_config")
        if not isinstance(text, dict):
            raise ModelError(f"{whole.place}: text_config must be an object, not {text!r:.80}; download it again")
        outer = {name: whole.config[name] for name in _OUTER if name in whole.config}
        self._whole = whole
        self._config = {**inner.defaults, **text, **outer, "architectures": [inner.architecture]}
        self._names = {short: name for name in whole.tensors if (short := _inside(name))}

    @property
    def place(self) -> Path:
        """The folder or file of the outer checkpoint."""
        return self._whole.place

    @property
    def config(self) -> Mapping[str, object]:
        """The config.json that the text model alone would have."""
        return self._config

    @property
    def generation_config(self) -> Mapping[str, object]:
        """The generation config of the outer checkpoint."""
        return self._whole.generation_config

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """The tensors of the text model, by its own names."""
        return {short: self._whole.tensors[name] for short, name in self._names.items()}

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """See Checkpoint."""
        shorts = {self._names[short]: short for short in names}
        for name, tensor in self._whole.read(shorts):
            yield shorts[name], tensor


def _inside(name: str) -> str:
    """The text model's name for a tensor; "" for a tensor of another part."""
    if name == "lm_head.weight":
        return name
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
    if prefix is None:
        return ""
    short = name.removeprefix(prefix)
    return short if short.startswith(("model.", "lm_head.")) else f"model.{short}"
