"""Classification heads of checkpoints: the names of their classes, and how logits become probabilities.

A head (`score.weight`) replaces the head over the vocabulary. Its input is the hidden state of the last token.
"""

from collections.abc import Mapping
from types import MappingProxyType

from quire.config import Activation, Classification
from quire.models.config_fields import Fields

_SUFFIX = "ForSequenceClassification"
_NAMED_ALIKE = (
    *("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Phi3", "Olmo2", "Mixtral", "Qwen2Moe", "Qwen3Moe"),
    *("Olmo3", "Exaone4", "SmolLM3", "SeedOss", "Glm4", "Arcee", "Ministral3", "HunYuanDenseV1", "HunYuanMoEV1"),
    *("GPTNeoX", "Falcon", "Phi", "Starcoder2", "StableLm", "Nemotron"),
)
# architecture -> the architecture of the same decoder with a head over the vocabulary
CLASSIFIERS: Mapping[str, str] = MappingProxyType(
    {
        **{name + _SUFFIX: f"{name}ForCausalLM" for name in _NAMED_ALIKE},
        **{f"Gemma3Text{_SUFFIX}": "Gemma3ForCausalLM", f"GPT2{_SUFFIX}": "GPT2LMHeadModel"},
    }
)
MAX_CLASSES = 65536
_DEFAULT_CLASSES = 2  # of transformers, which does not write them
_ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(  # by `problem_type`
    {
        "single_label_classification": "softmax",
        "multi_label_classification": "sigmoid",
        "regression": "none",
    }
)
_CROSS_ENCODER_ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {"torch.nn.modules.activation.Sigmoid": "sigmoid", "torch.nn.modules.linear.Identity": "none"}
)


def is_classifier(architecture: str) -> bool:
    """Whether an architecture has a classification head, supported or not."""
    return architecture.endswith(_SUFFIX)


def read_classification(fields: Fields) -> Classification:
    """The classes in a config.json. Raises ModelError for names that are not numbered from 0 on."""
    given = fields.optional("id2label", dict, {})
    number = fields.integer("num_labels", default=len(given) or _DEFAULT_CLASSES, most=MAX_CLASSES)
    labels = tuple(str(given.get(str(index), f"LABEL_{index}")) for index in range(number))
    if given and {str(index) for index in range(number)} != given.keys():
        raise fields.error(f"id2label must name the classes 0 to {number - 1}, not {', '.join(map(str, given))[:80]}")
    kind = fields.optional("problem_type", str, "")
    if kind and kind not in _ACTIVATIONS:
        raise fields.error(f"problem_type {kind!r:.80} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    usual = _ACTIVATIONS.get(kind, "sigmoid" if number == 1 else "softmax")
    return Classification(labels, _activation_of_cross_encoder(fields, usual) if number == 1 else usual)


def _activation_of_cross_encoder(fields: Fields, usual: Activation) -> Activation:
    """What sentence-transformers applies to the one logit of a cross-encoder. Raises ModelError for other functions."""
    older = fields.optional("sbert_ce_default_activation_function", str, "")
    path = fields.within("sentence_transformers").optional("activation_fn", str, older)
    if path and path not in _CROSS_ENCODER_ACTIVATIONS:
        raise fields.error(
            f"activation_fn {path!r:.80} is not supported; supported: {', '.join(_CROSS_ENCODER_ACTIVATIONS)}"
        )
    return _CROSS_ENCODER_ACTIVATIONS.get(path, usual)
