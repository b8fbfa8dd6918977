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


_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings"),
)


def _text(architecture: str, sizes: tuple[int | None, ...], **others: float) -> TextModel:
    """A text model with the defaults of its config in transformers. sizes: values of _SIZES; None: derived."""
    return TextModel(architecture, MappingProxyType({**dict(zip(_SIZES, sizes, strict=True)), **others}))


_LLAMA = {"llama": _text("LlamaForCausalLM", (32000, 4096, 11008, 32, 32, None, 2048))}
_MISTRAL = {"mistral": _text("MistralForCausalLM", (32000, 4096, 14336, 32, 32, 8, 131072))}
_MINISTRAL3 = {"ministral3": _text("Ministral3ForCausalLM", (131072, 4096, 14336, 34, 32, 8, 262144))}
_QWEN2 = {"qwen2": _text("Qwen2ForCausalLM", (151936, 4096, 22016, 32, 32, 32, 32768))}
_QWEN3 = {"qwen3": _text("Qwen3ForCausalLM", (151936, 4096, 22016, 32, 32, 32, 32768))}
_QWEN3_MOE = {
    "qwen3_moe": _text(
        "Qwen3MoeForCausalLM",
        (151936, 2048, 6144, 24, 32, 4, 32768),
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
    )
}
_COHERE2 = {"cohere2": _text("Cohere2ForCausalLM", (256000, 8192, 22528, 40, 64, None, 8192))}
_GEMMA3 = {"gemma3_text": _text("Gemma3ForCausalLM", (262208, 2304, 9216, 26, 8, 4, 131072), head_dim=256)}
_GEMMA4 = {"gemma4_text": _text("Gemma4ForCausalLM", (262144, 2304, 9216, 30, 8, 4, 131072), head_dim=256)}
_GEMMA4_UNIFIED = {
    "gemma4_unified_text": _text(
        "Gemma4ForCausalLM",
        (262144, 2304, 9216, 30, 8, 4, 262144),
        head_dim=256,
        sliding_window=1024,
        hidden_size_per_layer_input=0,  # no field in transformers, as it has none
    )
}
_QWEN2_VL = _text(
    "Qwen2ForCausalLM",
    (152064, 8192, 29568, 80, 64, 8, 32768),
    rms_norm_eps=1e-5,
    rope_theta=1e6,
    max_window_layers=80,
)
_QWEN3_VL = {"qwen3_vl_text": _text("Qwen3ForCausalLM", (151936, 4096, 22016, 32, 32, 32, 128000), rope_theta=5e5)}
_QWEN3_VL_MOE = {
    "qwen3_vl_moe_text": _text(
        "Qwen3MoeForCausalLM",
        (151936, 2048, 5632, 24, 16, 16, 128000),
        rope_theta=5e5,
        moe_intermediate_size=1408,
        num_experts=60,
        num_experts_per_tok=4,
        norm_topk_prob=True,  # no field in transformers, which always normalises
    )
}
_QWEN3_5 = {"qwen3_5_text": _text("Qwen3_5ForCausalLM", (248320, 4096, 12288, 32, 16, 4, 32768))}
_QWEN3_5_MOE = {"qwen3_5_moe_text": _text("Qwen3_5MoeForCausalLM", (248320, 2048, None, 40, 16, 2, 32768))}
_GLM4V = {
    "glm4v_text": _text(
        "Glm4ForCausalLM",
        (151552, 4096, 13696, 40, 32, 2, 32768),
        rms_norm_eps=1e-5,
        partial_rotary_factor=1.0,
    )
}
_GLM4V_MOE = {
    "glm4v_moe_text": _text("Glm4MoeForCausalLM", (151424, 4096, 10944, 46, 96, 8, 65536), attention_bias=True)
}

# architecture of the whole -> model_type of its text_config -> the text model; the first is that of a text_config
# without a model_type
TEXT_MODELS: Mapping[str, Mapping[str, TextModel]] = MappingProxyType(
    {
        "Gemma3ForConditionalGeneration": _GEMMA3,
        "Gemma4ForConditionalGeneration": _GEMMA4,
        "Gemma4UnifiedForConditionalGeneration": _GEMMA4_UNIFIED,
        "Mistral3ForConditionalGeneration": _MISTRAL | _MINISTRAL3,
        "Qwen2VLForConditionalGeneration": {"qwen2_vl_text": _QWEN2_VL},
        "Qwen2_5_VLForConditionalGeneration": {"qwen2_5_vl_text": _QWEN2_VL},
        "Qwen3VLForConditionalGeneration": _QWEN3_VL,
        "Qwen3VLMoeForConditionalGeneration": _QWEN3_VL_MOE,
        "Qwen3_5ForConditionalGeneration": _QWEN3_5,
        "Qwen3_5MoeForConditionalGeneration": _QWEN3_5_MOE,
        "LlavaForConditionalGeneration": _LLAMA | _MISTRAL | _QWEN2,
        "LlavaNextForConditionalGeneration": _LLAMA | _MISTRAL | _QWEN2,
        "LlavaOnevisionForConditionalGeneration": _QWEN2,
        "SmolVLMForConditionalGeneration": _LLAMA,
        "Idefics3ForConditionalGeneration": _LLAMA,
        "InternVLForConditionalGeneration": _QWEN2 | _QWEN3 | _QWEN3_MOE | _LLAMA,
        "AyaVisionForConditionalGeneration": _COHERE2,
        "Glm4vForConditionalGeneration": _GLM4V,
        "Glm46VForConditionalGeneration": _GLM4V | _GLM4V_MOE,
        "Glm4vMoeForConditionalGeneration": _GLM4V_MOE,
    }
)
# architectures whose text needs more than a text model -> why
UNSUPPORTED_WITHOUT_IMAGES: Mapping[str, str] = MappingProxyType(
    {
        "PaliGemmaForConditionalGeneration": (
            "its prompts start with an image, and their tokens attend to each other in both directions; quire reads "
            "text only, and a token attends to those before it"
        )
    }
)
# fields of the outer config that override those of text_config, each with its older names
_OUTER_FIELDS = (("dtype", "torch_dtype"), ("eos_token_id",), ("quantization_config",))
_OTHER_NAMES: Mapping[str, str] = MappingProxyType({"num_experts": "num_local_experts"})  # of fields with a default
_TIED = "tie_word_embeddings"
# architectures that are tied if the outer config does not say
_TIED_BY_DEFAULT = (
    *("Gemma3ForConditionalGeneration", "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"),
    *("Mistral3ForConditionalGeneration", "InternVLForConditionalGeneration"),
    "AyaVisionForConditionalGeneration",
)
# architectures that are tied if either config says so; in others the outer one decides
_TIED_BY_EITHER = (
    *("LlavaForConditionalGeneration", "LlavaOnevisionForConditionalGeneration", "Qwen2VLForConditionalGeneration"),
    *("Qwen2_5_VLForConditionalGeneration", "Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration"),
)
# published with the fields and tensor names of the text model alone, beside those of the vision tower
_FLAT = ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")
_FLAT_PREFIXES = ("model.embed_tokens.", "model.layers.", "model.norm.")
# of published checkpoints, and of transformers 5
_PREFIXES = ("language_model.", "model.language_model.", "model.text_model.")


class TextCheckpoint:
    """Implements Checkpoint.

    The constructor raises ModelError if text_config is missing or of another model_type, or if two tensors have the
    same name in the text model.
    """

    def __init__(self, checkpoint: Checkpoint, architecture: str) -> None:
        """architecture: of the whole, in TEXT_MODELS."""
        self._checkpoint = checkpoint
        text, model = _text_model(checkpoint, architecture)
        self._names: dict[str, str] = {}
        self._skipped: list[str] = []
        for name in checkpoint.tensors:
            short = _text_name(name, is_flat=architecture in _FLAT)
            if not short:
                self._skipped.append(name)
            elif self._names.setdefault(short, name) != name:
                raise ModelError(
                    f"{checkpoint.path}: {self._names[short]} and {name} are the same tensor of the text model; "
                    "remove one"
                )
        missing = {name: value for name, value in model.defaults.items() if _OTHER_NAMES.get(name) not in text}
        config = {**missing, **text, "architectures": [model.architecture], "model_type": None}
        for names in _OUTER_FIELDS:
            outer = {name: checkpoint.config[name] for name in names if checkpoint.config.get(name) is not None}
            if outer:
                config = {name: value for name, value in config.items() if name not in names} | outer
        self._config = {**config, **_plain_ropes(config), _TIED: self._tied(text, architecture)}

    def _tied(self, text: Mapping[str, object], architecture: str) -> object:
        """What tie_word_embeddings is in transformers."""
        tied = self._checkpoint.config.get(_TIED)
        if tied is None and architecture in _TIED_BY_DEFAULT:
            return "lm_head.weight" not in self._names
        if tied is None or architecture in _TIED_BY_EITHER:
            return tied or text.get(_TIED)
        return tied

    @property
    def skipped(self) -> str:
        """The number of tensors that are not read because they are of other parts, and the names of these parts."""
        parts = dict.fromkeys(_part(name) for name in self._skipped)
        return f"{len(self._skipped)} tensors of other parts are not read: {', '.join(parts) or 'there are none'}"

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


def _text_model(checkpoint: Checkpoint, architecture: str) -> tuple[Mapping[str, object], TextModel]:
    """The fields of the text model, and what it is. Raises ModelError if they are missing or of another model_type."""
    kinds, text = TEXT_MODELS[architecture], checkpoint.config.get("text_config")
    if text is None and architecture in _FLAT:
        text = {name: value for name, value in checkpoint.config.items() if name != "model_type"}
    if not isinstance(text, dict):
        raise ModelError(f"{checkpoint.path}: text_config must be an object, not {text!r:.80}; download it again")
    kind = text.get("model_type", next(iter(kinds)))
    if not isinstance(kind, str) or kind not in kinds:
        raise ModelError(
            f"{checkpoint.path}: text_config.model_type {kind!r:.80} is not supported in {architecture}; "
            f"supported: {', '.join(kinds)}"
        )
    return text, kinds[kind]


def _plain_ropes(config: Mapping[str, object]) -> Mapping[str, object]:
    """Rotary embeddings named `mrope`, as those that they are for text, which has one position on all axes."""
    found = {name: rope for name in ("rope_scaling", "rope_parameters") if isinstance(rope := config.get(name), dict)}
    return {
        name: {**rope, "rope_type": "default"}
        for name, rope in found.items()
        if rope.get("rope_type", rope.get("type")) == "mrope"
    }


def _text_name(name: str, *, is_flat: bool) -> str:
    """The text model's name for a tensor; "" for a tensor of another part."""
    if name == "lm_head.weight" or (is_flat and name.startswith(_FLAT_PREFIXES)):
        return name
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
    if prefix is None:
        return ""
    short = name.removeprefix(prefix)
    return short if short.startswith(("model.", "lm_head.")) else f"model.{short}"


def _part(name: str) -> str:
    """The part of the whole that a tensor belongs to: the first component of its name that is not `model`."""
    first, _, rest = name.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == "model" else first
